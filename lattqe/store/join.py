"""A feature set that grows: the old rows that stay, in their order, then the new ones."""

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from lattqe.errors import LattqeError
from lattqe.store.features import FeatureSet
from lattqe.store.tables import column_matrix
from lattqe.store.writer import FeatureWriter

JOIN_ROWS = 16384  # copied at a time


def kept_rows(old: FeatureSet, removed: Collection[str]) -> np.ndarray:
    """Row numbers (m,) of `old` that stay when the ids `removed` go; ids that are not there are refused."""
    gone = set(removed)
    ids = old.ids() if gone else []
    unknown = sorted(gone - set(ids))
    if unknown:
        raise LattqeError(f"{len(unknown)} ids to remove are not in {old.uri}, the first is {unknown[0]!r}")
    if len(gone) == old.rows:
        raise LattqeError(f"all {old.rows} rows of {old.uri} would be removed: nothing would be left")
    return np.array([row for row in range(old.rows) if not gone or ids[row] not in gone], dtype=np.int64)


def check_same_vectors(old: FeatureSet, new: FeatureSet) -> None:
    """Refuse sets whose vectors cannot stand in one matrix."""
    for name in ("dim", "dtype"):
        if getattr(old, name) != getattr(new, name):
            raise LattqeError(f"{new.uri} has {name} {getattr(new, name)}, {old.uri} has {getattr(old, name)}: "
                              "import the new rows like the old ones")


def check_joinable(old: FeatureSet, new: FeatureSet) -> None:
    """Refuse sets whose rows cannot stand in one table."""
    check_same_vectors(old, new)
    if old.manifest.fields["columns"] != new.manifest.fields["columns"]:
        raise LattqeError(f"{new.uri} has columns {new.columns}, {old.uri} has {old.columns}: "
                          "import the new rows like the old ones")


def join_features(old: FeatureSet, kept: np.ndarray, new: FeatureSet | None, to: str) -> FeatureSet:
    """Write rows `kept` (m,) ascending of `old`, then all of `new`, to `to`; values are copied, never rounded again."""
    schema = old.table(0, 1).schema
    extra = [column for column in schema if column.name not in ("id", "vector", "label")]
    inputs = {"old": old.as_input()} | ({"new": new.as_input()} if new is not None else {})
    writer = FeatureWriter(to, old.dim, old.dtype, labels=old.has_labels, inputs=inputs, normalise=False, extra=extra,
                           config={"job": "join", "kept": xxhash.xxh3_128_hexdigest(kept.astype("<i8").tobytes())})
    if writer.finished is not None:
        return writer.finished
    with writer:
        for source, rows in ((old, kept), (new, np.arange(new.rows if new is not None else 0))):
            for start in range(0, len(rows), JOIN_ROWS):
                if source is not None:
                    _copy(source, rows[start:start + JOIN_ROWS], writer, [column.name for column in extra])
    return FeatureSet.open(to)


def _copy(source: FeatureSet, rows: np.ndarray, writer: FeatureWriter, extra: list[str]) -> None:
    """Append some rows (ascending) of one set to another."""
    first = int(rows[0])
    table = source.table(first, int(rows[-1]) + 1).take(pa.array(rows - first)).combine_chunks()
    labels = table.column("label").to_numpy() if source.has_labels else None
    vectors = column_matrix(table.column("vector").combine_chunks())
    writer.append(vectors, table.column("id").to_pylist(), labels, {name: table.column(name) for name in extra})


def stack_features(sets: Sequence[FeatureSet], to: str) -> FeatureSet:
    """Write ids and vectors of several sets, one after the other; labels and other columns, which may differ, stay."""
    for other in sets[1:]:
        check_same_vectors(sets[0], other)
    writer = FeatureWriter(to, sets[0].dim, sets[0].dtype, normalise=False, config={"job": "stack"},
                           inputs={f"set{number}": each.as_input() for number, each in enumerate(sets)})
    if writer.finished is not None:
        return writer.finished
    with writer:
        for each in sets:
            for start, vectors in each.blocks(JOIN_ROWS):
                writer.append(vectors, each.ids(start, start + len(vectors)))
    return FeatureSet.open(to)
