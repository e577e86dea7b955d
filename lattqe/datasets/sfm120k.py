"""SfM-120k: the published database of training and validation landmarks, `retrieval-SfM-120k.pkl`.

Its features, extracted in the order of `cids`, are the rows; its clusters (3D reconstructions) are the labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.truth import LabelTruth
from lattqe.formats import pickle_file

HALVES = ("train", "val")


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
        """For each row the ids of its published positives; none for rows that are no queries."""
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
    array = np.asarray(value).reshape(-1) if isinstance(value, (Sequence, np.ndarray)) else np.array(["?"])
    if array.size and array.dtype.kind not in "iu":
        raise LattqeError(f"{key} must be a list of whole numbers, found {value!r:.60}")
    return array.astype(np.int64)
