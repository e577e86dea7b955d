"""Training data: labelled feature sets joined row after row, each its own world for neighbors."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, NeighborGraph
from lattqe.store.features import comparable_labels

# Beyond this many rows the graph is a job of its own (`lattqe neighbors`), spread over a cluster.
LARGEST_GRAPH = 200_000


@dataclass(frozen=True)
class TrainingData:
    """The rows of all sets, one set after the other.

    vectors (n, D) float16 or float32; labels (n,) int64, 0..classes-1, distinct among sets unless shared;
    bounds (sets + 1,): set s is the rows bounds[s]..bounds[s + 1]; neighbors (n, K) int64 row numbers within the same
    set, -1 for missing, or None where the sampler finds its own; pairs (m, 2) int64 rows of published queries and
    their positives, by query, or None.
    """

    vectors: NDArray[np.floating]
    labels: NDArray[np.int64]
    bounds: NDArray[np.int64]
    neighbors: NDArray[np.int64] | None = None
    pairs: NDArray[np.int64] | None = None

    @property
    def rows(self) -> int:
        """Images in all sets together."""
        return len(self.labels)

    @property
    def dim(self) -> int:
        """Columns of the vectors."""
        return self.vectors.shape[1]

    @property
    def class_sizes(self) -> NDArray[np.int64]:
        """(classes,) images of each class."""
        return np.bincount(self.labels).astype(np.int64)

    @property
    def skipped(self) -> int:
        """Classes with one image only: they have no positive."""
        return int((self.class_sizes == 1).sum())

    def gather(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The vectors of rows (...,) as (..., D) float32, of unit length (half precision is a little off)."""
        found = self.vectors[rows].astype(np.float32)
        found /= np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-12)
        return found


def join(
    vectors: list[NDArray[np.floating]],
    labels: list[NDArray[np.integer]],
    neighbors: list[NDArray[np.integer]] | None = None,
    shared_labels: bool = False,
    pairs: list[NDArray[np.int64]] | None = None,
) -> TrainingData:
    """Join sets of vectors (n_s, D) and labels (n_s,), with graphs (n_s, K) and pairs (m_s, 2) of rows within each set.

    A label below 0 means 'belongs to nothing': such a row is a class by itself, a neighbor and a negative for others.
    """
    bounds = np.concatenate(([0], np.cumsum([len(block) for block in vectors]))).astype(np.int64)
    keys = [
        label.astype(np.int64) if shared_labels else label.astype(np.int64) + (number << 32)
        for number, label in enumerate(labels)
    ]
    joined_labels = np.concatenate([np.where(label < 0, -1, key) for label, key in zip(labels, keys)])
    joined_labels = np.where(joined_labels < 0, -1 - np.arange(len(joined_labels)), joined_labels)
    compact = np.unique(joined_labels, return_inverse=True)[1].astype(np.int64)
    graph = None
    if neighbors is not None:
        width = min(block.shape[1] for block in neighbors)
        graph = np.concatenate(
            [
                np.where(block[:, :width] < 0, -1, block[:, :width].astype(np.int64) + start)
                for block, start in zip(neighbors, bounds)
            ]
        )
    joined = vectors[0] if len(vectors) == 1 else np.concatenate(vectors)
    joined_pairs = None
    if pairs is not None and any(map(len, pairs)):
        joined_pairs = np.concatenate([own + start for own, start in zip(pairs, bounds)])
        joined_pairs = joined_pairs[np.argsort(joined_pairs[:, 0], kind="stable")]
    data = TrainingData(joined, compact, bounds, graph, joined_pairs)
    if (data.class_sizes < 2).all():
        raise LattqeError(f"all {len(data.class_sizes)} classes have one image only: training needs positives")
    return data


def load(
    features: list[str], graphs: list[str], k: int | None, shared_labels: bool = False, cache: str | None = None
) -> TrainingData:
    """Read labelled sets; `k` neighbors for each row come from `graphs` (one for each set) or are computed."""
    sets = [FeatureSet.open(uri, cache=cache) for uri in features]
    check_sets(sets)
    neighbors = (
        None
        if k is None
        else [_neighbors(one, graphs[number] if graphs else None, k) for number, one in enumerate(sets)]
    )
    labels = comparable_labels(*sets) if shared_labels else [one.labels() for one in sets]
    return join([one.read() for one in sets], labels, neighbors, shared_labels, [published_pairs(one) for one in sets])


def published_pairs(features: FeatureSet) -> NDArray[np.int64]:
    """Rows (m, 2) of queries and positives that the set's column `positives` names by id; none without such a column.

    Positives that are not in the set, because some of its rows were left out, do not count.
    """
    if "positives" not in features.columns:
        return np.empty((0, 2), dtype=np.int64)
    place = {name: row for row, name in enumerate(features.ids())}
    column = features.table(0, features.rows).column("positives").to_pylist()
    pairs = [(row, place[name]) for row, names in enumerate(column) for name in names or () if name in place]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def check_sets(sets: list[FeatureSet]) -> None:
    """Refuse sets without labels or of different widths, by name."""
    for one in sets:
        if not one.has_labels:
            raise LattqeError(f"{one.uri} has no labels: import it with a label for each image")
        if one.dim != sets[0].dim:
            raise LattqeError(
                f"{one.uri} has {one.dim} columns and {sets[0].uri} has {sets[0].dim}: train on vectors of one network"
            )


def _neighbors(features: FeatureSet, graph: str | None, k: int) -> NDArray[np.integer]:
    """The k nearest rows of each row, from a stored graph or by exhaustive search."""
    if graph is None:
        from lattqe.search import knn_graph

        if features.rows > LARGEST_GRAPH:
            raise LattqeError(
                f"{features.uri} has {features.rows} rows: make its graph once with "
                f"`lattqe neighbors {features.uri} -k {k} --to GRAPH` and give --neighbors GRAPH"
            )
        return knn_graph(features.read(), min(k, features.rows - 1))[0]
    stored = NeighborGraph.open(graph)
    if stored.rows != features.rows:
        raise LattqeError(
            f"{graph} has {stored.rows} rows and {features.uri} has {features.rows}: give the graph of these features"
        )
    made_from = stored.manifest.inputs.get("features", {}).get("digest", features.digest)
    if made_from != features.digest:
        raise LattqeError(
            f"{graph} was made from other features than {Path(features.uri).name} holds now: "
            f"make it again with `lattqe neighbors {features.uri} -k {k} --to GRAPH`"
        )
    if stored.k < k:
        raise LattqeError(f"{graph} has {stored.k} neighbors for each row, training wants {k}: make it with -k {k}")
    return stored.read(0, stored.rows)[0][:, :k]
