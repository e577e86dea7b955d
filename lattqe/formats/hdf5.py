"""HDF5: the datasets of a file by their path. Links and storage that lead out of the file are not followed."""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.matrix import MatrixReader
from lattqe.formats.named import ID_NAMES, LABEL_NAMES, open_named
from lattqe.formats.reader import Options

MAX_CHUNK = 1 << 29  # bytes that reading one row may unpack
MAX_COLUMN = 1 << 28  # bytes of ids or labels
HEAP = b"GCOL\x01\0\0\0"  # where a collection of texts begins: signature, version
HEAP_OBJECT = struct.Struct("<H6xQ")  # index (0: free space), size


def open_hdf5(path: Path, options: Options) -> MatrixReader:
    """Open a dataset with a row for each image; ids and labels are taken from datasets of these names."""
    contents = datasets(path)
    key = options.key.strip("/") if options.key else None
    options = Options(key, bool(options.transposed))
    return open_named(str(path), contents, options, kind="HDF5", columns_are_images=False)


def is_hdf5(path: Path) -> bool:
    """Whether the file has the signature of HDF5 (a MATLAB v7.3 file has it too)."""
    import h5py

    return bool(h5py.is_hdf5(path))


def datasets(path: Path) -> dict[str, Any]:
    """Return the file's datasets by path: h5py's, which are read by slices; ids and labels as whole arrays."""
    import h5py

    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:  # visits hard links only: soft and external ones can lead anywhere
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            _check_storage(path, name, item)
            is_column = name in (*ID_NAMES, *LABEL_NAMES) and len(item.shape) == 1
            found[name] = _column(path, item) if is_column else item

    h5py.File(path, "r").visititems(visit)
    return found


def _check_storage(path: Path, name: str, dataset: Any) -> None:
    if dataset.external or dataset.is_virtual:
        raise LattqeError(f"{path}: {name} keeps its values in other files; copy them into one file")
    if dataset.chunks and math.prod(dataset.chunks) * dataset.dtype.itemsize > MAX_CHUNK:
        raise LattqeError(f"{path}: {name} is stored in chunks {dataset.chunks}, too large to unpack; use smaller ones")


def _column(path: Path, dataset: Any) -> np.ndarray:
    """Read a whole one-dimensional dataset; text comes as Python strings."""
    if math.prod(dataset.shape) * dataset.dtype.itemsize > MAX_COLUMN:
        raise LattqeError(f"{path}: {dataset.name} is too large for a column of ids or labels")
    if dataset.dtype.hasobject:
        _check_heaps(path)
    return np.asarray(dataset[()])


def _check_heaps(path: Path) -> None:
    """Refuse a file whose text would be read for ever.

    Text of any length lies in collections of objects, one after the other, each with its size. HDF5 (2.0 at least)
    never gets past free space of size 0, without a chance to interrupt it. What only looks like a collection, in the
    middle of other data, is passed over.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(HEAP)
        while start >= 0:
            (size,) = struct.unpack_from("<Q", data[start + 8 : start + 16].ljust(8, b"\0"))
            position, end = start + 16, min(start + size, len(data))
            while position + HEAP_OBJECT.size <= end:
                index, length = HEAP_OBJECT.unpack_from(data, position)
                if index == 0 and length == 0:
                    raise LattqeError(f"{path} is damaged: a collection of texts at byte {start} has no end")
                position += length if index == 0 else HEAP_OBJECT.size + (length + 7) // 8 * 8
            start = data.find(HEAP, start + 1)
