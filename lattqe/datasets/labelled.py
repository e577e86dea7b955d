"""Labelled sets to train on: descriptors of real photographs, and SfM-120k; read, and prepared as feature sets.

The photographs are four labelled sets (birds, cars, groceries, objects) with class-disjoint splits. An optional data
set, never shipped: a folder with NAME_vectors.npy, NAME_labels.npy, NAME_split.npy and NAME_isquery.npy for each set.

SfM-120k is the published database of training and validation landmarks, `retrieval-SfM-120k.pkl`. Its features,
extracted in the order of `cids`, are the rows; its clusters (3D reconstructions) are the labels.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.datasets.prepare import Folder, MatrixFile, Report, SetProgress, lacking_files, stem, store
from lattqe.errors import LattqeError
from lattqe.evaluation.truth import LabelTruth
from lattqe.formats import pickle_file
from lattqe.formats.matrix import read_header
from lattqe.formats.source import local_files
from lattqe.store import FeatureSet, FeatureWriter, Place, open_place
from lattqe.store.local import scratch_folder

PHOTO_SETS = ("cub200", "cars196", "grocery81", "caltech101")
PHOTO_SPLITS = {"train": 0, "val": 1, "test": 2}
HALVES = ("train", "val")  # of SfM-120k
ENVIRONMENT = "LATTQE_DATA"

PHOTO_FILES = {
    "vectors": (2, "f"),
    "labels": (1, "iu"),
    "split": (1, "iu"),
    "isquery": (1, "b"),
}  # sides, kinds of values

# Sets are joined, or used as each other's distractors, with labels that do not collide.
LABEL_OFFSET = 1000
PAIRS_LOOKED_AT = 2_000


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
            raise LattqeError(
                f"the folder of the photos is not known: give it, or set {ENVIRONMENT} to the folder above it"
            )
        folder = Path(os.environ[ENVIRONMENT]) / "photos"
    folder = Path(folder)
    if not folder.is_dir():
        raise LattqeError(f"no photos in {folder}: it is not a folder")
    return folder


@contextmanager
def photos_in(data: str | Path | None) -> Iterator[Path]:
    """The photographs in a folder or s3:// prefix, or in `photos` below it, on this disk for as long as they are read;
    None: where LATTQE_DATA says.
    """
    if data is None:
        yield photos_folder()
        return
    place = open_place(str(data))
    if place.is_local:
        below = Path(place.uri) / "photos"
        yield photos_folder(below if below.is_dir() else place.uri)
        return
    with scratch_folder("photos") as scratch:
        there = place.child("photos") if place.exists(f"photos/{PHOTO_SETS[0]}_vectors.npy") else place
        for name in PHOTO_SETS:
            _download_photos(there, name, scratch)
        yield scratch


def _download_photos(place: Place, name: str, folder: Path) -> None:
    """Copy the files of one set to a folder on disk."""
    for part in PHOTO_FILES:
        place.download(f"{name}_{part}.npy", folder / f"{name}_{part}.npy")


def load_photos(name: str, split: str, folder: str | Path | None = None, *, columns: int | None = None) -> PhotoSplit:
    """Load one split ('train', 'val', 'test') of one set.

    columns: keep only that many columns, the first (they are in order of variance) and normalise again; 128 trains in
    minutes on two cores.
    """
    if name not in PHOTO_SETS:
        raise LattqeError(f"unknown set of photos {name!r}: choose one of {', '.join(PHOTO_SETS)}")
    if split not in PHOTO_SPLITS:
        raise LattqeError(f"unknown split {split!r}: choose one of {', '.join(PHOTO_SPLITS)}")
    folder = photos_folder(folder)
    vectors, labels, splits, isquery = (
        _array(folder / f"{name}_{part}.npy", *kind) for part, kind in PHOTO_FILES.items()
    )
    if not len(vectors) == len(labels) == len(splits) == len(isquery):
        raise LattqeError(f"the files of {name} in {folder} do not have the same number of rows")
    if columns is not None and not 1 <= columns <= vectors.shape[1]:
        raise LattqeError(f"columns must be 1..{vectors.shape[1]}, got {columns}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < LABEL_OFFSET:
        raise LattqeError(f"{name} has labels {labels.min()}..{labels.max()}: they must be 0..{LABEL_OFFSET - 1}")
    mine = splits == PHOTO_SPLITS[split]
    return PhotoSplit(
        name, split, *_rows(mine & ~isquery, name, vectors, labels, columns),
        *_rows(mine & isquery, name, vectors, labels, columns),
    )  # fmt: skip


def _rows(
    mask: NDArray[np.bool_], name: str, vectors: NDArray[Any], labels: NDArray[Any], columns: int | None
) -> tuple[NDArray[np.float32], NDArray[np.int32], list[str]]:
    rows = np.flatnonzero(mask)
    x = vectors[rows, :columns].astype(np.float32)
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    wrong = np.flatnonzero(~((lengths > 0) & np.isfinite(lengths)))
    if len(wrong):
        raise LattqeError(f"the vector of row {rows[wrong[0]]} of {name} has length {lengths[wrong[0], 0]}")
    x /= lengths
    offset = PHOTO_SETS.index(name) * LABEL_OFFSET
    return x, (labels[rows] + offset).astype(np.int32), [f"{name}_{row:05d}" for row in rows]


def _array(path: Path, sides: int, kinds: str) -> NDArray[Any]:
    """The array in a file, mapped; refused where it has another number of sides or another kind of values."""
    if not path.is_file():
        raise LattqeError(f"cannot read {path}: there is no such file")
    try:
        read_header(path)  # damaged ones are reported in one line
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, OverflowError) as error:
        raise LattqeError(f"cannot read {path}: {error}") from error
    if array.ndim != sides or array.dtype.kind not in kinds:
        raise LattqeError(f"{path} holds {array.dtype} values of shape {array.shape}: this is not a file of photos")
    return array


@dataclass(frozen=True)
class SfmHalf:
    """The training or the validation half.

    ids: names of the images, row by row. labels: (n,) int32 cluster. query_rows, positive_rows: (m,) int64 the
    published pairs; in validation the query rows are the queries, searched among all rows but themselves.
    """

    ids: tuple[str, ...]
    labels: NDArray[np.int32]
    query_rows: NDArray[np.int64]
    positive_rows: NDArray[np.int64]

    @property
    def truth(self) -> LabelTruth:
        """Relevant is what has the query's cluster; the query itself is taken out. One query for each distinct row."""
        return LabelTruth(self.labels, query_rows=np.unique(self.query_rows))

    def positives_of_rows(self) -> list[list[str]]:
        """For each row the ids of its published positives; none for rows that are not queries."""
        positives: list[list[str]] = [[] for _ in self.ids]
        for query, positive in zip(self.query_rows.tolist(), self.positive_rows.tolist()):
            if self.ids[positive] not in positives[query]:
                positives[query].append(self.ids[positive])
        return positives


