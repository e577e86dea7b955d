"""Scoring: where each graded row stands in the exact ranking, and from there to per-query and mean results.

Positions are read off a list, or counted without making one. Both ways give the same integers, and everything after
them is shared: the same scores to the last digit. Average precision is the area under a trapezoidal precision-recall
curve, the published evaluation of Oxford, Paris and their revisited versions; scikit-learn's is another number.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.truth import GroundTruth, Judgements, Setup

IntArray = NDArray[np.integer[Any]]

NOT_RANKED = -1
"""The position of a row that a truncated ranking does not contain."""

_BEYOND = 2**62  # sorts such rows behind every position, and stays there when junk is subtracted


def average_precision(positions: Sequence[int] | IntArray, positives: int) -> float:
    """The average precision of one query, in 0..1.

    positions: 0-based positions of the positives that were found, junk already removed; in any order.
    positives: how many there are in all; those that were not found contribute nothing.
    """
    found = np.sort(np.asarray(positions, dtype=np.int64))
    return float(_trapezoids(np.arange(len(found)), found).sum() / positives)


def _trapezoids(before: IntArray, position: IntArray) -> NDArray[np.float64]:
    """Mean of the precisions just before and at each positive; `before` positives stand ahead of it."""
    ahead = np.where(position == 0, 1.0, before / np.maximum(position, 1))
    return (ahead + (before + 1) / (position + 1)) / 2


def score_positions(
    query: IntArray,
    position: IntArray,
    positive: NDArray[np.bool_],
    junk: NDArray[np.bool_],
    queries: int,
    ks: Sequence[int],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Average precision (queries,) and precision at each k (queries, len(ks)) of many queries.

    query, position, positive, junk: (n,) one entry for each labelled row of each query: the query's number, the row's
    0-based position in the whole ranking (NOT_RANKED if absent), and what it counts as (neither: it is ignored, a
    negative). Queries without positives get 0. Sums run over the entries of one query in the order of their positions,
    so a query's numbers do not depend, to the last digit, on the other queries of the call.
    """
    far = np.where(position == NOT_RANKED, _BEYOND, position)
    order = np.lexsort((far, query))
    query, position, positive, junk = query[order], far[order], positive[order], junk[order]
    start = np.searchsorted(query, np.arange(queries))[query]
    positives_before = _count_before(positive, start)[positive]
    position = (position - _count_before(junk, start))[positive]
    query = query[positive]
    total = np.bincount(query, minlength=queries)
    found = position < _BEYOND // 2
    steps = _trapezoids(positives_before[found], position[found])
    ap = np.bincount(query[found], steps, minlength=queries) / np.maximum(total, 1)
    return ap, _precision_at(query, position, queries, ks)


def _count_before(flag: NDArray[np.bool_], start: IntArray) -> NDArray[np.int64]:
    """For each entry, how many flagged entries of its own query stand before it."""
    ahead = np.concatenate(([0], np.cumsum(flag)))
    return ahead[:-1] - ahead[start]


def _precision_at(query: IntArray, position: IntArray, queries: int, ks: Sequence[int]) -> NDArray[np.float64]:
    """Precision within the first min(k, position of the last positive) results, as published.

    A positive that the ranking does not contain counts as standing beyond it, so that truncation only lowers the value.
    """
    last = np.zeros(queries, dtype=np.int64)
    np.maximum.at(last, query, position + 1)
    precision = np.zeros((queries, len(ks)))
    for column, k in enumerate(ks):
        depth = np.minimum(last, min(k, int(last.max(initial=0))))  # a k of any size
        hits = np.bincount(query[position < depth[query]], minlength=queries)
        precision[:, column] = hits / np.maximum(depth, 1)
    return precision


