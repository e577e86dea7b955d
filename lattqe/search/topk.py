"""Exact search of one set of rows in another, on one device, by a running top-k for many rows at once.

It is fed with float32 scores of known error and finished exactly. Each row has a threshold: what lies below it cannot
be among its k best, whatever the rounding. Entries above it are appended to a small buffer; a full buffer is cut back
to the entries that could still be among the k best. Where ties or near ties leave too many of those, the row is scored
exactly on the spot. A threshold may also be guessed from a sample: at the end each row tells whether its guess is
proven by what was kept, and a row whose guess was too high is searched anew.
"""

from collections.abc import Sequence

import numpy as np
import torch

from lattqe.errors import LattqeError
from lattqe.search.device_topk import DeviceTopK
from lattqe.search.exact import best_of, exact_order, exact_scores, just_below, merge, published
from lattqe.search.products import Block, Products, TorchProducts, lanes_on, with_room
from lattqe.search.rows import check_queries, in_lanes, tiles

QUERY_BLOCK = 4096
MANY_QUERIES = 256  # for each thread: fewer, and the threads share the database instead
BUFFER_BYTES = 128 << 20  # of candidates, for one block of queries
RECEIVE_CHUNK = 8192  # pairs looked up at once
SPARE = 3  # candidates that a row's buffer holds for each of its k best


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
    with lanes_on(device) as lanes:
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
    if k < 1:
        raise LattqeError(f"k must be at least 1, got {k}")
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


def running_topk(
    products: Products,
    rows: Block,
    others: Block,
    k: int,
    known: np.ndarray | None = None,
    floor: np.ndarray | None = None,
) -> "RunningTopK | DeviceTopK":
    """A running top-k where the products are made: in arrays, or in tensors on their device."""
    error = products.error(rows, others)
    if isinstance(products, TorchProducts):
        return DeviceTopK(rows, others, k, error, capacity_for(k), products.device, known, floor)
    return RunningTopK(rows, others, k, error, known, floor)