def load_sfm120k(path: str | Path, half: str) -> SfmHalf:
    """Read and check one half, 'train' or 'val', of the published pickle."""
    if half not in HALVES:
        raise LattqeError(f"unknown half {half!r} of SfM-120k: choose one of {', '.join(HALVES)}")
    content = pickle_file.load(path)
    if not isinstance(content, Mapping) or half not in content or not isinstance(content[half], Mapping):
        raise LattqeError(f"{path} has no half {half!r}: expected a dict with 'train' and 'val'")
    try:
        return _checked(content[half])
    except LattqeError as error:
        raise LattqeError(f"{path}, {half}: {error}") from error


def _checked(db: Mapping[str, Any]) -> SfmHalf:
    missing = [key for key in ("cids", "cluster", "qidxs", "pidxs") if key not in db]
    if missing:
        raise LattqeError(f"key {missing[0]!r} is missing; expected cids, cluster, qidxs and pidxs")
    if not isinstance(db["cids"], (Sequence, np.ndarray)) or getattr(db["cids"], "ndim", 1) != 1:
        raise LattqeError(f"cids must be a list of names, found {db['cids']!r:.60}")
    ids = tuple(str(name) for name in db["cids"])
    if not ids or len(set(ids)) < len(ids):
        raise LattqeError(f"cids must be distinct names, found {len(ids)} with {len(set(ids))} distinct")
    clusters = _integers(db["cluster"], "cluster")
    queries, positives = (_integers(db[key], key) for key in ("qidxs", "pidxs"))
    if len(clusters) != len(ids):
        raise LattqeError(f"{len(clusters)} clusters for {len(ids)} images")
    if len(queries) != len(positives):
        raise LattqeError(f"{len(queries)} qidxs for {len(positives)} pidxs")
    for key, rows in (("qidxs", queries), ("pidxs", positives)):
        outside = rows[(rows < 0) | (rows >= len(ids))]
        if len(outside):
            raise LattqeError(f"{key} names row {outside[0]} of {len(ids)} images")
    if len(clusters) and (clusters.min() < 0 or clusters.max() > np.iinfo(np.int32).max):
        raise LattqeError(f"clusters must be 0 or more and fit int32, found {clusters.min()}..{clusters.max()}")
    return SfmHalf(ids, clusters.astype(np.int32), queries, positives)


def _integers(value: Any, key: str) -> NDArray[np.int64]:
    try:
        if not isinstance(value, (Sequence, np.ndarray)):
            raise ValueError
        array = np.asarray(value).reshape(-1)  # lists within lists of different lengths: ValueError
        if array.size and array.dtype.kind not in "iu":
            raise ValueError
    except ValueError:
        raise LattqeError(f"{key} must be a list of whole numbers, found {value!r:.60}") from None
    return array.astype(np.int64)


