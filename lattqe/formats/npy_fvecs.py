"""numpy's .npy (one matrix, a row for each image) and .fvecs (each row is its dimension, then so many float32)."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.matrix import FileMatrix, MatrixReader, Transposed, in_file
from lattqe.formats.reader import Options, Reader, RowBlock, as_vectors, check_matrix, decoding

MAX_HEADER = 10_000  # characters; what numpy itself trusts


def open_npy(path: Path, options: Options) -> MatrixReader:
    """Open a matrix of vectors."""
    options.refuse_column_names(path, "holds one array")
    offset, shape, fortran, dtype = read_header(path)
    check_matrix(str(path), shape[::-1] if options.transposed else shape, dtype)
    if fortran:
        matrix: Any = Transposed(in_file(path, offset, shape[::-1], dtype))
    else:
        matrix = in_file(path, offset, shape, dtype)
    return MatrixReader(str(path), Transposed(matrix) if options.transposed else matrix, kind=".npy")


def read_array(path: Path) -> np.ndarray:
    """Read a whole small array (ids, labels, masks) into memory; never an array of Python objects."""
    offset, shape, fortran, dtype = read_header(path)
    count = math.prod(shape)
    held = path.stat().st_size - offset
    if dtype.hasobject:
        raise LattqeError(f"{path} holds Python objects: save it as text or numbers")
    if count * dtype.itemsize > held:
        raise LattqeError(f"{path} is cut short: it declares {count:,} values of {dtype} and holds {held:,} bytes")
    with decoding(path, ".npy"):
        return np.fromfile(path, dtype, count, offset=offset).reshape(shape, order="F" if fortran else "C")


def read_header(path: Path) -> tuple[int, tuple[int, ...], bool, np.dtype]:
    """Return (offset of the data, shape, whether it is stored column by column, dtype)."""
    with decoding(path, ".npy"), path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise LattqeError(f"{path} is a .npy file of the unknown version {version[0]}.{version[1]}")
        shape, fortran, dtype = read(file, max_header_size=MAX_HEADER)
        if any(side < 0 for side in shape):
            raise LattqeError(f"{path} is damaged: its shape is {shape}")
        return file.tell(), shape, fortran, dtype


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

    def _blocks(self, step: int) -> Iterator[RowBlock]:
        for start in range(0, self.rows, step):
            piece = np.ascontiguousarray(self._stored[start : min(start + step, self.rows), 0 : self.dim + 1])
            other = np.flatnonzero(piece[:, :1].view("<i4")[:, 0] != self.dim)
            if len(other):
                row, dim = start + int(other[0]), int(piece[other[0], :1].view("<i4")[0])
                raise LattqeError(f"{self.name}: row {row} has dimension {dim}, the first row has {self.dim}")
            yield RowBlock(as_vectors(piece[:, 1:]))


def open_fvecs(path: Path, options: Options) -> Reader:
    """Open a .fvecs file; it can only be read row by row."""
    options.refuse_column_names(path, "holds one matrix")
    if options.transposed:
        raise LattqeError(f"{path}: a .fvecs file has one image in each row; leave out --transposed")
    return FvecsReader(path)
