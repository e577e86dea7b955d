""".fvecs, as faiss and the TEXMEX sets have it: each row is its dimension (int32) and then so many float32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.matrix import FileMatrix, in_file
from lattqe.formats.reader import Block, Options, Reader, as_vectors, check_matrix


class FvecsReader(Reader):
    """Every row repeats the dimension; a row that says another one is refused."""

    kind = ".fvecs"

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        self.name = str(path)
        self.dim = int(np.fromfile(path, "<i4", 1)[0]) if size >= 4 else 0
        row_bytes = 4 * (self.dim + 1)
        if self.dim < 1 or size % row_bytes:
            raise LattqeError(f"{path} is not a whole .fvecs file: {size:,} bytes, first dimension {self.dim}")
        self.rows = size // row_bytes
        check_matrix(self.name, (self.rows, self.dim), np.dtype("<f4"))
        self._stored: FileMatrix = in_file(path, 0, (self.rows, self.dim + 1), np.dtype("<f4"))

    def _blocks(self, step: int) -> Iterator[Block]:
        for start in range(0, self.rows, step):
            piece = np.ascontiguousarray(self._stored[start : min(start + step, self.rows), 0 : self.dim + 1])
            other = np.flatnonzero(piece[:, :1].view("<i4")[:, 0] != self.dim)
            if len(other):
                row, dim = start + int(other[0]), int(piece[other[0], :1].view("<i4")[0])
                raise LattqeError(f"{self.name}: row {row} has dimension {dim}, the first row has {self.dim}")
            yield Block(as_vectors(piece[:, 1:]))


def open_fvecs(path: Path, options: Options) -> Reader:
    """Open a .fvecs file; it can only be read row by row."""
    if options.transposed:
        raise LattqeError(f"{path}: a .fvecs file has one image in each row; leave out --transposed")
    return FvecsReader(path)
