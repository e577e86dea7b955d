"""The same image twice: near-duplicates within a set and between two, and queries that are rows of the database.

Two rows are near-duplicates when their similarity reaches a threshold; a group is all that are joined by such pairs
(connected components), so its ends may be less alike than the threshold. A query that is itself a row of the database
is neither an answer to itself nor its own neighbor: search, evaluation, benchmark, validation and the Python API all
ask `own_rows` which ones are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, NeighborGraph, Ranks
from lattqe.store.export import plain_cell
from lattqe.store.features import NORM_TOLERANCE

THRESHOLD = 0.95
BLOCK_ROWS = 65_536
QUERY_ROWS = 4_096
QUICK_SEARCH = 2e12  # operations that a warning may cost: half a minute on two cores
LARGEST_SEARCH = 2e13  # operations that are done in this process: minutes on two cores

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """Near-duplicates of a set of `total` rows.

    group: (m,) number of the group of each of the rows, from 0, the largest group first; rows: (m,) ascending within a
    group; representative: (m,) bool, one for each group; similarity: (m,) to the representative.
    full: rows whose whole list is near-duplicates, so that there may be more than the graph says.
    """

    total: int
    threshold: float
    group: IntArray
    rows: IntArray
    representative: NDArray[np.bool_]
    similarity: NDArray[np.float32]
    full: int

    @cached_property
    def sizes(self) -> IntArray:
        """(groups,) rows of each, descending."""
        return np.bincount(self.group).astype(np.int64) if len(self.group) else np.empty(0, np.int64)

    @property
    def redundant(self) -> IntArray:
        """Ascending rows that could go: all but the representatives."""
        return np.sort(self.rows[~self.representative])

    def summary(self) -> dict[str, Any]:
        """Counts and shares, JSON-able."""
        return {
            "rows": self.total,
            "threshold": self.threshold,
            "groups": len(self.sizes),
            "rows_in_groups": len(self.rows),
            "share_in_groups": len(self.rows) / self.total,
            "redundant": len(self.redundant),
            "share_redundant": len(self.redundant) / self.total,
            "largest_group": int(self.sizes.max(initial=0)),
            "rows_with_full_lists": self.full,
        }


def check_threshold(threshold: float) -> float:
    """Refuse a threshold that is not a similarity of two nearly equal directions."""
    if not 0 < threshold <= 1:
        raise LattqeError(f"threshold {threshold} is not a cosine above 0 and at most 1: try {THRESHOLD}")
    return threshold


def find_groups(
    features: FeatureSet,
    graph: NeighborGraph,
    threshold: float = THRESHOLD,
    on_done: Callable[[int], None] = lambda _: None,
) -> Groups:
    """Groups of near-duplicates from the set's own graph; nothing is searched. `on_done(n)`: after each n rows."""
    check_threshold(threshold)
    made_from = graph.manifest.inputs.get("features", {}).get("digest", features.digest)
    if graph.rows != features.rows or made_from != features.digest:
        raise LattqeError(
            f"{graph.uri} is not the graph of {features.uri}: make it with "
            f"`lattqe neighbors {features.uri} -k 64 --to GRAPH`"
        )
    ones, others, scores, full = [], [], [], 0
    for start, I, D in graph.blocks(BLOCK_ROWS):
        near = (threshold <= D) & (I >= 0)
        at, column = np.nonzero(near)
        ones.append(at + start)
        others.append(I[at, column].astype(np.int64))
        scores.append(D[at, column])
        full += int(near.all(axis=1).sum())
        on_done(len(I))
    one, other, score = (np.concatenate(pieces) for pieces in (ones, others, scores))
    return _grouped(features, threshold, one, other, score, full)