class CountingIndex(Protocol):
    """The part of the search index that counting needs; see lattqe.search."""

    @property
    def rows(self) -> int:
        """Number of database rows."""

    def score(self, xq: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """(nq, m) exact scores of the rows (nq, m); -1 is padding."""

    def count_above(
        self, xq: NDArray[np.float32], scores: NDArray[np.float64], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """(nq, m) how many database rows stand before each of the rows (nq, m) in the exact order."""


def positions_in_ranking(
    ranking: NDArray[np.integer[Any]], judgements: Judgements, first_query: int = 0
) -> NDArray[np.int64]:
    """(n,) 0-based position of each graded row in its query's list, NOT_RANKED if absent.

    ranking: (nq, k) database rows, best first; -1 fills lists that are shorter than k. Errors count queries from
    first_query.
    """
    positions = np.full(len(judgements.rows), NOT_RANKED, dtype=np.int64)
    highest = max(int(ranking.max(initial=-1)), int(judgements.rows.max(initial=-1)))
    where = np.full(highest + 2, NOT_RANKED, dtype=np.int64)
    for i in range(judgements.queries):
        listed = np.flatnonzero(ranking[i] >= 0)
        row = ranking[i][listed]
        where[row] = listed
        twice = np.flatnonzero(where[row] != listed)
        if len(twice):
            raise LattqeError(f"the ranking of query {first_query + i} contains row {row[twice[0]]} more than once")
        mine = slice(judgements.offsets[i], judgements.offsets[i + 1])
        positions[mine] = where[judgements.rows[mine]]
        where[row] = NOT_RANKED
    return positions


def positions_by_counting(index: CountingIndex, xq: NDArray[np.float32], judgements: Judgements) -> NDArray[np.int64]:
    """(n,) 0-based exact position of each graded row: its score is sent out, the rows standing before it come back.

    xq: (nq, D). Memory is nq times the longest list of graded rows; `query_blocks` bounds it.
    """
    counts = np.diff(judgements.offsets)
    filled = np.arange(counts.max(initial=0)) < counts[:, None]
    if not filled.any():
        return np.empty(0, dtype=np.int64)
    rows = np.full(filled.shape, -1, dtype=np.int64)
    rows[filled] = judgements.rows
    before = index.count_above(xq, index.score(xq, rows), rows)
    return np.asarray(before)[filled].astype(np.int64)


def query_blocks(counts: NDArray[np.int64], budget: int, most: int = 4096) -> Iterator[tuple[int, int]]:
    """Cut queries into consecutive blocks (start, stop): block length times longest list of graded rows <= budget.

    A single query is never cut: its graded rows are at most the database's.
    """
    start = 0
    while start < len(counts):
        longest = np.maximum(np.maximum.accumulate(counts[start : start + most]), 1)
        fits = longest * np.arange(1, len(longest) + 1) <= budget
        length = max(1, int(fits.argmin()) if not fits.all() else len(fits))
        yield start, start + length
        start += length


DEFAULT_KS = (1, 5, 10)

# Graded rows (with padding) in memory at once: a handful of 8-byte arrays of this many entries, about 200 MB.
DEFAULT_BUDGET = 1 << 22


@dataclass(frozen=True)
class Scores:
    """The result of one setup. All values are in 0..1; queries without positives have 0 and are left out of the means.

    ap: (nq,) average precision; positives: (nq,) number of positives; precision: (nq, len(ks)) precision at each k.
    """

    setup: str
    ap: NDArray[np.float64]
    positives: NDArray[np.int64]
    precision: NDArray[np.float64]
    ks: tuple[int, ...]

    def __repr__(self) -> str:
        means = "".join(f", mP@{k} {100 * value:.1f}" for k, value in zip(self.ks, self.mean_precision))
        return f"Scores({self.setup}: mAP {100 * self.mean_ap:.1f}{means}, {int(self.evaluated.sum())} queries)"

    @property
    def evaluated(self) -> NDArray[np.bool_]:
        """(nq,) the queries that have positives."""
        return self.positives > 0

    @property
    def mean_ap(self) -> float:
        """Mean average precision over the queries that have positives; 0 if there are none."""
        return float(self.ap[self.evaluated].mean()) if self.evaluated.any() else 0.0

    @property
    def mean_precision(self) -> NDArray[np.float64]:
        """(len(ks),) mean precision at each k over the queries that have positives; 0 if there are none."""
        return self.precision[self.evaluated].mean(axis=0) if self.evaluated.any() else np.zeros(len(self.ks))

    def summary(self) -> dict[str, Any]:
        """The means as JSON-able numbers, in 0..1, with how many queries they are means of."""
        return {
            "setup": self.setup,
            "map": self.mean_ap,
            **{f"mp@{k}": float(value) for k, value in zip(self.ks, self.mean_precision)},
            "queries": int(self.evaluated.sum()),
            "queries_without_positives": int((~self.evaluated).sum()),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, per query, JSON-able; `from_dict` gives back the same numbers to the last digit."""
        return {
            "setup": self.setup,
            "ks": list(self.ks),
            "ap": self.ap.tolist(),
            "positives": self.positives.tolist(),
            "precision": self.precision.tolist(),
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Scores":
        """The scores that `to_dict` described; ValueError where they are impossible."""
        try:
            ap, ks = np.array(content["ap"], dtype=np.float64), tuple(content["ks"])
            precision = np.array(content["precision"], dtype=np.float64).reshape(len(ap), len(ks))
            positives = np.array(content["positives"], dtype=np.int64)
        except OverflowError as error:
            raise ValueError("a number beyond 64 bits") from error
        if ap.ndim != 1 or positives.shape != ap.shape or not ((ap >= 0) & (ap <= 1)).all():  # nor NaN
            raise ValueError("no average precisions from 0 to 1, one for each query")
        return cls(content["setup"], ap, positives, precision, ks)


def evaluate(
    index: CountingIndex,
    xq: NDArray[np.float32],
    truth: GroundTruth,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    budget: int = DEFAULT_BUDGET,
) -> dict[str, Scores]:
    """Score queries (nq, D) against an index of any size, exactly, without making rankings.

    Returns the scores of each setup of the ground truth by name. Rows of the index beyond `truth.database_rows` are
    distractors. Queries are taken in blocks of at most `budget` graded rows.
    """
    _same_queries(len(xq), truth, "queries")
    if index.rows < truth.database_rows:
        raise LattqeError(
            f"the ground truth covers {truth.database_rows} database rows and the index has {index.rows}:"
            " index the whole database (distractors go after it)"
        )
    return _evaluate_blocks(
        truth, ks, budget, lambda start, stop, block: positions_by_counting(index, xq[start:stop], block)
    )


class StoredRanking(Protocol):
    """Rankings that were stored: `lattqe.store.Ranks` is one."""

    @property
    def rows(self) -> int:
        """Number of queries."""

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Row numbers (n, k) and scores (n, k) of queries start..stop-1."""


def score_ranking(
    ranking: NDArray[np.integer[Any]] | StoredRanking,
    truth: GroundTruth,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    budget: int = DEFAULT_BUDGET,
) -> dict[str, Scores]:
    """Score rankings (nq, k) that were made before, in memory or stored: database rows, best first, -1 for missing.

    A list shorter than the database can only lower the scores: positives outside it contribute 0.
    """
    _same_queries(len(ranking) if isinstance(ranking, np.ndarray) else ranking.rows, truth, "rankings")

    def locate(start: int, stop: int, block: Judgements) -> NDArray[np.int64]:
        lists = ranking[start:stop] if isinstance(ranking, np.ndarray) else ranking.read(start, stop)[0]
        return positions_in_ranking(lists, block, start)

    return _evaluate_blocks(truth, ks, budget, locate)


def _same_queries(count: int, truth: GroundTruth, what: str) -> None:
    if count != truth.queries:
        raise LattqeError(f"got {count} {what}, but the ground truth has {truth.queries} queries: they must correspond")


def _evaluate_blocks(
    truth: GroundTruth, ks: Sequence[int], budget: int, locate: Callable[[int, int, Judgements], NDArray[np.int64]]
) -> dict[str, Scores]:
    if any(k < 1 for k in ks):
        raise LattqeError(f"precision at k needs k >= 1, got {list(ks)}")
    pieces: dict[str, list[Scores]] = {setup.name: [] for setup in truth.setups}
    for start, stop in query_blocks(truth.counts, budget):
        block = truth.judgements(start, stop)
        positions = locate(start, stop, block)
        for setup in truth.setups:
            pieces[setup.name].append(score_block(block, positions, setup, ks))
    return {name: _join(name, parts, ks) for name, parts in pieces.items()}


def score_block(
    judgements: Judgements, positions: NDArray[np.int64], setup: Setup, ks: Sequence[int] = DEFAULT_KS
) -> Scores:
    """Score one setup from the positions (n,) of the graded rows (n,)."""
    positive = np.isin(judgements.grades, setup.positive)
    junk = np.isin(judgements.grades, setup.junk)
    query = judgements.query
    ap, precision = score_positions(query, positions, positive, junk, judgements.queries, ks)
    counts = np.bincount(query[positive], minlength=judgements.queries)
    return Scores(setup.name, ap, counts.astype(np.int64), precision, tuple(ks))


def _join(name: str, parts: list[Scores], ks: Sequence[int]) -> Scores:
    return Scores(
        name,
        np.concatenate([np.empty(0), *(part.ap for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.positives for part in parts)]),
        np.concatenate([np.empty((0, len(ks))), *(part.precision for part in parts)]),
        tuple(ks),
    )
