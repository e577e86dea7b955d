"""A feature set: ids, L2-normalised vectors, optional labels and other columns, cut into Arrow parts by rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store.manifest import DTYPES, Manifest, check_columns, features_schema
from lattqe.store.parts import StoredRows, column_matrix, string_column
from lattqe.store.place import Place

# Rows converted to float64 at a time: a few MiB of working memory for any width.
CHUNK_VALUES = 1 << 19

# How far the norm of a stored vector may be from 1: rounding of each component, and some.
NORM_TOLERANCE = {"float16": 2e-3, "float32": 1e-5}
MAX_DIM = 1 << 20
SORTED_AT_ONCE = 1 << 22  # hashes of ids


def norms(vectors: np.ndarray) -> np.ndarray:
    """L2 norms (n,) float64 of vectors (n, D); NaN or infinity where a component is."""
    out = np.empty(len(vectors))
    step = max(1, CHUNK_VALUES // max(1, vectors.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(vectors), step):
            chunk = vectors[start : start + step].astype(np.float64)
            out[start : start + step] = np.sqrt(np.einsum("ij,ij->i", chunk, chunk))
    return out


def normalised(vectors: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (n, D) in `dtype`, and which rows are good (n,): the others are zero or not finite."""
    out = np.empty(vectors.shape, dtype)
    good = np.empty(len(vectors), bool)
    step = max(1, CHUNK_VALUES // max(1, vectors.shape[1]))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start in range(0, len(vectors), step):
            chunk = vectors[start : start + step].astype(np.float64)
            # Scaling by the largest component first keeps squares of very large or small vectors in range.
            chunk /= np.abs(chunk).max(axis=1, keepdims=True)
            chunk /= np.sqrt(np.einsum("ij,ij->i", chunk, chunk))[:, None]
            good[start : start + step] = np.isfinite(chunk).all(axis=1)
            out[start : start + step] = chunk
    return out, good


def as_matrix(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Check that an array is a numeric (n, dim) matrix."""
    vectors = np.asarray(vectors)
    if vectors.dtype.kind not in "fiu":
        raise LattqeError(f"vectors are numbers, not {vectors.dtype}")
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise LattqeError(f"vectors have shape {vectors.shape}, (n, {dim}) is needed")
    return vectors


def bad_ids(ids: pa.Array) -> np.ndarray:
    """Which ids (n,) are missing, empty, or hold a line break: ids are exported as lines."""
    bad = pc.or_kleene(pc.equal(pc.binary_length(ids), 0), pc.match_substring_regex(ids, "[\r\n]"))
    return pc.fill_null(bad, True).to_numpy(zero_copy_only=False)


def check_ids(ids: pa.Array, where: str, first: int) -> None:
    """Refuse stored ids (n,) of rows from `first` on that are empty or hold a line break."""
    wrong = np.flatnonzero(bad_ids(ids))
    if len(wrong):
        raise CorruptDataError(f"{where}: the id of row {first + wrong[0]} is empty or holds a line break")


class IdRegister:
    """Collects the 128-bit hashes of ids row by row and finds those that came twice: 16 bytes for each row, and while
    it looks for them little more.
    """

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []

    def add(self, ids: pa.ChunkedArray | pa.Array) -> None:
        """Register the ids of the next rows."""
        digest = xxhash.xxh3_128_digest
        data = b"".join([digest(text) for text in ids.cast(pa.binary()).to_pylist()])
        self._chunks.append(np.frombuffer(data, np.uint64).reshape(-1, 2))

    def duplicates(self, limit: int) -> list[list[int]]:
        """Rows that share an id, for the first `limit` such ids in order of their first row."""
        repeated: list[np.ndarray] = []
        shares = 1 + sum(map(len, self._chunks)) // SORTED_AT_ONCE
        firsts = np.cumsum([0, *map(len, self._chunks)])
        for share in range(shares):
            # Equal hashes fall into one share: sorting all at once would take twice the memory again.
            within = [np.flatnonzero(chunk[:, 0] % np.uint64(shares) == share) for chunk in self._chunks]
            if not within:
                return []
            rows = np.concatenate([first + places for first, places in zip(firsts, within)])
            hashes = np.concatenate([chunk[places] for chunk, places in zip(self._chunks, within)])
            order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: rows ascend among equals
            changes = (hashes[order[1:]] != hashes[order[:-1]]).any(axis=1)
            starts = np.flatnonzero(np.r_[True, changes])
            stops = np.r_[starts[1:], len(order)]
            several = np.flatnonzero(stops - starts > 1)
            first = rows[order[starts[several]]]
            for group in several[np.argsort(first, kind="stable")[:limit]]:
                repeated.append(rows[order[starts[group] : stops[group]][:4]])
        return [rows.tolist() for rows in sorted(repeated, key=lambda rows: rows[0])[:limit]]


class FeatureSet(StoredRows):
    """A finished feature set. Vectors come in their stored dtype; views on mapped files are read-only.

    `label_names` says what the labels mean where they were text (label i is `label_names[i]`), else it is None: numbers
    that were given as numbers.
    """

    kind = "features"

    def __init__(self, place: Place, manifest: Manifest, cache: str | None = None) -> None:
        self.dim, self.dtype = _dimensions(manifest, place.uri)
        self.label_names = _label_names(manifest, place.uri)
        super().__init__(place, manifest, cache)

    @property
    def has_labels(self) -> bool:
        """Whether there is a label for each row."""
        return "label" in self.columns

    def content_fields(self) -> dict[str, Any]:
        """Fields of an artifact with the same columns, for `Pending.begin`: dim, dtype, labels and their names."""
        names = {} if self.label_names is None else {"label_names": self.label_names}
        return {"dim": self.dim, "dtype": self.dtype, "labels": self.has_labels, **names}

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Vectors of rows start..stop, (n, D); a read-only view where they are in one part, else a copy."""
        start, stop = self.parts.span(start, stop)
        out: np.ndarray | None = None
        for row, batch in self.parts.slices(start, stop):
            block = column_matrix(batch.column("vector"))
            if len(block) == stop - start:
                return block
            if out is None:
                out = np.empty((stop - start, self.dim), self.dtype)
            out[row - start : row - start + len(block)] = block
        return np.empty((0, self.dim), self.dtype) if out is None else out

    def pieces(
        self, start: int = 0, stop: int | None = None, on_ids: Callable[[pa.Array], None] | None = None
    ) -> list[np.ndarray]:
        """Vectors of rows start..stop as read-only views (n_i, D), one for each part that has some of them.

        They are for searching, whose bounds rest on unit vectors: CorruptDataError where one is of another length.
        on_ids: called with the ids (n_i,) of each, a copy.
        """
        found = []
        for row, batch in self.parts.slices(*self.parts.span(start, stop)):
            found.append(column_matrix(batch.column("vector")))
            self._check_unit(found[-1], row)
            if on_ids is not None:
                on_ids(_copied(batch.column("id")))
        return found or [np.empty((0, self.dim), self.dtype)]

    def _check_unit(self, vectors: np.ndarray, first: int) -> None:
        step = max(1, CHUNK_VALUES // self.dim)
        for start in range(0, len(vectors), step):
            chunk = vectors[start : start + step].astype(np.float32)
            # Written so that NaN, for which every comparison is false, counts as wrong.
            with np.errstate(over="ignore", invalid="ignore"):
                off = ~(np.abs(np.sqrt(np.einsum("ij,ij->i", chunk, chunk)) - 1) <= 2 * NORM_TOLERANCE[self.dtype])
            if off.any():
                row = start + int(np.flatnonzero(off)[0])
                raise CorruptDataError(
                    f"{self.uri}: the vector of row {first + row} has norm "
                    f"{norms(vectors[row : row + 1])[0]:.6g}, not 1: make the set again"
                )

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Vectors of a row list (n,) in its order, repeats allowed: (n, D)."""
        rows = self.parts.check_rows(rows)
        out = np.empty((len(rows), self.dim), self.dtype)
        for batch, places, within in self.parts.groups(rows):
            out[places] = column_matrix(batch.column("vector"))[within]
        return out

    def blocks(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """(start, vectors (n, D)) over all rows, n = `size` but for the last; one part and the next are held."""
        if size < 1:
            raise LattqeError(f"a block needs at least one row, not {size}")
        pending: list[np.ndarray] = []
        start = held = 0
        for _, batch in self.parts.slices(0, self.rows, keep=False):
            matrix = column_matrix(batch.column("vector"))
            while len(matrix):
                taken, matrix = matrix[: size - held], matrix[size - held :]
                pending.append(taken)
                held += len(taken)
                if held == size:
                    yield start, pending[0] if len(pending) == 1 else np.concatenate(pending)
                    start, held, pending = start + held, 0, []
            del matrix, batch
        if pending:
            yield start, pending[0] if len(pending) == 1 else np.concatenate(pending)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Ids of rows start..stop."""
        return self._column("id", start, stop).to_pylist()

    def gather_ids(self, rows: np.ndarray) -> list[str]:
        """Ids of a row list (n,) in its order, repeats allowed."""
        rows = self.parts.check_rows(rows)
        found = [""] * len(rows)
        for batch, places, within in self.parts.groups(rows):
            for place, name in zip(places.tolist(), batch.column("id").take(pa.array(within)).to_pylist()):
                found[place] = name
        return found

    def find_ids(self, ids: Sequence[str] | pa.Array | pa.ChunkedArray, keep: bool = False) -> np.ndarray:
        """Rows (n,) int64 of ids, -1 where there is none. All ids of the set are gone through, part by part, in Arrow:
        as Python objects those of a hundred million rows would need ten gigabytes. keep: the rows are read next.
        """
        return rows_of_ids(ids, lambda least: self.id_runs(least, keep))

    def id_runs(self, least: int, keep: bool = False) -> Iterator[tuple[int, pa.ChunkedArray]]:
        """(first row, ids) over all rows, at least so many at a time; none where that is 0.

        Each look-up makes a table of what it looks for: there shall not be one for every part.
        """
        held: list[pa.Array] = []
        first = count = 0
        for _, batch in self.parts.slices(0, self.rows if least else 0, keep):
            held.append(_copied(batch.column("id")))
            count += batch.num_rows
            if count >= least:
                yield first, pa.chunked_array(held)
                first, count, held = first + count, 0, []
        if held:
            yield first, pa.chunked_array(held)

    def id_column(self, start: int = 0, stop: int | None = None) -> pa.ChunkedArray:
        """Ids of rows start..stop, as they are stored."""
        return self._column("id", start, stop)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Labels of rows start..stop, (n,) int32."""
        if not self.has_labels:
            raise LattqeError(f"{self.uri} has no labels: import it with --labels")
        return self._column("label", start, stop).to_numpy().astype(np.int32, copy=False)

    def _column(self, name: str, start: int, stop: int | None) -> pa.ChunkedArray:
        start, stop = self.parts.span(start, stop)
        pieces = [batch.column(name) for _, batch in self.parts.slices(start, stop)]
        kind = pa.string() if name == "id" else pa.int32()
        return pa.chunked_array(pieces, type=kind)

    def verify(self) -> None:
        """Check every checksum and every invariant; CorruptDataError at the first fault."""
        from lattqe.store.artifacts import verify_features

        verify_features(self)


def rows_of_ids(
    ids: Sequence[str] | pa.Array | pa.ChunkedArray, runs: Callable[[int], Iterable[tuple[int, pa.ChunkedArray]]]
) -> np.ndarray:
    """Rows (n,) int64 of ids, -1 where there is none, among runs(least) of stored ids, each with its first row."""
    asked = string_column(ids)
    wanted = asked.unique()
    rows = np.full(len(wanted) + 1, -1, np.int64)
    for start, stored in runs(len(wanted)):
        found = pc.fill_null(pc.index_in(stored, wanted), len(wanted)).to_numpy()
        there = np.flatnonzero(found < len(wanted))
        rows[found[there]] = start + there
    return rows[pc.fill_null(pc.index_in(asked, wanted), len(wanted)).to_numpy()]


def _copied(ids: pa.Array) -> pa.Array:
    """Ids (n,) of a part without its other columns: a view would hold the vectors, too."""
    return pa.concat_arrays([ids, ids.slice(0, 0)])


class Labelled(Protocol):
    """What has labels, and perhaps names for them: every `FeatureSet` that has labels."""

    @property
    def uri(self) -> str:
        """Where it is, for messages."""

    @property
    def label_names(self) -> list[str] | None:
        """What the numbers mean; None where they are plain numbers."""

    def labels(self) -> np.ndarray:
        """The labels (n,) of all rows."""


def comparable_labels(*sets: Labelled) -> list[np.ndarray]:
    """Labels (n,) int32 of each set such that equal numbers mean the same in all: named labels are matched by name.

    Sets number their own texts from 0, so the stored numbers of two sets say nothing. The first set keeps its numbers;
    names that it lacks follow in order of appearance. Named labels against plain numbers are refused.
    """
    labels = [one.labels() for one in sets]
    for other in sets[1:]:
        check_same_naming(sets[0], other)
    names = joined_names(*sets)
    if names is None:
        return labels
    numbers = {name: number for number, name in enumerate(names)}
    return [renumbered(stored, one, numbers) for stored, one in zip(labels, sets)]


def check_same_naming(one: Labelled, other: Labelled) -> None:
    """Refuse labels of which one set has names and the other plain numbers."""
    if (one.label_names is None) != (other.label_names is None):
        named, plain = (one, other) if other.label_names is None else (other, one)
        raise LattqeError(
            f"the labels of {named.uri} are text and those of {plain.uri} are numbers: they cannot be "
            "compared; give both text labels or both numbers"
        )


def joined_names(*sets: Labelled) -> list[str] | None:
    """The label names of all sets together, those of the first set in their place; None where labels are numbers."""
    if sets[0].label_names is None:
        return None
    return list(dict.fromkeys(name for one in sets for name in one.label_names or ()))


def renumbered(labels: np.ndarray, features: Labelled, numbers: Mapping[str, int]) -> np.ndarray:
    """Labels (n,) of a set with names, by the numbers that the names have elsewhere; below 0 stays (no label)."""
    names = features.label_names or []
    if len(labels) and int(labels.max()) >= len(names):
        raise CorruptDataError(f"{features.uri}: label {int(labels.max())} has no name, there are {len(names)}")
    table = np.array([numbers[name] for name in names], np.int32)
    return np.where(labels < 0, labels, table[labels]).astype(np.int32)


def _label_names(manifest: Manifest, uri: str) -> list[str] | None:
    """Lattqe 0.1.0 kept the names in the configuration of the import."""
    names = manifest.fields.get("label_names", manifest.config.get("label_names"))
    if names is not None and (
        not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names)
    ):
        raise CorruptDataError(f"{uri}: the label names in its manifest are not a list of distinct strings")
    if any(set("\r\n") & set(name) for name in names or ()):  # they are exported as lines, as ids are
        raise CorruptDataError(f"{uri}: a label name in its manifest holds a line break")
    return names


def _dimensions(manifest: Manifest, uri: str) -> tuple[int, str]:
    """Dim and dtype, sound enough that nothing is allocated on the word of a damaged manifest."""
    dim, dtype = manifest.fields.get("dim"), manifest.fields.get("dtype")
    if not isinstance(dim, int) or isinstance(dim, bool) or not 1 <= dim <= MAX_DIM or dtype not in list(DTYPES):
        raise CorruptDataError(f"{uri}: dim {dim!r} and dtype {dtype!r} are invalid for a feature set")
    check_columns(manifest, features_schema(dim, dtype), uri)
    for part in manifest.parts:
        if part.rows < 1 or part.bytes < part.rows * dim * np.dtype(dtype).itemsize:
            raise CorruptDataError(
                f"{uri}/{part.name}: {part.bytes} bytes cannot hold {part.rows} rows of {dim} × {dtype}"
            )
    return dim, dtype


@dataclass(frozen=True)
class Kept:
    """Which rows of a set stay, by those that leave: a few numbers, however many rows there are.

    rows: of the set before; removed: (r,) int64 ascending.
    """

    LEFT: ClassVar[int] = -2  # in renumbered lists: a row that is no longer there

    rows: int
    removed: np.ndarray

    def __len__(self) -> int:
        return self.rows - len(self.removed)

    def old(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """What the rows start..stop of those that stay were numbered before: (n,) int64 ascending."""
        new = np.arange(start, len(self) if stop is None else stop)
        return new + np.searchsorted(self.removed - np.arange(len(self.removed)), new, side="right")

    def new(self, rows: np.ndarray) -> np.ndarray:
        """Old row numbers in the new numbering, int32 of the same shape: `LEFT` for rows that went, -1 stays."""
        if not len(self.removed):
            return rows.astype(np.int32, copy=False)
        before = np.searchsorted(self.removed, rows)
        gone = self.removed[np.minimum(before, len(self.removed) - 1)] == rows
        return np.where(gone, self.LEFT, rows - before).astype(np.int32)
