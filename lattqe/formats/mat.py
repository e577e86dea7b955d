"""MATLAB's .mat in the layout of revisitop: X (dimensions × database images), Q (dimensions × queries). v5 and v7.3."""

from pathlib import Path
from typing import Any

from lattqe.errors import LattqeError
from lattqe.formats.hdf5 import datasets, is_hdf5
from lattqe.formats.matrix import Described, MatrixReader, Transposed
from lattqe.formats.named import LABEL_NAMES, choose, open_named
from lattqe.formats.reader import Options

NUMERIC = ("double", "single", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def open_mat(path: Path, options: Options) -> MatrixReader:
    """Open a variable whose columns are images (`--no-transposed`: whose rows are)."""
    contents = _contents_73(path) if is_hdf5(path) else _contents_5(path, options)
    return open_named(str(path), contents, options, kind=".mat", columns_are_images=True)


def _contents_73(path: Path) -> dict[str, Any]:
    """A v7.3 file is HDF5, and stores column by column what HDF5 reads row by row."""
    return {
        name: Transposed(array) if len(array.shape) == 2 else array
        for name, array in datasets(path).items()
        if not name.startswith("#")  # MATLAB's own notes
    }


def _contents_5(path: Path, options: Options) -> dict[str, Any]:
    """Read the one chosen variable of a v5 file (and ids and labels beside it) into memory."""
    import numpy as np
    from scipy.io import loadmat, whosmat

    announced = {
        name: Described(shape, np.dtype(kind) if kind in NUMERIC else kind) for name, shape, kind in whosmat(path)
    }
    chosen = choose(str(path), announced, options.key)
    wanted = [chosen, *(name for name in LABEL_NAMES if name in announced)]
    loaded = loadmat(path, variable_names=wanted)
    missing = [name for name in wanted if name not in loaded]
    if missing:
        raise LattqeError(f"{path} is damaged: its variable {missing[0]!r} cannot be read")
    return {**announced, **{name: loaded[name] for name in wanted}}
