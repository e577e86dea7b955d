"""Matrices that stay in their file, and the reader of one matrix with ids and labels beside it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.reader import Block, Labels, Reader, as_vectors, check_matrix

BFLOAT16 = "bfloat16"  # numpy has no such type


class Matrix(Protocol):
    """A numpy array, an HDF5 dataset, or one of the classes below: sliced as matrix[rows, columns]."""

    @property
    def shape(self) -> Any:
        """(rows, columns)."""

    @property
    def dtype(self) -> Any:
        """The numpy type of what slicing gives."""

    def __getitem__(self, key: tuple[slice, slice], /) -> Any: ...


@dataclass(frozen=True)
class FileMatrix:
    """A matrix stored row by row in a file from byte `offset` on, `stride` elements from one row to the next.

    It is read, not memory-mapped: the resident memory stays one block, and a file cut short under our hands is an
    error instead of a signal.
    """

    path: Path
    offset: int
    shape: tuple[int, int]
    stored: Any  # a numpy dtype, or BFLOAT16
    stride: int

    @property
    def dtype(self) -> np.dtype:
        """The numpy type of what slicing gives."""
        return np.dtype(np.float32) if self.stored == BFLOAT16 else np.dtype(self.stored)

    def __getitem__(self, key: tuple[slice, slice]) -> np.ndarray:
        """Read rows × columns; both slices count forward by one."""
        rows, columns = (range(side)[part] for side, part in zip(self.shape, key))
        if len(columns) == self.shape[1]:
            return self._read(rows.start * self.stride, len(rows), len(columns))
        return np.concatenate([self._read(row * self.stride + columns.start, 1, len(columns)) for row in rows])

    def _read(self, start: int, rows: int, columns: int) -> np.ndarray:
        """Read `rows` pieces of `columns` elements, the first one at element `start`."""
        stored = np.dtype("<u2") if self.stored == BFLOAT16 else np.dtype(self.stored)
        count = (rows - 1) * self.stride + columns
        piece = np.fromfile(self.path, stored, count, offset=self.offset + start * stored.itemsize)
        if len(piece) != count:
            raise LattqeError(f"{self.path} ends in the middle")
        matrix = np.lib.stride_tricks.as_strided(
            piece, (rows, columns), (self.stride * stored.itemsize, stored.itemsize), writeable=False
        )
        return (matrix.astype(np.uint32) << 16).view(np.float32) if self.stored == BFLOAT16 else matrix


@dataclass(frozen=True)
class Transposed:
    """A matrix seen the other way round."""

    matrix: Matrix

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.matrix.shape[1], self.matrix.shape[0]

    @property
    def dtype(self) -> Any:
        """The numpy type of what slicing gives."""
        return self.matrix.dtype

    def __getitem__(self, key: tuple[slice, slice]) -> np.ndarray:
        """Slice [rows, columns]."""
        return np.asarray(self.matrix[key[1], key[0]]).T


@dataclass(frozen=True)
class Described:
    """An array of which only shape and element type are known: it is listed, and refused where values are needed."""

    shape: tuple[int, ...]
    dtype: Any


def in_file(path: Path, offset: int, shape: Sequence[int], stored: Any, stride: int | None = None) -> FileMatrix:
    """Describe a stored matrix, after checking that its file is long enough to hold it."""
    rows, columns = (int(side) for side in shape)
    stride = columns if stride is None else stride
    itemsize = 2 if stored == BFLOAT16 else np.dtype(stored).itemsize
    held = (os.path.getsize(path) - offset) // itemsize
    if rows and columns and (rows - 1) * stride + columns > held:
        raise LattqeError(f"{path} is cut short: {rows} × {columns} is declared, {max(held, 0):,} numbers are there")
    return FileMatrix(path, offset, (rows, columns), stored, stride)


class MatrixReader(Reader):
    """A matrix whose rows are images, with ids and labels of the same length where there are any."""

    def __init__(
        self,
        name: str,
        matrix: Matrix,
        *,
        kind: str,
        ids: list[str] | None = None,
        labels: Labels | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.rows, self.dim = check_matrix(name, matrix.shape, matrix.dtype)
        self.name, self.kind, self.notes = name, kind, notes
        self.has_ids = ids is not None
        self.labels = None if labels is None else (int if isinstance(labels, np.ndarray) else str)
        self._matrix, self._ids, self._labels = matrix, ids, labels

    def _label_names(self) -> set[str]:
        return set(self._labels) if isinstance(self._labels, list) else set()

    def _blocks(self, step: int) -> Iterator[Block]:
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            yield Block(
                as_vectors(np.asarray(self._matrix[slice(start, stop), slice(0, self.dim)])),
                None if self._ids is None else self._ids[start:stop],
                None if self._labels is None else self._labels[start:stop],
            )
