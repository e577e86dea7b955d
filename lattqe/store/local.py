"""A place on disk: files appear by rename or link of a complete, synced temporary file in the same folder."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store.place import Bytes, ChangedError, MissingFileError, Place, check_name, traffic

TEMPORARY, SCRATCH = ".tmp-", "lattqe-scratch-"
OWNER = re.compile(re.escape(TEMPORARY) + r"(?P<host>.+)-(?P<pid>\d{1,9})-[0-9a-f]{12}", re.DOTALL)
# The process behind a temporary file of another machine cannot be checked: it counts as abandoned after a day.
ABANDONED_SECONDS = 86_400

_REASONS = {
    errno.ENOSPC: "no space left on that disk: free some, or choose another destination",
    errno.EDQUOT: "the disk quota is used up: free some space, or choose another destination",
    errno.EFBIG: "the file would be larger than this process or file system allows",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied, or the file system has no hard links",
    errno.EOPNOTSUPP: "the file system lacks hard links, which exclusive writing needs",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "there is a file where a folder is needed",
    errno.EISDIR: "it is a folder, not a file",
    errno.EEXIST: "there is a file where a folder is needed",
    errno.ENAMETOOLONG: "the name is too long",
}


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an operating system's error into one line that says what could not be done, where and why."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"cannot {action} {path}: there is no such file or folder") from error
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
        raise LattqeError(f"cannot {action} {path}: {reason}") from error


class LocalPlace(Place):
    """A folder on disk; made when the first file is written."""

    is_local = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        self.uri = str(self.path)

    def child(self, name: str) -> "LocalPlace":
        """The folder `name` in this one."""
        return LocalPlace(self.path / check_name(name))

    def file(self, name: str) -> Path:
        """Where the file `name` is, for libraries that need a path."""
        return self.path / check_name(name)

    def sizes(self) -> dict[str, int]:
        """Relative name -> bytes, recursively; empty where there is no folder."""
        found: dict[str, int] = {}

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        with explained("list", self.path):
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "")
            for folder, _, names in os.walk(self.path, onerror=fail):
                for name in names:
                    path = Path(folder, name)
                    if not name.startswith(TEMPORARY):
                        with suppress(MissingFileError), explained("list", path):  # gone since it was listed
                            found[path.relative_to(self.path).as_posix()] = path.stat().st_size
        return dict(sorted(found.items()))

    def size(self, name: str) -> int:
        """Bytes of one file."""
        with explained("read", self.file(name)):
            return self.file(name).stat().st_size

    def signature(self, name: str) -> tuple[int, int, int]:
        """What changes when a file is replaced or written to: its node, its size, its time."""
        with explained("read", self.file(name)):
            status = self.file(name).stat()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset` on."""
        path = self.file(name)
        with explained("read", path), open(path, "rb") as file:
            file.seek(offset)
            data = file.read(length)
        if len(data) != length:
            raise LattqeError(f"cannot read {path}: it ends at byte {offset + len(data)}, not {offset + length}")
        traffic.add(read=length)
        return data

    def fetch(self, name: str) -> pa.Buffer:
        """The whole file, memory-mapped."""
        with self.open_input(name) as file:
            traffic.add(read=file.size())
            return file.read_buffer()

    def open_input(self, name: str) -> pa.NativeFile:
        """A memory-mapped Arrow file."""
        path = self.file(name)
        with explained("read", path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "")
            if path.stat().st_size == 0:
                return pa.BufferReader(b"")  # an empty file cannot be mapped
            return pa.memory_map(str(path), "r")

    def download(self, name: str, path: Path) -> None:
        """Copy one file."""
        with explained("copy", self.file(name)):
            shutil.copyfile(self.file(name), path)

    @contextmanager
    def _temporary(self, path: Path) -> Iterator[tuple[BinaryIO, Path]]:
        """A file beside `path` to be written, which is gone in the end whatever happens."""
        temporary = path.with_name(f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}")
        with explained("write", path):
            new_folders = [folder for folder in path.parents if not folder.exists()]
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(temporary, "xb") as file:
                    yield file, temporary
            except BaseException:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                    for folder in new_folders:
                        folder.rmdir()
                raise
            temporary.unlink(missing_ok=True)

    def write(self, name: str, data: Bytes) -> None:
        """Replace the file in one step."""
        with self.open_output(name) as file:
            file.write(memoryview(data))

    @contextmanager
    def open_output(self, name: str) -> Iterator[BinaryIO]:
        """A binary file that takes its name on a clean exit."""
        path = self.file(name)
        with self._temporary(path) as (file, temporary):
            yield file
            traffic.add(written=_settle(file))
            os.replace(temporary, path)
            _sync_folder(path.parent)

    def create(self, name: str, data: Bytes) -> None:
        """Link a complete file to a name that must be free: linking is exclusive, renaming is not."""
        path = self.file(name)
        with explained("write", path):
            if path.exists():
                raise AlreadyExistsError(f"{path} exists already")
        with self._temporary(path) as (file, temporary):
            file.write(memoryview(data))
            traffic.add(written=_settle(file))
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise AlreadyExistsError(f"{path} exists already") from None
            _sync_folder(path.parent)

    def copy_from(self, source: Place, there: str, name: str) -> bool:
        """A second name for a file of the same disk: what is stored is never written to, only replaced or removed."""
        if not isinstance(source, LocalPlace):
            return False
        path, known = self.file(name), os.path.realpath(source.file(there))
        with explained("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(known, path)  # the manifest, which comes last, brings the names in its folder to the disk
        except FileExistsError:
            return os.path.samefile(known, path)
        except OSError:  # another disk, too many names for one file, not permitted, or no such file
            return False
        return True

    def replace(self, name: str, data: Bytes, seen: bytes | None) -> None:
        """Compare and replace while the folder is locked: the lock ends with its process, however that ends."""
        path = self.file(name)
        with explained("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            there = path.read_bytes() if path.exists() else None
            if there != seen:
                raise ChangedError(f"{path} was replaced by another process")
            self.write(name, data)
        finally:
            os.close(folder)

    def delete(self, name: str) -> None:
        """Remove one file, and the folders below the place that it leaves empty."""
        path = self.file(name)
        with explained("delete", path):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            path.unlink()
        for folder in path.parents:
            if folder == self.path or not folder.is_relative_to(self.path):
                break
            try:
                folder.rmdir()
            except OSError:  # not empty, or gone: another process uses it
                break

    def sweep(self) -> None:
        """Remove temporary files whose process is dead, or that are a day old on another machine's account."""
        with explained("clean up", self.path):
            for path in self.path.rglob(f"{TEMPORARY}*"):
                with suppress(FileNotFoundError):
                    if _abandoned(path):
                        self._remove(path)

    def is_file(self) -> bool:
        """Whether the address is that of a file, not of a folder."""
        return os.path.isfile(self.path)  # False where that may not be known

    def remove_if_empty(self) -> None:
        """Remove the folder where nothing is in it."""
        with suppress(OSError):
            self.path.rmdir()


class PackagePlace(LocalPlace):
    """A model that is part of the package, `lattqe://NAME`: the address means the same on every machine."""

    def __init__(self, name: str) -> None:
        folder = Path(__file__).resolve().parent.parent / "models"
        shipped = sorted(each.name for each in folder.glob("[a-z]*") if each.is_dir())
        if name not in shipped:
            raise LattqeError(
                f"lattqe://{name}: no model of that name is part of lattqe: use "
                f"{' or '.join(f'lattqe://{each}' for each in shipped)}"
            )
        super().__init__(folder / name)
        self.uri = f"lattqe://{name}"

    @contextmanager
    def _temporary(self, path: Path) -> Iterator[tuple[BinaryIO, Path]]:
        raise LattqeError(f"{self.uri} is part of the package and cannot be written: choose another destination")
        yield


def _settle(file: BinaryIO) -> int:
    """Bring the file to the disk; returns its bytes."""
    file.flush()
    os.fsync(file.fileno())
    return os.fstat(file.fileno()).st_size


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot; the rename is still atomic
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _abandoned(path: Path) -> bool:
    owner = OWNER.fullmatch(path.name)
    if owner is None:  # not named by us: it may be a user's
        return False
    if owner["host"] == socket.gethostname():
        try:
            os.kill(int(owner["pid"]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    return time.time() - path.stat().st_mtime > ABANDONED_SECONDS


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder lattqe-scratch-PURPOSE-…, removed at the end; by the next one where its process was killed.

    The process holds a lock on it, which ends with the process, however that ends.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        _remove_unlocked(left)
    hidden = Path(tempfile.mkdtemp(prefix=".lattqe-"))
    lock, folder = os.open(hidden, os.O_RDONLY), hidden.with_name(f"{SCRATCH}{purpose}-{secrets.token_hex(6)}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hidden.rename(folder)  # only now do others see it
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_unlocked(folder: Path) -> None:
    """Remove a scratch folder of this user whose process is gone."""
    with suppress(OSError):  # gone meanwhile, or locked, or not ours to open
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
