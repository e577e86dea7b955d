"""Exact search of one set of rows in another, on one device: the k best, the k lowest, scores and exact ranks."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lattqe.errors import LattqeError
from lattqe.search.blocks import Block, check_rows, check_vectors
from lattqe.search.exact import exact_scores, merge, norms, published
from lattqe.search.lanes import in_lanes, lanes_on
from lattqe.search.pieces import Rows, row_range
from lattqe.search.products import Products
from lattqe.search.running import RunningTopK

QUERY_BLOCK = 4096
MANY_QUERIES = 256  # for each thread: fewer, and the threads share the database instead
BUFFER_BYTES = 128 << 20  # of candidates, for one block of queries
TILE_ENTRIES = 4 << 20  # of one product: with its masks it stays near the last-level cache
COUNT_QUERIES, COUNT_ENTRIES = 1024, 2 << 20


def topk(xq: np.ndarray, xb: np.ndarray, k: int, *, largest: bool = True, exclude: np.ndarray | None = None,
         first_row: int = 0, device: torch.device | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best rows of xb (nb, D) for each row of xq (nq, D): D (nq, k) float32, I (nq, k) int32.

    Exact: ordered by the float64 dot product, then by row, ascending; `largest=False` gives the k lowest, ascending.
    `exclude` (nq,) int names one row of xb that each query must not find (-1: none). Row numbers in the answer, and in
    `exclude`, start at `first_row`. Fewer than k rows: row -1, score 0.
    """
    # The lowest scores are the highest of the opposite query: negation is exact.
    sign = 1 if largest else -1
    with lanes_on(device) as lanes:
        database = Block.load(xb, lanes[0])
        scores, ids = best_rows(sign * np.asarray(xq), database, k, lanes, exclude=exclude, first_row=first_row)
    return published(sign * scores, ids)


