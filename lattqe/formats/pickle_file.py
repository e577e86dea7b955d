"""Pickles of plain data, read without unpickling: one matrix, a dict of arrays, or a dict from image to vector.

`load(path)` imports nothing and calls nothing that a file names. A pickle is a program for a small stack machine;
`pickle_machine` is that machine with everything but data taken out: containers, strings, numbers and numpy arrays of
them. A name outside `pickle_names.MEANINGS` is refused by that name.

No declared size is trusted: strings and arrays are slices of the file, and what has to be copied is charged to a budget
in proportion to the file's size. Byte strings of 64 KiB and more, and arrays, are views of the memory-mapped file.
"""

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.matrix import MatrixReader, open_named
from lattqe.formats.pickle_machine import Machine
from lattqe.formats.pickle_names import MEANINGS, Malformed, Name
from lattqe.formats.reader import Options, as_ids, is_numeric


def load(path: str | os.PathLike[str]) -> Any:
    """Read a pickle file: dicts, lists, tuples, sets, strings, bytes, numbers, numpy arrays; anything else is refused.

    Strings of Python 2 are decoded as latin-1.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise LattqeError(f"{path} is empty: a pickle was expected")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LattqeError(f"cannot read {path}: {error.strerror or error}") from error
    return loads(data, str(path))


def loads(
    data: bytes | mmap.mmap,
    name: str = "pickle",
    *,
    meanings: Mapping[Name, Callable[..., Any]] = MEANINGS,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle held in memory; `name` stands in error messages.

    `meanings` are the names the pickle may mention; `persistent` resolves its persistent ids (torch files have them).
    """
    return loads_first(data, name, meanings=meanings, persistent=persistent)[0]


def loads_first(
    data: bytes | mmap.mmap | memoryview,
    name: str,
    *,
    meanings: Mapping[Name, Callable[..., Any]] = MEANINGS,
    persistent: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:
    """Read the pickle that data begins with: its value, and where it ends."""
    machine = Machine(memoryview(data), meanings, persistent)
    try:
        return machine.run(), machine.position
    except Malformed as error:
        raise LattqeError(f"{name} is refused: {error}") from error
    except LattqeError:
        raise
    except Exception as error:  # the program of a damaged file can fail in any way; none of them is a bug of ours
        raise LattqeError(f"{name} is not a readable pickle: damaged near byte {machine.position}") from error


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
    options.refuse_column_names(path, "maps each image to its vector")
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
