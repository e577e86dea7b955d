"""Stored lists (graphs, edges, ranks); opening and checking an artifact of any kind."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store.features import NORM_TOLERANCE, FeatureSet, IdRegister, check_ids, norms
from lattqe.store.manifest import Manifest, check_columns, describe_kind, read_manifest, schema_of
from lattqe.store.models import model_address
from lattqe.store.parts import StoredRows, column_matrix, load_part
from lattqe.store.place import Place, open_place

MAX_K = 1 << 24


class NeighborGraph(StoredRows):
    """k neighbors for each row: row numbers, -1 padding at the end, and scores, 0 where padded."""

    kind = "neighbors"

    def __init__(self, place: Place, manifest: Manifest, cache: str | None = None) -> None:
        self.k = _list_length(manifest, place.uri)
        # How many rows there are to be named: of ranks None where the manifest does not say.
        self.database_rows = _database_rows(manifest, place.uri)
        super().__init__(place, manifest, cache)

    def read(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(I (n, k) int32, D (n, k) float32) of rows start..stop; read-only views where they are in one part."""
        start, stop = self.parts.span(start, stop)
        pieces = [_lists(batch) for _, batch in self.parts.slices(start, stop)]
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return np.empty((0, self.k), np.int32), np.empty((0, self.k), np.float32)
        return np.concatenate([piece[0] for piece in pieces]), np.concatenate([piece[1] for piece in pieces])

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(I, D) of a row list (n,) in its order, repeats allowed."""
        rows = self.parts.check_rows(rows)
        I, D = np.empty((len(rows), self.k), np.int32), np.empty((len(rows), self.k), np.float32)
        for batch, places, within in self.parts.groups(rows):
            neighbors, scores = _lists(batch)
            I[places], D[places] = neighbors[within], scores[within]
        return I, D

    def blocks(self, size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(start, I, D) over all rows, `size` rows at a time."""
        if size < 1:
            raise LattqeError(f"a block needs at least one row, not {size}")
        for start in range(0, self.rows, size):
            yield start, *self.read(start, min(start + size, self.rows))

    def _check(self, batch: pa.RecordBatch, first: int, where: str) -> None:
        """Refuse lists that would lead out of the feature set, or back to the row itself; `verify` checks more."""
        I, D = _lists(batch)
        own = None if isinstance(self, Ranks) else first
        for fault, wrong in impossible_lists(I, D, self.database_rows, own):
            rows = np.flatnonzero(wrong)
            if len(rows):
                raise CorruptDataError(f"{where}: row {first + rows[0]} {fault}")

    def verify(self) -> None:
        """Check every checksum and every invariant; CorruptDataError at the first fault."""
        verify_lists(self)


