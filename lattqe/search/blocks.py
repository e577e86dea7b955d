"""A block of rows ready to be compared: in memory, on its device, with norms and surplus duplicates."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.search.duplicates import surplus_rows
from lattqe.search.exact import norms
from lattqe.search.pieces import Pieces, Rows, row_range
from lattqe.search.products import Products


@dataclass(frozen=True)
class Block:
    """Rows (n, D): `stored` in main memory for exact scores, `held` on the device for products."""

    stored: Rows
    held: Any
    norms: np.ndarray
    surplus: np.ndarray | None

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def dim(self) -> int:
        """D, the length of a vector."""
        return int(self.stored.shape[1])

    @classmethod
    def load(cls, x: Rows, products: Products, k: int | None = None, widen: bool = False) -> "Block":
        """Bring x (n, D) to the device; `widen` keeps it there as float32, for blocks that are used many times.

        With k, find the duplicates that can be in nobody's k best.
        """
        x = check_rows(x)
        length = norms(x)
        if not np.isfinite(length).all():
            row = int(np.flatnonzero(~np.isfinite(length))[0])
            raise LattqeError(f"row {row} of the vectors holds NaN or infinity: verify the feature set it came from")
        held = products.widen(products.hold(x)) if widen else products.hold(x)
        # On the CPU the wide copy serves exact scores as well: gathering from it needs no conversion.
        stored = held if isinstance(held, Rows) else x
        return cls(stored, held, length, None if k is None else surplus_rows(x, k))

    def part(self, start: int, stop: int) -> "Block":
        """Rows start..stop, without a copy."""
        if (start, stop) == (0, len(self)):
            return self
        rows = slice(start, stop)
        surplus = None if self.surplus is None else self.surplus[rows]
        stored = row_range(self.stored, start, stop)
        held = stored if self.held is self.stored else self.held[rows]
        return Block(stored, held, self.norms[rows], surplus)

    def without(self, k: int) -> "Block":
        """The same rows, with the surplus duplicates of another k."""
        return replace(self, surplus=surplus_rows(self.stored, k))


def check_rows(x: Rows) -> Rows:
    """As `check_vectors`; rows in pieces were checked when they were put together."""
    return x if isinstance(x, Pieces) else check_vectors(x)


def check_vectors(x: np.ndarray) -> np.ndarray:
    """Return x (n, D) as a contiguous float16 or float32 array, or say what is wrong with it."""
    x = np.asarray(x)
    if x.ndim != 2:
        raise LattqeError(f"vectors must be a matrix (rows, dimensions), got shape {x.shape}")
    if x.dtype not in (np.float16, np.float32):
        if not np.issubdtype(x.dtype, np.floating):
            raise LattqeError(f"vectors must be float16 or float32, got {x.dtype}: convert them first")
        x = x.astype(np.float32)
    return np.ascontiguousarray(x)
