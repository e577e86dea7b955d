"""Exact search: the best rows for queries, what every index can do, and exact scores and ranks of chosen rows."""

from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lattqe.device import room_on
from lattqe.errors import LattqeError
from lattqe.search.exact import exact_scores, merge, norms, published
from lattqe.search.lanes import lanes_on, with_room
from lattqe.search.products import Block, Products, TorchProducts
from lattqe.search.rows import Rows, check_k, check_queries, check_rows, in_lanes, in_one, row_range, tiles
from lattqe.search.topk import capacity_for, running_topk

if TYPE_CHECKING:
    from lattqe.store import FeatureSet

QUERY_BLOCK = 4096
MANY_QUERIES = 256  # for each thread: fewer, and the threads share the database instead
BUFFER_BYTES = 128 << 20  # of candidates, for one block of queries
COUNT_QUERIES, COUNT_ENTRIES = 1024, 2 << 20
SCANS = 12  # of a tile's products of one query take as long as sorting their numbers
ENTRIES = 1 << 21  # scores that a SmallIndex sorts at once: with their order some 50 MB


def topk(
    xq: np.ndarray,
    xb: np.ndarray,
    k: int,
    *,
    largest: bool = True,
    exclude: np.ndarray | None = None,
    first_row: int = 0,
    device: torch.device | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best rows of xb (nb, D) for each row of xq (nq, D): D (nq, k) float32, I (nq, k) int32.

    Exact: ordered by the float64 dot product, then by row, ascending; `largest=False` gives the k lowest, ascending.
    `exclude` (nq,) int names one row of xb that each query must not find (-1: none). Row numbers in the answer, and in
    `exclude`, start at `first_row`. Fewer than k rows: row -1, score 0.
    """
    # The lowest scores are the highest of the opposite query: negation is exact.
    sign = 1 if largest else -1
    with lanes_on(device, dim=xb.shape[1], products=float(len(xq)) * len(xb)) as lanes:
        database = Block.load(xb, lanes[0])
        scores, ids = best_rows(sign * np.asarray(xq), database, k, lanes, exclude=exclude, first_row=first_row)
    return published(sign * scores, ids)


def best_rows(
    xq: np.ndarray,
    database: Block,
    k: int,
    lanes: Sequence[Products],
    *,
    exclude: np.ndarray | None = None,
    first_row: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best, in the form that can be merged: (nq, k) float64 (-inf missing), (nq, k) int32 (-1 missing).

    Threads share the queries or, where these are few, the rows of the database.
    """
    xq = check_queries(xq, database.dim)
    k = check_k(k)
    database = database.without(k)
    limit = int(np.clip(BUFFER_BYTES // (8 * capacity_for(k)), 1, QUERY_BLOCK))
    few = len(xq) < MANY_QUERIES * len(lanes)
    blocks = list(tiles(len(xq), limit if few else min(limit, -(-len(xq) // len(lanes)))))
    ranges = list(tiles(len(database), -(-len(database) // len(lanes)) if few else len(database)))

    def search(products: Products, task: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        first, last, start, stop = task
        queries = Block.load(xq[first:last], products, widen=True)
        hidden = None if exclude is None else np.asarray(exclude[first:last]) - first_row - start
        part = database.part(start, stop)
        scores, ids = with_room(lambda: search_block(queries, part, k, products, hidden), [products])
        return scores, np.where(ids < 0, -1, ids + (start + first_row)).astype(np.int32)

    scores, ids = np.full((len(xq), k), -np.inf), np.full((len(xq), k), -1, dtype=np.int32)
    found = in_lanes(search, [(*block, *rows) for block in blocks for rows in ranges], lanes)
    for number, (first, last) in enumerate(blocks if ranges else ()):
        lists = found[number * len(ranges) : (number + 1) * len(ranges)]
        scores[first:last], ids[first:last] = merge(lists, k) if len(lists) > 1 else lists[0]
    return scores, ids


def search_block(
    queries: Block, database: Block, k: int, products: Products, hidden: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Search one block of queries over all tiles of the database, but for row `hidden` (nq,) of it (-1: none).

    (nq, k) float64 (-inf missing), (nq, k) int32 (-1 missing).
    """
    running = running_topk(products, queries, database, k)
    for lo, hi in tiles(len(database), max(products.entries // max(len(queries), 1), products.tile)):
        tile = products.multiply(queries.held, products.widen(database.held[lo:hi]))
        if hidden is not None:
            inside = np.flatnonzero((hidden >= lo) & (hidden < hi))
            products.blank(tile, inside, hidden[inside] - lo)
        if lo == 0 and hi > k:
            running.lift(slice(None), products.kth(tile, k))
        i, j, scores = products.passing(tile, running.threshold)
        running.offer(slice(None), i, j + lo, scores)
    running.settle(0, len(queries))
    running.prepare_scores()
    running.score(0, len(queries))
    return running.lists(0, len(queries))


class Index(Protocol):
    """Rows that can be searched exactly, wherever they are: in this process or in shards on a cluster."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    def search(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the k best rows: D (nq, k) float32 descending, I (nq, k) int32; missing: 0 and -1."""

    def lowest(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the k rows with the lowest scores: D (nq, k) float32 ascending, I (nq, k) int32."""

    def score(self, xq: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Exact scores of rows (nq, m), -1 padding: (nq, m) float64, 0 at padding."""

    def count_above(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """How many rows stand before each (score, row) in the exact order: (nq, m) int64, 0 at padding."""

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of rows (n,): (n, D) float32."""


class FlatIndex:
    """All rows in one process, on one device; float16 rows stay float16 and are widened tile by tile."""

    def __init__(self, xb: Rows, device: torch.device | None = None, first_row: int = 0) -> None:
        self.first_row = first_row
        self._device = device
        with lanes_on(device) as lanes:
            self._block = Block.load(xb, lanes[0])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._block)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self._block.dim

    def search(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See Index."""
        return published(*self.search_exact(xq, k))

    def lowest(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See Index."""
        scores, ids = self.search_exact(-np.asarray(xq), k)
        return published(-scores, ids)

    def search_exact(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The lists that shards merge: (nq, k) float64 with -inf where missing, (nq, k) int32."""
        with lanes_on(self._device, dim=self.dim, products=float(len(xq)) * self.rows) as lanes:
            return best_rows(xq, self._block, k, lanes, first_row=self.first_row)

    def score(self, xq: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        return pair_scores(xq, self._block.stored, self._local(rows))

    def count_above(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        return count_above(xq, self._block.stored, scores, rows, first_row=self.first_row)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        return self.gather_stored(rows).astype(np.float32)

    def gather_stored(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of rows (n,) as they are stored: (n, D) float16 or float32."""
        local = self._local(rows)
        if local.size and local.min() < 0:
            raise LattqeError(f"row {int(np.min(rows))} requested: rows count from {self.first_row}")
        return self._block.stored[local]

    def resident(self, device: torch.device) -> torch.Tensor | None:
        """All rows (n, D) on a device in their stored width, row 0 first, or None where it has no room for them."""
        held = self._block.held
        if self.first_row:
            return None
        if isinstance(held, torch.Tensor) and held.device.type == device.type != "cpu":
            return held
        return self._copies.on(device)

    @cached_property
    def _copies(self) -> "Resident":
        return Resident(lambda: self._block.stored, self.rows * self.dim * self._block.stored.dtype.itemsize)

    def _local(self, rows: np.ndarray) -> np.ndarray:
        """Row numbers within this index, -1 kept; those it does not have are refused."""
        rows = np.asarray(rows, dtype=np.int64)
        local = np.where(rows < 0, -1, rows - self.first_row)
        if local.size and (local.max() >= self.rows or local[rows >= 0].min(initial=0) < 0):
            raise LattqeError(f"row {int(rows.max())} requested: this index has {self.rows} rows from {self.first_row}")
        return local


class Resident:
    """Rows of that many bytes, read and brought to a device once, by whichever thread asks first."""

    def __init__(self, read: Callable[[], Rows], size: int) -> None:
        self._read, self._size, self._lock = read, size, Lock()
        self._there: dict[torch.device, torch.Tensor | None] = {}

    def on(self, device: torch.device) -> torch.Tensor | None:
        """All of them (n, D) in their stored width, or None where the device has no room for them."""
        with self._lock:
            if device not in self._there:
                fits = 0 < self._size <= room_on(device)
                self._there[device] = TorchProducts(device).hold(self._read()) if fits else None
            return self._there[device]


def pair_scores(xq: np.ndarray, xb: Rows, rows: np.ndarray) -> np.ndarray:
    """Exact scores of chosen rows: xq (nq, D), rows (nq, m) of xb, -1 padding -> (nq, m) float64, 0 at padding."""
    xq, rows = check_queries(xq, xb.shape[1]), np.asarray(rows)
    if rows.size and rows.max() >= len(xb):
        raise LattqeError(f"row {int(rows.max())} requested, but the database has {len(xb)} rows")
    i, m = np.nonzero(rows >= 0)
    scores = np.zeros(rows.shape)
    scores[i, m] = exact_scores(xq, xb, i, rows[i, m])
    return scores


def count_above(xq: np.ndarray, xb: Rows, scores: np.ndarray, rows: np.ndarray, *, first_row: int = 0) -> np.ndarray:
    """Count the rows of xb (nb, D) that stand before given (score, row) pairs in the exact order of each query.

    xq (nq, D), scores (nq, m) float64 as `pair_scores` gives them, rows (nq, m) (-1: padding, counted as 0) ->
    (nq, m) int64. The rows need not be of xb: counts over several shards add up to the rank in all of them; row
    numbers of xb start at `first_row`. The products are float64 because labelled items are often in the bulk of the
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


def _count_in(
    xq: np.ndarray, xb: Rows, scores: np.ndarray, rows: np.ndarray, error: np.ndarray, first_row: int
) -> np.ndarray:
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


def _count_clear(
    products: np.ndarray, scores: np.ndarray, rows: np.ndarray, error: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count in place what is above each score beyond doubt; return (query, m, column) of what is too close to tell."""
    doubtful = [(np.empty(0, dtype=np.int64),) * 3]
    ordered = np.sort(products, axis=1)
    for q in range(len(products)):
        real = np.flatnonzero(rows[q] >= 0)
        least, most = scores[q, real] - error[q], scores[q, real] + error[q]
        low, high = np.searchsorted(ordered[q], least, side="left"), np.searchsorted(ordered[q], most, side="right")
        counts[q, real] += products.shape[1] - high
        close = np.flatnonzero(high > low)
        if len(close) > SCANS:
            order = np.argsort(products[q])
            near = [order[low[each] : high[each]] for each in close]
        else:
            near = [np.flatnonzero((products[q] >= least[each]) & (products[q] <= most[each])) for each in close]
        if near:
            columns, sizes = np.concatenate(near), [len(each) for each in near]
            doubtful.append((np.full(len(columns), q), np.repeat(real[close], sizes), columns))
    q_all, m_all, near_all = (np.concatenate(column) for column in zip(*doubtful))
    return q_all, m_all, near_all


class StoredIndex:
    """Feature sets, one after the other, as one exact index in this process; an `Index`, as `ShardedIndex` is on Ray.

    Rows stay where they are mapped. Gathering some of them does not read the others.
    """

    def __init__(self, sets: "Sequence[FeatureSet]", device: torch.device | None = None) -> None:
        for other in sets[1:]:
            if other.dim != sets[0].dim:
                raise LattqeError(
                    f"{other.uri} has {other.dim} dimensions and {sets[0].uri} {sets[0].dim}: use "
                    "features of one extractor"
                )
        self.sets, self._device = list(sets), device
        self.rows, self.dim = sum(each.rows for each in sets), sets[0].dim

    @cached_property
    def flat(self) -> FlatIndex:
        """All rows, ready to be searched."""
        return FlatIndex(in_one([piece for each in self.sets for piece in each.pieces()]), self._device)

    def search(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See Index."""
        return self.flat.search(xq, k)

    def lowest(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See Index."""
        return self.flat.lowest(xq, k)

    def score(self, xq: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        return self.flat.score(xq, rows)

    def count_above(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        return self.flat.count_above(xq, scores, rows)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        return self.sets[0].gather(rows) if len(self.sets) == 1 else self.flat.gather(rows)

    def resident(self, device: torch.device) -> torch.Tensor | None:
        """See FlatIndex; nothing is read where there is no room."""
        return self._copies.on(device)

    @cached_property
    def _copies(self) -> Resident:
        size = sum(each.rows * each.dim * np.dtype(each.dtype).itemsize for each in self.sets)
        return Resident(lambda: in_one([piece for each in self.sets for piece in each.pieces()]), size)


class SmallIndex(FlatIndex):
    """A FlatIndex over xb (nb, D) whose `count_above` ranks all rows for each query.

    Counting is made for a million rows in shards. A grid of settings over some thousand rows is several times faster
    when every query's scores are sorted once; the positions are the same integers.
    """

    def __init__(self, xb: np.ndarray, device: torch.device | None = None) -> None:
        super().__init__(xb, device)
        self._wide = np.ascontiguousarray(xb, dtype=np.float64).T
        self._longest = float(norms(xb).max(initial=0.0))

    def count_above(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """See Index: (nq, m) rows that stand before each of `rows` (nq, m), whose exact scores are given."""
        counts = np.zeros(rows.shape, dtype=np.int64)
        step = max(1, ENTRIES // max(self.rows, 1))
        for start in range(0, len(xq), step):
            part = slice(start, start + step)
            counts[part] = self._positions(xq[part], scores[part], np.asarray(rows[part]))
        return counts

    def _positions(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Positions in the order of float64 products; where two of these are too close to tell, counted exactly.

        A product and the exact score differ by the rounding of two sums, so neighbors in the order that are further
        apart than two such errors stand as they do in the exact order, whatever is tied elsewhere.
        """
        products = xq.astype(np.float64) @ self._wide
        order = np.argsort(-products, axis=1)
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(self.rows)[None], axis=1)
        error = 2.0**-52 * self.dim * norms(xq) * self._longest + 1e-300
        ranked = np.take_along_axis(products, order, axis=1)
        close = ranked[:, :-1] - ranked[:, 1:] <= 2 * error[:, None]
        unclear = np.zeros(products.shape, dtype=bool)
        unclear[:, :-1] |= close
        unclear[:, 1:] |= close
        real = rows >= 0
        found = np.where(real, np.take_along_axis(place, np.maximum(rows, 0), axis=1), 0)
        doubtful = real & np.take_along_axis(unclear, found, axis=1)
        queries = np.flatnonzero(doubtful.any(axis=1))
        if len(queries):
            exact = super().count_above(xq[queries], scores[queries], np.where(doubtful[queries], rows[queries], -1))
            found[queries] = np.where(doubtful[queries], exact, found[queries])
        return found
