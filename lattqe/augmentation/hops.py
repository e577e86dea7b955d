"""Hops: features that flow over the edges of the whole graph, several times.

The weights that a method gives to the lists of all rows are the edges W of a graph; negative ones are dropped. With
A = (W + Wᵀ)/2 + diag(w₀), w₀ each row's weight for itself, and S = A with rows that add up to 1, a hop is
H ← α S H + (1 - α) X, from H = X. After the last one rows are L2-normalised: the result is an ordinary index.

Everything is cut by rows (S) and by columns (H), and every number is computed in an order that no cut changes: entries
of S by their column, sums of S H one by one along a row. So a band of rows of a cluster's worker has the bytes of the
same rows in one process.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy.sparse as sparse

from lattqe.errors import LattqeError
from lattqe.expansion.base import CANCELLED, HOP_ALPHA

MOST_HOPS = 64  # with α = 0.9 one part in 1,000 of the first vectors' neighbors is left after 64
COLUMN_BYTES = 64 << 20  # of the columns of H that are held twice at once


def check_hops(hops: int, alpha: float) -> None:
    """Refuse numbers that mean nothing."""
    if isinstance(hops, bool) or not isinstance(hops, int) or not 1 <= hops <= MOST_HOPS:
        raise LattqeError(f"hops is {hops}: use a whole number from 1 (each row from its neighbors) to {MOST_HOPS}")
    if not (math.isfinite(alpha) and 0 < alpha < 1):
        raise LattqeError(f"the share of the neighbors is {alpha}: use a number between 0 and 1, such as {HOP_ALPHA}")


def directed(weights: np.ndarray, rows: np.ndarray, n: int) -> sparse.csr_array:
    """W (m, n) float32 of some rows: the positive weights of weights (m, 1 + k) for rows (m, 1 + k), -1 for none.

    Column 0, the row itself, is left out. A row that is listed twice has both weights.
    """
    if weights.shape != rows.shape or weights.ndim != 2:
        raise LattqeError(f"weights {weights.shape} do not fit rows {rows.shape}: want (n, 1 + k) twice")
    if not np.isfinite(weights).all():
        bad = int(np.flatnonzero(~np.isfinite(weights).all(axis=1))[0])
        raise LattqeError(f"edges of row {bad}: NaN or infinite weights")
    if rows.size and rows.max() >= n:
        raise LattqeError(f"edges to row {int(rows.max())}, but there are {n} rows: these are edges of other features")
    kept = (rows[:, 1:] >= 0) & (weights[:, 1:] > 0)
    starts = np.concatenate([[0], np.cumsum(kept.sum(axis=1))])
    if starts[-1] < 2**30:  # then no sum with the transpose needs wider numbers, which would be half of its memory
        starts = starts.astype(np.int32)
    values = weights[:, 1:][kept].astype(np.float32)
    W = sparse.csr_array((values, rows[:, 1:][kept], starts), shape=(len(rows), n))
    W.sum_duplicates()
    return W


def transition(W: sparse.csr_array, incoming: sparse.csr_array, loops: np.ndarray, first: int) -> sparse.csr_array:
    """Rows of S (m, n) float32, from W (m, n), the same rows of Wᵀ, and w₀ (m,); `first`: number of the first row.

    A row without any edge stays itself.
    """
    own = np.arange(len(loops))
    A = (W.astype(np.float64) + incoming.astype(np.float64)) / 2
    A = A + _entries(np.maximum(loops, 0), own, first + own, W.shape)
    total = A @ np.ones(A.shape[1])
    alone = np.flatnonzero(total == 0)
    if len(alone):
        A = A + _entries(np.ones(len(alone)), alone, first + alone, W.shape)
        total[alone] = 1
    data = (A.data / np.repeat(total, np.diff(A.indptr))).astype(np.float32)
    return sparse.csr_array((data, A.indices, A.indptr), shape=A.shape)


def _entries(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, ...]) -> sparse.csr_array:
    where = (rows.astype(np.int32), columns.astype(np.int32))
    return sparse.csr_array((values.astype(np.float64), where), shape=shape)


def hopped(S: sparse.csr_array, H: np.ndarray, x: np.ndarray, alpha: float) -> np.ndarray:
    """One hop of some rows (m, c) float32: S (m, n), H (n, c) float32 of all rows, x (m, c) their original vectors."""
    out = S @ np.ascontiguousarray(H, dtype=np.float32)
    out *= np.float32(alpha)
    out += np.float32(1 - alpha) * np.asarray(x, dtype=np.float32)
    return out


def unit_rows(H: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rows of H (m, D) L2-normalised, float32; where a sum cancelled, the original vector x (m, D)."""
    sums = np.ascontiguousarray(H, dtype=np.float64)
    norms = np.sqrt((sums * sums).sum(axis=1, keepdims=True))
    return np.where(norms > CANCELLED, sums / np.maximum(norms, CANCELLED), x).astype(np.float32)


def column_groups(n: int, dim: int, most_bytes: int = COLUMN_BYTES) -> list[slice]:
    """Columns cut so that all rows of a group, in float32, are about so many bytes; columns never mix."""
    step = max(8, most_bytes // max(1, 4 * n))
    return [slice(low, min(low + step, dim)) for low in range(0, dim, step)]


def hop(
    weights: np.ndarray,
    rows: np.ndarray,
    x: np.ndarray,
    alpha: float,
    hops: int,
    on_hop: Callable[[], None] | None = None,
) -> np.ndarray:
    """All rows x (n, D) after so many hops over their edges: (n, D) float32, L2-normalised.

    weights, rows (n, 1 + k): as `augment_rows` gives them, column 0 the row itself. on_hop: called after each hop of
    each group of columns.
    """
    check_hops(hops, alpha)
    n = len(x)
    if len(rows) != n:
        raise LattqeError(f"edges of {len(rows)} rows, but {n} vectors: these are edges of other features")
    W = directed(weights, rows, n)
    S = transition(W, W.T.tocsr(), weights[:, 0], 0)
    out = np.empty(x.shape, dtype=np.float32)
    for columns in column_groups(n, x.shape[1]):
        original = np.ascontiguousarray(x[:, columns], dtype=np.float32)
        H = original
        for _ in range(hops):
            H = hopped(S, H, original, alpha)
            if on_hop is not None:
                on_hop()
        out[:, columns] = H
    return unit_rows(out, x)
