"""HDF5: the datasets of a file by their path. Links and storage that lead out of the file are not followed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lattqe.errors import LattqeError
from lattqe.formats.hdf5_text import read_texts
from lattqe.formats.matrix import MatrixReader
from lattqe.formats.named import ID_NAMES, LABEL_NAMES, open_named
from lattqe.formats.reader import Options

MAX_CHUNK = 1 << 29  # bytes that reading one row may unpack
MAX_COLUMN = 1 << 28  # bytes of ids or labels


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
    contents = datasets(path)
    key = options.key.strip("/") if options.key else None
    options = Options(key, bool(options.transposed))
    return open_named(str(path), contents, options, kind="HDF5", columns_are_images=False)


def is_hdf5(path: Path) -> bool:
    """Whether the file has the signature of HDF5 (a MATLAB v7.3 file has it too)."""
    import h5py

    return bool(h5py.is_hdf5(path))


def datasets(path: Path) -> dict[str, Any]:
    """Return the file's datasets by path: ids and labels as whole arrays, others to be read by slices."""
    import h5py

    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:  # visits hard links only: soft and external ones can lead anywhere
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            is_column = name in (*ID_NAMES, *LABEL_NAMES) and len(item.shape) == 1
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
