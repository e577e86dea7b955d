""".pkl and .pickle: one matrix, a dict of arrays, or a dict from image to vector. Read without unpickling."""

from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.columns import as_ids
from lattqe.formats.matrix import MatrixReader
from lattqe.formats.named import open_named
from lattqe.formats.reader import Options, is_numeric
from lattqe.formats.safe_pickle import load


def open_pickle(path: Path, options: Options) -> MatrixReader:
    """Open the vectors of a pickle.

    Which side are the images: `--transposed` or `--no-transposed` if given; otherwise columns for the names vecs,
    qvecs, X and Q (cnnimageretrieval, revisitop), rows for all others. What was taken is among the notes.
    """
    return open_contents(path, load(path), options, "pickle")


def open_contents(path: Path, value: Any, options: Options, kind: str) -> MatrixReader:
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


def _rows_by_name(path: Path, value: dict[Any, Any], options: Options, kind: str) -> MatrixReader:
    if options.transposed:
        raise LattqeError(f"{path} maps each image to its vector; leave out --transposed")
    ids, notes = as_ids(list(value), str(path)), ["the keys are taken for ids"]
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