def best_rows(xq: np.ndarray, database: Block, k: int, lanes: Sequence[Products], *,
              exclude: np.ndarray | None = None, first_row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best, in the form that can be merged: (nq, k) float64 (-inf missing), (nq, k) int32 (-1 missing).

    Threads share the queries or, where these are few, the rows of the database.
    """
    xq = check_queries(xq, database.dim)
    if k < 1:
        raise LattqeError(f"k must be at least 1, got {k}")
    database = database.without(k)
    limit = int(np.clip(BUFFER_BYTES // (max(4 * k, 64) * 8), 1, QUERY_BLOCK))
    few = len(xq) < MANY_QUERIES * len(lanes)
    blocks = list(tiles(len(xq), limit if few else min(limit, -(-len(xq) // len(lanes)))))
    ranges = list(tiles(len(database), -(-len(database) // len(lanes)) if few else len(database)))

    def search(products: Products, task: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        first, last, start, stop = task
        queries = Block.load(xq[first:last], products, widen=True)
        hidden = None if exclude is None else np.asarray(exclude[first:last]) - first_row - start
        scores, ids = _search_block(queries, database.part(start, stop), k, products, hidden)
        return scores, np.where(ids < 0, -1, ids + (start + first_row)).astype(np.int32)

    scores, ids = np.full((len(xq), k), -np.inf), np.full((len(xq), k), -1, dtype=np.int32)
    found = in_lanes(search, [(*block, *rows) for block in blocks for rows in ranges], lanes)
    for number, (first, last) in enumerate(blocks if ranges else ()):
        lists = found[number * len(ranges) : (number + 1) * len(ranges)]
        scores[first:last], ids[first:last] = merge(lists, k) if len(lists) > 1 else lists[0]
    return scores, ids


def _search_block(queries: Block, database: Block, k: int, products: Products,
                  hidden: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Search one block of queries over all tiles of the database."""
    running = RunningTopK(queries, database, k)
    for lo, hi in tiles(len(database), max(TILE_ENTRIES // len(queries), products.tile)):
        tile = products.multiply(queries.held, products.widen(database.held[lo:hi]))
        if hidden is not None:
            inside = np.flatnonzero((hidden >= lo) & (hidden < hi))
            products.blank(tile, inside, hidden[inside] - lo)
        if lo == 0 and hi > k:
            running.lift(0, products.kth(tile, k))
        i, j, scores = products.passing(tile, running.threshold)
        running.offer(0, i, j + lo, scores)
    running.settle(0, len(queries))
    running.prepare_scores()
    running.score(0, len(queries))
    return running.lists(0, len(queries))


def pair_scores(xq: np.ndarray, xb: Rows, rows: np.ndarray) -> np.ndarray:
    """Exact scores of chosen rows: xq (nq, D), rows (nq, m) of xb, -1 padding -> (nq, m) float64, 0 at padding."""
    xq, rows = check_queries(xq, xb.shape[1]), np.asarray(rows)
    if rows.size and rows.max() >= len(xb):
        raise LattqeError(f"row {int(rows.max())} asked for, but the database has {len(xb)} rows")
    i, m = np.nonzero(rows >= 0)
    scores = np.zeros(rows.shape)
    scores[i, m] = exact_scores(xq, xb, i, rows[i, m])
    return scores


def count_above(xq: np.ndarray, xb: Rows, scores: np.ndarray, rows: np.ndarray, *,
                first_row: int = 0) -> np.ndarray:
    """Count the rows of xb (nb, D) that stand before given (score, row) pairs in the exact order of each query.

    xq (nq, D), scores (nq, m) float64 as `pair_scores` gives them, rows (nq, m) (-1: padding, counted as 0) ->
    (nq, m) int64. The rows need not be of xb: counts over several shards add up to the rank in all of them; row
    numbers of xb start at `first_row`. The products are float64 because labelled items often lie in the bulk of the
    scores, where a float32 error bound covers thousands of rows; memory: a few tiles of 16 MiB.
    """
    xb = check_rows(xb)
    xq = check_queries(xq, xb.shape[1])
    scores, rows = np.asarray(scores, dtype=np.float64), np.asarray(rows)
    error = 2.0**-52 * xb.shape[1] * norms(xq) * norms(xb).max(initial=0.0) + 1e-300
    with lanes_on() as lanes:
        ranges = list(tiles(len(xb), -(-len(xb) // len(lanes)) or 1))

        def count(_: Products, task: tuple[int, int]) -> np.ndarray:
            return _count_in(xq, row_range(xb, *task), scores, rows, error, first_row + task[0])

        return sum(in_lanes(count, ranges, lanes), np.zeros(rows.shape, dtype=np.int64))


def _count_in(xq: np.ndarray, xb: Rows, scores: np.ndarray, rows: np.ndarray, error: np.ndarray,
              first_row: int) -> np.ndarray:
    """Count in one range of the database, tile by tile."""
    counts = np.zeros(rows.shape, dtype=np.int64)
    for first, last in tiles(len(xq), COUNT_QUERIES):
        part = slice(first, last)
        xq64 = xq[part].astype(np.float64)
        for lo, hi in tiles(len(xb), max(COUNT_ENTRIES // max(xb.shape[1], 1), 1)):
            products = xq64 @ xb[lo:hi].astype(np.float64).T
            q, m, near = _count_clear(products, scores[part], rows[part], error[part], counts[part])
            exact = exact_scores(xq[part], xb[lo:hi], q, near)
            wanted, row = scores[part][q, m], rows[part][q, m]
            before = (exact > wanted) | ((exact == wanted) & (near + lo + first_row < row))
            np.add.at(counts[part], (q[before], m[before]), 1)
    return counts


def _count_clear(products: np.ndarray, scores: np.ndarray, rows: np.ndarray, error: np.ndarray,
                 counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count in place what is above each score beyond doubt; return (query, m, column) of what is too close to tell."""
    doubtful: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    ordered = np.sort(products, axis=1)
    for q in range(len(products)):
        real = np.flatnonzero(rows[q] >= 0)
        high = np.searchsorted(ordered[q], scores[q, real] + error[q], side="right")
        low = np.searchsorted(ordered[q], scores[q, real] - error[q], side="left")
        counts[q, real] += products.shape[1] - high
        for m in real[high > low]:
            near = np.flatnonzero(np.abs(products[q] - scores[q, m]) <= error[q])
            doubtful.append((np.full(len(near), q), np.full(len(near), m), near))
    if not doubtful:
        return (np.empty(0, dtype=np.int64),) * 3
    q_all, m_all, near_all = (np.concatenate(column) for column in zip(*doubtful))
    return q_all, m_all, near_all


def check_queries(xq: np.ndarray, dim: int) -> np.ndarray:
    """Return queries (nq, D) ready for use, or say why they do not fit a database of `dim` dimensions."""
    xq = check_vectors(xq)
    if xq.shape[1] != dim:
        raise LattqeError(f"queries have {xq.shape[1]} dimensions and the database {dim}: use one extractor for both")
    return xq


def tiles(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut 0..n into (start, stop) of at most `size`."""
    for start in range(0, n, size):
        yield start, min(start + size, n)
