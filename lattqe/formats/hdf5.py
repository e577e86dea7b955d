"""HDF5: the datasets of a file by their path. Links and storage that lead out of the file are not followed.

Texts of any length are read from the file's bytes: a dataset of such texts holds for each its length and where it lies
(a collection of objects, a number in it). The library trusts both: a damaged length makes it fill gigabytes, and free
space of size 0 keeps it busy for ever (HDF5 2.0). Here every number is compared with the file first.
"""

import math
import mmap
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lattqe.errors import LattqeError
from lattqe.formats.matrix import ID_NAMES, LABEL_NAMES, MatrixReader, open_named
from lattqe.formats.reader import Options

REFERENCE = struct.Struct("<IQI")  # length in bytes, address of the collection, number of the object
COLLECTION = struct.Struct("<4sB3xQ")  # signature, version, size
OBJECT = struct.Struct("<H6xQ")  # number (0: free space), size
MAX_TEXT = 1 << 16  # bytes
MAX_CHUNK = 1 << 29  # bytes that reading one row may unpack
MAX_COLUMN = 1 << 28  # bytes of ids or labels


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
        raise LattqeError(f"{path}: the texts of {dataset.name} are stored in an uncommon way; give them by a file")
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


def open_hdf5(path: Path, options: Options) -> MatrixReader:
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
    """Refuse a dataset that lies in other files, or whose chunks are too large to be unpacked."""
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
