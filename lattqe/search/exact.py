"""What exact means: the score of two vectors, the order of a list, and how far a float32 product may be from the truth.

The score of two rows is the BLAS dot product `ddot` of their stored values in float64, one call for each pair: it
depends on the two vectors alone, never on the batch, the block or the number of threads. For float16 vectors of unit
length it is the true value, with no rounding at all (products are multiples of 2^-48, sums stay below 2), so it is the
same on every machine; for float32 it is the same wherever BLAS uses the same kernel.
Everything that is kept is scored by this one function; float32 products only decide what is worth scoring, and their
error bound decides how much slack that needs. Stored float32 scores are these float64 scores rounded once, so graphs
and ranks are the same bytes for any cut of the work.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from lattqe.search.rows import Rows, pieces_of, split_rows

SCORING_CHUNK = 524_288  # elements gathered at once: enough that threads seldom meet in the interpreter, near the cache
LONG_RUN = 8  # candidates of one query, from which on its vector is not gathered again for each of them
TINY = 1e-25  # sums of squares below it may have lost terms to float32's underflow
DOT_LENGTH = 8192  # OpenBLAS splits longer dot products among threads, and then the sum depends on their number


def exact_scores(xq: Rows, xb: Rows, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Score the pairs (xq[i[p]], xb[j[p]]) for p in 0..n: (n,) float64. Fast where equal i stand together."""
    scores = np.empty(len(i))
    for asked, queries, query in split_rows(xq, i):
        for found, rows, row in split_rows(xb, j[asked]):
            scores[asked[found]] = _score(queries, rows, query[found], row)
    return scores


def _score(xq: np.ndarray, xb: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Score pairs of rows that lie in one array each."""
    starts = np.flatnonzero(np.diff(i, prepend=-1))
    if len(i) < LONG_RUN * len(starts):
        return _score_pairs(xq, xb, i, j)
    return _score_runs(xq, xb, i, j, starts)


def _score_pairs(xq: np.ndarray, xb: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Score pairs of which few have the same i: gather both sides."""
    scores = np.empty(len(i))
    step = min(max(SCORING_CHUNK // (2 * max(xq.shape[1], 1)), 1), len(i))
    found, asked = _Rows(step, xb), _Rows(step, xq)
    for lo in range(0, len(i), max(step, 1)):
        part = slice(lo, lo + step)
        scores[part] = _dots(found.take(j[part])[:, None], asked.take(i[part])[:, :, None])
    return scores


def _score_runs(xq: np.ndarray, xb: np.ndarray, i: np.ndarray, j: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Score runs of equal i, several at once, filled up to the longest of them."""
    scores = np.empty(len(i))
    step = max(SCORING_CHUNK // max(xq.shape[1], 1), 1)
    starts = np.union1d(starts, np.arange(0, len(i), step))
    lengths = np.diff(np.append(starts, len(i)))
    order = np.argsort(lengths, kind="stable")  # of like length together: little to fill up
    starts, lengths = starts[order], lengths[order]
    found = _Rows(step, xb)
    for first, last in _groups(lengths.tolist(), step):
        longest = lengths[first:last].max()
        places = starts[first:last, None] + np.minimum(np.arange(longest), lengths[first:last, None] - 1)
        rows = found.take(j[places.ravel()]).reshape(last - first, longest, 1, xb.shape[1])
        asked = xq[i[starts[first:last]]].astype(np.float64)
        scores[places] = _dots(rows, asked[:, None, :, None])
    return scores


def _groups(lengths: list[int], area: int) -> Iterator[tuple[int, int]]:
    """Cut runs of ascending length into groups (first, last + 1) of which all, filled up to the last, which is the
    longest, take at most `area` places, and few of them for nothing.
    """
    first = 0
    for run, length in enumerate(lengths):
        if (run + 1 - first) * length > area or length > 2 * lengths[first] + LONG_RUN:
            yield first, run
            first = run
    if lengths:
        yield first, len(lengths)


class _Rows:
    """Rows of x in float64, gathered into the same memory each time."""

    def __init__(self, limit: int, x: np.ndarray) -> None:
        self.x = x
        self.narrow, self.wide = np.empty((limit, x.shape[1]), x.dtype), np.empty((limit, x.shape[1]))

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows (n,) of x, (n, D) float64, valid until the next call."""
        wide = self.wide[: len(rows)]
        # "clip" only spares numpy a copy: the row numbers are all of x.
        wide[:] = np.take(self.x, rows, axis=0, out=self.narrow[: len(rows)], mode="clip")
        return wide


def _dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Dot products of a (..., 1, D) and b (..., D, 1), which numpy hands to `ddot` one by one: (...)."""
    total = np.matmul(a[..., :DOT_LENGTH], b[..., :DOT_LENGTH, :])[..., 0, 0]
    for start in range(DOT_LENGTH, a.shape[-1], DOT_LENGTH):
        part = slice(start, start + DOT_LENGTH)
        total += np.matmul(a[..., part], b[..., part, :])[..., 0, 0]
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


def norms(x: Rows, chunk: int = 4096) -> np.ndarray:
    """Upper bounds of the row norms of x (n, D), (n,) float64."""
    squares = [np.empty(0)]
    for piece in pieces_of(x):
        for start in range(0, len(piece), chunk):
            rows = piece[start : start + chunk].astype(np.float32, copy=False)
            sums = np.einsum("ij,ij->i", rows, rows).astype(np.float64)
            tiny = np.flatnonzero(sums < TINY)
            sums[tiny] = np.square(rows[tiny].astype(np.float64)).sum(axis=1)
            squares.append(sums)
    return np.sqrt(np.concatenate(squares)) * (1 + 1e-3)  # a float32 sum may be low by D u < 1e-3


def best_of(scores: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Order each list and keep k: (n, m) float64 and (n, m) int32 -> (n, k) and (n, k).

    Score descending, then row ascending; a missing entry is row -1 with score -inf.
    """
    m = scores.shape[1]
    if m < k:
        scores = np.pad(scores, ((0, 0), (0, k - m)), constant_values=-np.inf)
        ids = np.pad(ids, ((0, 0), (0, k - m)), constant_values=-1)
    order, ordered = exact_order(scores, ids)
    return np.ascontiguousarray(ordered[:, :k]), np.take_along_axis(ids, order[:, :k], axis=1)


def exact_order(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The permutation (n, m) that puts each list in exact order, and the scores in it; only lists with ties pay for a
    second key.
    """
    order = np.argsort(-scores, axis=1)
    ordered = np.take_along_axis(scores, order, axis=1)
    tied = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > -np.inf)).any(axis=1)
    order[tied] = np.lexsort((ids[tied], -scores[tied]), axis=-1)
    return order, ordered


def merge(lists: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge exact lists of the same queries over different rows: [((n, m) float64, (n, m) int32)] -> one of k."""
    scores = np.concatenate([part[0] for part in lists], axis=1)
    ids = np.concatenate([part[1] for part in lists], axis=1)
    return best_of(scores, ids, k)


def published(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Turn inner lists (float64, -inf where missing) into what is stored: D float32 (0 where missing), I int32."""
    return np.where(ids < 0, 0.0, scores).astype(np.float32), ids.astype(np.int32, copy=False)
