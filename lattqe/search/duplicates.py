"""Exact duplicates in their thousands: rows that can never be a neighbor, enough equal ones standing before them."""

import numpy as np
import xxhash


def surplus_rows(x: np.ndarray, k: int) -> np.ndarray | None:
    """Find rows of x (n, D) with more than k identical rows before them: (n,) bool, or None where there are none.

    Equal vectors have equal scores and ties go to the lower row, so with k + 1 of them in front (one of which may be
    the query itself) such a row is in nobody's list. Without this, a database of equal vectors would have to be scored
    pair by pair in float64.
    """
    n = len(x)
    if n <= k + 1:
        return None
    rows = np.ascontiguousarray(x)
    crowded = _in_large_groups(_leading_bytes(rows), k + 1)
    if not crowded.size:
        return None
    hashes = np.array([xxhash.xxh3_128_digest(rows[row]) for row in crowded], dtype="V16")
    order, rank = _rank_in_groups(hashes.view("u8").reshape(-1, 2))
    surplus = np.zeros(n, dtype=bool)
    surplus[crowded[order[rank > k]]] = True
    return surplus if surplus.any() else None


def _leading_bytes(rows: np.ndarray) -> np.ndarray:
    """Eight bytes from the start of each row: most data is told apart by them at once. (n,) uint64."""
    raw = rows.view(np.uint8).reshape(len(rows), -1)[:, :8]
    key = np.zeros((len(rows), 8), dtype=np.uint8)
    key[:, : raw.shape[1]] = raw
    return key.view(np.uint64).ravel()


def _in_large_groups(key: np.ndarray, size: int) -> np.ndarray:
    """Row numbers, ascending, whose key occurs more than `size` times."""
    _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    return np.flatnonzero(counts[inverse] > size)


def _rank_in_groups(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort (n, 2) keys stably; return the order and, in that order, each item's position within its equal keys."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    begins = np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)]
    starts = np.flatnonzero(begins)
    return order, np.arange(len(keys)) - starts[np.cumsum(begins) - 1]
