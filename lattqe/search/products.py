"""Float32 products of two blocks of rows, and which of their entries are worth keeping: numpy on CPU, torch on GPU.

Both classes have the same methods; what `multiply` returns is opaque to the caller, so that a tile never leaves
its device: only the few entries above a threshold do. numpy's OpenBLAS measured 10-25 % faster than torch's MKL on
AMD, and its A @ A.T does half the work; comparing against a threshold is an order of magnitude cheaper than a top-k.
One lane for each thread: its own product buffers, BLAS on one thread, so that selection runs in parallel too.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from lattqe.errors import LattqeError
from lattqe.search.exact import norms
from lattqe.search.rows import Rows, check_rows, pieces_of, row_range, surplus_rows

SYMMETRIC_DIM = 256  # below, numpy loses more by mirroring A @ A.T than it gains by computing half of it

Passing = tuple[np.ndarray, np.ndarray, np.ndarray]


class Products(Protocol):
    """Where tiles are multiplied."""

    tile: int

    def hold(self, x: Rows) -> Any:
        """Bring rows (n, D) to the device in their stored width."""

    def widen(self, rows: Any) -> Any:
        """Turn held rows into float32; float32 rows are not copied."""

    def multiply(self, a: Any, b: Any) -> Any:
        """All dot products of widened rows (na, D) and (nb, D): an (na, nb) float32 tile, valid until the next call."""

    def blank(self, tile: Any, i: np.ndarray, j: np.ndarray) -> None:
        """Set the entries (i, j) to -inf."""

    def kth(self, tile: Any, k: int, columns: bool = False) -> np.ndarray:
        """The k-th largest entry of each row (or column), float32."""

    def passing(self, tile: Any, threshold: np.ndarray, columns: bool = False) -> Passing:
        """Entries above the threshold of their row (na,): rows i ascending, columns j, scores.

        With `columns`, above the threshold of their column (nb,): columns ascending, rows, scores.
        """


class NumpyProducts:
    """CPU: BLAS into one reused buffer, then comparisons that run at the speed of the cache."""

    def __init__(self, tile: int = 2048) -> None:
        self.tile = tile
        self._buffer = np.empty(0, dtype=np.float32)
        self._mask = np.empty(0, dtype=bool)

    def hold(self, x: Rows) -> Rows:
        """See Products; memory-mapped rows stay memory-mapped."""
        return x

    def widen(self, rows: Rows) -> Rows:
        """See Products; torch converts with vector instructions and all threads, numpy does not."""
        return rows if rows.dtype == np.float32 else _together(rows, torch.empty(rows.shape)).numpy()

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """See Products."""
        size = len(a) * len(b)
        if self._buffer.size < size:
            self._buffer = np.empty(size, dtype=np.float32)
            self._mask = np.empty(size, dtype=bool)
        if a.shape[1] < SYMMETRIC_DIM and a.ctypes.data == b.ctypes.data:
            b = b.copy()
        return np.matmul(a, b.T, out=self._buffer[:size].reshape(len(a), len(b)))

    def blank(self, tile: np.ndarray, i: np.ndarray, j: np.ndarray) -> None:
        """See Products."""
        tile[i, j] = -np.inf

    def kth(self, tile: np.ndarray, k: int, columns: bool = False) -> np.ndarray:
        """See Products."""
        lines = np.ascontiguousarray(tile.T) if columns else tile
        place = lines.shape[1] - k
        return np.partition(lines, place, axis=1)[:, place]

    def passing(self, tile: np.ndarray, threshold: np.ndarray, columns: bool = False) -> Passing:
        """See Products."""
        mask = self._mask[: tile.size].reshape(tile.shape)
        np.greater(tile, threshold if columns else threshold[:, None], out=mask)
        places = np.flatnonzero(mask)
        i = places // tile.shape[1]
        j, scores = places - i * tile.shape[1], np.take(tile, places)
        if not columns:
            return i, j, scores
        order = np.argsort(j.astype(np.uint16) if tile.shape[1] <= 1 << 16 else j, kind="stable")  # radix on 16 bits
        return j[order], i[order], scores[order]


class TorchProducts:
    """GPU (or any torch device): products, thresholds and comparisons stay there, the few kept entries come back."""

    def __init__(self, device: torch.device, tile: int = 8192) -> None:
        self.device = device
        self.tile = tile
        self._buffer = torch.empty(0, device=device)

    def hold(self, x: Rows) -> torch.Tensor:
        """See Products."""
        held = torch.empty(x.shape, dtype=torch.float16 if x.dtype == np.float16 else torch.float32, device=self.device)
        return _together(x, held)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """See Products."""
        return rows.float()

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See Products; true float32, because the error bound is that of float32 and not of TF32."""
        size = len(a) * len(b)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, device=self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        return torch.mm(a, b.T, out=self._buffer[:size].view(len(a), len(b)))

    def blank(self, tile: torch.Tensor, i: np.ndarray, j: np.ndarray) -> None:
        """See Products."""
        tile[self._bring(i), self._bring(j)] = -torch.inf

    def kth(self, tile: torch.Tensor, k: int, columns: bool = False) -> np.ndarray:
        """See Products."""
        lines = tile.T.contiguous() if columns else tile
        return torch.topk(lines, k, dim=1, sorted=False).values.amin(dim=1).cpu().numpy()

    def passing(self, tile: torch.Tensor, threshold: np.ndarray, columns: bool = False) -> Passing:
        """See Products; `nonzero` of the transposed mask comes ordered by columns."""
        lines = tile.T if columns else tile
        i, j = (lines > self._bring(threshold)[:, None]).nonzero(as_tuple=True)
        return i.cpu().numpy(), j.cpu().numpy(), lines[i, j].cpu().numpy()

    def _bring(self, values: np.ndarray) -> torch.Tensor:
        return as_tensor(values).to(self.device)


