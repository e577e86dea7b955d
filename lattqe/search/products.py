"""Products of two blocks of rows, how far they may be from the truth, and which of them are worth keeping.

All kinds have the same methods; what `multiply` returns is opaque to the caller, so that a tile never leaves its
device: only the few entries above a threshold do. Which kind is the fastest depends on the processor and on the rows
(numpy's OpenBLAS or torch's MKL, int8 where there are instructions for it): `lattqe.search.graph.fastest_kind`
measures. A product only decides what is worth an exact score, so every kind gives the same answer. Comparing with a
threshold is an order of magnitude cheaper than a top-k.
One lane for each thread: its own product buffers, BLAS on one thread, so that selection runs in parallel too.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from lattqe.device import Sender, bringing, matmul_precision
from lattqe.errors import LattqeError
from lattqe.search.exact import FORMATS, Codes, coarse_error, encode, float32_error, multiply_codes, norms
from lattqe.search.rows import Rows, as_tensor, check_rows, pieces_of, row_range, surplus_rows, together

SYMMETRIC_DIM = 256  # below, numpy loses more by mirroring A @ A.T than it gains by computing half of it
TILE_ENTRIES = 4 << 20  # of one product: with its masks it stays near the last-level cache
STRIP_ENTRIES = 1 << 17  # of a tile, compared at once with two thresholds: they stay in a core's own cache
SAMPLED_ROWS = 32  # of a tile, on which it is seen whether one threshold for all of it lets too much pass
SURPLUS = 2.0  # times as many entries pass one threshold: up to here it is faster than thresholds of their own
CPU = torch.device("cpu")

Passing = tuple[Any, Any, Any]


class Products(Protocol):
    """Where and how tiles are multiplied: `kind` is its name, `threads` how many the CPU's part of the work has."""

    kind: str
    tile: int  # rows on each side of a tile
    entries: int  # of a tile that is as wide as few rows permit
    threads: int

    def hold(self, x: Rows) -> Any:
        """Bring rows (n, D) to the device in their stored width."""

    def widen(self, rows: Any) -> Any:
        """Turn held rows into what `multiply` takes: float32 or codes; what is that already is not copied."""

    def error(self, rows: "Block", others: "Block") -> np.ndarray:
        """How far a product of each of the rows with any of the others may be from the exact score, (n,) float64.

        The bound is rigorous; it is that of the scores that `multiply` gives for the same blocks or parts of them.
        """

    def multiply(self, a: Any, b: Any) -> Any:
        """All dot products of widened rows (na, D) and (nb, D): an (na, nb) float32 tile, valid until the next call."""

    def release(self) -> None:
        """Give the memory of tiles back."""

    def blank(self, tile: Any, i: np.ndarray, j: np.ndarray) -> None:
        """Set the entries (i, j) to -inf."""

    def kth(self, tile: Any, k: int, columns: bool = False) -> Any:
        """The k-th largest entry of each row (or column), float32."""

    def passing(self, tile: Any, threshold: Any, columns: bool = False) -> Passing:
        """Entries above the threshold of their row (na,): rows i ascending, columns j, scores; arrays, or tensors on
        the device, as `threshold` and what `kth` gives.

        With `columns`, above the threshold of their column (nb,): columns ascending, rows, scores.
        """

    def passing_both(self, tile: Any, rows: Any, columns: Any) -> tuple[Passing, Passing]:
        """What `passing` gives for thresholds of the rows (na,), and for those of the columns (nb,)."""


