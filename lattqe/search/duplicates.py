"""Exact duplicates in their thousands: rows that can never be a neighbor, enough equal ones standing before them."""

import numpy as np
import xxhash

from lattqe.search.pieces import Rows, pieces_of


def surplus_rows(x: Rows, k: int) -> np.ndarray | None:
    """Find rows of x (n, D) with more than k identical rows before them: (n,) bool, or None where there are none.

    Equal vectors have equal scores and ties go to the lower row, so with k + 1 of them in front (one of which may be
    the query itself) such a row is in nobody's list. Without this, a database of equal vectors would have to be scored
    pair by pair in float64.
    """
    n = len(x)
    if n <= k + 1:
        return None
    crowded = _in_large_groups(_leading_bytes(x), k + 1)
    if not crowded.size:
        return None
    digests = [xxhash.xxh3_128_digest(np.ascontiguousarray(x[row : row + 1]).data) for row in crowded]
    hashes = np.array(digests, dtype="V16")
    order, rank = _rank_in_groups(hashes.view("u8").reshape(-1, 2))
    surplus = np.zeros(n, dtype=bool)
    surplus[crowded[order[rank > k]]] = True
    return surplus if surplus.any() else None


def _leading_bytes(x: Rows) -> np.ndarray:
    """Eight bytes from the start of each row: most data is told apart by them at once. (n,) uint64."""
    columns = 8 // x.dtype.itemsize
    leading = np.concatenate([piece[:, :columns] for piece in pieces_of(x)])
    key = np.zeros((len(x), columns), dtype=x.dtype)
    key[:, : leading.shape[1]] = leading
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
