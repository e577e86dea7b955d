"""Tables of record batches (Parquet, Arrow): a column of lists holds the vectors; `id` and `label` may be beside it."""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lattqe.errors import LattqeError
from lattqe.formats.matrix import ID_NAMES, LABEL_NAMES, VECTOR_NAMES
from lattqe.formats.reader import (
    Labels,
    Reader,
    ReadOptions,
    RowBlock,
    as_ids,
    as_labels,
    as_vectors,
    check_matrix,
    text_labels,
)
from lattqe.store.ipc import FILE_MAGIC, unpacked_bytes


class BatchReader(Reader):
    """Chooses the columns and turns batches into blocks; a format gives schema, number of rows, and batches."""

    def __init__(self, path: Path, schema: pa.Schema, rows: int, options: ReadOptions, kind: str) -> None:
        name = str(path)
        if options.transposed:
            raise LattqeError(f"{name}: a table has one image in each row; leave out --transposed")
        self.name, self.rows, self.kind, self._schema = name, rows, kind, schema
        self._path, self._options = path, options
        if len(set(schema.names)) != len(schema.names):
            raise LattqeError(f"{name} has two columns of the same name")
        self._vector = _choose_vector(name, schema, options.key)
        self._id = _choose_column(name, schema, ID_NAMES, options.ids_key)
        self._label = _choose_column(name, schema, LABEL_NAMES, options.labels_key)
        self.notes = _unused(schema, {self._vector, self._id, self._label})
        self.has_ids = self._id is not None
        if self._label:
            self.labels = int if pa.types.is_integer(_plain(schema.field(self._label).type)) else str
        if rows == 0:
            raise LattqeError(f"{name} is empty: it has no rows")
        options.check_expansion(path, self._values() * 4, f"vectors of {self._values():,} numbers")
        self.dim = self._find_dim()
        check_matrix(name, (rows, self.dim), np.dtype(np.float32))

    @abstractmethod
    def batches(self, columns: list[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield the named columns in batches of at most `size` rows."""

    def _values(self) -> int:
        """How many numbers all vectors have, as far as the file says so before they are read."""
        return 0

    def _blocks(self, step: int) -> Iterator[RowBlock]:
        columns = [column for column in (self._vector, self._id, self._label) if column]
        first = texts = 0
        for batch in self._sound(columns, step):
            texts += sum(_text_bytes(batch.column(column)) for column in columns[1:])
            self._options.check_expansion(self._path, texts, f"ids and labels of {texts:,} bytes")
            yield self._block(batch, first)
            first += batch.num_rows
        if first != self.rows:
            raise LattqeError(f"{self.name} is damaged: {self.rows} rows are declared, {first} are there")

    def _label_names(self) -> set[str]:
        if self.labels is not str or self._label is None:
            return set()
        names: set[str] = set()
        for batch in self._sound([self._label], 1 << 16):
            texts = _text_bytes(batch.column(0))
            self._options.check_expansion(self._path, texts, f"labels of {texts:,} bytes")
            names.update(text_labels(_texts(batch.column(0), self.name, "label"), self.name))
        return names

    def _sound(self, columns: list[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield checked batches of at most `size` rows: offsets of a damaged file can point anywhere."""
        for batch in self.batches(columns, size):
            batch.validate(full=True)
            for start in range(0, batch.num_rows, size):
                yield batch.slice(start, size)

    def _block(self, batch: pa.RecordBatch, first: int) -> RowBlock:
        vectors = _vectors(batch.column(self._vector), self.dim, self.name, first)
        ids = None if self._id is None else as_ids(_texts(batch.column(self._id), self.name, "id"), self.name)
        labels: Labels | None = None
        if self._label is not None:
            column = batch.column(self._label)
            if self.labels is str:
                labels = _texts(column, self.name, "label")
            else:
                labels = as_labels(_whole(column, self.name, "label").to_pylist(), self.name)
        return RowBlock(vectors, ids, labels)

    def _find_dim(self) -> int:
        kind = _plain(self._schema.field(self._vector).type)
        if pa.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        for batch in self._sound([self._vector], 1):
            length = pc.list_value_length(_storage(batch.column(0)))[0].as_py()
            return int(length or 0)
        raise LattqeError(f"{self.name} is damaged: {self.rows} rows are declared, none are there")


def _choose_vector(name: str, schema: pa.Schema, key: str | None) -> str:
    lists = [field.name for field in schema if _is_vector(field.type)]
    if key is not None:
        if key not in schema.names:
            raise LattqeError(f"{name} has no column {key!r}; it has {', '.join(schema.names[:8])}")
        if key not in lists:
            raise LattqeError(f"{name}: column {key!r} holds {schema.field(key).type}; lists of numbers are needed")
        return key
    usual = [column for column in lists if column.lower() in VECTOR_NAMES]
    for found in (lists, usual):
        if len(found) == 1:
            return found[0]
    if lists:
        raise LattqeError(f"{name} has several columns of vectors, {', '.join(lists[:8])}: choose one with --key NAME")
    raise LattqeError(f"{name} has no column of vectors (lists of numbers); it has {', '.join(schema.names[:8])}")


def _choose_column(name: str, schema: pa.Schema, usual: tuple[str, ...], key: str | None) -> str | None:
    """The column of ids or labels: the one requested, or the first with a usual name."""
    if key is not None and key not in schema.names:
        raise LattqeError(f"{name} has no column {key!r}; it has {', '.join(schema.names[:8])}")
    return key or next((column for column in usual if column in schema.names), None)


def _unused(schema: pa.Schema, used: set[str | None]) -> list[str]:
    """A note about columns that are left out, and the options that would use them."""
    left = [column for column in schema.names if column not in used]
    if not left:
        return []
    shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
    return [f"not used: {shown} (--ids-key NAME takes ids from a column, --labels-key NAME labels, --key NAME vectors)"]


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type under an extension type or a dictionary."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    return _plain(kind.value_type) if pa.types.is_dictionary(kind) else kind


def _is_vector(kind: pa.DataType) -> bool:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    is_list = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))


