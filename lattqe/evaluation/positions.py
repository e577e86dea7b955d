"""Where each graded row stands in a query's exact ranking: read off a list, or counted without making one.

Both ways give the same integers, and everything after them is shared: the same scores to the last digit.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.average_precision import NOT_RANKED
from lattqe.evaluation.judgements import Judgements


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
