"""What an Arrow IPC file or stream would unpack to, read from its messages before Arrow unpacks anything.

Arrow itself allocates what each compressed buffer declares when a batch is read. Only the fields that lead to those
declarations are read here; Arrow checks the rest.
"""

import struct
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

FILE_MAGIC = b"ARROW1"
CONTINUATION = 0xFFFFFFFF
DICTIONARY_BATCH, RECORD_BATCH = 2, 3
OLD_COMPRESSION = b"ARROW:experimental_compression"  # of Arrow 0.17, among a message's custom metadata
BUFFER = np.dtype([("offset", "<i8"), ("length", "<i8")])
BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])


def unpacked_bytes(data: pa.Buffer) -> int | None:
    """Bytes that the compressed buffers of an IPC file or stream declare; None where no batch is compressed.

    pa.ArrowInvalid where the messages lead out of the data.
    """
    view = memoryview(data)
    messages = _file_messages(view) if bytes(view[: len(FILE_MAGIC)]) == FILE_MAGIC else _stream_messages(view)
    total = None
    try:
        for metadata, body, times in messages:
            declared = _declared(metadata, body)
            if declared is not None:
                total = (total or 0) + times * declared
    except (struct.error, ValueError, IndexError) as error:
        raise pa.ArrowInvalid(f"its messages are damaged ({error})") from error
    return total


class _Table:
    """A table of a flatbuffer, at a position of its bytes."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - self._read("<i", at)

    @classmethod
    def root(cls, data: memoryview) -> "_Table":
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def _read(self, form: str, at: int) -> int:
        if at < 0:
            raise ValueError("an offset below zero")
        return int(struct.unpack_from(form, self._data, at)[0])

    def _field(self, number: int) -> int | None:
        """Where a field is, if it is there."""
        slot = 4 + 2 * number
        if slot >= self._read("<H", self._fields):
            return None
        offset = self._read("<H", self._fields + slot)
        return self._at + offset if offset else None

    def number(self, field: int, form: str) -> int:
        at = self._field(field)
        return 0 if at is None else self._read(form, at)

    def table(self, field: int) -> "_Table | None":
        at = self._field(field)
        return None if at is None else _Table(self._data, at + self._read("<I", at))

    def structs(self, field: int, dtype: np.dtype) -> np.ndarray:
        at = self._field(field)
        if at is None:
            return np.empty(0, dtype)
        start = at + self._read("<I", at)
        return np.frombuffer(self._data, dtype, self._read("<I", start), start + 4)


def _file_messages(data: memoryview) -> Iterator[tuple[memoryview, memoryview, int]]:
    """Metadata and body of each batch that the footer names, and how often it does."""
    end = len(data) - len(FILE_MAGIC) - 4
    length = struct.unpack_from("<i", data, end)[0]
    if not 0 < length <= end:
        raise ValueError("no footer")
    footer = _Table.root(data[end - length : end])
    blocks = [block for field in (2, 3) for block in footer.structs(field, BLOCK).tolist()]
    for (offset, size, _, body), times in Counter(blocks).items():
        if min(offset, size, body) < 0:
            raise ValueError("a block below zero")
        start, length = _prefix(data, offset)
        yield data[start : start + length], data[offset + size :], times


def _stream_messages(data: memoryview) -> Iterator[tuple[memoryview, memoryview, int]]:
    """Metadata and body of each message, one after the other, as far as they are there."""
    at = 0
    while at + 4 <= len(data):
        start, length = _prefix(data, at)
        if length == 0 or start + length > len(data):
            return
        metadata, at = data[start : start + length], start + length
        yield metadata, data[at:], 1
        body = _Table.root(metadata).number(3, "<q")
        if body < 0:
            raise ValueError("a body below zero")
        at += body


def _prefix(data: memoryview, at: int) -> tuple[int, int]:
    """Where a message's metadata starts, and its length; old files have no mark before it."""
    first = struct.unpack_from("<I", data, at)[0]
    start = at + 8 if first == CONTINUATION else at + 4
    return start, struct.unpack_from("<I", data, start - 4)[0]


def _declared(metadata: memoryview, body: memoryview) -> int | None:
    """The sum of what a message's compressed buffers declare, each before its bytes; None without compression."""
    message = _Table.root(metadata)
    kind, batch = message.number(1, "<B"), message.table(2)
    if kind == DICTIONARY_BATCH and batch is not None:
        batch = batch.table(1)
    elif kind != RECORD_BATCH:
        return None
    if batch is None or (batch.table(3) is None and OLD_COMPRESSION not in bytes(metadata)):
        return None
    buffers = batch.structs(2, BUFFER)
    return sum(
        max(0, struct.unpack_from("<q", body, offset)[0])  # -1: stored as it is
        for offset, length in buffers.tolist()
        if length >= 8 and offset >= 0
    )
