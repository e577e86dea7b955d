"""Matrices that stay in their file, which of several named arrays are vectors, ids, labels; and files of matrices.

Those are numpy's .npy (a row for each image), .fvecs (each row is its dimension, then that many float32), and pickles:
one matrix, a dict of arrays, or a dict from image to vector.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.pickle_file import load
from lattqe.formats.reader import (
    Labels,
    Reader,
    ReadOptions,
    RowBlock,
    as_ids,
    as_labels,
    as_vectors,
    check_matrix,
    decoding,
    is_numeric,
)

BFLOAT16 = "bfloat16"  # numpy has no such type
VECTOR_NAMES = ("vector", "vectors", "vecs", "x", "features", "feats", "embeddings", "descriptors")
ID_NAMES, LABEL_NAMES = ("ids", "id"), ("labels", "label")
# cnnimageretrieval and revisitop keep one image in each column and use these names.
COLUMN_NAMES = ("vecs", "qvecs", "X", "Q")
MAX_HEADER = 10_000  # characters; what numpy itself trusts


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
            raise LattqeError(f"{self.path} is truncated")
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
class DescribedArray:
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

    def _blocks(self, step: int) -> Iterator[RowBlock]:
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            yield RowBlock(
                as_vectors(np.asarray(self._matrix[slice(start, stop), slice(0, self.dim)])),
                None if self._ids is None else self._ids[start:stop],
                None if self._labels is None else self._labels[start:stop],
            )


def open_named(
    name: str, contents: Mapping[str, Any], options: ReadOptions, *, kind: str, columns_are_images: bool | None
) -> MatrixReader:
    """Open the vectors among named arrays. `columns_are_images` is the format's rule; None: decided by the name."""
    chosen = choose(name, contents, options.key)
    matrix, notes = contents[chosen], []
    if options.key is None and len(contents) > 1:
        notes.append(f"reading {chosen!r} of {_listing(contents)} (--key NAME for another)")
    transposed = options.transposed
    if transposed is None:
        transposed = chosen in COLUMN_NAMES if columns_are_images is None else columns_are_images
        if columns_are_images is None:
            way = "columns" if transposed else "rows"
            other = "--no-transposed" if transposed else "--transposed"
            notes.append(f"the {way} of {chosen!r} {_shape(matrix)} are taken as images ({other} for the opposite)")
    if transposed and len(matrix.shape) == 2:
        matrix = Transposed(matrix)
    rows = matrix.shape[0] if len(matrix.shape) == 2 else 0
    ids, id_note = _beside(contents, ID_NAMES, rows, options.ids_key, name)
    labels, label_note = _beside(contents, LABEL_NAMES, rows, options.labels_key, name)
    return MatrixReader(
        f"{name}: {chosen}" if chosen else name,
        matrix,
        kind=kind,
        ids=None if ids is None else as_ids(contents[ids], f"{name}: {ids}"),
        labels=None if labels is None else as_labels(contents[labels], f"{name}: {labels}"),
        notes=[*notes, *id_note, *label_note],
    )


def choose(name: str, contents: Mapping[str, Any], key: str | None) -> str:
    """Return the name of the vectors: the one requested, the only matrix, or the only one with a usual name."""
    if key is not None:
        if key not in contents:
            raise LattqeError(f"{name} holds no {key!r}; it holds {_listing(contents) or 'no arrays'}")
        if not hasattr(contents[key], "shape"):
            raise LattqeError(f"{name}: {key!r} is a {type(contents[key]).__name__}, not an array")
        return key
    matrices = [name for name, value in contents.items() if _is_matrix(value)]
    usual = [name for name in matrices if name.rpartition("/")[2].lower() in VECTOR_NAMES]
    for found in (matrices, usual):
        if len(found) == 1:
            return found[0]
    if not matrices:
        arrays = [name for name, value in contents.items() if hasattr(value, "shape")]
        if len(arrays) == 1:
            return arrays[0]  # its shape or type is refused by name later
        raise LattqeError(f"{name} holds no matrix of numbers; it holds {_listing(contents) or 'no arrays'}")
    raise LattqeError(f"{name} holds several matrices: {_listing(contents, matrices)}: choose one with --key NAME")


