"""The parts of artifacts: tables made from arrays, their bytes, and rows read from them.

A part is an Arrow IPC file with one record batch and no compression: after mapping it, a vector is viewed, not parsed.
Each part is checked before its first use. Parts of a remote artifact can be kept in a folder on this machine
(`PartCache`).
"""

import fcntl
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import pyarrow as pa

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store.ipc import unpacked_bytes
from lattqe.store.local import LocalPlace, explained
from lattqe.store.manifest import (
    APPROXIMATE,
    NUMBERS,
    Manifest,
    Part,
    checksum,
    edges_schema,
    features_schema,
    list_type,
    neighbors_schema,
    ranks_schema,
    read_manifest,
    schema_columns,
)
from lattqe.store.place import MissingFileError, Place, open_place

# Parts read from S3 live in memory, at most this much of them for each open artifact; parts on disk are only mapped.
RESIDENT_BYTES = 256 << 20
# Parts that threads load beforehand: two checksums at once keep up with the raw speed of a disk cache.
PARTS_AHEAD = 2
FETCHES = 3  # of a part that does not match its checksum
# Looks at a part's rows when they are loaded: the batch, its first row, its address.
Check: TypeAlias = Callable[[pa.RecordBatch, int, str], None]
# Files on disk whose checksum this process has found right: (path, signature of the file, checksum).
_checked: set[tuple[str, tuple[int, int, int], str]] = set()


def matrix_column(matrix: np.ndarray) -> pa.FixedSizeListArray:
    """An (n, d) array as a column of n lists, without a copy where it is contiguous."""
    flat = np.ascontiguousarray(matrix).reshape(-1)
    values = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
    return pa.FixedSizeListArray.from_arrays(values, type=list_type(values.type, matrix.shape[1]))


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
            f"labels must be 32-bit integers, not {labels.dtype} (first: {labels.reshape(-1)[:1].tolist()})"
        )
    return labels.reshape(-1).astype(np.int32)


def string_column(texts: Sequence[str] | pa.Array | pa.ChunkedArray) -> pa.Array:
    """Texts as one Arrow column; LattqeError if any value is not text."""
    try:
        return _as_column(
            texts.cast(pa.string()) if isinstance(texts, pa.Array | pa.ChunkedArray) else pa.array(texts, pa.string())
        )
    except (pa.ArrowException, UnicodeEncodeError, TypeError) as error:
        raise LattqeError(f"ids must be strings: {error}") from error


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
        if unpacked_bytes(data) is not None:
            raise CorruptDataError(f"{where} is compressed, which no part is: it was replaced; make it again")
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


def load_part(place: Place, part: Part) -> pa.Buffer:
    """The bytes of a part, mapped or fetched, with the size and checksum that the manifest says.

    What comes from afar may be damaged on the way alone: it is fetched again before it counts as damaged.
    """
    for _ in range(0 if isinstance(place, LocalPlace) else FETCHES - 1):
        with suppress(CorruptDataError):
            return _load_once(place, part)
    return _load_once(place, part)


def _load_once(place: Place, part: Part) -> pa.Buffer:
    where = f"{place.uri}/{part.name}"
    try:
        size = place.size(part.name)
        if size != part.bytes:
            raise CorruptDataError(f"{where} has {size} bytes, its manifest says {part.bytes}: it was cut or replaced")
        data = place.fetch(part.name)
    except MissingFileError as error:
        raise CorruptDataError(f"{where} is missing, though its manifest names it") from error
    if isinstance(place, LocalPlace):
        key = (where, place.signature(part.name), part.checksum)
        if key not in _checked:
            _check(data, part, where)
            _checked.add(key)
    else:
        _check(data, part, where)
    return data


def _check(data: pa.Buffer, part: Part, where: str) -> None:
    if data.size != part.bytes or checksum(data) != part.checksum:
        raise CorruptDataError(f"{where} does not match its checksum: it is damaged; restore it or make it again")


