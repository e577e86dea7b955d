"""kNN graphs that are kept: joined with newcomers, updated when rows join or leave.

An update is exact, at a cost in proportion to what changes: a new row enters an old row's list only if its score
reaches the list's last one, which the graph holds. So the new rows are multiplied with the old ones once, feeding both
sides; a list is touched only where something may enter, and only touched lists are scored and ordered again. A list
that lost a member says nothing about what comes next: its row is searched anew.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lattqe.errors import LattqeError
from lattqe.search.exact import just_below, merge, published
from lattqe.search.graph import Lists, compare_between, compare_within, rows_per_block
from lattqe.search.index import pair_scores
from lattqe.search.pairing import Clock
from lattqe.search.products import Block, Products, lanes_on
from lattqe.search.rows import tiles
from lattqe.search.topk import best_rows

CHUNK = 2048  # rows compared at once: k² bytes for each

# (i (n,) rows of the lists, j (n,) row numbers) -> exact scores (n,) float64
Rescore = Callable[[np.ndarray, np.ndarray], np.ndarray]


def join_lists(
    ids: np.ndarray, scores: np.ndarray, newcomers: Lists, rescore: Rescore
) -> tuple[np.ndarray, np.ndarray]:
    """Merge exact newcomers into stored lists: ids (n, k) int32, scores (n, k) float32 -> the same, exact order.

    Rounding keeps order, so the rounded scores decide wherever they differ. Only lists in which a newcomer's rounded
    score equals a stored one, or equal stored scores hide their order, are scored again in float64.
    """
    ids, scores = ids.copy(), scores.copy()
    touched = np.flatnonzero((newcomers.ids >= 0).any(axis=1))
    for start in range(0, len(touched), CHUNK):
        rows = touched[start : start + CHUNK]
        known = np.where(ids[rows] < 0, -np.inf, scores[rows].astype(np.float64))
        unclear = np.flatnonzero(_unclear(ids[rows], scores[rows], newcomers.scores[rows].astype(np.float32)))
        i, m = np.nonzero(ids[rows[unclear]] >= 0)
        known[unclear[i], m] = rescore(rows[unclear[i]], ids[rows[unclear[i]], m])
        joined = merge([(known, ids[rows]), (newcomers.scores[rows], newcomers.ids[rows])], ids.shape[1])
        scores[rows], ids[rows] = published(*joined)
    return ids, scores


def _unclear(ids: np.ndarray, scores: np.ndarray, newcomers: np.ndarray) -> np.ndarray:
    """Which lists (n,) the rounded scores do not order: ids, scores (n, k) stored, newcomers (n, k) rounded."""
    there = ids >= 0
    equal = ((scores[:, :, None] == newcomers[:, None, :]) & there[:, :, None]).any(axis=(1, 2))
    hidden = (scores[:, 1:] == scores[:, :-1]) & (ids[:, 1:] < ids[:, :-1]) & there[:, 1:]
    return equal | hidden.any(axis=1)


def update_graph(
    xb: np.ndarray,
    I: np.ndarray,
    D: np.ndarray,
    stale: np.ndarray | None = None,
    *,
    device: torch.device | None = None,
    clock: Clock | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Bring a graph up to date: I (n, k) int32, D (n, k) float32, the same as `knn_graph(xb, k)` gives.

    xb (n, D): the surviving old rows in their order, then the new ones. I, D (m, k): the old rows' lists in the row
    numbers of xb. `stale` (m,) bool marks old rows whose list lost a member; their I and D are not looked at.
    Products: (n - m)·n for the new rows, and n for each stale row; `clock.counts` has them counted.
    """
    n, (m, k) = len(xb), I.shape
    if m > n:
        raise LattqeError(f"a graph of {m} rows cannot belong to {n} rows")
    stale = np.zeros(m, dtype=bool) if stale is None else stale
    clock = clock or Clock()
    new_I, new_D = np.empty((n, k), dtype=np.int32), np.empty((n, k), dtype=np.float32)
    new_I[:m], new_D[:m] = I, D
    with lanes_on(device) as lanes:
        for start, stop in tiles(n - m, rows_per_block(xb.shape[1], k)):
            rows = Block.load(xb[m + start : m + stop], lanes[0], k, widen=True)
            lists = compare_within(rows, Lists.empty(stop - start, k), m + start, lanes, clock)
            for lo, hi in tiles(m + start, rows_per_block(xb.shape[1], k)):
                lists = _compare_with_known(rows, lists, m + start, xb, (lo, hi), new_I, new_D, lanes, clock)
            new_D[m + start : m + stop], new_I[m + start : m + stop] = published(lists.scores, lists.ids)
        _search_again(xb, np.flatnonzero(stale), new_I, new_D, lanes, clock)
    return new_I, new_D


def _compare_with_known(
    rows: Block,
    lists: Lists,
    first_row: int,
    xb: np.ndarray,
    known: tuple[int, int],
    I: np.ndarray,
    D: np.ndarray,
    lanes: Sequence[Products],
    clock: Clock,
) -> Lists:
    """Compare new rows with rows lo..hi, whose lists I, D are complete without them and are updated in place."""
    lo, hi = known
    k = I.shape[1]
    # A stand-in for each known list: k entries just below its last score. What comes before them may enter.
    floor = np.where(I[lo:hi, -1] < 0, -np.inf, just_below(D[lo:hi, -1].astype(np.float64)))
    stand_in = Lists(np.repeat(floor[:, None], k, axis=1), np.full((hi - lo, k), -1, dtype=np.int32))
    visitors = Block.load(xb[lo:hi], lanes[0], k, widen=True)
    lists, offered = compare_between(rows, visitors, lists, stand_in, first_row, lo, lanes, clock)
    touched = np.flatnonzero((offered.ids >= 0).any(axis=1))
    if len(touched):
        own = I[lo + touched]
        own_scores = np.where(own < 0, -np.inf, pair_scores(xb[lo + touched], xb, own))
        clock.count("scored", int((own >= 0).sum()))
        newcomers = offered.ids[touched]
        scores = np.where(newcomers < 0, -np.inf, offered.scores[touched])
        D[lo + touched], I[lo + touched] = published(*merge([(own_scores, own), (scores, newcomers)], k))
    return lists


def _search_again(
    xb: np.ndarray, rows: np.ndarray, I: np.ndarray, D: np.ndarray, lanes: Sequence[Products], clock: Clock
) -> None:
    """Search rows whose lists lost a member among all others."""
    if not len(rows):
        return
    clock.count("products", len(rows) * len(xb))
    found = best_rows(xb[rows], Block.load(xb, lanes[0]), I.shape[1], lanes, exclude=rows)
    D[rows], I[rows] = published(*found)
