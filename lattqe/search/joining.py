"""Merging newcomers into lists that are known only as a stored graph: row numbers in exact order, scores rounded."""

from collections.abc import Callable

import numpy as np

from lattqe.search.exact import merge, published
from lattqe.search.graph import Lists

CHUNK = 2048  # rows compared at once: k² bytes for each

# (i (n,) rows of the lists, j (n,) row numbers) -> exact scores (n,) float64
Rescore = Callable[[np.ndarray, np.ndarray], np.ndarray]


def join_lists(ids: np.ndarray, scores: np.ndarray, newcomers: Lists,
               rescore: Rescore) -> tuple[np.ndarray, np.ndarray]:
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
