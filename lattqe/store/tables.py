"""Arrow schemas of the stored artifacts, tables made from arrays, and the bytes of a part.

A part is an Arrow IPC file with one record batch and no compression: after mapping it, a vector is viewed, not parsed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store.manifest import Manifest, describe_kind

DTYPES = {"float16": pa.float16(), "float32": pa.float32()}
NUMBERS = {pa.float16(): "float16", pa.float32(): "float32", pa.int32(): "int32"}  # that lists are made of
DEFAULT_PART_BYTES = 64 << 20
# What an id is taken to need when rows are counted into parts before any id is seen.
NOMINAL_ID_BYTES = 24


def check_dtype(dtype: str) -> str:
    """float16 or float32."""
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in DTYPES:
        raise LattqeError(f"dtype {name!r} cannot be stored: use float16 or float32")
    return name


def _column(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list(kind: pa.DataType, size: int) -> pa.DataType:
    return pa.list_(pa.field("item", kind, nullable=False), size)


def features_schema(
    dim: int, dtype: str = "float16", labels: bool = False, extra: Sequence[pa.Field] = ()
) -> pa.Schema:
    """Columns id, vector, label (with `labels`), then `extra`."""
    columns = [_column("id", pa.string()), _column("vector", _list(DTYPES[check_dtype(dtype)], dim))]
    if labels:
        columns.append(_column("label", pa.int32()))
    taken = {"id", "vector", "label"}
    for column in extra:
        if column.name in taken:
            raise LattqeError(f"column {column.name!r} is there twice or has a reserved name")
        taken.add(column.name)
    return pa.schema([*columns, *(column.remove_metadata() for column in extra)])


def neighbors_schema(k: int) -> pa.Schema:
    """Columns neighbors (k row numbers, -1 = none) and scores."""
    return pa.schema([_column("neighbors", _list(pa.int32(), k)), _column("scores", _list(pa.float32(), k))])


def edges_schema(k: int) -> pa.Schema:
    """Columns neighbors (k row numbers, -1 = none) and weights: the row's own, then those of its neighbors."""
    return pa.schema([_column("neighbors", _list(pa.int32(), k)), _column("weights", _list(pa.float32(), 1 + k))])


def ranks_schema(k: int) -> pa.Schema:
    """The id of the query, then as in a neighbor graph."""
    return pa.schema([_column("id", pa.string()), *neighbors_schema(k)])


def schema_of(kind: str, fields: Mapping[str, Any]) -> pa.Schema:
    """The schema of a kind from its fields: dim, dtype and labels for features, k for the others."""
    try:
        if kind == "features":
            return features_schema(int(fields["dim"]), fields["dtype"], bool(fields.get("labels", False)))
        if kind == "neighbors":
            return neighbors_schema(int(fields["k"]))
        if kind == "edges":
            return edges_schema(int(fields["k"]))
        if kind == "ranks":
            return ranks_schema(int(fields["k"]))
    except KeyError as error:
        raise LattqeError(f"kind {kind!r} needs the field {error}") from error
    raise LattqeError(f"kind {kind!r} has no schema of its own: pass one")


def schema_columns(schema: pa.Schema) -> list[dict[str, str]]:
    """The columns as a manifest tells them: name and type, in order."""
    return [{"name": column.name, "type": str(column.type)} for column in schema]


def check_columns(manifest: Manifest, schema: pa.Schema, uri: str) -> None:
    """An artifact has at least the columns of its kind, in their order; CorruptDataError otherwise."""
    columns, needed = manifest.fields.get("columns"), schema_columns(schema)
    if not isinstance(columns, list) or columns[: len(needed)] != needed or not all(map(_is_column, columns)):
        raise CorruptDataError(f"{uri}: the columns in its manifest are not those of {describe_kind(manifest.kind)}")


def _is_column(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"name", "type"}
        and all(isinstance(text, str) for text in entry.values())
    )


def matrix_column(matrix: np.ndarray) -> pa.FixedSizeListArray:
    """An (n, d) array as a column of n lists, without a copy where it is contiguous."""
    flat = np.ascontiguousarray(matrix).reshape(-1)
    values = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
    return pa.FixedSizeListArray.from_arrays(values, type=_list(values.type, matrix.shape[1]))


def column_matrix(column: pa.FixedSizeListArray) -> np.ndarray:
    """A column of n lists of numbers, none of them missing, as an (n, d) read-only view."""
    values = column.flatten()
    dtype = np.dtype(NUMBERS[values.type])
    # Arrow's own `to_numpy` imports pandas wherever that is installed: time and memory in every process.
    flat = np.frombuffer(values.buffers()[1], dtype, len(values), values.offset * dtype.itemsize)
    flat.flags.writeable = False
    return flat.reshape(len(column), column.type.list_size)


def features_table(
    ids: Sequence[str] | pa.Array,
    vectors: np.ndarray,
    labels: np.ndarray | None = None,
    extra: Mapping[str, Any] | None = None,
) -> pa.Table:
    """A table of ids (n,), vectors (n, D) float16 or float32 as they are, labels (n,), and other columns."""
    extra = dict(extra or {})
    columns = [string_column(ids), matrix_column(vectors)]
    if labels is not None:
        columns.append(pa.array(_as_labels(labels)))
    more = {
        name: _as_column(values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values))
        for name, values in extra.items()
    }
    schema = features_schema(
        vectors.shape[1],
        vectors.dtype.name,
        labels is not None,
        [pa.field(name, values.type) for name, values in more.items()],
    )
    return _table([*columns, *more.values()], schema)


