"""Which queries are themselves rows of the database: they are no answers to themselves, nor neighbors of their own.

Search, evaluation, benchmark, validation and the Python API all ask here.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet
from lattqe.store.features import NORM_TOLERANCE

COMPARED_ROWS = 8192  # vectors of either side in memory at once
# How far a vector may be from the same one stored elsewhere, in units of what rounding to its type does to a norm.
SLACK = 4


def own_rows(
    database: FeatureSet, queries: FeatureSet, find_ids: Callable[[pa.ChunkedArray], np.ndarray] | None = None
) -> np.ndarray | None:
    """The row (nq,) int64 of each query that is itself in the database, -1 for the others; None: none of them is.

    A query is the row that has its id and its vector, up to rounding: sets whose ids are mere numbers share ids without
    being the same. The vector of a row is the stored one or, in an augmented index, the one it was made from; queries
    that are not adapted as the rows are, are adapted first. find_ids: what looks the ids up instead of the database.
    """
    if database.dim != queries.dim:
        return None
    if database.digest == queries.digest:
        return np.arange(queries.rows)
    asked = queries.id_column()
    rows = database.find_ids(asked, keep=True) if find_ids is None else find_ids(asked)
    named = np.flatnonzero(rows >= 0)
    same = _same_vectors(database, queries, rows[named], named)
    if not same.all():
        others = named[~same]
        before, adapt = _before_augmentation(database, queries, len(others))
        if before is not database or adapt is not None:
            same[~same] = _same_vectors(before, queries, rows[others], others, adapt)
    rows[named[~same]] = -1
    return rows if same.any() else None


def _same_vectors(
    database: FeatureSet,
    queries: FeatureSet,
    rows: np.ndarray,
    asked: np.ndarray,
    adapt: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Whether rows (n,) of the database and the queries `asked` (n,) have the same vectors: (n,) bool."""
    same = np.zeros(len(rows), dtype=bool)
    allowed = SLACK * max(NORM_TOLERANCE[one.dtype] for one in (database, queries))
    for start in range(0, len(rows), COMPARED_ROWS):
        part = slice(start, start + COMPARED_ROWS)
        x = queries.gather(asked[part]).astype(np.float32)
        x = x if adapt is None else adapt(x)
        same[part] = np.linalg.norm(x - database.gather(rows[part]).astype(np.float32), axis=1) <= allowed
    return same


def _before_augmentation(
    database: FeatureSet, queries: FeatureSet, shared: int
) -> tuple[FeatureSet, Callable[[np.ndarray], np.ndarray] | None]:
    """The rows that an index was made from, or the set itself; and what queries go through to be compared with them."""
    if not {"adaptation", "neighbors"} & set(database.manifest.inputs):
        return database, None  # without importing torch

    from lattqe.augmentation.recipe import ADAPTED, ORIGINALS, adaptation_for, find_input, is_augmented

    space = adaptation_for(database, queries)
    before = database
    if is_augmented(database):
        try:
            before = FeatureSet.open(find_input(database, "features", ORIGINALS, ADAPTED))
        except LattqeError as error:
            raise LattqeError(
                f"{shared} queries of {queries.uri} have ids of rows in {database.uri}, but whether they are these "
                f"rows cannot be told: {error}; bring these features back, or import the queries with other ids"
            ) from error
    return before, None if space is None else space.apply