def _storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _vectors(column: pa.Array, dim: int, name: str, first: int) -> np.ndarray:
    """Make (n, dim) of a column of lists; a missing vector, number or another length is refused by its row."""
    column = _storage(column)
    if column.null_count:
        raise LattqeError(f"{name}: row {first + int(np.argmax(column.is_null().to_numpy(False)))} has no vector")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    other = np.flatnonzero(lengths != dim)
    if len(other):
        raise LattqeError(f"{name}: row {first + other[0]} has {lengths[other[0]]} dimensions, the first row has {dim}")
    values = column.flatten()
    if values.null_count:
        row = first + int(np.argmax(values.is_null().to_numpy(False))) // dim
        raise LattqeError(f"{name}: the vector of row {row} lacks a number")
    return as_vectors(values.to_numpy(zero_copy_only=False).reshape(len(column), dim))


def _whole(column: pa.Array, name: str, what: str) -> pa.Array:
    if column.null_count:
        raise LattqeError(f"{name}: some rows have no {what}")
    return column


def _is_text(kind: pa.DataType) -> bool:
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary,
             pa.types.is_large_binary)  # fmt: skip
    return any(test(kind) for test in texts)


def _texts(column: pa.Array, name: str, what: str) -> list[str]:
    kind = _plain(column.type)
    if not _is_text(kind) and not pa.types.is_integer(kind):
        raise LattqeError(f"{name}: the {what} column holds {column.type}; text or whole numbers are needed")
    column = _whole(_storage(column), name, what)
    if pa.types.is_dictionary(column.type):  # each text once in memory, however often it is used
        used, rows = _used(column)
        found = _texts(used, name, what)
        return [found[row] for row in rows.tolist()]
    values: list[Any] = column.to_pylist()
    return [value.decode("utf-8") if isinstance(value, bytes) else str(value) for value in values]


def _used(column: pa.DictionaryArray) -> tuple[pa.Array, np.ndarray]:
    """The values that a dictionary's rows use, and for each row the number of its value among them; none is missing."""
    numbers, rows = np.unique(column.indices.to_numpy(zero_copy_only=False), return_inverse=True)
    return column.dictionary.take(pa.array(numbers)), rows


def _text_bytes(column: pa.Array) -> int:
    """Bytes of a column's texts, written out one by one; 0 for numbers."""
    column = _storage(column)
    if pa.types.is_dictionary(column.type):
        if column.null_count:  # refused later
            return 0
        used, rows = _used(column)
        return int(_lengths(used) @ np.bincount(rows, minlength=len(used))) if len(used) else 0
    return int(_lengths(column).sum())


def _lengths(column: pa.Array) -> np.ndarray:
    """The bytes of each text (n,); 0 for anything else."""
    kind = column.type
    if pa.types.is_string_view(kind):  # a length and three more numbers for each
        return np.frombuffer(column.buffers()[1], "<i4")[4 * column.offset :][: 4 * len(column) : 4].astype(np.int64)
    if _is_text(kind):
        return pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.zeros(len(column), np.int64)