class Parts:
    """The rows of a stored artifact as Arrow batches, one for each part."""

    def __init__(self, place: Place, manifest: Manifest, cache: str | None, check: Check) -> None:
        self.place, self.manifest, self._check = place, manifest, check
        self._cache = PartCache(cache, manifest.digest) if cache is not None and not place.is_local else None
        self.starts = np.cumsum([0, *(part.rows for part in manifest.parts)])
        self._kept: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._lock = threading.Lock()

    def batch(self, number: int, keep: bool = True) -> pa.RecordBatch:
        """All rows of part `number`, checked; `keep` it for later calls, as far as memory is bounded."""
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        part = self.manifest.parts[number]
        if self._cache is not None:
            data = self._cache.load(self.place, part)
        else:
            data = load_part(self.place, part)
        where = f"{self.place.uri}/{part.name}"
        batch = decode_part(data, self.manifest.fields["columns"], part.rows, where)
        self._check(batch, int(self.starts[number]), where)
        if keep:
            self._keep(number, batch)
        return batch

    def _keep(self, number: int, batch: pa.RecordBatch) -> None:
        with self._lock:
            self._kept[number] = batch
            if self.place.is_local or self._cache is not None:
                return
            while len(self._kept) > 1 and sum(self.manifest.parts[i].bytes for i in self._kept) > RESIDENT_BYTES:
                self._kept.popitem(last=False)

    def span(self, start: int, stop: int | None) -> tuple[int, int]:
        """Check a row range; None is the end."""
        rows = self.manifest.rows
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise LattqeError(f"rows {start}:{stop} are not within the {rows} rows of {self.place.uri}")
        return int(start), int(stop)

    def slices(self, start: int, stop: int, keep: bool = True) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of the range part by part, with the row each piece starts at; the next part is loaded meanwhile."""
        if start == stop:
            return
        first, last = (int(np.searchsorted(self.starts, row, side="right")) - 1 for row in (start, stop - 1))
        for number, batch in enumerate(self._ahead(first, last, keep), first):
            begin = int(self.starts[number])
            low, high = max(start, begin), min(stop, begin + batch.num_rows)
            yield low, batch.slice(low - begin, high - low)

    def _ahead(self, first: int, last: int, keep: bool) -> Iterator[pa.RecordBatch]:
        """Parts first..last; threads load and check the next ones while one is in use."""
        if first == last:
            yield self.batch(first, keep)
            return
        with ThreadPoolExecutor(PARTS_AHEAD) as pool:
            coming: deque[Future[pa.RecordBatch]] = deque()
            for number in range(first, last + 1):
                coming.append(pool.submit(self.batch, number, keep))
                if len(coming) > PARTS_AHEAD:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()

    def groups(self, rows: np.ndarray) -> Iterator[tuple[pa.RecordBatch, np.ndarray, np.ndarray]]:
        """For a row list, part by part: the batch, the positions within `rows` (m,), the rows within the batch (m,)."""
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        for chunk in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if len(chunk):
                number = int(numbers[chunk[0]])
                yield self.batch(number), chunk, rows[chunk] - self.starts[number]

    def check_rows(self, rows: np.ndarray) -> np.ndarray:
        """A row list (n,) as int64, all within the artifact."""
        rows = np.asarray(rows)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise LattqeError(f"a row list has one dimension of whole numbers, not shape {rows.shape} of {rows.dtype}")
        rows = rows.astype(np.int64, copy=False)
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.manifest.rows:
            raise LattqeError(
                f"rows {int(rows.min())}..{int(rows.max())} are not within the {self.manifest.rows} "
                f"rows of {self.place.uri}"
            )
        return rows


class PartCache:
    """`folder/<digest>/<part>`: filled part by part, as parts are needed, once among all processes of the machine."""

    def __init__(self, folder: str, digest: str) -> None:
        self.place = LocalPlace(folder).child(digest)

    def load(self, source: Place, part: Part) -> pa.Buffer:
        """The part, mapped from the cache; fetched first where it is not there or is damaged."""
        try:
            return load_part(self.place, part)
        except CorruptDataError:  # absent or damaged
            pass
        with _locked(self.place.file(f"{part.name}.lock")):
            try:
                return load_part(self.place, part)  # another process fetched it while we waited
            except CorruptDataError:
                self.place.write(part.name, load_part(source, part))
        return load_part(self.place, part)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process (or thread) at a time; the lock goes with its holder, so a killed one blocks no other."""
    with explained("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class StoredRows:
    """A finished artifact that is cut into parts by rows."""

    kind: ClassVar[str]

    def __init__(self, place: Place, manifest: Manifest, cache: str | None = None) -> None:
        self.place, self.manifest, self.uri = place, manifest, place.uri
        self.parts = Parts(place, manifest, cache, self._check)

    @classmethod
    def open(cls, uri: str, cache: str | None = None) -> Self:
        """Open a finished artifact of this kind; `cache` is a local folder to keep parts of a remote one in."""
        place = open_place(uri)
        return cls(place, read_manifest(place, cls.kind), cache)

    def _check(self, batch: pa.RecordBatch, first: int, where: str) -> None:
        """Raise CorruptDataError for a part whose values would do harm, whatever its checksum says."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.manifest.rows

    @property
    def digest(self) -> str:
        """Digest of the content."""
        return self.manifest.digest

    @property
    def columns(self) -> list[str]:
        """Names of the stored columns."""
        return [column["name"] for column in self.manifest.fields["columns"]]

    def as_input(self) -> dict[str, str]:
        """How an artifact made from this one names it in its manifest."""
        lacks = self.manifest.approximation
        return {"uri": self.uri, "digest": self.digest, "kind": self.kind} | ({APPROXIMATE: lacks} if lacks else {})

    def table(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """All columns of rows start..stop."""
        start, stop = self.parts.span(start, stop)
        if start == stop:
            return pa.Table.from_batches([self.parts.batch(0).slice(0, 0)])
        return pa.Table.from_batches([batch for _, batch in self.parts.slices(start, stop)])
