"""A place on S3 or on a server that speaks it. pyarrow reads; boto3 writes, for a part goes up as one conditional PUT.

An object shows when its PUT (or its multipart upload) is complete and never before, so nothing is ever half there.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
from botocore.exceptions import ClientError

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store.local import explained
from lattqe.store.place import Bytes, ChangedError, MissingFileError, Place, check_name, traffic
from lattqe.store.s3_client import TransientError, clients, retrying

T = TypeVar("T")

# Large enough that a request's latency is small beside it, small enough that a part is several requests at once.
RANGE_BYTES = 8 << 20
PARALLEL_REQUESTS = 8
# An upload of another process may be alive: it counts as abandoned after a day.
ABANDONED = timedelta(days=1)


class S3Place(Place):
    """A prefix of a bucket."""

    is_local = False

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.bucket = bucket
        self.prefix = "/".join(part for part in prefix.split("/") if part)
        if self.prefix:
            check_name(self.prefix)
        self.uri = f"s3://{bucket}/{self.prefix}".rstrip("/")

    def child(self, name: str) -> "S3Place":
        """The prefix `name` below this one."""
        return S3Place(self.bucket, self._key(name))

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self.prefix, check_name(name)) if part)

    def _uri(self, name: str) -> str:
        return f"s3://{self.bucket}/{self._key(name)}"

    def _object(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(name)}

    def _try(self, action: str, name: str, attempt: Callable[[], T]) -> T:
        return retrying(action, self._uri(name) if name else self.uri, attempt)

    def sizes(self) -> dict[str, int]:
        """Relative name -> bytes of every object below the prefix."""
        start = f"{self.prefix}/" if self.prefix else ""

        def attempt() -> dict[str, int]:
            pages = clients().boto.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start)
            return {
                entry["Key"][len(start) :]: entry["Size"]
                for page in pages
                for entry in page.get("Contents", ())
                if not entry["Key"].endswith("/")
            }

        return dict(sorted(self._try("list", "", attempt).items()))

    def size(self, name: str) -> int:
        """Bytes of one object."""

        def attempt() -> int:
            try:
                return int(clients().boto.head_object(**self._object(name))["ContentLength"])
            except ClientError:
                self._find_cause(name)  # the answer to a HEAD has no body with the cause
                raise

        return self._try("read", name, attempt)

    def _find_cause(self, name: str) -> None:
        """Ask for the object in a way whose error names its cause; return where the object can be read after all."""
        clients().boto.get_object(**self._object(name))["Body"].close()

    def _read(self, name: str, action: Callable[[pa.NativeFile], T]) -> T:
        """Open the object with pyarrow and do `action`; boto3 says what an error of pyarrow's means."""

        def attempt() -> T:
            try:
                traffic.ask("HeadObject")
                with clients().arrow().open_input_file(f"{self.bucket}/{self._key(name)}") as file:
                    return action(file)
            except OSError as error:
                self._find_cause(name)
                raise TransientError from error

        return self._try("read", name, attempt)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset` on."""
        data = self._read(name, lambda file: _ask_range(file, offset, length))
        if len(data) != length:
            raise LattqeError(
                f"cannot read {self._uri(name)}: it ends at byte {offset + len(data)}, not {offset + length}"
            )
        traffic.add(read=length)
        return data

    def fetch(self, name: str) -> pa.Buffer:
        """The whole object: a small one in one checked answer, a larger one in parallel ranges."""
        data = self._try("read", name, lambda: self._fetch_small(name))
        if data is None:
            data = self._read(name, _read_whole)
        traffic.add(read=data.size)
        return data

    def _fetch_small(self, name: str) -> pa.Buffer | None:
        """An object of one range; boto3 holds it against the checksum that it was stored with. None: it is larger."""
        answer = clients().boto.get_object(**self._object(name))
        with closing(answer["Body"]) as body:
            return pa.py_buffer(body.read()) if answer["ContentLength"] <= RANGE_BYTES else None

    def download(self, name: str, path: Path) -> None:
        """Stream the object to disk, held against its checksum where it was stored with one of the whole."""

        def attempt() -> None:
            with closing(clients().boto.get_object(**self._object(name))["Body"]) as body:
                target.seek(0)
                while chunk := body.read(RANGE_BYTES):
                    with explained("write", path):  # an error of the disk is not one of the connection
                        target.write(chunk)
                        target.flush()
                traffic.add(read=target.tell())
                target.truncate()

        with explained("write", path):
            target = open(path, "wb")  # noqa: SIM115
        with target:
            self._try("read", name, attempt)

    def open_input(self, name: str) -> pa.NativeFile:
        """A seekable Arrow file over the object; its reads are not retried, unlike those of `fetch`."""
        return self._try("read", name, lambda: self._open(name))

    def _open(self, name: str) -> pa.NativeFile:
        try:
            traffic.ask("HeadObject")
            return clients().arrow().open_input_file(f"{self.bucket}/{self._key(name)}")
        except OSError as error:
            self._find_cause(name)
            raise TransientError from error

    def write(self, name: str, data: Bytes) -> None:
        """Replace the object with one PUT."""
        self._try("write", name, lambda: self._put(name, data))

    def _put(self, name: str, data: Bytes, **conditions: str) -> None:
        body = bytes(memoryview(data))
        clients().boto.put_object(**self._object(name), Body=body, **conditions)
        traffic.add(written=len(body))

    def create(self, name: str, data: Bytes) -> None:
        """One PUT with If-None-Match; a lost answer to our own earlier attempt does not make us the loser."""
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1
            self._put(name, data, IfNoneMatch="*")

        try:
            self._try("write", name, attempt)
        except AlreadyExistsError:
            if attempts == 1 or self.fetch(name) != pa.py_buffer(memoryview(data)):
                raise

    def copy_from(self, source: Place, there: str, name: str) -> bool:
        """One request, after which S3 copies the object itself."""
        if not isinstance(source, S3Place):
            return False
        known = source._object(there)
        try:
            self._try("write", name, lambda: clients().boto.copy_object(**self._object(name), CopySource=known))
        except MissingFileError:  # who reads it will say so
            return False
        return True

    def replace(self, name: str, data: Bytes, seen: bytes | None) -> None:
        """One PUT with If-Match on what was compared; our own attempt whose answer was lost counts as ours."""
        body = bytes(memoryview(data))

        def attempt() -> None:
            answer = clients().boto.get_object(**self._object(name))
            there = answer["Body"].read()
            if there not in (body, seen):
                raise ChangedError(f"{self._uri(name)} was replaced by another process")
            if there != body:
                self._put(name, body, IfMatch=answer["ETag"])

        try:
            if seen is None:
                self.create(name, body)
            else:
                self._try("replace", name, attempt)
        except (AlreadyExistsError, MissingFileError) as error:
            raise ChangedError(f"{self._uri(name)} was replaced by another process") from error

    @contextmanager
    def open_output(self, name: str) -> Iterator[BinaryIO]:
        """A local temporary file that goes up on a clean exit, in pieces where it is large."""

        def attempt() -> None:
            file.seek(0)
            clients().boto.upload_fileobj(_Unclosable(file), self.bucket, self._key(name))

        with explained("write to", Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
            yield file
            file.flush()
            self._try("write", name, attempt)
            traffic.add(written=os.fstat(file.fileno()).st_size)

    def delete(self, name: str) -> None:
        """Remove one object."""
        self._try("delete", name, lambda: clients().boto.delete_object(**self._object(name)))

    def sweep(self) -> None:
        """Abort multipart uploads below the prefix that began more than a day ago."""
        prefix = f"{self.prefix}/" if self.prefix else ""

        def attempt() -> None:
            client = clients().boto
            pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            for upload in (upload for page in pages for upload in page.get("Uploads", ())):
                if upload["Initiated"] < datetime.now(UTC) - ABANDONED:
                    client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])

        self._try("clean up", "", attempt)

    def is_file(self) -> bool:
        """Whether there is an object of the very name of the prefix."""
        parent, _, name = self.prefix.rpartition("/")
        return bool(name) and S3Place(self.bucket, parent).exists(name)

    def remove_if_empty(self) -> None:
        """Nothing to do: an empty prefix does not exist."""


class _Unclosable:
    """boto3 closes what it uploads; a retry needs the file open."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        """Stay open."""


def _ask_range(file: pa.NativeFile, offset: int, length: int) -> bytes:
    traffic.ask("GetObject")
    return bytes(file.read_at(length, offset))


def _read_whole(file: pa.NativeFile) -> pa.Buffer:
    size = file.size()
    if size <= RANGE_BYTES:
        return pa.py_buffer(_ask_range(file, 0, size))
    whole = pa.allocate_buffer(size)
    target = np.frombuffer(whole, np.uint8)

    def read(offset: int) -> None:
        length = min(RANGE_BYTES, size - offset)
        data = _ask_range(file, offset, length)
        if len(data) != length:
            raise OSError("the object changed its size while it was read")
        target[offset : offset + length] = np.frombuffer(data, np.uint8)

    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        for _ in pool.map(read, range(0, size, RANGE_BYTES)):
            pass
    return whole
