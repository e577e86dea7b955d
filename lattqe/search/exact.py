"""What exact means: the score of two vectors, the order of a list, and how far a float32 product may be from the truth.

The score of two rows is the BLAS dot product `ddot` of their stored values in float64, one call for each pair: it
depends on the two vectors alone, never on the batch, the block or the number of threads. For float16 vectors of unit
length it is the true value, with no rounding at all (products are multiples of 2^-48, sums stay below 2), so it is the
same on every machine; for float32 it is the same wherever BLAS uses the same kernel.
Everything that is kept is scored by this one function; float32 products only decide what is worth scoring, and their
error bound decides how much slack that needs. Stored float32 scores are these float64 scores rounded once, so graphs
and ranks are the same bytes for any cut of the work.
"""

from collections.abc import Sequence

import numpy as np

SCORING_CHUNK = 262_144  # float64 elements of one temporary: it should stay in the cache
RUN_ELEMENTS = 32_768  # of all candidates of one query, from which on it pays to take queries one by one
DOT_LENGTH = 8192  # OpenBLAS splits longer dot products among threads, and then the sum depends on their number


def exact_scores(xq: np.ndarray, xb: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Score the pairs (xq[i[p]], xb[j[p]]) for p in 0..n: (n,) float64. Fast where equal i stand together."""
    scores = np.empty(len(i), dtype=np.float64)
    step = max(SCORING_CHUNK // max(xq.shape[1], 1), 1)
    starts = np.flatnonzero(np.diff(i, prepend=-1))
    if len(i) * xq.shape[1] < RUN_ELEMENTS * len(starts):  # short runs, short vectors: gather both sides
        for lo in range(0, len(i), step):
            hi = min(lo + step, len(i))
            scores[lo:hi] = _dots(xb[j[lo:hi]].astype(np.float64), xq[i[lo:hi]].astype(np.float64))
        return scores
    for start, stop in zip(starts, np.append(starts[1:], len(i))):
        query = xq[i[start]].astype(np.float64)
        for lo in range(start, stop, step):
            hi = min(lo + step, stop)
            scores[lo:hi] = _dots(xb[j[lo:hi]].astype(np.float64), query)
    return scores


def _dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Dot products of rows a (n, D) with rows b (n, D) or one vector b (D,): matmul of 1 x D by D x 1 is `ddot`."""
    total = np.zeros(len(a))
    for start in range(0, a.shape[1], DOT_LENGTH):
        part = slice(start, start + DOT_LENGTH)
        total += np.matmul(a[:, None, part], b[..., part, None])[:, 0, 0]
    return total


def float32_error(dim: int, norms_q: np.ndarray, norms_b: np.ndarray | float) -> np.ndarray:
    """How far a float32 dot product may be from the exact one: γ_D ‖x‖‖y‖, for any order of summation.

    The bound is the rigorous one (D u / (1 - D u), u = 2^-24), because rounding errors of constant or quantised
    vectors all point the same way and a statistical bound fails there. The last term covers underflow.
    """
    gamma = dim * 2.0**-24 / (1 - dim * 2.0**-24)
    return gamma * np.asarray(norms_q, dtype=np.float64) * norms_b + dim * 2.0**-149


def just_below(values: np.ndarray) -> np.ndarray:
    """Round float64 down to a float32 strictly below it, so that `>` keeps everything that might be equal."""
    return np.nextafter(values.astype(np.float32), np.float32(-np.inf))


def norms(x: np.ndarray, chunk: int = 4096) -> np.ndarray:
    """Upper bounds of the row norms of x (n, D), (n,) float64."""
    result = np.empty(len(x), dtype=np.float64)
    for start in range(0, len(x), chunk):
        rows = x[start : start + chunk].astype(np.float32, copy=False)
        result[start : start + chunk] = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return result * (1 + 1e-3)  # the float32 sum above may itself be low by D u < 1e-3


def best_of(scores: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Order each list and keep k: (n, m) float64 and (n, m) int32 -> (n, k) and (n, k).

    Score descending, then row ascending; a missing entry is row -1 with score -inf.
    """
    m = scores.shape[1]
    if m < k:
        scores = np.pad(scores, ((0, 0), (0, k - m)), constant_values=-np.inf)
        ids = np.pad(ids, ((0, 0), (0, k - m)), constant_values=-1)
    order = exact_order(scores, ids)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)


def exact_order(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The permutation (n, m) that puts each list in exact order; only lists with ties pay for a second key."""
    order = np.argsort(-scores, axis=1)
    ordered = np.take_along_axis(scores, order, axis=1)
    tied = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > -np.inf)).any(axis=1)
    order[tied] = np.lexsort((ids[tied], -scores[tied]), axis=-1)
    return order


def merge(lists: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge exact lists of the same queries over different rows: [((n, m) float64, (n, m) int32)] -> one of k."""
    scores = np.concatenate([part[0] for part in lists], axis=1)
    ids = np.concatenate([part[1] for part in lists], axis=1)
    return best_of(scores, ids, k)


def published(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Turn inner lists (float64, -inf where missing) into what is stored: D float32 (0 where missing), I int32."""
    return np.where(ids < 0, 0.0, scores).astype(np.float32), ids.astype(np.int32, copy=False)