class Edges(StoredRows):
    """What a method made of a neighbor graph: k neighbors for each row, -1 for none, and their weights.

    Weights have one column more, the first: that of the row itself. They may be negative, and are 0 where padded.
    """

    kind = "edges"

    def __init__(self, place: Place, manifest: Manifest, cache: str | None = None) -> None:
        self.k = _list_length(manifest, place.uri)
        super().__init__(place, manifest, cache)

    def read(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(weights (n, 1 + k) float32, rows (n, 1 + k) int32) of rows start..stop, column 0 the row itself."""
        start, stop = self.parts.span(start, stop)
        return self.gather(np.arange(start, stop))

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(weights, rows) of a row list (n,) in its order, repeats allowed."""
        rows = self.parts.check_rows(rows)
        numbers = np.empty((len(rows), 1 + self.k), np.int32)
        weights = np.empty((len(rows), 1 + self.k), np.float32)
        numbers[:, 0] = rows
        for batch, places, within in self.parts.groups(rows):
            numbers[places, 1:] = column_matrix(batch.column("neighbors"))[within]
            weights[places] = column_matrix(batch.column("weights"))[within]
        return weights, numbers

    def _check(self, batch: pa.RecordBatch, first: int, where: str) -> None:
        """Refuse edges that lead out of the feature set or back to the row itself, and weights that are not numbers."""
        neighbors, weights = column_matrix(batch.column("neighbors")), column_matrix(batch.column("weights"))
        for fault, wrong in impossible_lists(neighbors, weights, self.rows, first):
            rows = np.flatnonzero(wrong)
            if len(rows):
                raise CorruptDataError(f"{where}: row {first + rows[0]} {fault.replace('score', 'weight')}")

    def verify(self) -> None:
        """Check every checksum and every invariant; CorruptDataError at the first fault."""
        verify_edges(self)


class Ranks(NeighborGraph):
    """What a search found: for each query its id, the best k database rows and their scores."""

    kind = "ranks"

    def searched(self, given: Sequence[str] = ()) -> list[FeatureSet]:
        """The sets whose rows the lists name, in order: the database, then distractors where there were some.

        They are opened where the ranks say that they were, or at the addresses `given`, and must be the same.
        """
        inputs = [self.manifest.inputs[name] for name in ("database", "distractors") if name in self.manifest.inputs]
        if len(given) not in (0, len(inputs)):
            raise LattqeError(f"{self.uri} was found in {len(inputs)} sets, {len(given)} are given: name all of them")
        sets = []
        for number, entry in enumerate(inputs):
            uri = given[number] if given else entry["uri"]
            try:
                features = FeatureSet.open(uri)
            except LattqeError as error:
                hint = "" if given else " (give its address by --database)"
                raise LattqeError(f"the rows that {self.uri} names cannot be read{hint}: {error}") from error
            if features.digest != entry["digest"]:
                raise LattqeError(
                    f"{uri} is not the set that was searched for {self.uri}: give that one with --database"
                )
            sets.append(features)
        return sets

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Ids of the queries of rows start..stop."""
        start, stop = self.parts.span(start, stop)
        return [name for _, batch in self.parts.slices(start, stop) for name in batch.column("id").to_pylist()]


def impossible_lists(
    I: np.ndarray, D: np.ndarray, limit: int | None, own: int | None
) -> Iterator[tuple[str, np.ndarray]]:
    """(what is wrong, which rows (n,) bool) of lists I, D (n, k); `own` is the row number of a graph's first list."""
    yield "names a row below -1", np.any(I < -1, axis=1)
    if limit is not None:
        yield f"names a row beyond the {limit} there are", np.any(limit <= I, axis=1)
    yield "has a score that is not finite", ~np.isfinite(D).all(axis=1)
    if own is not None:
        yield "is its own neighbor", (np.arange(own, own + len(I))[:, None] == I).any(axis=1)


def _lists(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    return column_matrix(batch.column("neighbors")), column_matrix(batch.column("scores"))


def _database_rows(manifest: Manifest, uri: str) -> int | None:
    rows = manifest.fields.get("database_rows", None if manifest.kind == Ranks.kind else manifest.rows)
    if not isinstance(rows, int | None) or isinstance(rows, bool):
        raise CorruptDataError(f"{uri}: its manifest gives {rows!r} as the number of database rows")
    return rows


def _list_length(manifest: Manifest, uri: str) -> int:
    k = manifest.fields.get("k")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise CorruptDataError(f"{uri}: {describe_kind(manifest.kind)} with k = {k!r} is invalid")
    check_columns(manifest, schema_of(manifest.kind, {"k": k}), uri)
    for part in manifest.parts:
        if part.rows < 1 or part.bytes < part.rows * k * 8:
            raise CorruptDataError(f"{uri}/{part.name}: {part.bytes} bytes cannot hold {part.rows} × {k} neighbors")
    return k


# Rows looked at in one go.
BLOCK = 16_384
OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class StoredFiles:
    """A finished artifact that is not cut by rows, such as a model: a place and a manifest."""

    place: Place
    manifest: Manifest


Artifact = FeatureSet | NeighborGraph | Edges | Ranks | StoredFiles


def open_artifact(uri: str, cache: str | None = None) -> Artifact:
    """A FeatureSet, NeighborGraph, Edges or Ranks, or the StoredFiles of another kind; shipped models by name."""
    place = open_place(model_address(uri))
    manifest = read_manifest(place)
    for kind in (FeatureSet, NeighborGraph, Edges, Ranks):
        if manifest.kind == kind.kind:
            return kind(place, manifest, cache)
    return StoredFiles(place, manifest)


def check_input_kind(uri: str, kind: str) -> Manifest:
    """The manifest of an artifact that must be of `kind`; LattqeError names both kinds where it is not."""
    return read_manifest(open_place(uri), kind)


def verify_artifact(uri: str, report: OnBytes = lambda rows: None) -> Manifest:
    """Check a stored artifact of any kind; `report` hears how many more bytes are done."""
    artifact = open_artifact(uri)
    if isinstance(artifact, FeatureSet):
        verify_features(artifact, report)
    elif isinstance(artifact, NeighborGraph):
        verify_lists(artifact, report)
    elif isinstance(artifact, Edges):
        verify_edges(artifact, report)
    else:
        for part in artifact.manifest.parts:
            load_part(artifact.place, part)
            report(part.bytes)
        if artifact.manifest.kind == "model":
            from lattqe.model.network import check_model  # which imports this module, and torch

            check_model(uri)
    return artifact.manifest


def verify_features(features: FeatureSet, report: OnBytes = lambda rows: None) -> None:
    """Unit norms, finite, ids unique and not empty."""
    register, tolerance = IdRegister(), NORM_TOLERANCE[features.dtype]
    for where, first, batch in _batches(features, report):
        for start in range(0, batch.num_rows, BLOCK):
            lengths = norms(column_matrix(batch.column("vector").slice(start, BLOCK)))
            # Written so that NaN, for which every comparison is false, counts as wrong.
            wrong = np.flatnonzero(~(np.abs(lengths - 1) <= tolerance))
            if len(wrong):
                raise CorruptDataError(
                    f"{where}: the vector of row {first + start + wrong[0]} has norm {lengths[wrong[0]]:.6g}, not 1"
                )
        check_ids(batch.column("id"), where, first)
        register.add(batch.column("id"))
        if features.has_labels and features.label_names is not None:
            labels = batch.column("label").to_numpy()
            wrong = np.flatnonzero((labels < 0) | (labels >= len(features.label_names)))
            if len(wrong):
                raise CorruptDataError(
                    f"{where}: row {first + wrong[0]} has label {labels[wrong[0]]}, and there are "
                    f"{len(features.label_names)} label names"
                )
    repeated = register.duplicates(limit=1)
    if repeated:
        row = repeated[0][1]
        number = int(np.searchsorted(features.parts.starts, row, side="right")) - 1
        raise CorruptDataError(
            f"{features.uri}/{features.manifest.parts[number].name}: the id of row {row}, "
            f"{features.ids(row, row + 1)[0]!r}, is that of row {repeated[0][0]} too"
        )


def verify_lists(lists: NeighborGraph, report: OnBytes = lambda rows: None) -> None:
    """Rows in range, padding at the end, scores finite and sorted, no row twice, in a graph no row beside itself."""
    limit = lists.database_rows
    for where, first, batch in _batches(lists, report):
        if isinstance(lists, Ranks):
            check_ids(batch.column("id"), where, first)
        for start in range(0, batch.num_rows, BLOCK):
            I = column_matrix(batch.column("neighbors").slice(start, BLOCK))
            D = column_matrix(batch.column("scores").slice(start, BLOCK))
            own = None if isinstance(lists, Ranks) else first + start
            for what, wrong in _list_faults(I, D, limit, own):
                rows = np.flatnonzero(wrong)
                if len(rows):
                    raise CorruptDataError(f"{where}: row {first + start + rows[0]} {what}")


def verify_edges(edges: Edges, report: OnBytes = lambda rows: None) -> None:
    """Rows in range, none beside itself, weights finite and 0 in padding."""
    for where, first, batch in _batches(edges, report):
        neighbors, weights = column_matrix(batch.column("neighbors")), column_matrix(batch.column("weights"))
        wrong = np.flatnonzero(((neighbors == -1) & (weights[:, 1:] != 0)).any(axis=1))
        if len(wrong):
            raise CorruptDataError(f"{where}: row {first + wrong[0]} has a weight other than 0 in its padding")


def _list_faults(I: np.ndarray, D: np.ndarray, limit: int | None, own: int | None) -> Iterator[tuple[str, np.ndarray]]:
    """(what is wrong, which rows (n,) bool) for lists I, D (n, k); `own` is the row number of the first list."""
    yield from impossible_lists(I, D, limit, own)
    padding = I == -1
    yield "has a neighbor after its padding", (padding[:, :-1] & ~padding[:, 1:]).any(axis=1)
    yield "has a score other than 0 in its padding", (padding & (D != 0)).any(axis=1)
    yield "has scores that are not sorted", ((D[:, 1:] > D[:, :-1]) & ~padding[:, 1:]).any(axis=1)
    ordered = np.sort(I, axis=1)
    yield "names a neighbor twice", ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)).any(axis=1)


def _batches(artifact: StoredRows, report: OnBytes) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """(address of the part, its first row, its rows), with the Arrow structure checked in full."""
    slices = artifact.parts.slices(0, artifact.rows, keep=False)
    for part, (first, batch) in zip(artifact.manifest.parts, slices):
        where = f"{artifact.uri}/{part.name}"
        try:
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise CorruptDataError(f"{where} is not sound: {error}") from error
        yield where, first, batch
        report(part.bytes)