def _together(x: Rows, out: torch.Tensor) -> torch.Tensor:
    """Copy rows (n, D), which may lie in pieces, into `out`, converting them to its dtype."""
    start = 0
    for piece in pieces_of(x):
        out[start : start + len(piece)] = as_tensor(piece)
        start += len(piece)
    return out


def as_tensor(x: np.ndarray) -> torch.Tensor:
    """View an array as a tensor that is only read: Arrow's and Ray's arrays are read-only, which torch warns about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(x))


@dataclass(frozen=True)
class Block:
    """Rows (n, D): `stored` in main memory for exact scores, `held` on the device for products."""

    stored: Rows
    held: Any
    norms: np.ndarray
    surplus: np.ndarray | None
    found: dict[int, np.ndarray | None] = field(default_factory=dict)  # surplus duplicates by k

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

    def take(self, rows: np.ndarray) -> "Block":
        """Rows (m,), copied."""
        surplus = None if self.surplus is None else self.surplus[rows]
        stored = self.stored[rows]
        return Block(stored, stored if self.held is self.stored else self.held[rows], self.norms[rows], surplus)

    def without(self, k: int) -> "Block":
        """The same rows, with the surplus duplicates of another k, which are looked for once."""
        if k not in self.found:
            self.found[k] = surplus_rows(self.stored, k)
        return replace(self, surplus=self.found[k])


@contextmanager
def lanes_on(device: torch.device | None = None) -> Iterator[list[Products]]:
    """Lanes for a device: on the CPU as many as torch has threads, each with single-threaded BLAS; one for a GPU."""
    if device is not None and device.type != "cpu":
        yield [TorchProducts(device)]
        return
    with _libraries().limit(limits=1, user_api="blas"):
        yield [NumpyProducts() for _ in range(torch.get_num_threads())]


@cache
def _libraries() -> ThreadpoolController:
    """The loaded BLAS libraries: looking for them takes longer than a small search, so once."""
    return ThreadpoolController()
