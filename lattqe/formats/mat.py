"""MATLAB's .mat in the layout of revisitop: X (dimensions × database images), Q (dimensions × queries). v5 and v7.3."""

from pathlib import Path
from typing import Any

import numpy as np

from lattqe.formats.hdf5 import datasets, is_hdf5
from lattqe.formats.mat5 import read_variables
from lattqe.formats.matrix import Described, MatrixReader, Transposed
from lattqe.formats.named import LABEL_NAMES, open_named
from lattqe.formats.reader import Options


def open_mat(path: Path, options: Options) -> MatrixReader:
    """Open a variable whose columns are images (`--no-transposed`: whose rows are)."""
    contents = _contents_73(path) if is_hdf5(path) else read_variables(path)
    for name in LABEL_NAMES:
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
