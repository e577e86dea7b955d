"""Descriptors of real photographs in four labelled sets (birds, cars, groceries, objects) with class-disjoint splits.

An optional data set, never shipped: a folder with NAME_vectors.npy, NAME_labels.npy, NAME_split.npy and
NAME_isquery.npy for each set.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.truth import LabelTruth

SETS = ("cub200", "cars196", "grocery81", "caltech101")
SPLITS = {"train": 0, "val": 1, "test": 2}
ENVIRONMENT = "LATTQE_DATA"

# Sets are joined, or used as each other's distractors, with labels that do not collide.
LABEL_OFFSET = 1000


@dataclass(frozen=True)
class PhotoSplit:
    """One split of one set. Rows keep their order in the file.

    xb, labels, ids: (n, D) float32 unit vectors, (n,) int32, names: the database, or all images for 'train'.
    xq, query_labels, query_ids: the queries, none for 'train'. They are not part of the database.
    """

    name: str
    split: str
    xb: NDArray[np.float32]
    labels: NDArray[np.int32]
    ids: list[str]
    xq: NDArray[np.float32]
    query_labels: NDArray[np.int32]
    query_ids: list[str]

    @property
    def truth(self) -> LabelTruth:
        """Relevant is what has the query's label."""
        return LabelTruth(self.labels, query_labels=self.query_labels)


def photos_folder(folder: str | Path | None = None) -> Path:
    """The folder given, or `photos` in the folder that the environment variable LATTQE_DATA names."""
    if folder is None:
        if not os.environ.get(ENVIRONMENT):
            raise LattqeError(f"where are the photos? Give their folder, or set {ENVIRONMENT} to the folder above it")
        folder = Path(os.environ[ENVIRONMENT]) / "photos"
    folder = Path(folder)
    if not folder.is_dir():
        raise LattqeError(f"no photos in {folder}: it is not a folder")
    return folder


def photos_in(data: str | Path | None) -> Path:
    """The photographs in a folder, or in `photos` below it; None: where LATTQE_DATA says."""
    if data is not None and (Path(data) / "photos").is_dir():
        data = Path(data) / "photos"
    return photos_folder(data)


def load_photos(name: str, split: str, folder: str | Path | None = None, *, columns: int | None = None) -> PhotoSplit:
    """Load one split ('train', 'val', 'test') of one set.

    columns: keep only the first so many columns (they are in order of variance) and normalise again; 128 trains in
    minutes on two cores.
    """
    if name not in SETS:
        raise LattqeError(f"unknown set of photos {name!r}: choose one of {', '.join(SETS)}")
    if split not in SPLITS:
        raise LattqeError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    folder = photos_folder(folder)
    vectors, labels, splits, isquery = (
        _array(folder / f"{name}_{part}.npy") for part in ("vectors", "labels", "split", "isquery")
    )
    if not len(vectors) == len(labels) == len(splits) == len(isquery):
        raise LattqeError(f"the files of {name} in {folder} do not have the same number of rows")
    if columns is not None and not 1 <= columns <= vectors.shape[1]:
        raise LattqeError(f"columns must be 1..{vectors.shape[1]}, got {columns}")
    mine = splits == SPLITS[split]
    return PhotoSplit(
        name, split, *_rows(mine & ~isquery, name, vectors, labels, columns),
        *_rows(mine & isquery, name, vectors, labels, columns),
    )  # fmt: skip


def _rows(
    mask: NDArray[np.bool_], name: str, vectors: NDArray[Any], labels: NDArray[Any], columns: int | None
) -> tuple[NDArray[np.float32], NDArray[np.int32], list[str]]:
    rows = np.flatnonzero(mask)
    x = vectors[rows, :columns].astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    offset = SETS.index(name) * LABEL_OFFSET
    return x, (labels[rows] + offset).astype(np.int32), [f"{name}_{row:05d}" for row in rows]


def _array(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise LattqeError(f"cannot read {path}: {error}") from error
