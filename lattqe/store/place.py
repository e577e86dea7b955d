"""A place where artifacts are stored: one seam, and a scheme of the URI picks the class behind it.

A place is a folder: `dir`, `file:///dir` or `s3://bucket/prefix`. Files in it have plain relative names. A file is
either wholly there or not there at all, on disk and on S3 alike, whatever happens to the process that writes it.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, TypeAlias
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from lattqe.errors import LattqeError

# What can be written.
Bytes: TypeAlias = bytes | memoryview | pa.Buffer


class Traffic:
    """Numbers that only grow: bytes read and written, and requests to S3."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = self._written = 0
        self._requests: Counter[str] = Counter()
        self._taken = (0, 0)

    def add(self, *, read: int = 0, written: int = 0) -> None:
        """Count bytes."""
        with self._lock:
            self._read += read
            self._written += written

    def ask(self, operation: str) -> None:
        """Count a request, by its name in S3's interface."""
        with self._lock:
            self._requests[operation] += 1

    def totals(self) -> dict[str, int]:
        """All so far: "read" and "written" in bytes, and each kind of request."""
        with self._lock:
            return {"read": self._read, "written": self._written, **self._requests}

    def take(self) -> tuple[int, int]:
        """Bytes read and bytes written since the last call: what a worker sends along with its result."""
        with self._lock:
            before, self._taken = self._taken, (self._read, self._written)
            return self._taken[0] - before[0], self._taken[1] - before[1]


traffic = Traffic()


class MissingFileError(LattqeError):
    """A file, folder or object that is not there."""


class ChangedError(LattqeError):
    """A file was replaced in the meantime, by another process."""


class UnavailableError(LattqeError):
    """The storage did not answer for as long as we were willing to wait; the same command may succeed later."""


def check_name(name: str) -> str:
    """Refuse names that could leave their folder: manifests come from elsewhere and are not trusted."""
    parts = name.split("/")
    if not name or "\\" in name or not name.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise LattqeError(f"refused file name {name!r}: names are plain and relative, without '..' or backslashes")
    return name


class Place(ABC):
    """A folder on some storage. Cheap to make, safe to share among threads and to send to other processes."""

    uri: str
    is_local: bool

    @abstractmethod
    def child(self, name: str) -> "Place":
        """The place below this one."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Relative name -> bytes of every file, recursively, sorted by name; unfinished files do not show."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of one file; MissingFileError where there is none."""

    @abstractmethod
    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset` on."""

    @abstractmethod
    def fetch(self, name: str) -> pa.Buffer:
        """The whole file as one buffer: memory-mapped on disk, fetched in parallel ranges from S3."""

    @abstractmethod
    def open_input(self, name: str) -> pa.NativeFile:
        """A seekable Arrow file, memory-mapped on disk."""

    @abstractmethod
    def download(self, name: str, path: Path) -> None:
        """Copy one file to a path on disk."""

    @abstractmethod
    def write(self, name: str, data: Bytes) -> None:
        """Put the whole file there, replacing what was there in one step."""

    @abstractmethod
    def create(self, name: str, data: Bytes) -> None:
        """Put the whole file there if the name is free, else AlreadyExistsError; of many callers one succeeds."""

    def copy_from(self, source: "Place", there: str, name: str) -> bool:
        """Let the storage put the file `there` of another place here as `name`, in the place of what was there.

        The bytes do not come through this process. False where the storage cannot do it: nothing has happened then.
        """
        return False

    @abstractmethod
    def replace(self, name: str, data: Bytes, seen: bytes | None) -> None:
        """Put the whole file in the place of one that holds `seen` (None: of none), else ChangedError.

        Of many callers that saw the same one succeeds. Files that hold a state are meant: they are read and compared.
        """

    @abstractmethod
    def open_output(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A context manager that yields a binary file; what was written shows on a clean exit, else never."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove one file; nothing happens where there is none."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what killed writers left half done (temporary files, abandoned uploads), not what live ones do."""

    @abstractmethod
    def is_file(self) -> bool:
        """Whether the address is that of a file, not of a folder."""

    @abstractmethod
    def remove_if_empty(self) -> None:
        """Remove the folder itself where the storage has folders and nothing is in it."""

    def list(self) -> list[str]:
        """Relative names of all files, recursively, sorted."""
        return list(self.sizes())

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        try:
            self.size(name)
        except MissingFileError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """The whole file as bytes."""
        return self.fetch(name).to_pybytes()

    def delete_tree(self) -> None:
        """Remove every file of the place; the manifest first, so that a half-deleted artifact does not exist."""
        for name in sorted(self.sizes(), key=lambda name: name != "manifest.json"):
            self.delete(name)
        self.sweep()
        self.remove_if_empty()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)


def open_place(uri: str) -> Place:
    """Open `dir`, `file:///dir`, `s3://bucket/prefix` or `lattqe://model`; nothing is created or contacted yet."""
    from lattqe.store.local import LocalPlace

    uri = str(uri)
    # Other tools allow credentials here: never show them, not even in a message. A secret key may have a slash.
    if uri.startswith("s3://") and (set("@:") & set(uri.split("/")[2]) or "?" in uri):
        raise LattqeError(
            "an s3:// address holds no credentials and no options: use s3://bucket/prefix, and set "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"
        )
    if "://" not in uri:
        if not uri.strip() or not uri.isprintable():
            raise LattqeError(f"{uri!r} is not a valid address: give a folder, file:///folder or s3://bucket/prefix")
        return LocalPlace(uri)
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return LocalPlace(unquote(parts.path))
    if parts.scheme == "lattqe":
        from lattqe.store.local import PackagePlace

        return PackagePlace(parts.netloc)
    if parts.scheme == "s3" and parts.netloc:
        from lattqe.store.s3 import S3Place  # boto3 takes long to import and is needed only here

        return S3Place(parts.netloc, uri.split("://", 1)[1].partition("/")[2])
    raise LattqeError(f"{uri!r} is not a valid address: give a folder, file:///folder or s3://bucket/prefix")


def absolute(uri: str) -> str:
    """The address as any process understands it: workers that were there before us have another working directory."""
    return open_place(uri).uri


def node_folder(path: str | None) -> str | None:
    """The same for a folder that every node has for itself; "~" stays, it is each node's own home."""
    return path if path is None or path.startswith("~") else os.path.abspath(path)