def _is_matrix(value: Any) -> bool:
    return len(getattr(value, "shape", ())) == 2 and is_numeric(value.dtype)


def _beside(
    contents: Mapping[str, Any], names: tuple[str, ...], rows: int, key: str | None, file: str
) -> tuple[str | None, list[str]]:
    """Find ids or labels among the arrays; those of another length are left out, and that is said."""
    if key is not None:
        if not isinstance(contents.get(key), (list, tuple, np.ndarray)):
            raise LattqeError(f"{file} holds no column {key!r} of text or whole numbers; it holds {_listing(contents)}")
        return key, []
    for name in names:
        value = contents.get(name)
        if isinstance(value, (list, tuple, np.ndarray)):
            count = value.size if isinstance(value, np.ndarray) else len(value)
            if count == rows:
                return name, [f"{name!r} of the same file is used (--{names[0]} FILE for others)"]
            return None, [f"{name!r} of the same file is not used: it has {count:,} entries for {rows:,} rows"]
    return None, []


def _shape(value: Any) -> str:
    return " × ".join(str(side) for side in value.shape)


def _listing(contents: Mapping[str, Any], names: list[str] | None = None) -> str:
    """Name a few of the arrays with their shapes."""
    names = list(contents) if names is None else names
    shown = [f"{name} ({_shape(contents[name])})" if hasattr(contents[name], "shape") else name for name in names[:6]]
    return ", ".join(shown) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def open_npy(path: Path, options: ReadOptions) -> MatrixReader:
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


def open_fvecs(path: Path, options: ReadOptions) -> Reader:
    """Open a .fvecs file; it can only be read row by row."""
    options.refuse_column_names(path, "holds one matrix")
    if options.transposed:
        raise LattqeError(f"{path}: a .fvecs file has one image in each row; leave out --transposed")
    return FvecsReader(path)


def open_pickle(path: Path, options: ReadOptions) -> MatrixReader:
    """Open the vectors of a pickle.

    Which side are the images: `--transposed` or `--no-transposed` if given; otherwise columns for the names vecs,
    qvecs, X and Q (cnnimageretrieval, revisitop), rows for all others. What was taken is among the notes.
    """
    return open_contents(path, load(path), options, "pickle")


def open_contents(path: Path, value: Any, options: ReadOptions, kind: str) -> MatrixReader:
    """Open the vectors of a pickle's value: an array, a dict of arrays, a dict from image to vector."""
    if hasattr(value, "shape"):
        value = {"": value}
    if not isinstance(value, dict):
        raise LattqeError(f"{path} holds a {type(value).__name__}: an array or a dict of arrays is needed")
    if options.key is None and _is_image_to_vector(value):
        return _rows_by_name(path, value, options, kind)
    contents = {name: item for name, item in value.items() if isinstance(name, str)}
    return open_named(str(path), contents, options, kind=kind, columns_are_images=None)


def _is_image_to_vector(value: dict[Any, Any]) -> bool:
    """Whether all values are vectors of one length."""
    shapes = {item.shape for item in value.values() if isinstance(item, np.ndarray) and is_numeric(item.dtype)}
    arrays = all(isinstance(item, np.ndarray) and item.ndim == 1 for item in value.values())
    return bool(value) and arrays and len(shapes) == 1


def _rows_by_name(path: Path, value: dict[Any, Any], options: ReadOptions, kind: str) -> MatrixReader:
    options.refuse_column_names(path, "maps each image to its vector")
    if options.transposed:
        raise LattqeError(f"{path} maps each image to its vector; leave out --transposed")
    ids, notes = as_ids(list(value), str(path)), ["its keys are used as ids"]
    return MatrixReader(str(path), RowList(list(value.values())), kind=kind, ids=ids, notes=notes)


class RowList:
    """Vectors of one length, seen as a matrix without joining them."""

    def __init__(self, vectors: list[np.ndarray]) -> None:
        self._vectors = vectors
        self.shape = (len(vectors), len(vectors[0]))
        self.dtype = np.result_type(*{vector.dtype for vector in vectors})

    def __getitem__(self, key: tuple[slice, slice]) -> np.ndarray:
        """Slice [rows, columns]."""
        return np.stack(self._vectors[key[0]])[:, key[1]].astype(self.dtype, copy=False)
