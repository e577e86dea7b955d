"""A running top-k for many rows at once.

It is fed with float32 scores of known error and finished exactly. Each row has a threshold: what lies below it cannot
be among its k best, whatever the rounding. Entries above it are appended to a small buffer; a full buffer is cut back
to the entries that could still be among the k best. Where ties or near ties leave too many of those, the row is scored
exactly on the spot. A threshold may also be guessed from a sample: at the end each row tells whether its guess is
proven by what was kept, and a row whose guess was too high is searched again.

`lattqe.search.device_topk` has the same in tensors on a device.
"""

import numpy as np

from lattqe.search.device_topk import DeviceTopK
from lattqe.search.exact import best_of, exact_order, exact_scores, just_below
from lattqe.search.products import Block, Products, TorchProducts

RECEIVE_CHUNK = 2048  # pairs looked up at once
SPARE = 3  # candidates that a row's buffer holds for each of its k best


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
        `guess`, will probably be offered that many.
        """
        possible = just_below(kth.astype(np.float64) - 2 * self.error[cut])
        self.threshold[cut] = np.maximum(self.threshold[cut], possible)
        if not guess:
            self.proven[cut] = np.maximum(self.proven[cut], possible)

    def sharpen(self, cut: slice, rank: int) -> None:
        """Guess the thresholds of the rows in `cut` anew: of what they were offered, `rank` are probably enough."""
        rows = np.arange(*cut.indices(len(self.rows)))
        width = int(self._fill[rows].max(initial=0))
        if rank < min(self.k, width):
            kth = np.partition(self._scores[rows, :width], width - rank, axis=1)[:, width - rank]
            self.lift(cut, kth, guess=True)

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
            counts = np.bincount(i)
            offered = rows[: len(counts)]
            fill = self._fill[offered]
            self._fill[offered] = filled = np.minimum(fill + counts, capacity)
            # Entries of one row go to places that follow each other: what is known by row is worked out by row.
            first = offered * capacity + fill
            place = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(len(i))
            full = np.flatnonzero(filled == capacity)
            if not full.size:
                self._scores.reshape(-1)[place], self._ids.reshape(-1)[place] = scores, j
                return
            fits = place < ((offered + 1) * capacity)[i]
            self._scores.reshape(-1)[place[fits]], self._ids.reshape(-1)[place[fits]] = scores[fits], j[fits]
            self._compact(offered[full])
            keep = ~fits & (scores > self.threshold[rows[i]])
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
        """All rows are settled, so at most half full: exact scores, one for each entry, take the memory of the others.

        They are twice as wide. The first touch of fresh memory costs more than all that is written to it here.
        """
        width = max(int(self._fill.max(initial=0)), 1)
        self._wide = self._scores.view(np.float64)
        self._exact = self._wide[:, :width]
        self._exact.fill(np.nan)
        self._ids[:, :width][np.arange(width) >= self._fill[:, None]] = -1
        self._scores = np.empty((0, 0), dtype=np.float32)

    def score(self, start: int, stop: int, mirror: "RunningTopK | None" = None) -> int:
        """Score the entries of rows start..stop that have no exact score yet; return how many that were.

        An entry (i, j) is also handed to row j of `mirror`, which may hold (j, i): most pairs stand in both lists.
        Where `mirror` is this object, only entries with j > i are scored, the others being handed over.
        """
        width = self._exact.shape[1]
        wanted = (self._ids[start:stop, :width] >= 0) & np.isnan(self._exact[start:stop])
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
        # Rows in about ascending order, by a radix sort on 16 bits: those looked at twice are still in the cache.
        near = np.argsort((i >> max(len(self.rows).bit_length() - 16, 0)).astype(np.uint16), kind="stable")
        i, j, scores = i[near], j[near].astype(np.int32), scores[near]
        for lo in range(0, len(i), RECEIVE_CHUNK):
            part = slice(lo, lo + RECEIVE_CHUNK)
            places = np.flatnonzero(self._ids[i[part], :width] == j[part, None])
            p = places // width
            self._exact[i[part][p], places - p * width] = scores[part][p]

    def lists(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The exact lists of rows start..stop: ((n, k) float64, (n, k) int32 of `others`), -inf and -1 missing."""
        ids = self._ids[start:stop, : self._exact.shape[1]]
        return best_of(np.where(ids >= 0, self._exact[start:stop], -np.inf), ids, self.k)

    def room(self) -> tuple[np.ndarray, np.ndarray]:
        """Memory for the finished lists, (n, k) float64 and (n, k) int32: that of the candidates, row by row.

        Once the lists of some rows are written there, those rows' candidates are gone. Fresh memory costs more than
        ordering the lists does.
        """
        return self._wide[:, : self.k], self._ids[:, : self.k]

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
        counts = keep.sum(axis=1)
        # What is kept moves to the front of its row in the same order; flat places are cheaper than (row, column).
        source, target = np.flatnonzero(keep), np.flatnonzero(np.arange(width) < counts[:, None])
        fresh, moved = np.full(scores.shape, -np.inf, dtype=np.float32), np.empty(ids.shape, dtype=np.int32)
        fresh.reshape(-1)[target], moved.reshape(-1)[target] = np.take(scores, source), np.take(ids, source)
        self._scores[rows, :width], self._ids[rows, :width] = fresh, moved
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
    """Candidates that one row's buffer holds: an even number, of which half are room for as many in float64."""
    return max(SPARE * k + SPARE * k % 2, 64)