def _grouped(
    features: FeatureSet, threshold: float, one: IntArray, other: IntArray, score: NDArray[np.float32], full: int
) -> Groups:
    """Connected components of the pairs (one, other); the representative has the most pairs, then the closest."""
    n = features.rows
    from scipy.sparse import coo_array  # only here: a small search does not wait for scipy
    from scipy.sparse.csgraph import connected_components

    joined = coo_array((np.ones(len(one), np.int8), (one, other)), shape=(n, n)).tocsr()
    _, component = connected_components(joined, directed=False)
    members = np.flatnonzero(np.bincount(component)[component] > 1)
    found, number, sizes = np.unique(component[members], return_inverse=True, return_counts=True)
    order = np.argsort(-sizes, kind="stable")  # the largest first, then by their first row
    renamed = np.empty(len(found), np.int64)
    renamed[order] = np.arange(len(found))
    group = renamed[number]
    pairs = np.bincount(one, minlength=n) + np.bincount(other, minlength=n)
    closeness = np.bincount(one, score, minlength=n) + np.bincount(other, score, minlength=n)
    ranked = np.lexsort((members, -closeness[members], -pairs[members], group))
    first = ranked[np.flatnonzero(np.r_[True, np.diff(group[ranked]) > 0])] if len(ranked) else ranked
    by_group = np.lexsort((members, group))
    chosen = members[first]  # one row for each group, in the order of the groups
    rows, groups = members[by_group], group[by_group]
    return Groups(
        n,
        threshold,
        groups,
        rows,
        rows == chosen[groups] if len(groups) else np.zeros(0, bool),
        _similarities(features, rows, chosen[groups] if len(groups) else rows),
        full,
    )


def _similarities(features: FeatureSet, ones: IntArray, others: IntArray) -> NDArray[np.float32]:
    """(m,) dot products of pairs of rows, in blocks."""
    pieces = [np.empty(0, np.float32)]
    for start in range(0, len(ones), QUERY_ROWS):
        block = slice(start, start + QUERY_ROWS)
        left, right = (features.gather(rows[block]).astype(np.float64) for rows in (ones, others))
        pieces.append((left * right).sum(axis=1).astype(np.float32))
    return np.concatenate(pieces)


@dataclass(frozen=True)
class Leakage:
    """Rows of another set that have a near-duplicate in this one: their numbers, its row, the similarity; all (m,)."""

    asked: int  # rows of the other set that were looked at
    threshold: float
    rows: IntArray
    found: IntArray
    similarity: NDArray[np.float32]

    def summary(self) -> dict[str, Any]:
        """Counts and shares, JSON-able."""
        return {
            "rows": self.asked,
            "threshold": self.threshold,
            "leaked": len(self.rows),
            "share_leaked": len(self.rows) / max(self.asked, 1),
        }


def find_leakage(
    features: FeatureSet,
    other: FeatureSet,
    threshold: float = THRESHOLD,
    ranks: Ranks | None = None,
    sample: IntArray | None = None,
    on_done: Callable[[int], None] = lambda _: None,
) -> Leakage:
    """Rows of `other` whose best row of `features` reaches the threshold, searched here or read off `ranks`.

    With `sample` (n,) only these rows of `other` are looked at.
    """
    check_threshold(threshold)
    if features.dim != other.dim:
        raise LattqeError(
            f"{features.uri} has {features.dim} dimensions and {other.uri} {other.dim}: use one extractor for both"
        )
    asked = np.arange(other.rows) if sample is None else sample
    if ranks is None and search_cost(features, len(asked)) > LARGEST_SEARCH:
        raise LattqeError(
            f"{other.rows:,} × {features.rows:,} rows are too many to search in this process: run "
            f"`lattqe search {features.uri} {other.uri} -k 1 --to RANKS` and give --graph RANKS"
        )
    from lattqe.search.index import StoredIndex  # and torch with it, which those who evaluate ranks do without

    index = StoredIndex([features])
    found, best = np.empty(len(asked), np.int64), np.empty(len(asked), np.float32)
    for start in range(0, len(asked), QUERY_ROWS):
        block = slice(start, start + QUERY_ROWS)
        if ranks is None:
            D, I = index.search(other.gather(asked[block]).astype(np.float32), 1)
        else:
            I, D = ranks.gather(asked[block])
        found[block], best[block] = I[:, 0], D[:, 0]
        on_done(len(I))
    leaked = np.flatnonzero((best >= threshold) & (found >= 0))
    return Leakage(len(asked), threshold, asked[leaked].astype(np.int64), found[leaked], best[leaked])


