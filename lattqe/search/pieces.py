"""Rows that lie in several arrays, such as the mapped parts of a feature set, used as if they were one.

Copying them together would cost every worker of a machine its own memory; mapped rows are shared, and cost none.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from lattqe.errors import LattqeError


class Pieces:
    """Rows (n, D) of one dtype in several arrays; a slice or a row list of it is an array, if possible a view."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
            raise LattqeError(f"vectors of {sorted({array.shape[1] for array in arrays})} dimensions do not belong "
                              "together: use features of one extractor")
        self.arrays = list(arrays)
        self.starts = np.cumsum([0, *map(len, self.arrays)])
        self.dtype = self.arrays[0].dtype
        self.shape = (int(self.starts[-1]), int(self.arrays[0].shape[1]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            found = self.within(*rows.indices(len(self))[:2])
            return found[0] if len(found) == 1 else np.concatenate(found)
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
