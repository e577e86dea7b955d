"""Every invariant of the stored things, checked part by part; the first thing wrong is told with its part."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from lattqe.errors import CorruptDataError
from lattqe.store.features import FeatureSet
from lattqe.store.manifest import Manifest
from lattqe.store.models import load_model
from lattqe.store.neighbors import NeighborGraph, Ranks
from lattqe.store.normalise import NORM_TOLERANCE, norms
from lattqe.store.parts import load_part
from lattqe.store.stored import StoredRows
from lattqe.store.tables import column_matrix
from lattqe.store.thing import open_thing
from lattqe.store.unique import IdRegister, bad_ids

# Rows looked at in one go.
BLOCK = 16_384

Report = Callable[[int], None]


def verify_thing(uri: str, report: Report = lambda rows: None) -> Manifest:
    """Check a stored thing of any kind; `report` hears how many more bytes are done."""
    thing = open_thing(uri)
    if isinstance(thing, FeatureSet):
        verify_features(thing, report)
    elif isinstance(thing, NeighborGraph):
        verify_lists(thing, report)
    else:
        for part in thing.manifest.parts:
            load_part(thing.place, part)
            report(part.bytes)
        if thing.manifest.kind == "model":
            tensors, *_ = load_model(uri)
            for name, tensor in tensors.items():
                if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
                    raise CorruptDataError(f"{uri}: tensor {name!r} holds NaN or infinity")
    return thing.manifest


def verify_features(features: FeatureSet, report: Report = lambda rows: None) -> None:
    """Unit norms, finite, ids unique and not empty."""
    register, tolerance = IdRegister(), NORM_TOLERANCE[features.dtype]
    for where, first, batch in _batches(features, report):
        for start in range(0, batch.num_rows, BLOCK):
            lengths = norms(column_matrix(batch.column("vector").slice(start, BLOCK)))
            # Written so that NaN, for which every comparison is false, counts as wrong.
            wrong = np.flatnonzero(~(np.abs(lengths - 1) <= tolerance))
            if len(wrong):
                raise CorruptDataError(f"{where}: the vector of row {first + start + wrong[0]} has norm "
                                       f"{lengths[wrong[0]]:.6g}, not 1")
        _check_ids(batch.column("id"), where, first)
        register.add(batch.column("id"))
    repeated = register.duplicates(limit=1)
    if repeated:
        row = repeated[0][1]
        number = int(np.searchsorted(features.parts.starts, row, side="right")) - 1
        raise CorruptDataError(f"{features.uri}/{features.manifest.parts[number].name}: the id of row {row}, "
                               f"{features.ids(row, row + 1)[0]!r}, is that of row {repeated[0][0]} too")


def verify_lists(lists: NeighborGraph, report: Report = lambda rows: None) -> None:
    """Rows in range, padding at the end, scores finite and sorted, nobody twice, in a graph nobody beside itself."""
    limit = lists.manifest.fields.get("database_rows", None if isinstance(lists, Ranks) else lists.rows)
    if not isinstance(limit, int | None):
        raise CorruptDataError(f"{lists.uri}: its manifest speaks of {limit!r} database rows")
    for where, first, batch in _batches(lists, report):
        if isinstance(lists, Ranks):
            _check_ids(batch.column("id"), where, first)
        for start in range(0, batch.num_rows, BLOCK):
            I = column_matrix(batch.column("neighbors").slice(start, BLOCK))  # noqa: E741
            D = column_matrix(batch.column("scores").slice(start, BLOCK))
            own = None if isinstance(lists, Ranks) else first + start
            for what, wrong in _list_faults(I, D, limit, own):
                rows = np.flatnonzero(wrong)
                if len(rows):
                    raise CorruptDataError(f"{where}: row {first + start + rows[0]} {what}")


def _list_faults(I: np.ndarray, D: np.ndarray, limit: int | None,  # noqa: E741
                 own: int | None) -> Iterator[tuple[str, np.ndarray]]:
    """(what is wrong, which rows (n,) bool) for lists I, D (n, k); `own` is the row number of the first list."""
    padding = I == -1
    yield "names a row below -1", np.any(I < -1, axis=1)
    if limit is not None:
        yield f"names a row beyond the {limit} there are", np.any(limit <= I, axis=1)
    yield "has a neighbor after its padding", (padding[:, :-1] & ~padding[:, 1:]).any(axis=1)
    yield "has a score that is not finite", ~np.isfinite(D).all(axis=1)
    yield "has a score other than 0 in its padding", (padding & (D != 0)).any(axis=1)
    yield "has scores that are not sorted", ((D[:, 1:] > D[:, :-1]) & ~padding[:, 1:]).any(axis=1)
    if own is not None:
        yield "is its own neighbor", (np.arange(own, own + len(I))[:, None] == I).any(axis=1)
    ordered = np.sort(I, axis=1)
    yield "names a neighbor twice", ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)).any(axis=1)


def _batches(thing: StoredRows, report: Report) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """(address of the part, its first row, its rows), with the Arrow structure checked in full."""
    slices = thing.parts.slices(0, thing.rows, keep=False)
    for part, (first, batch) in zip(thing.manifest.parts, slices):
        where = f"{thing.uri}/{part.name}"
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
