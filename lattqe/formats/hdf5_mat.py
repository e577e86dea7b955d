"""HDF5, and MATLAB's .mat in the layout of revisitop: X (dimensions × database images), Q (dimensions × queries).

HDF5 gives the datasets of a file by their path. Links and storage that lead out of the file are not followed. Texts of
any length are read from the file's bytes: a dataset of such texts holds for each its length and where it lies (a
collection of objects, a number in it). The library trusts both: a damaged length makes it fill gigabytes, and free
space of size 0 keeps it busy forever (HDF5 2.0). Here every number is compared with the file first.

A .mat of v7.3 is HDF5. Up to v7 (the 'level 5' format) a file is a list of elements, each with a type and a size; a
variable is an element of elements (flags, dimensions, name, values), or such an element packed by zlib. Values are
stored column by column. scipy reads more kinds of variables, but a damaged file can crash it (1.17).
"""

import functools
import math
import mmap
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.matrix import ID_NAMES, LABEL_NAMES, DescribedArray, MatrixReader, Transposed, in_file, open_named
from lattqe.formats.reader import ReadOptions

REFERENCE = struct.Struct("<IQI")  # length in bytes, address of the collection, number of the object
COLLECTION = struct.Struct("<4sB3xQ")  # signature, version, size
OBJECT = struct.Struct("<H6xQ")  # number (0: free space), size
MAX_TEXT = 1 << 16  # bytes
MAX_CHUNK = 1 << 29  # bytes that reading one row may unpack
MAX_COLUMN = 1 << 28  # bytes of ids or labels
HEADER = 128  # bytes: text, version, byte order
PREFIX = 4096  # bytes of a variable that hold all but its values
MAX_RATIO = 1040  # no zlib stream unpacks to more
MATRIX, COMPRESSED = 14, 15
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = {1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse", 16: "function", 17: "opaque"}
COMPLEX, LOGICAL = 0x800, 0x200


def read_texts(path: Path, dataset: Any) -> list[bytes]:
    """Read a one-dimensional dataset of texts of variable length."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        collections: dict[int, dict[int, tuple[int, int]]] = {}
        texts = []
        for length, address, number in _references(path, dataset, data):
            if length == 0:
                texts.append(b"")
                continue
            if address not in collections:
                collections[address] = _collection(path, data, address)
            start, size = collections[address].get(number, (0, 0))
            if not length <= min(size, MAX_TEXT):
                name = f"text {len(texts)} of {dataset.name} ({length:,} bytes)"
                raise LattqeError(f"{path} is damaged: {name} is not where it should be")
            texts.append(data[start : start + length])
        return texts


def _references(path: Path, dataset: Any, data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """Yield (length, address, number) of each text, from storage that is in one piece or in plain chunks."""
    rows, stored = int(dataset.shape[0]), dataset.id
    if stored.get_offset() is not None:
        pieces = [(stored.get_offset(), rows)]
    elif dataset.chunks and stored.get_create_plist().get_nfilters() == 0:
        infos = sorted((stored.get_chunk_info(number) for number in range(stored.get_num_chunks())), key=_first_row)
        pieces = [(info.byte_offset, min(dataset.chunks[0], rows - _first_row(info))) for info in infos]
    else:
        pieces = []
    if dataset.file.userblock_size or sum(count for _, count in pieces) != rows:
        raise LattqeError(f"{path}: the texts of {dataset.name} are stored in an uncommon way; give them in a file")
    for offset, count in pieces:
        if count < 0 or offset + count * REFERENCE.size > len(data):
            raise LattqeError(f"{path} is damaged: {dataset.name} lies outside of the file")
        yield from REFERENCE.iter_unpack(data[offset : offset + count * REFERENCE.size])


def _first_row(info: Any) -> int:
    return int(info.chunk_offset[0])


def _collection(path: Path, data: mmap.mmap, address: int) -> dict[int, tuple[int, int]]:
    """Return number -> (offset, size) of the objects in a collection."""
    damaged = LattqeError(f"{path} is damaged: there are no texts at byte {address:,}")
    if address + COLLECTION.size > len(data):
        raise damaged
    signature, version, size = COLLECTION.unpack_from(data, address)
    position, end = address + COLLECTION.size, address + size
    if signature != b"GCOL" or version != 1 or end > len(data):
        raise damaged
    objects: dict[int, tuple[int, int]] = {}
    while position + OBJECT.size <= end:
        number, length = OBJECT.unpack_from(data, position)
        if number == 0:  # free space, up to the end
            break
        position += OBJECT.size
        if position + length > end:
            raise damaged
        objects[number] = (position, length)
        position += (length + 7) // 8 * 8
    return objects


@dataclass(frozen=True)
class StoredMatrix:
    """A dataset that is read by slices, once it is clear that reading it stays within the file and within bounds."""

    path: Path
    dataset: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Sides of the dataset."""
        return tuple(self.dataset.shape)

    @property
    def dtype(self) -> Any:
        """The numpy type of the values."""
        return self.dataset.dtype

    def __getitem__(self, key: tuple[slice, slice]) -> Any:
        """Slice [rows, columns]."""
        check_storage(self.path, self.dataset)
        return self.dataset[key]


def open_hdf5(path: Path, options: ReadOptions) -> MatrixReader:
    """Open a dataset with a row for each image; ids and labels are taken from datasets of these names."""
    given = (options.key, options.ids_key, options.labels_key)
    key, ids, labels = (name.strip("/") if name else None for name in given)
    contents = datasets(path, {name for name in (ids, labels) if name})
    options = replace(options, key=key, transposed=bool(options.transposed), ids_key=ids, labels_key=labels)
    return open_named(str(path), contents, options, kind="HDF5", columns_are_images=False)


def is_hdf5(path: Path) -> bool:
    """Whether the file has the signature of HDF5 (a MATLAB v7.3 file has it too)."""
    import h5py

    return bool(h5py.is_hdf5(path))


def datasets(path: Path, columns: Collection[str] = ()) -> dict[str, Any]:
    """Return the file's datasets by path: ids, labels and `columns` as whole arrays, others to be read by slices."""
    import h5py

    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:  # visits hard links only: soft and external ones can lead anywhere
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            is_column = name in (*ID_NAMES, *LABEL_NAMES, *columns) and len(item.shape) == 1
            found[name] = _column(path, item) if is_column else StoredMatrix(path, item)

    h5py.File(path, "r").visititems(visit)
    return found


def check_storage(path: Path, dataset: Any) -> None:
    """Refuse a dataset that is stored in other files, or whose chunks are too large to be unpacked."""
    name = dataset.name
    if dataset.external or dataset.is_virtual:
        raise LattqeError(f"{path}: {name} keeps its values in other files; copy them into one file")
    if dataset.chunks and math.prod(dataset.chunks) * dataset.dtype.itemsize > MAX_CHUNK:
        raise LattqeError(f"{path}: {name} is stored in chunks {dataset.chunks}, too large to unpack; use smaller ones")


def _column(path: Path, dataset: Any) -> Any:
    """Read a whole one-dimensional dataset."""
    import h5py

    check_storage(path, dataset)
    if math.prod(dataset.shape) * dataset.dtype.itemsize > MAX_COLUMN:
        raise LattqeError(f"{path}: {dataset.name} is too large for a column of ids or labels")
    if h5py.check_string_dtype(dataset.dtype) and dataset.dtype.hasobject:
        return read_texts(path, dataset)
    return StoredMatrix(path, dataset) if dataset.dtype.hasobject else dataset[()]


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
        return DescribedArray(variable.shape, variable.kind or variable.stored)
    return Transposed(in_file(path, offset + variable.start, variable.shape[::-1], variable.stored))


def _packed(path: Path, offset: int, size: int, unpacked: int, variable: Variable) -> Any:
    if variable.kind or len(variable.shape) != 2:
        return DescribedArray(variable.shape, variable.kind or variable.stored)
    return Packed(path, offset, size, unpacked, variable)


def open_mat(path: Path, options: ReadOptions) -> MatrixReader:
    """Open a variable whose columns are images (`--no-transposed`: whose rows are)."""
    contents = _contents_73(path) if is_hdf5(path) else read_variables(path)
    for name in {*LABEL_NAMES, options.ids_key, options.labels_key}:
        if name in contents and 1 in contents[name].shape:
            contents[name] = _variable_values(contents[name])
    return open_named(str(path), contents, options, kind=".mat", columns_are_images=True)


def _variable_values(array: Any) -> Any:
    """Read a matrix of one row or column; MATLAB keeps whole numbers as floating point unless told otherwise."""
    if isinstance(array, DescribedArray) or len(array.shape) != 2:
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
