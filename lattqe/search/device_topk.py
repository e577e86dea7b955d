"""A running top-k for many rows at once, in tensors on a device.

Thresholds, buffers, cutting back and the final order are tensors; what comes back is the finished lists. Float16 rows
of ordinary length are scored there too: their products are multiples of 2^-48 and every sum of them fits 53 bits, so
float64 gives the true value in any order of summation, the same as on the CPU. Other rows are scored on the CPU.
"""

from collections.abc import Callable

import numpy as np
import torch

from lattqe.search.exact import Codes, exact_scores
from lattqe.search.products import Block

SUMMABLE_NORMS = 16.0  # product of two norms up to which sums of float16 products are exact: 2^52 multiples of 2^-48
SCORING_ELEMENTS = 1 << 24  # gathered at once for exact scores, in float64


class DeviceTopK:
    """Those of the k best rows that are in `others` for each of `rows`, as far as they were offered.

    As RunningTopK, with tensors on `device` for candidates and thresholds; the arguments here are arrays.
    """

    def __init__(
        self,
        rows: Block,
        others: Block,
        k: int,
        error: np.ndarray,
        capacity: int,
        device: torch.device,
        known: np.ndarray | None = None,
        floor: np.ndarray | None = None,
    ) -> None:
        self.rows, self.others, self.k, self.device = rows, others, k, device
        self.error, self.capacity = self._bring(error), capacity
        self.known = None if known is None else self._bring(known)
        self.surplus = None if others.surplus is None else self._bring(others.surplus)
        self.exact_here = _summable(rows, others)
        self._stored = [_rows_of(block, device) for block in (rows, others)] if self.exact_here else []
        self.proven = torch.full((len(rows),), -torch.inf, device=device)
        for least in (floor, None if known is None else known[:, -1]):
            if least is not None:
                self.proven = torch.maximum(self.proven, _just_below(self._bring(least) - self.error))
        self.threshold = self.proven.clone()
        self._scores = torch.full((len(rows), capacity), -torch.inf, device=device)
        self._ids = torch.zeros((len(rows), capacity), dtype=torch.int64, device=device)
        self._fill = torch.zeros(len(rows), dtype=torch.int64, device=device)

    def _bring(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def bare(self, cut: slice) -> bool:
        """Whether some of the rows in `cut` have no threshold yet."""
        return bool(torch.isneginf(self.threshold[cut]).any())

    def lift(self, cut: slice, kth: torch.Tensor, guess: bool = False) -> None:
        """See RunningTopK."""
        possible = _just_below(kth.double() - 2 * self.error[cut])
        self.threshold[cut] = torch.maximum(self.threshold[cut], possible)
        if not guess:
            self.proven[cut] = torch.maximum(self.proven[cut], possible)

    def sharpen(self, cut: slice, rank: int) -> None:
        """See RunningTopK."""
        if rank < self.k:
            self.lift(cut, self._scores[cut].topk(rank, dim=1).values[:, -1], guess=True)

    def offer(self, cut: slice, i: torch.Tensor, j: torch.Tensor, scores: torch.Tensor) -> None:
        """See RunningTopK."""
        start, _, step = cut.indices(len(self.rows))
        if self.surplus is not None:
            keep = ~self.surplus[j]
            i, j, scores = i[keep], j[keep], scores[keep]
        while i.numel():
            counts = torch.bincount(i)
            rank = torch.arange(len(i), device=self.device) - (counts.cumsum(0) - counts)[i]
            fill = self._fill[start : start + step * len(counts) : step]
            slot = fill[i] + rank
            fill.copy_((fill + counts).clamp_(max=self.capacity))
            fits = slot < self.capacity
            place = (start + step * i[fits]) * self.capacity + slot[fits]
            self._scores.view(-1)[place] = scores[fits]
            self._ids.view(-1)[place] = j[fits]
            full = (fill == self.capacity).nonzero()[:, 0]
            if not full.numel():
                return
            self._compact(start + step * full)
            keep = ~fits & (scores > self.threshold[start + step * i])
            i, j, scores = i[keep], j[keep], scores[keep]

    def settle(self, start: int, stop: int) -> None:
        """See RunningTopK."""
        fill = self._fill[start:stop]
        if self.known is None:
            self._compact(start + (fill >= self.k).nonzero()[:, 0])
            return
        rows = start + (fill > 0).nonzero()[:, 0]
        if rows.numel():
            reached = torch.cat([self.known[rows], self._scores[rows].double() - self.error[rows, None]], dim=1)
            kth = reached.topk(self.k, dim=1).values[:, -1]
            self.proven[rows] = torch.maximum(self.proven[rows], _just_below(kth - self.error[rows]))
            self._compact(rows)

    def unproven(self) -> np.ndarray:
        """See RunningTopK."""
        return (self.threshold > self.proven).nonzero()[:, 0].cpu().numpy()

    def prepare_scores(self) -> None:
        """See RunningTopK."""
        width = max(int(self._fill.max()) if len(self._fill) else 0, 1)
        self._exact = torch.full((len(self.rows), width), torch.nan, dtype=torch.float64, device=self.device)

    def score(self, start: int, stop: int, mirror: "DeviceTopK | None" = None) -> int:
        """See RunningTopK; both sides of a pair are scored, which costs less here than looking one up."""
        width = self._exact.shape[1]
        wanted = torch.arange(width, device=self.device) < self._fill[start:stop, None]
        i, slot = (wanted & torch.isnan(self._exact[start:stop])).nonzero(as_tuple=True)
        i = i + start
        self._exact[i, slot] = self._score(i, self._ids[i, slot])
        return len(i)

    def lists(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See RunningTopK: the finished lists, as arrays in main memory."""
        used = torch.arange(self._exact.shape[1], device=self.device) < self._fill[start:stop, None]
        scores = torch.where(used, self._exact[start:stop], -torch.inf)
        ids = torch.where(used, self._ids[start:stop, : used.shape[1]], -1)
        missing = self.k - used.shape[1]
        if missing > 0:
            scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
            ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        order = _exact_order(scores, ids)[:, : self.k]
        return scores.gather(1, order).cpu().numpy(), ids.gather(1, order).int().cpu().numpy()

    def room(self) -> tuple[np.ndarray, np.ndarray]:
        """See RunningTopK: the finished lists are in main memory, so this is fresh."""
        return np.empty((len(self.rows), self.k)), np.empty((len(self.rows), self.k), dtype=np.int32)

    def _compact(self, rows: torch.Tensor) -> None:
        """Drop from the buffers of `rows` what can no longer be among their k best."""
        if not rows.numel():
            return
        scores, ids = self._scores[rows], self._ids[rows]
        kth = scores.topk(self.k, dim=1).values[:, -1].double()
        proven = torch.maximum(self.proven[rows], _just_below(kth - 2 * self.error[rows]))
        keep = scores > torch.maximum(self.threshold[rows], proven)[:, None]
        crowded = (keep.sum(dim=1) > max(self.capacity // 2, self.k)).nonzero()[:, 0]
        if crowded.numel():
            keep[crowded], exact_kth = self._exactly_best(rows[crowded])
            reached = _just_below(exact_kth - self.error[rows[crowded]])
            proven[crowded] = torch.maximum(proven[crowded], reached)
        front = torch.argsort(~keep, dim=1, stable=True)
        counts = keep.sum(dim=1)
        kept = torch.arange(self.capacity, device=self.device) < counts[:, None]
        self._scores[rows] = torch.where(kept, scores.gather(1, front), -torch.inf)
        self._ids[rows] = ids.gather(1, front)
        self._fill[rows] = counts
        self.proven[rows] = proven
        self.threshold[rows] = torch.maximum(self.threshold[rows], proven)

    def _exactly_best(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark the k exactly best entries in crowded buffers: (m, capacity) bool, and the k-th scores (m,) float64."""
        used = torch.arange(self.capacity, device=self.device) < self._fill[rows, None]
        r, slot = used.nonzero(as_tuple=True)
        scores = torch.full(used.shape, -torch.inf, dtype=torch.float64, device=self.device)
        scores[r, slot] = self._score(rows[r], self._ids[rows[r], slot])
        order = _exact_order(scores, self._ids[rows])[:, : self.k]
        mask = torch.zeros_like(used).scatter_(1, order, True)
        return mask, scores.gather(1, order)[:, -1]

    def _score(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """Exact scores of the pairs (rows[i], others[j]), (m,) float64."""
        if not self.exact_here:
            found = exact_scores(self.rows.stored, self.others.stored, i.cpu().numpy(), j.cpu().numpy())
            return self._bring(found)
        step, (rows, others) = max(SCORING_ELEMENTS // max(self.rows.dim, 1), 1), self._stored
        parts = [
            (rows(i[lo : lo + step]).double() * others(j[lo : lo + step]).double()).sum(1)
            for lo in range(0, len(i), step)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=self.device)


def _rows_of(block: Block, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives rows (m,) of a block as they are stored, on the device; where codes stand for them, their places are
    sent there once.
    """
    if not isinstance(block.held, Codes):
        return lambda rows: block.held[rows]
    source, place = block.held.source, torch.from_numpy(block.held.place).to(device)
    return lambda rows: source[place[rows]]


def _summable(rows: Block, others: Block) -> bool:
    """Whether float64 sums of these rows' products are exact in any order."""
    narrow = all(block.stored.dtype == np.float16 for block in (rows, others))
    return narrow and float(rows.norms.max(initial=0.0) * others.norms.max(initial=0.0)) <= SUMMABLE_NORMS


def _just_below(values: torch.Tensor) -> torch.Tensor:
    """Round float64 down to a float32 strictly below it."""
    return torch.nextafter(values.float(), torch.tensor(-torch.inf, device=values.device))


def _exact_order(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The permutation (n, m) by score descending, then row ascending."""
    by_id = torch.argsort(ids, dim=1, stable=True)
    by_score = torch.argsort(scores.gather(1, by_id), dim=1, descending=True, stable=True)
    return by_id.gather(1, by_score)
