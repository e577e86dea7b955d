"""Rows of vectors: checked, in one array or in several, and which of many equal ones can never be a neighbor.

Rows in several arrays, such as the mapped parts of a feature set, are used as if they were one: copying them together
would cost every worker of a machine its own memory; mapped rows are shared, and cost none.
"""

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash

from lattqe.errors import LattqeError


class Pieces:
    """Rows (n, D) of one dtype in several arrays; a slice or a row list of it is an array, if possible a view."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
            raise LattqeError(
                f"vectors of {sorted({array.shape[1] for array in arrays})} dimensions do not belong "
                "together: use features of one extractor"
            )
        self.arrays = list(arrays)
        self.starts = np.cumsum([0, *map(len, self.arrays)])
        self.dtype = self.arrays[0].dtype
        self.shape = (int(self.starts[-1]), int(self.arrays[0].shape[1]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            found = self.within(start, stop)
            if step == 1:
                return found[0] if len(found) == 1 else np.concatenate(found)
            rows = np.arange(start, stop, step)
        out = np.empty((len(rows), self.shape[1]), self.dtype)
        for places, piece, within in split_rows(self, rows):
            out[places] = piece[within]
        return out

    def within(self, start: int, stop: int) -> list[np.ndarray]:
        """Views of what each piece has of the rows start..stop; at least one, maybe empty."""
        spans = [(max(start - low, 0), min(stop - low, len(array))) for low, array in zip(self.starts, self.arrays)]
        found = [array[lo:hi] for array, (lo, hi) in zip(self.arrays, spans) if lo < hi]
        return found or [self.arrays[0][:0]]

    def part(self, start: int, stop: int) -> "Rows":
        """Rows start..stop, without a copy."""
        return in_one(self.within(start, stop))


Rows = np.ndarray | Pieces


def in_one(arrays: Sequence[np.ndarray]) -> Rows:
    """Arrays (n_i, D), at least one, one after the other: without a copy if they are of one dtype."""
    if len(arrays) == 1:
        return arrays[0]
    return Pieces(arrays) if len({array.dtype for array in arrays}) == 1 else np.concatenate(arrays)


def pieces_of(x: Rows) -> list[np.ndarray]:
    """The arrays in which rows lie."""
    return x.arrays if isinstance(x, Pieces) else [x]


def split_rows(x: Rows, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A row list (m,) piece by piece: the places in the list whose rows one piece has, the piece, its rows there."""
    if not isinstance(x, Pieces):
        yield np.arange(len(rows)), x, rows
        return
    for start, piece in zip(x.starts.tolist(), x.arrays):
        places = np.flatnonzero((rows >= start) & (rows < start + len(piece)))
        if places.size:
            yield places, piece, rows[places] - start


def row_range(x: Rows, start: int, stop: int) -> Rows:
    """Rows start..stop, without a copy."""
    return x.part(start, stop) if isinstance(x, Pieces) else x[start:stop]


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


def surplus_rows(x: Rows, k: int) -> np.ndarray | None:
    """Find rows of x (n, D) with more than k identical rows before them: (n,) bool, or None where there are none.

    Equal vectors have equal scores and ties go to the lower row, so with k + 1 of them in front (one of which may be
    the query itself) such a row is in no list. Without this, a database of equal vectors would have to be scored
    pair by pair in float64.
    """
    n = len(x)
    if n <= k + 1:
        return None
    crowded = _in_large_groups(_leading_bytes(x), k + 1)
    if not crowded.size:
        return None
    digests = [xxhash.xxh3_128_digest(np.ascontiguousarray(x[row : row + 1]).data) for row in crowded]
    hashes = np.array(digests, dtype="V16")
    order, rank = _rank_in_groups(hashes.view("u8").reshape(-1, 2))
    surplus = np.zeros(n, dtype=bool)
    surplus[crowded[order[rank > k]]] = True
    return surplus if surplus.any() else None


def _leading_bytes(x: Rows) -> np.ndarray:
    """Eight bytes from the start of each row: most data is told apart by them at once. (n,) uint64."""
    columns = 8 // x.dtype.itemsize
    leading = np.concatenate([piece[:, :columns] for piece in pieces_of(x)])
    key = np.zeros((len(x), columns), dtype=x.dtype)
    key[:, : leading.shape[1]] = leading
    return key.view(np.uint64).ravel()


def _in_large_groups(key: np.ndarray, size: int) -> np.ndarray:
    """Row numbers, ascending, whose key occurs more than `size` times."""
    _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    return np.flatnonzero(counts[inverse] > size)


def _rank_in_groups(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort (n, 2) keys stably; return the order and, in that order, each item's position within its equal keys."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    begins = np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)]
    starts = np.flatnonzero(begins)
    return order, np.arange(len(keys)) - starts[np.cumsum(begins) - 1]


def as_tensor(x: np.ndarray) -> torch.Tensor:
    """View an array as a tensor that is only read: Arrow's and Ray's arrays are read-only, which torch warns about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(x if all(step >= 0 for step in x.strides) else np.ascontiguousarray(x))


def together(x: Rows, out: torch.Tensor) -> torch.Tensor:
    """Copy rows (n, D), which may lie in pieces, into `out`, converting them to its dtype."""
    start = 0
    for piece in pieces_of(x):
        out[start : start + len(piece)] = as_tensor(piece)
        start += len(piece)
    return out