def prepare_sfm120k(source: str, to: str, dtype: str = "float16", progress: SetProgress = lambda *_: None) -> Report:
    """SfM-120k: sfm120k-train, sfm120k-val and sfm120k-val-queries below `to`, labelled by cluster.

    The folder holds the published pickle (its name has 'sfm' in it) and the descriptors of the images of each half, in
    the order of `cids`: files with 'train' and 'val' in their names. The published pairs are the column `positives`.
    """
    folder, report = Folder.open(source), Report()
    pickles = [
        name
        for name in folder.names
        if name.endswith(".pkl") and re.search("sfm", stem(name)) and not re.search("(^|[^a-z])(train|val)", stem(name))
    ]
    matrices = {
        half: [name for name in folder.matrices(rf"(^|[^a-z]){half}") if name not in pickles] for half in HALVES
    }
    lacking = ["retrieval-SfM-120k.pkl, the published database"] * (not pickles)
    lacking += [
        f"descriptors of the half {half!r} (a file with {half!r} in its name)" for half in HALVES if not matrices[half]
    ]
    if lacking:
        raise lacking_files(folder, lacking)
    database = folder.one(pickles, "the database of SfM-120k")
    for half in HALVES:
        with local_files({"db": folder.uri(database)}) as local:
            content = load_sfm120k(local["db"], half)
        matrix = folder.one(matrices[half], f"the descriptors of the half {half!r}")
        whole = MatrixFile(
            folder.uri(matrix),
            content.ids,
            f"cids of {half!r} in {database}",
            content.labels,
            content.positives_of_rows(),
        )
        features = whole.write(f"{to.rstrip('/')}/sfm120k-{half}", dtype, report, progress)
        _check_order(features, content, folder.uri(matrix))
        if half == "val":
            _write_rows(features, np.unique(content.query_rows), f"{to.rstrip('/')}/sfm120k-val-queries", report)
    return report


def _check_order(features: FeatureSet, half: SfmHalf, matrix: str) -> None:
    """Published pairs show the same object: where they are no more alike than any two rows, the order is wrong."""
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(half.query_rows))[:PAIRS_LOOKED_AT]
    if len(chosen) < 8:
        return
    queries = features.gather(half.query_rows[chosen]).astype(np.float32)
    pairs = (queries * features.gather(half.positive_rows[chosen]).astype(np.float32)).sum(axis=1)
    any_two = (queries * features.gather(rng.integers(features.rows, size=len(chosen))).astype(np.float32)).sum(axis=1)
    spread = np.hypot(pairs.std(), any_two.std()) / np.sqrt(len(chosen))
    if pairs.mean() <= any_two.mean() + 4 * spread:
        raise LattqeError(
            f"{matrix}: published pairs have a mean similarity of {pairs.mean():.3f} and any two rows "
            f"{any_two.mean():.3f}: its rows are not the images of cids in their order; "
            f"delete {features.uri} and give those"
        )


def _write_rows(features: FeatureSet, rows: NDArray[np.int64], to: str, report: Report) -> None:
    """Some rows of a labelled set as a separate set, value for value."""
    writer = FeatureWriter(
        to,
        features.dim,
        features.dtype,
        labels=True,
        normalise=False,
        label_names=features.label_names,
        config={"job": "dataset", "rows": len(rows)},
        inputs={"features": features.as_input()},
    )
    if writer.finished is None:
        with writer:
            ids, labels = features.ids(), features.labels()
            writer.append(features.gather(rows), [ids[row] for row in rows], labels[rows])
    report.made[to.rsplit("/", 1)[-1]] = FeatureSet.open(to)


def prepare_photos(source: str, to: str, columns: int | None = None, progress: SetProgress = lambda *_: None) -> Report:
    """Labelled photographs: NAME-train, and NAME-val and NAME-test with their -queries, for the sets that are there."""
    folder, report = Folder.open(source), Report()
    prefix = "photos/" if any(name.startswith("photos/") for name in folder.names) else ""
    there = folder.place.child("photos") if prefix else folder.place
    present = [name for name in PHOTO_SETS if f"{prefix}{name}_vectors.npy" in folder.names]
    if not present:
        raise lacking_files(folder, [f"NAME_vectors.npy of {', '.join(PHOTO_SETS)}"])
    for name in present:
        lacking = [f"{name}_{part}.npy" for part in PHOTO_FILES if f"{prefix}{name}_{part}.npy" not in folder.names]
        if lacking:
            raise lacking_files(folder, lacking)
        with scratch_folder("dataset") as scratch:
            local = Path(there.uri) if there.is_local else scratch
            if not there.is_local:
                _download_photos(there, name, scratch)
            for split in PHOTO_SPLITS:
                _store_photos(load_photos(name, split, local, columns=columns), to, report)
        progress(name, 1, 1)
    return report


def _store_photos(split: PhotoSplit, to: str, report: Report) -> None:
    name, dim = f"{split.name}-{split.split}", split.xb.shape[1]
    source: dict[str, object] = {"photos": split.name, "split": split.split, "columns": dim}
    report.made[name] = store(f"{to.rstrip('/')}/{name}", [(split.xb, split.ids, split.labels)], dim, source)
    if len(split.xq):
        asked = [(split.xq, split.query_ids, split.query_labels)]
        report.made[f"{name}-queries"] = store(f"{to.rstrip('/')}/{name}-queries", asked, dim, source)
