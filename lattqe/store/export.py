"""A feature set for other tools: a .npy or .fvecs matrix, or a faiss index, written in one pass over the blocks."""

from pathlib import PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store.features import FeatureSet
from lattqe.store.place import Place, open_place

BLOCK_ROWS = 16_384
# Enough for 1,000 centroids by faiss's own rule of 256 points for each; more costs time and changes little.
TRAINING_ROWS = 262_144
SUFFIXES = (".npy", ".fvecs", ".faiss", ".index")


def export_features(features: FeatureSet, to: str, factory: str | None = None) -> list[str]:
    """Write `to` (by its suffix .npy, .fvecs, .faiss or .index) and `to`.ids.txt beside it; the names written.

    A faiss index is flat unless `factory` is a faiss factory string. `to` appears last: where it is, all is.
    """
    place, name = _split(to)
    suffix = PurePosixPath(name).suffix
    if suffix not in SUFFIXES:
        raise LattqeError(f"cannot export to {to}: the name must end in one of {', '.join(SUFFIXES)}")
    if factory is not None and suffix not in (".faiss", ".index"):
        raise LattqeError(f"a faiss factory string ({factory}) is of no use for a {suffix} file")
    if place.exists(name):
        raise AlreadyExistsError(f"{to} exists already: choose another name or delete it")
    index = None if suffix in (".npy", ".fvecs") else build_index(features, factory or "Flat")
    written: list[str] = []
    try:
        written.append(f"{name}.ids.txt")
        _write_lines(features, "id", place, written[-1])
        if features.has_labels:
            written.append(f"{name}.labels.txt")
            _write_lines(features, "label", place, written[-1])
        with place.open_output(name) as file:
            if index is not None:
                _write_index(index, file)
            elif suffix == ".npy":
                _write_npy(features, file)
            else:
                _write_fvecs(features, file)
    except BaseException:
        for other in written:
            place.delete(other)
        raise
    return [name, *written]


def _split(to: str) -> tuple[Place, str]:
    """The folder and the name of a file's address."""
    folder, slash, name = to.rpartition("/")
    if not name or folder.endswith(":/"):  # s3://bucket is no file
        raise LattqeError(f"cannot export to {to!r}: give the name of a file")
    return open_place(folder or ("/" if slash else ".")), name


def _write_lines(features: FeatureSet, column: str, place: Place, name: str) -> None:
    with place.open_output(name) as file:
        for start in range(0, features.rows, BLOCK_ROWS):
            values = features.table(start, min(start + BLOCK_ROWS, features.rows)).column(column).to_pylist()
            file.write("".join(f"{value}\n" for value in values).encode())


def _write_npy(features: FeatureSet, file: BinaryIO) -> None:
    shape = (features.rows, features.dim)
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.dtype(features.dtype).str, "fortran_order": False, "shape": shape})
    for _, block in features.blocks(BLOCK_ROWS):
        file.write(np.ascontiguousarray(block).data.cast("B"))


def _write_fvecs(features: FeatureSet, file: BinaryIO) -> None:
    """Each row is its dimension as int32, then its components as float32."""
    for _, block in features.blocks(BLOCK_ROWS):
        rows = np.empty((len(block), features.dim + 1), np.float32)
        rows.view(np.int32)[:, 0] = features.dim
        rows[:, 1:] = block
        file.write(rows.data.cast("B"))


def build_index(features: FeatureSet, factory: str) -> Any:
    """A faiss index by inner product over all rows, trained on a sample that depends on the number of rows alone."""
    import faiss

    try:
        index = faiss.index_factory(features.dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise LattqeError(f"faiss does not know the factory string {factory!r} for {features.dim} dimensions: try "
                          "Flat, \"IVF256,PQ16\" or HNSW32") from error
    if not index.is_trained:
        rows = np.arange(features.rows)
        if features.rows > TRAINING_ROWS:
            rows = np.sort(np.random.default_rng(0).choice(features.rows, TRAINING_ROWS, replace=False))
        try:
            index.train(features.gather(rows).astype(np.float32))
        except RuntimeError as error:
            raise LattqeError(f"faiss cannot train {factory!r} on {len(rows)} rows: use a smaller one") from error
    for _, block in features.blocks(BLOCK_ROWS):
        index.add(block.astype(np.float32))
    return index


def _write_index(index: Any, file: BinaryIO) -> None:
    import faiss

    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # type: ignore[attr-defined]