def search_cost(features: FeatureSet, queries: int) -> float:
    """Operations of an exhaustive search."""
    return 2.0 * features.rows * queries * features.dim


def leakage_warnings(
    trained: Sequence[FeatureSet], held_out: Sequence[FeatureSet], threshold: float = THRESHOLD
) -> list[str]:
    """One line for each held-out set with near-duplicates in training: validation on them flatters.

    Where the search would take long, an even sample of the held-out rows is looked at, and the line says so.
    """
    lines = []
    each = QUICK_SEARCH / max(len(trained) * len(held_out), 1)
    for other in held_out:
        fitting = int(min(each / search_cost(one, 1) for one in trained))
        sample = np.unique(np.linspace(0, other.rows - 1, max(1, min(fitting, other.rows))).astype(np.int64))
        leaks = [(one, find_leakage(one, other, threshold, sample=sample)) for one in trained]
        rows = np.unique(np.concatenate([leak.rows for _, leak in leaks]))
        if len(rows):
            source, leak = next((one, leak) for one, leak in leaks if len(leak.rows))
            looked = f"{len(sample):,} sampled rows" if len(sample) < other.rows else f"{other.rows:,} rows"
            lines.append(
                f"{len(rows):,} of {looked} of {other.uri} have a near-duplicate (cosine {threshold:g} or "
                f"more) in training, for example {ids_of(other, leak.rows[:1])[0]!r}: validation will be too "
                f"optimistic; `lattqe duplicates {source.uri} --against {other.uri}` lists them"
            )
    return lines


def groups_table(features: FeatureSet, groups: Groups) -> pa.Table:
    """Columns group, row, id, representative, similarity (to the representative) and label, group after group."""
    columns: dict[str, Any] = {
        "group": groups.group,
        "row": groups.rows,
        "id": ids_of(features, groups.rows),
        "representative": groups.representative,
        "similarity": groups.similarity,
    }
    return pa.table(columns | _label_columns("label", features, groups.rows))


def leakage_table(features: FeatureSet, other: FeatureSet, leakage: Leakage) -> pa.Table:
    """Columns row and id in the other set, found_row and found_id in this one, similarity, labels."""
    columns: dict[str, Any] = {
        "row": leakage.rows,
        "id": ids_of(other, leakage.rows),
        "found_row": leakage.found,
        "found_id": ids_of(features, leakage.found),
        "similarity": leakage.similarity,
    }
    return pa.table(
        columns | _label_columns("label", other, leakage.rows) | _label_columns("found_label", features, leakage.found)
    )


def ids_of(features: FeatureSet, rows: IntArray) -> list[str]:
    """Ids of some rows, in their order; only the parts that hold them are read."""
    names = [""] * len(rows)
    for batch, places, within in features.parts.groups(features.parts.check_rows(rows)):
        for place, name in zip(places.tolist(), batch.column("id").take(pa.array(within)).to_pylist()):
            names[place] = name
    return names


def _label_columns(name: str, features: FeatureSet, rows: IntArray) -> dict[str, Any]:
    if not features.has_labels:
        return {}
    labels = features.labels()[rows]
    names = features.label_names
    return {name: labels if names is None else [names[label] if label >= 0 else "" for label in labels.tolist()]}


def table_csv(table: pa.Table) -> Iterable[Sequence[str]]:
    """The rows of a table as cells of a CSV file, headings first; similarities have six digits."""
    yield table.column_names
    for row in zip(*(column.to_pylist() for column in table.columns)):
        yield [
            plain_cell(value)
            if isinstance(value, str)
            else f"{value:.6f}"
            if isinstance(value, float)
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
            for value in row
        ]


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