def neighbors_table(I: np.ndarray, D: np.ndarray) -> pa.Table:
    """A table of neighbors I (n, k) and scores D (n, k)."""
    return _table(
        [matrix_column(np.asarray(I, dtype=np.int32)), matrix_column(np.asarray(D, dtype=np.float32))],
        neighbors_schema(I.shape[1]),
    )


def edges_table(neighbors: np.ndarray, weights: np.ndarray) -> pa.Table:
    """A table of neighbors (n, k) and weights (n, 1 + k)."""
    return _table(
        [matrix_column(np.asarray(neighbors, dtype=np.int32)), matrix_column(np.asarray(weights, dtype=np.float32))],
        edges_schema(neighbors.shape[1]),
    )


def ranks_table(ids: Sequence[str] | pa.Array | pa.ChunkedArray, I: np.ndarray, D: np.ndarray) -> pa.Table:
    """A table of query ids (n,), ranks I (n, k) and scores D (n, k)."""
    lists = neighbors_table(I, D)
    return _table([string_column(ids), *lists.columns], ranks_schema(I.shape[1]))


def _as_labels(labels: np.ndarray) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.dtype.kind not in "iu" or (labels.size and not -(2**31) <= labels.min() <= labels.max() < 2**31):
        raise LattqeError(
            f"labels are whole numbers of 32 bits, not {labels.dtype} (first: {labels.reshape(-1)[:1].tolist()})"
        )
    return labels.reshape(-1).astype(np.int32)


def string_column(texts: Sequence[str] | pa.Array | pa.ChunkedArray) -> pa.Array:
    """Texts as one Arrow column; LattqeError where something is no text."""
    try:
        return _as_column(
            texts.cast(pa.string()) if isinstance(texts, pa.Array | pa.ChunkedArray) else pa.array(texts, pa.string())
        )
    except (pa.ArrowException, UnicodeEncodeError, TypeError) as error:
        raise LattqeError(f"ids must be texts: {error}") from error


def _as_column(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _table(columns: list[pa.Array], schema: pa.Schema) -> pa.Table:
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise LattqeError(f"columns differ in length: {[len(column) for column in columns]}")
    return pa.Table.from_arrays(columns, schema=schema)


def encode_part(table: pa.Table, schema: pa.Schema) -> pa.Buffer:
    """The bytes of a part: the same for the same rows, however the table was chunked or sliced."""
    if table.column_names != schema.names:
        raise LattqeError(f"columns are {table.column_names}, {schema.names} were announced")
    for column, values in zip(schema, table.columns):
        if values.null_count and not column.nullable:
            raise LattqeError(f"column {column.name!r} has missing values: it must not")
    if not table.num_rows:
        raise LattqeError("a part has at least one row")
    batch = pa.record_batch([_compact(column) for column in table.cast(schema).columns], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _compact(column: pa.ChunkedArray) -> pa.Array:
    """One array that shares nothing: a slice would carry some of its neighbors' text into the file."""
    return pa.concat_arrays([*column.chunks, column.chunk(0).slice(0, 0)])


def decode_part(data: pa.Buffer, columns: list[dict[str, str]], rows: int, where: str) -> pa.RecordBatch:
    """View the bytes of a part, which must hold what its manifest says."""
    try:
        reader = pa.ipc.open_file(pa.BufferReader(data))
        batch = reader.get_batch(0) if reader.num_record_batches == 1 else None
        if batch is not None:
            _validate(batch)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptDataError(f"{where} is not a readable Arrow file: {error}") from error
    if batch is None or batch.num_rows != rows:
        raise CorruptDataError(f"{where} does not hold one batch of {rows} rows")
    if schema_columns(batch.schema) != columns:
        raise CorruptDataError(f"{where} has other columns than its manifest says: {batch.schema.names}")
    return batch


def _validate(batch: pa.RecordBatch) -> None:
    """Raise an ArrowException where following the columns could lead out of the buffer, or where a value is missing."""
    batch.validate()
    for column, values in zip(batch.schema, batch.columns):
        if not pa.types.is_fixed_size_list(column.type):
            values.validate(full=True)  # offsets and texts; numbers need no such look
        elif values.null_count or values.values.null_count:
            raise pa.ArrowInvalid(f"column {column.name!r} has missing values")


def part_row_counts(rows: int, bytes_per_row: int, part_bytes: int = DEFAULT_PART_BYTES) -> list[int]:
    """Cut `rows` into parts of about `part_bytes`: all equal but the last. A function of these numbers alone."""
    if rows < 1 or bytes_per_row < 1:
        raise LattqeError(f"nothing to store: {rows} rows of {bytes_per_row} bytes")
    each = max(1, min(part_bytes // bytes_per_row, rows))
    return [min(each, rows - start) for start in range(0, rows, each)]


def row_bytes(kind: str, fields: Mapping[str, Any]) -> int:
    """Bytes that one row of a kind needs, for `part_row_counts`; ids count with a nominal length."""
    if kind == "features":
        width = int(fields["dim"]) * np.dtype(fields["dtype"]).itemsize
        return width + NOMINAL_ID_BYTES + 4 * bool(fields.get("labels", False))
    return 8 * int(fields["k"]) + {"ranks": NOMINAL_ID_BYTES, "edges": 4}.get(kind, 0)
