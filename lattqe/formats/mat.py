"""MATLAB's .mat in the layout of revisitop: X (dimensions × database images), Q (dimensions × queries). v5 and v7.3.

Up to v7 (the 'level 5' format) a file is a list of elements, each with a type and a size; a variable is an element of
elements (flags, dimensions, name, values), or such an element packed by zlib. Values are stored column by column. scipy
reads more kinds of variables, but a damaged file can crash it (1.17).
"""

import functools
import math
import mmap
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.hdf5 import datasets, is_hdf5
from lattqe.formats.matrix import LABEL_NAMES, Described, MatrixReader, Transposed, in_file, open_named
from lattqe.formats.reader import Options

HEADER = 128  # bytes: text, version, byte order
PREFIX = 4096  # bytes of a variable that hold all but its values
MAX_RATIO = 1040  # no zlib stream unpacks to more
MATRIX, COMPRESSED = 14, 15
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = {1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse", 16: "function", 17: "opaque"}
COMPLEX, LOGICAL = 0x800, 0x200


class Damaged(Exception):
    """The bytes are not what the format says."""


@dataclass(frozen=True)
class Variable:
    """The head of a variable: values of type `stored` from byte `start` of the element on, or `kind` if not numeric."""

    name: str
    shape: tuple[int, ...]
    kind: str | None
    stored: np.dtype
    start: int


class Packed:
    """A matrix in a zlib stream of `size` bytes, unpacked as a whole when it is first needed."""

    def __init__(self, path: Path, offset: int, size: int, unpacked: int, variable: Variable) -> None:
        self.path, self.offset, self.size, self.unpacked = path, offset, size, unpacked
        self.shape, self.dtype, self.start = variable.shape, variable.stored, variable.start

    def __getitem__(self, key: tuple[slice, slice]) -> np.ndarray:
        """Slice [rows, columns]."""
        return self.values[key]

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The whole matrix; zlib's checksum is checked."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(file.read(self.size), self.unpacked + 1)
        if len(data) != self.unpacked or not unpacker.eof:
            raise LattqeError(f"{self.path} is damaged: a variable is not of the size that is declared")
        return np.frombuffer(data, self.dtype, math.prod(self.shape), self.start).reshape(self.shape, order="F")


def read_variables(path: Path) -> dict[str, Any]:
    """Return the variables by name: matrices that stay in the file (or `Packed`), and what other kinds are called."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
            if order is None or data[124:126] not in (b"\x00\x01", b"\x01\x00"):
                raise LattqeError(f"{path} is not a .mat file of version 5, 6, 7 or 7.3: save it with -v7 or -v7.3")
            return dict(_variables(path, data, order))
    except (Damaged, struct.error, zlib.error) as error:
        raise LattqeError(f"{path} is cut short or damaged") from error


def _variables(path: Path, data: mmap.mmap, order: str) -> Iterator[tuple[str, Any]]:
    position = HEADER
    while position + 8 <= len(data):
        kind, size = struct.unpack_from(order + "II", data, position)
        position += 8
        if position + size > len(data):
            raise Damaged
        if kind == MATRIX:
            variable = _head(data[position : position + min(size, PREFIX)], size, order)
            yield variable.name, _in_place(path, position, variable)
        elif kind == COMPRESSED:
            # More than the prefix: zlib gives what it has decoded so far.
            head = zlib.decompressobj().decompress(data[position : position + min(size, 2 * PREFIX)], PREFIX)
            inner, unpacked = struct.unpack_from(order + "II", head)
            if unpacked > MAX_RATIO * size:
                raise Damaged
            if inner == MATRIX:
                variable = _head(head, unpacked + 8, order, start=8)
                yield variable.name, _packed(path, position, size, unpacked + 8, variable)
        position += size


def _head(data: bytes, size: int, order: str, start: int = 0) -> Variable:
    """Read flags, dimensions and name; `data` is the beginning of an element of `size` bytes."""
    _, position, length = _element(data, start, order)
    (flags,) = struct.unpack_from(order + "I", data, position)
    other = CLASSES.get(flags & 0xFF) or ("complex" if flags & COMPLEX else "logical" if flags & LOGICAL else None)
    shape: tuple[int, ...] = ()
    if other != "opaque":  # an object of a newer class has no dimensions
        _, position, length = _element(data, _padded(position, length), order)
        shape = struct.unpack_from(f"{order}{length // 4}i", data, position)
    _, position, length = _element(data, _padded(position, length), order)
    name = data[position : position + length].decode("latin-1")
    if other is not None:
        return Variable(name, shape, other, np.dtype("u1"), position)
    kind, position, length = _element(data, _padded(position, length), order)
    stored = np.dtype(order + TYPES.get(kind, "V1"))
    declared = math.prod(shape) * stored.itemsize
    if kind not in TYPES or min(shape, default=-1) < 0 or declared != length or position + length > size:
        raise Damaged
    return Variable(name, shape, None, stored, position)


def _element(data: bytes, position: int, order: str) -> tuple[int, int, int]:
    """Return (type, where its bytes are, how many) of the element at `position`."""
    kind, length = struct.unpack_from(order + "II", data, position)
    if kind >> 16:  # up to four bytes stand in the head itself
        return kind & 0xFFFF, position + 4, kind >> 16
    return kind, position + 8, length


def _padded(position: int, length: int) -> int:
    return (position + length + 7) // 8 * 8


def _in_place(path: Path, offset: int, variable: Variable) -> Any:
    if variable.kind or len(variable.shape) != 2:
        return Described(variable.shape, variable.kind or variable.stored)
    return Transposed(in_file(path, offset + variable.start, variable.shape[::-1], variable.stored))


def _packed(path: Path, offset: int, size: int, unpacked: int, variable: Variable) -> Any:
    if variable.kind or len(variable.shape) != 2:
        return Described(variable.shape, variable.kind or variable.stored)
    return Packed(path, offset, size, unpacked, variable)


def open_mat(path: Path, options: Options) -> MatrixReader:
    """Open a variable whose columns are images (`--no-transposed`: whose rows are)."""
    contents = _contents_73(path) if is_hdf5(path) else read_variables(path)
    for name in {*LABEL_NAMES, options.ids_key, options.labels_key}:
        if name in contents and 1 in contents[name].shape:
            contents[name] = _column(contents[name])
    return open_named(str(path), contents, options, kind=".mat", columns_are_images=True)


def _column(array: Any) -> Any:
    """Read a matrix of one row or column; MATLAB keeps whole numbers as floating point unless told otherwise."""
    if isinstance(array, Described) or len(array.shape) != 2:
        return array
    values = np.asarray(array[0 : array.shape[0], 0 : array.shape[1]]).ravel()
    whole = values.dtype.kind == "f" and (np.abs(values) < 2**53).all() and (values == np.rint(values)).all()
    return values.astype(np.int64) if whole else values


def _contents_73(path: Path) -> dict[str, Any]:
    """A v7.3 file is HDF5, and stores column by column what HDF5 reads row by row."""
    return {
        name: Transposed(array) if len(array.shape) == 2 else array
        for name, array in datasets(path).items()
        if not name.startswith("#")  # MATLAB's own notes
    }
