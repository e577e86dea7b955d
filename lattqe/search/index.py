"""What every index can do, and the index that holds its rows in this process."""

from typing import Protocol

import numpy as np
import torch

from lattqe.errors import LattqeError
from lattqe.search.blocks import Block
from lattqe.search.exact import published
from lattqe.search.lanes import lanes_on
from lattqe.search.pieces import Rows
from lattqe.search.topk import best_rows, count_above, pair_scores


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
        with lanes_on(self._device) as lanes:
            return best_rows(xq, self._block, k, lanes, first_row=self.first_row)

    def score(self, xq: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        return pair_scores(xq, self._block.stored, self._local(rows))

    def count_above(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        return count_above(xq, self._block.stored, scores, rows, first_row=self.first_row)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """See Index."""
        local = self._local(rows)
        if local.size and local.min() < 0:
            raise LattqeError(f"row {int(np.min(rows))} asked for: rows count from {self.first_row}")
        return self._block.stored[local].astype(np.float32)

    def _local(self, rows: np.ndarray) -> np.ndarray:
        """Row numbers within this index, -1 kept; those it does not have are refused."""
        rows = np.asarray(rows, dtype=np.int64)
        local = np.where(rows < 0, -1, rows - self.first_row)
        if local.size and (local.max() >= self.rows or local[rows >= 0].min(initial=0) < 0):
            raise LattqeError(f"row {int(rows.max())} asked for: this index has {self.rows} rows from {self.first_row}")
        return local
