"""Any stored artifact: opening one without knowing its kind, and checking every invariant, part by part."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lattqe.errors import CorruptDataError
from lattqe.store.features import NORM_TOLERANCE, FeatureSet, IdRegister, bad_ids, norms
from lattqe.store.lists import Edges, NeighborGraph, Ranks, impossible_lists
from lattqe.store.manifest import Manifest, read_manifest
from lattqe.store.models import load_model
from lattqe.store.parts import StoredRows, load_part
from lattqe.store.place import Place, open_place
from lattqe.store.tables import column_matrix

# Rows looked at in one go.
BLOCK = 16_384

Report = Callable[[int], None]


@dataclass(frozen=True)
class StoredFiles:
    """A finished artifact that is not cut by rows, such as a model: a place and a manifest."""

    place: Place
    manifest: Manifest


Artifact = FeatureSet | NeighborGraph | Edges | Ranks | StoredFiles


def open_artifact(uri: str, cache: str | None = None) -> Artifact:
    """A FeatureSet, NeighborGraph, Edges or Ranks, or the StoredFiles of any other kind."""
    place = open_place(uri)
    manifest = read_manifest(place)
    for kind in (FeatureSet, NeighborGraph, Edges, Ranks):
        if manifest.kind == kind.kind:
            return kind(place, manifest, cache)
    return StoredFiles(place, manifest)


def check_input_kind(uri: str, kind: str) -> Manifest:
    """The manifest of an artifact that must be of `kind`; LattqeError names both kinds where it is not."""
    return read_manifest(open_place(uri), kind)


def verify_artifact(uri: str, report: Report = lambda rows: None) -> Manifest:
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
            tensors, *_ = load_model(uri)
            for name, tensor in tensors.items():
                if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
                    raise CorruptDataError(f"{uri}: tensor {name!r} holds NaN or infinity")
    return artifact.manifest


def verify_features(features: FeatureSet, report: Report = lambda rows: None) -> None:
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
        _check_ids(batch.column("id"), where, first)
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


def verify_lists(lists: NeighborGraph, report: Report = lambda rows: None) -> None:
    """Rows in range, padding at the end, scores finite and sorted, no row twice, in a graph no row beside itself."""
    limit = lists.database_rows
    for where, first, batch in _batches(lists, report):
        if isinstance(lists, Ranks):
            _check_ids(batch.column("id"), where, first)
        for start in range(0, batch.num_rows, BLOCK):
            I = column_matrix(batch.column("neighbors").slice(start, BLOCK))
            D = column_matrix(batch.column("scores").slice(start, BLOCK))
            own = None if isinstance(lists, Ranks) else first + start
            for what, wrong in _list_faults(I, D, limit, own):
                rows = np.flatnonzero(wrong)
                if len(rows):
                    raise CorruptDataError(f"{where}: row {first + start + rows[0]} {what}")


def verify_edges(edges: Edges, report: Report = lambda rows: None) -> None:
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


def _batches(artifact: StoredRows, report: Report) -> Iterator[tuple[str, int, pa.RecordBatch]]:
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


def _check_ids(ids: pa.Array, where: str, first: int) -> None:
    wrong = np.flatnonzero(bad_ids(ids))
    if len(wrong):
        raise CorruptDataError(f"{where}: the id of row {first + wrong[0]} is empty or holds a line break")
