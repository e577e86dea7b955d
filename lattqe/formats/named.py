"""Files that hold several arrays by name: which of them are the vectors, which way round, which are ids and labels."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.columns import as_ids, as_labels
from lattqe.formats.matrix import MatrixReader, Transposed
from lattqe.formats.reader import Options, is_numeric

VECTOR_NAMES = ("vector", "vectors", "vecs", "x", "features", "feats", "embeddings", "descriptors")
ID_NAMES, LABEL_NAMES = ("ids", "id"), ("labels", "label")
# cnnimageretrieval and revisitop keep one image in each column and use these names.
COLUMN_NAMES = ("vecs", "qvecs", "X", "Q")


def open_named(
    name: str, contents: Mapping[str, Any], options: Options, *, kind: str, columns_are_images: bool | None
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
            notes.append(f"the {way} of {chosen!r} {_shape(matrix)} are taken for images ({other} for the other way)")
    if transposed and len(matrix.shape) == 2:
        matrix = Transposed(matrix)
    rows = matrix.shape[0] if len(matrix.shape) == 2 else 0
    ids, id_note = _beside(contents, ID_NAMES, rows)
    labels, label_note = _beside(contents, LABEL_NAMES, rows)
    return MatrixReader(
        f"{name}: {chosen}" if chosen else name,
        matrix,
        kind=kind,
        ids=None if ids is None else as_ids(contents[ids], f"{name}: {ids}"),
        labels=None if labels is None else as_labels(contents[labels], f"{name}: {labels}"),
        notes=[*notes, *id_note, *label_note],
    )


def choose(name: str, contents: Mapping[str, Any], key: str | None) -> str:
    """Return the name of the vectors: the one asked for, the only matrix, or the only one with a usual name."""
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
    raise LattqeError(f"{name} holds several matrices: {_listing(contents, matrices)}: choose one by --key NAME")


def _is_matrix(value: Any) -> bool:
    return len(getattr(value, "shape", ())) == 2 and is_numeric(value.dtype)


def _beside(contents: Mapping[str, Any], names: tuple[str, ...], rows: int) -> tuple[str | None, list[str]]:
    """Find ids or labels among the arrays; those of another length are left out, and that is said."""
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
