"""Average precision as the area under a trapezoidal precision-recall curve, and precision at k, for many queries.

This is the published evaluation of Oxford, Paris and their revisited versions; scikit-learn's average precision is
another number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    query: IntArray, position: IntArray, positive: NDArray[np.bool_], junk: NDArray[np.bool_], queries: int,
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
        depth = np.minimum(last, k)
        hits = np.bincount(query[position < depth[query]], minlength=queries)
        precision[:, column] = hits / np.maximum(depth, 1)
    return precision