class RunningTopK:
    """Those of the k best rows that are in `others` for each of `rows`, as far as they were offered.

    `error` (n,) float64: how far offered scores may be from the exact ones. `known` (n, k) float64: exact scores,
    descending, of rows that are not in `others`; the k best are those of both. `floor` (n,) float64: of scores as good
    k are known elsewhere. Memory: `capacity_for(k)` × 8 bytes for each row.
    `threshold` (n,) float32: what is not above it may be left out; `proven` (n,): of which that is certain.
    """

    def __init__(
        self,
        rows: Block,
        others: Block,
        k: int,
        error: np.ndarray,
        known: np.ndarray | None = None,
        floor: np.ndarray | None = None,
    ) -> None:
        self.k = k
        self.known = known
        self.rows, self.others = rows, others
        self.error = error
        self.proven = np.full(len(rows), -np.inf, dtype=np.float32)
        for least in (floor, None if known is None else known[:, -1]):
            if least is not None:
                np.maximum(self.proven, just_below(least - self.error), out=self.proven)
        self.threshold = self.proven.copy()
        capacity = capacity_for(k)
        self._scores = np.full((len(rows), capacity), -np.inf, dtype=np.float32)
        self._ids = np.empty((len(rows), capacity), dtype=np.int32)
        self._fill = np.zeros(len(rows), dtype=np.int32)

    def bare(self, cut: slice) -> bool:
        """Whether some of the rows in `cut` have no threshold yet."""
        return bool(np.isneginf(self.threshold[cut]).any())

    def lift(self, cut: slice | np.ndarray, kth: np.ndarray, guess: bool = False) -> None:
        """Raise thresholds of the rows in `cut`: each has k offered scores not below kth (m,) float32, or, with
        `guess`, will probably be offered so many.
        """
        possible = just_below(kth.astype(np.float64) - 2 * self.error[cut])
        self.threshold[cut] = np.maximum(self.threshold[cut], possible)
        if not guess:
            self.proven[cut] = np.maximum(self.proven[cut], possible)

    def offer(self, cut: slice | np.ndarray, i: np.ndarray, j: np.ndarray, scores: np.ndarray) -> None:
        """Take candidates: the i-th of the rows in `cut` (m,), i ascending, other rows j (m,), float32 scores (m,).

        Scores not above the rows' thresholds may be left out, and should be.
        """
        rows = cut if isinstance(cut, np.ndarray) else np.arange(*cut.indices(len(self.rows)))
        if self.others.surplus is not None:
            keep = ~self.others.surplus[j]
            i, j, scores = i[keep], j[keep], scores[keep]
        capacity = self._scores.shape[1]
        while i.size:
            rank, counts = _places(i)
            offered = rows[: len(counts)]
            fill = self._fill[offered]
            slot = fill[i] + rank
            self._fill[offered] = fill = np.minimum(fill + counts, capacity)
            full = np.flatnonzero(fill == capacity)
            fits = slot < capacity if full.size else slice(None)
            place = rows[i[fits]] * capacity + slot[fits]
            self._scores.reshape(-1)[place] = scores[fits]
            self._ids.reshape(-1)[place] = j[fits]
            if not full.size:
                return
            self._compact(offered[full])
            keep = (slot >= capacity) & (scores > self.threshold[rows[i]])
            i, j, scores = i[keep], j[keep], scores[keep]

    def settle(self, start: int, stop: int) -> None:
        """Nothing more will be offered to the rows start..stop: keep only what may be among their k best."""
        if self.known is None:
            self._compact(start + np.flatnonzero(self._fill[start:stop] >= self.k))
            return
        rows = start + np.flatnonzero(self._fill[start:stop])
        width = int(self._fill[start:stop].max(initial=0))
        # What is surely reached by k, known and new together: most newcomers that only displace each other fall here.
        reached = np.concatenate([self.known[rows], self._scores[rows, :width] - self.error[rows, None]], axis=1)
        kth = np.partition(reached, width, axis=1)[:, width]
        self.proven[rows] = np.maximum(self.proven[rows], just_below(kth - self.error[rows]))
        self._compact(rows)

    def unproven(self) -> np.ndarray:
        """All rows are settled: those whose guessed threshold was too high, or too close to tell, (m,) ascending."""
        return np.flatnonzero(self.threshold > self.proven)

    def prepare_scores(self) -> None:
        """All rows are settled: make room for exact scores, one for each entry, in place of the others."""
        self._scores = np.empty((0, 0), dtype=np.float32)
        self._exact = np.full((len(self.rows), max(int(self._fill.max(initial=0)), 1)), np.nan)

    def score(self, start: int, stop: int, mirror: "RunningTopK | None" = None) -> int:
        """Score the entries of rows start..stop that have no exact score yet; return how many that were.

        An entry (i, j) is also handed to row j of `mirror`, which may hold (j, i): most pairs stand in both lists.
        Where `mirror` is this object, only entries with j > i are scored, the others being handed over.
        """
        width = self._exact.shape[1]
        wanted = (np.arange(width) < self._fill[start:stop, None]) & np.isnan(self._exact[start:stop])
        if mirror is self:
            wanted &= self._ids[start:stop, :width] > np.arange(start, stop)[:, None]
        i, j = start + np.repeat(np.arange(stop - start), wanted.sum(axis=1)), self._ids[start:stop, :width][wanted]
        self._exact[start:stop][wanted] = scores = exact_scores(self.rows.stored, self.others.stored, i, j)
        if mirror is not None:
            mirror._receive(j, i, scores)
        return len(scores)

    def _receive(self, i: np.ndarray, j: np.ndarray, scores: np.ndarray) -> None:
        """Take exact scores of pairs (i, j), for those of them that are entries here."""
        width = self._exact.shape[1]
        for lo in range(0, len(i), RECEIVE_CHUNK):
            part = slice(lo, lo + RECEIVE_CHUNK)
            entry = (self._ids[i[part], :width] == j[part, None]) & (np.arange(width) < self._fill[i[part], None])
            p, slot = np.nonzero(entry)
            self._exact[i[part][p], slot] = scores[part][p]

    def lists(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The exact lists of rows start..stop: ((n, k) float64, (n, k) int32 of `others`), -inf and -1 missing."""
        used = np.arange(self._exact.shape[1]) < self._fill[start:stop, None]
        scores = np.where(used, self._exact[start:stop], -np.inf)
        return best_of(scores, np.where(used, self._ids[start:stop, : used.shape[1]], -1), self.k)

    def _compact(self, rows: np.ndarray) -> None:
        """Drop from the buffers of `rows` what can no longer be among their k best."""
        if not rows.size:
            return
        width = max(int(self._fill[rows].max()), self.k)  # what lies beyond is empty in all of them
        scores, ids = self._scores[rows, :width], self._ids[rows, :width]
        kth = np.partition(scores, width - self.k, axis=1)[:, width - self.k].astype(np.float64)
        proven = np.maximum(self.proven[rows], just_below(kth - 2 * self.error[rows]))
        keep = scores > np.maximum(self.threshold[rows], proven)[:, None]
        crowded = np.flatnonzero(keep.sum(axis=1) > max(self._scores.shape[1] // 2, self.k))
        if crowded.size:
            keep[crowded], exact_kth = self._exactly_best(rows[crowded], width)
            proven[crowded] = np.maximum(proven[crowded], just_below(exact_kth - self.error[rows[crowded]]))
        r, c = np.nonzero(keep)
        slot, counts = _places(r, len(rows))
        fresh = np.full_like(scores, -np.inf)
        fresh[r, slot] = scores[r, c]
        self._scores[rows, :width] = fresh
        self._ids[rows[r], slot] = ids[r, c]
        self._fill[rows] = counts
        self.proven[rows] = proven
        self.threshold[rows] = np.maximum(self.threshold[rows], proven)

    def _exactly_best(self, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Mark the k exactly best entries in crowded buffers: (m, width) bool, and the k-th scores (m,) float64."""
        used = np.arange(width) < self._fill[rows, None]
        ids = self._ids[rows, :width]
        r, _ = np.nonzero(used)
        scores = np.full(used.shape, -np.inf)
        scores[used] = exact_scores(self.rows.stored, self.others.stored, rows[r], ids[used])
        order, ordered = exact_order(scores, ids)
        mask = np.zeros(used.shape, dtype=bool)
        np.put_along_axis(mask, order[:, : self.k], True, axis=1)
        return mask, ordered[:, self.k - 1]


def capacity_for(k: int) -> int:
    """Candidates that one row's buffer holds."""
    return max(SPARE * k, 64)


def _places(i: np.ndarray, length: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """For ascending i (m,): each entry's place among those equal to it (m,), and how many there are of each (n,)."""
    counts = np.bincount(i, minlength=length)
    return np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts), counts