class ArrowReader(BatchReader):
    """One IPC file or stream, memory-mapped."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path = path
        with path.open("rb") as file:
            self._is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        unpacked = unpacked_bytes(pa.memory_map(str(path)).read_buffer()) or 0
        options.check_expansion(path, unpacked, f"{unpacked:,} bytes")
        rows = sum(batch.num_rows for batch in self._stored())
        super().__init__(path, self._open().schema, rows, options, "Arrow")

    def batches(self, columns: list[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield the named columns in the batches that are stored."""
        # Columns are chosen afterwards: asking Arrow to skip the others makes it copy what it would only map.
        return (batch.select(columns) for batch in self._stored())

    def _open(self) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
        opener = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opener(pa.memory_map(str(self._path)), options=pa.ipc.IpcReadOptions(use_threads=False))

    def _stored(self) -> Iterator[pa.RecordBatch]:
        reader = self._open()
        if self._is_file:
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from reader


def open_arrow(path: Path, options: ReadOptions) -> ArrowReader:
    """Open an Arrow file or stream."""
    return ArrowReader(path, options)


class ParquetReader(BatchReader):
    """One Parquet file."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        # Mapped: a row group is read page by page, and a damaged page of a declared gigabyte is not allocated first.
        self._mapped = pa.memory_map(str(path)).read_buffer()
        self._file = pq.ParquetFile(pa.memory_map(str(path)), pre_buffer=False)
        schema = self._file.schema_arrow
        texts = [field.name for field in schema if _is_text(field.type)]
        # Texts as they are stored mostly: one of a megabyte that a million rows share is not written out for each.
        self._file = pq.ParquetFile(pa.memory_map(str(path)), pre_buffer=False, read_dictionary=texts)
        super().__init__(path, self._file.schema_arrow, self._file.metadata.num_rows, options, "Parquet")

    def batches(self, columns: list[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield the named columns in batches of at most `size` rows."""
        return self._file.iter_batches(batch_size=size, columns=columns, use_threads=False)

    def _values(self) -> int:
        """By the footer: one row may have as many as it likes, and is read as a whole."""
        counts = declared_values(self._mapped)
        return sum(count for path, count in counts if path.startswith(f"{self._vector}."))


def declared_values(file: pa.Buffer) -> list[tuple[str, int]]:
    """The columns of all row groups of a Parquet file, by their paths, and how many values each has, by its footer.

    Read from the bytes (Thrift's compact protocol): pyarrow's own objects for columns end the whole process where the
    numbers of a damaged one contradict each other. ValueError: it makes no sense.
    """
    data = memoryview(file).cast("B")
    length = int.from_bytes(data[-8:-4], "little")
    try:
        footer, _ = _thrift(data[len(data) - 8 - length : len(data) - 8], 0, STRUCT)
        columns = [column[3] for group in footer[4] for column in group[1]]  # row groups, their columns, metadata
        return [(".".join(str(name, "utf-8") for name in column[3]), int(column[5])) for column in columns]
    except (IndexError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError("its footer does not describe its columns") from error


STRUCT, LIST, SET, MAP, BINARY, DOUBLE, BYTE = 12, 9, 10, 11, 8, 7, 3


def _thrift(data: memoryview, at: int, kind: int) -> tuple[Any, int]:
    """One value of a kind at a place, and the place after it: structs as {field: value}, lists as lists."""
    if kind == STRUCT:
        fields: dict[int, Any] = {}
        number = 0
        while head := data[at]:
            at += 1
            if head >> 4:
                number += head >> 4
            else:
                number, at = _varint(data, at)
                number = (number >> 1) ^ -(number & 1)
            kind = head & 15
            if kind in (1, 2):  # true and false have no bytes of their own
                fields[number] = kind == 1
            else:
                fields[number], at = _thrift(data, at, kind)
        return fields, at + 1
    if kind in (LIST, SET):
        count, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if count == 15:
            count, at = _varint(data, at)
        values = []
        for _ in range(count):
            value, at = _thrift(data, at, BYTE if kind in (1, 2) else kind)
            values.append(value)
        return values, at
    if kind == BINARY:
        count, at = _varint(data, at)
        return data[at : at + count], at + count
    if kind == DOUBLE:
        return data[at + 7], at + 8  # not needed, but there
    if kind == BYTE:
        return data[at], at + 1
    if kind == MAP:
        raise KeyError("Parquet has no maps")
    number, at = _varint(data, at)
    return (number >> 1) ^ -(number & 1), at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number of seven bits a byte, at most 64 in all."""
    value = 0
    for place in range(0, 70, 7):
        byte = data[at]
        value, at = value | (byte & 127) << place, at + 1
        if byte < 128:
            return value, at
    raise IndexError("a number of more than 64 bits")


def open_parquet(path: Path, options: ReadOptions) -> ParquetReader:
    """Open a Parquet file."""
    return ParquetReader(path, options)