class NumpyProducts:
    """CPU: BLAS into one reused buffer, then comparisons that run at the speed of the cache."""

    kind = "float32 numpy"

    def __init__(self, tile: int = 2048, threads: int = 1) -> None:
        self.tile, self.entries, self.threads = tile, TILE_ENTRIES, threads
        self._buffer = np.empty(0, dtype=np.float32)
        self._mask = np.empty(0, dtype=bool)

    def hold(self, x: Rows) -> Any:
        """See Products; memory-mapped rows stay memory-mapped."""
        return x

    def widen(self, rows: Rows) -> Rows:
        """See Products; torch converts with vector instructions and all threads, numpy does not."""
        return rows if rows.dtype == np.float32 else together(rows, torch.empty(rows.shape)).numpy()

    def error(self, rows: "Block", others: "Block") -> np.ndarray:
        """See Products."""
        return float32_error(rows.dim, rows.norms, others.norms.max(initial=0.0))

    def multiply(self, a: Any, b: Any) -> np.ndarray:
        """See Products."""
        size = len(a) * len(b)
        if self._buffer.size < size:
            self._buffer = np.empty(size, dtype=np.float32)
            self._mask = np.empty(size, dtype=bool)
        return self._product(a, b, self._buffer[:size].reshape(len(a), len(b)))

    def _product(self, a: Any, b: Any, out: np.ndarray) -> np.ndarray:
        """A @ B.T; of a block with itself numpy computes half, but that is worth its mirroring for long rows only."""
        if a.shape[1] < SYMMETRIC_DIM and a.ctypes.data == b.ctypes.data:
            b = b.copy()
        return np.matmul(a, b.T, out=out)

    def release(self) -> None:
        """See Products."""
        self._buffer, self._mask = np.empty(0, dtype=np.float32), np.empty(0, dtype=bool)

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
        np.greater(tile, np.ascontiguousarray(threshold) if columns else threshold[:, None], out=mask)
        i, j, scores = _entries(tile, mask)
        if not columns:
            return i, j, scores
        order = _by_column(j, tile.shape[1])
        return j[order], i[order], scores[order]

    def passing_both(self, tile: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> tuple[Passing, Passing]:
        """See Products. What is above the lower of its two thresholds is found at once, and then told apart.

        Where thresholds differ little, comparing all with the lowest of them is several times as fast.
        """
        mask, columns = self._mask[: tile.size].reshape(tile.shape), np.ascontiguousarray(columns)
        lowest = np.minimum(rows.min(initial=np.inf), columns.min(initial=np.inf))
        sample = slice(None, None, -(-max(len(tile), 1) // SAMPLED_ROWS))
        pass_own = np.count_nonzero(tile[sample] > np.minimum(rows[sample, None], columns))
        if np.count_nonzero(tile[sample] > lowest) <= SURPLUS * pass_own:
            np.greater(tile, lowest, out=mask)
        else:
            _above_lower(tile, rows, columns, mask)
        i, j, scores = _entries(tile, mask)
        of_rows, of_columns = np.flatnonzero(scores > rows[i]), np.flatnonzero(scores > columns[j])
        of_columns = of_columns[_by_column(j[of_columns], tile.shape[1])]
        return ((i[of_rows], j[of_rows], scores[of_rows]), (j[of_columns], i[of_columns], scores[of_columns]))


class MklProducts(NumpyProducts):
    """CPU: torch's BLAS (MKL on x86), with numpy's selection."""

    kind = "float32 torch"

    def _product(self, a: Any, b: Any, out: np.ndarray) -> np.ndarray:
        with matmul_precision(CPU):
            torch.mm(as_tensor(a), as_tensor(b).T, out=torch.from_numpy(out))
        return out


class Int8Products(NumpyProducts):
    """CPU: int8 codes, summed in 32 bits."""

    kind = "int8"

    def hold(self, x: Rows) -> Codes:
        """See Products; the rows stay where they are, beside their codes."""
        return encode(x, FORMATS["int8"])

    def widen(self, rows: Any) -> Any:
        """See Products: codes are ready."""
        return rows

    def error(self, rows: "Block", others: "Block") -> np.ndarray:
        """See Products."""
        return coarse_error(rows.held, others.held, FORMATS["int8"], super().error(rows, others))

    def _product(self, a: Any, b: Any, out: np.ndarray) -> np.ndarray:
        multiply_codes(a, b, FORMATS["int8"], torch.from_numpy(out))
        return out


class TorchProducts:
    """GPU (or any torch device): products, thresholds and comparisons stay there, and what passes them too."""

    kind = "float32"

    def __init__(self, device: torch.device, tile: int = 8192, threads: int | None = None) -> None:
        self.device = device
        self.tile, self.entries, self.threads = tile, TILE_ENTRIES, threads or torch.get_num_threads()
        self._buffer = torch.empty(0, device=device)
        self.sender = Sender(device)

    def hold(self, x: Rows) -> Any:
        """See Products; may be called by a thread that loads the next rows while these are compared."""
        dtype = torch.float16 if x.dtype == np.float16 else torch.float32
        return self.sender.bring([as_tensor(piece) for piece in pieces_of(x)], dtype)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """See Products."""
        return rows.float()

    def error(self, rows: "Block", others: "Block") -> np.ndarray:
        """See Products."""
        return float32_error(rows.dim, rows.norms, others.norms.max(initial=0.0))

    def multiply(self, a: Any, b: Any) -> torch.Tensor:
        """See Products."""
        size = len(a) * len(b)
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, device=self.device)
        return self._product(a, b, self._buffer[:size].view(len(a), len(b)))

    def _product(self, a: Any, b: Any, out: torch.Tensor) -> torch.Tensor:
        """True float32, because the error bound is that of float32 and not of TF32."""
        with matmul_precision(self.device):
            return torch.mm(a, b.T, out=out)

    def release(self) -> None:
        """See Products."""
        self._buffer = torch.empty(0, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def blank(self, tile: torch.Tensor, i: np.ndarray, j: np.ndarray) -> None:
        """See Products."""
        tile[self._bring(i), self._bring(j)] = -torch.inf

    def kth(self, tile: torch.Tensor, k: int, columns: bool = False) -> torch.Tensor:
        """See Products."""
        lines = tile.T.contiguous() if columns else tile
        return torch.topk(lines, k, dim=1, sorted=False).values.amin(dim=1)

    def passing(self, tile: torch.Tensor, threshold: torch.Tensor, columns: bool = False) -> Passing:
        """See Products; `nonzero` of the transposed mask comes ordered by columns."""
        lines = tile.T if columns else tile
        i, j = (lines > threshold[:, None]).nonzero(as_tuple=True)
        return i, j, lines[i, j]

    def passing_both(self, tile: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> tuple[Passing, Passing]:
        """See Products."""
        return self.passing(tile, rows), self.passing(tile, columns, columns=True)

    def _bring(self, values: np.ndarray) -> torch.Tensor:
        return as_tensor(values).to(self.device)


class CoarseTorchProducts(TorchProducts):
    """GPU (or any torch device): float16 or TF32 codes, summed in float32 by tensor cores where there are any."""

    def __init__(self, device: torch.device, kind: str, tile: int = 8192, threads: int | None = None) -> None:
        super().__init__(device, tile, threads)
        self.kind, self.form = kind, FORMATS[kind]

    def hold(self, x: Rows) -> Codes:
        """See Products."""
        return encode(super().hold(x), self.form)

    def widen(self, rows: Any) -> Any:
        """See Products: codes are ready."""
        return rows

    def error(self, rows: "Block", others: "Block") -> np.ndarray:
        """See Products."""
        return coarse_error(rows.held, others.held, self.form, super().error(rows, others))

    def _product(self, a: Any, b: Any, out: torch.Tensor) -> torch.Tensor:
        return multiply_codes(a, b, self.form, out)


def _above_lower(tile: np.ndarray, rows: np.ndarray, columns: np.ndarray, mask: np.ndarray) -> None:
    """Set `mask` where an entry is above the lower of the thresholds of its row and its column."""
    height = max(STRIP_ENTRIES // max(tile.shape[1], 1), 1)
    lower = np.empty((height, tile.shape[1]), dtype=np.float32)
    for lo in range(0, len(tile), height):
        strip = slice(lo, lo + height)
        least = np.minimum(rows[strip, None], columns, out=lower[: len(tile) - lo])
        np.greater(tile[strip], least, out=mask[strip])


def _entries(tile: np.ndarray, mask: np.ndarray) -> Passing:
    """Where a mask of the tile is set: rows ascending, columns, scores."""
    places = np.flatnonzero(mask)
    i = places // tile.shape[1]
    return i, places - i * tile.shape[1], np.take(tile, places)


def _by_column(j: np.ndarray, width: int) -> np.ndarray:
    """The order (m,) that puts columns j (m,), below `width`, in ascending order and keeps that of equal ones."""
    return np.argsort(j.astype(np.uint16) if width <= 1 << 16 else j, kind="stable")  # radix on 16 bits


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

        With k, find the duplicates that can be in no row's k best.
        """
        x = check_rows(x)
        length = norms(x)
        if not np.isfinite(length).all():
            row = int(np.flatnonzero(~np.isfinite(length))[0])
            raise LattqeError(f"row {row} of the vectors holds NaN or infinity: verify the feature set it came from")
        with bringing(*x.shape):
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
