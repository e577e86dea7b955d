"""What one training is: its data, its configuration, its destination; and the claim it lays on the destination.

The data are labelled feature sets joined row after row, each its own world for neighbors.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.duplicates import own_rows
from lattqe.errors import LattqeError
from lattqe.model import LAttQE
from lattqe.model.network import VERSION
from lattqe.store import FeatureSet, Manifest, NeighborGraph, open_place
from lattqe.store.artifacts import check_input_kind
from lattqe.store.features import check_same_naming, comparable_labels
from lattqe.store.models import model_address
from lattqe.store.pending import claim, make_plan
from lattqe.store.place import node_folder
from lattqe.training.checkpoint import Team
from lattqe.training.config import TrainingConfig

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
    return TrainingData(joined, class_numbers(labels, shared_labels), bounds, graph, joined_pairs)


def class_numbers(labels: list[NDArray[np.integer]], shared_labels: bool) -> NDArray[np.int64]:
    """The labels (n_s,) of all sets as (n,), 0..classes-1, distinct among sets unless shared; a row whose label is
    below 0 is a class by itself. Classes none of which has two images are refused.
    """
    keys = [
        label.astype(np.int64) if shared_labels else label.astype(np.int64) + (number << 32)
        for number, label in enumerate(labels)
    ]
    joined = np.concatenate([np.where(label < 0, -1, key) for label, key in zip(labels, keys)])
    joined = np.where(joined < 0, -1 - np.arange(len(joined)), joined)
    classes, compact = np.unique(joined, return_inverse=True)
    if len(classes) == len(joined):
        raise LattqeError(f"all {len(classes)} classes have one image only: training needs positives")
    return compact.astype(np.int64)


def _labels(sets: list[FeatureSet], shared_labels: bool) -> list[NDArray[np.integer]]:
    """The labels (n_s,) of each set, of which equal ones mean the same in all sets where they are shared."""
    return list(comparable_labels(*sets)) if shared_labels else [one.labels() for one in sets]


def load(
    features: list[str],
    graphs: list[str],
    k: int | None,
    shared_labels: bool = False,
    cache: str | None = None,
    team: Team | None = None,
) -> TrainingData:
    """Read labelled sets; `k` neighbors for each row come from `graphs` (one for each set) or are computed, by the
    leader of the team for all of its workers.
    """
    sets = [FeatureSet.open(uri, cache=cache) for uri in features]
    check_sets(sets)
    neighbors = (
        None
        if k is None
        else [_neighbors(one, graphs[number] if graphs else None, k, team or Team()) for number, one in enumerate(sets)]
    )
    return join(
        [one.read() for one in sets],
        _labels(sets, shared_labels),
        neighbors,
        shared_labels,
        [published_pairs(one) for one in sets],
    )


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


def _check_once(sets: list[FeatureSet], what: str) -> None:
    """Refuse a set that is given twice, under one name or two: it would count for two."""
    seen: dict[str, str] = {}
    for one in sets:
        if one.digest in seen:
            raise LattqeError(f"{one.uri} holds the same rows as {seen[one.digest]}: give each {what} once")
        seen[one.digest] = one.uri


def _neighbors(features: FeatureSet, graph: str | None, k: int, team: Team) -> NDArray[np.integer]:
    """The k nearest rows of each row, from a stored graph or by exhaustive search."""
    if graph is None:
        from lattqe.search import knn_graph

        k = min(k, features.rows - 1)
        (rows,) = team.from_leader(
            lambda: (knn_graph(features.read(), k, device=team.gpu)[0],), (np.zeros((features.rows, k), np.int32),)
        )
        return rows
    return open_graph(graph, features, k).read(0, features.rows)[0][:, :k]


def open_graph(uri: str, features: FeatureSet, k: int | None) -> NeighborGraph:
    """Open the graph of a training set; refuse that of other features, or one with fewer than k neighbors, where the
    sampler needs any.
    """
    stored = NeighborGraph.open(uri)
    wanted = f"`lattqe neighbors {features.uri}{'' if k is None else f' -k {k}'} --to GRAPH`"
    if stored.rows != features.rows:
        raise LattqeError(
            f"{uri} has {stored.rows} rows and {features.uri} has {features.rows}: give the graph of these features"
        )
    if stored.manifest.inputs.get("features", {}).get("digest", features.digest) != features.digest:
        raise LattqeError(
            f"{uri} was made from other features than {features.uri} holds now: make it again with {wanted}"
        )
    if k is not None and stored.k < k:
        raise LattqeError(
            f"{uri} has {stored.k} neighbors for each row of {features.uri}, training needs {k}: make it with {wanted}"
        )
    return stored


@dataclass(frozen=True)
class TrainingPlan:
    """All that a worker must know; ready to be sent to it as JSON.

    features: labelled training sets; graphs: their neighbor graphs, or none; validation: (database, queries or None);
    cache: folder on each node for parts of S3 sets; inputs: digests of all of these, for the manifest.
    """

    destination: str
    config: TrainingConfig
    features: list[str]
    validation: list[tuple[str, str | None]]
    graphs: list[str] = field(default_factory=list)
    cache: str | None = None
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def training(self) -> dict[str, Any]:
        """The settings that are stored beside the network's own."""
        return {name: value for name, value in self.config.to_dict().items() if name != "network"}

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**vars(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingPlan":
        """The plan written by `to_dict`."""
        pairs = [(database, queries) for database, queries in values["validation"]]
        return cls(**{**values, "validation": pairs, "config": TrainingConfig.from_dict(values["config"])})

    def claim(self) -> Manifest | None:
        """Claim the destination for this training, join an unfinished equal one, or get the finished model."""
        shapes = {
            name: {"shape": list(tensor.shape), "dtype": "float32"}
            for name, tensor in sorted(LAttQE(self.config.network).state_dict().items())
        }
        network = self.config.network
        config = {"version": VERSION, "network": network.to_dict(), "training": self.training}
        return claim(open_place(self.destination), make_plan("model", {"tensors": shapes}, config, self.inputs, None))


def make(
    destination: str,
    config: TrainingConfig,
    features: list[str],
    validation: list[tuple[str, str | None]],
    graphs: list[str] | None = None,
    cache: str | None = None,
) -> TrainingPlan:
    """Open all inputs, refuse what does not fit together, and write down what was found.

    Whatever is wrong with the inputs is said here, before Ray starts and long before a worker would meet it.
    """
    graphs = graphs or []
    if graphs and len(graphs) != len(features):
        raise LattqeError(f"{len(graphs)} neighbor graphs for {len(features)} feature sets: give one for each")
    sets = [FeatureSet.open(uri) for uri in features]
    held_out = [[FeatureSet.open(uri) for uri in pair if uri is not None] for pair in validation]
    check_sets([*sets, *(one for pair in held_out for one in pair)])
    _check_once(sets, "training set")
    _check_once([pair[0] for pair in held_out], "validation set")
    if sets[0].dim != config.network.dim:
        raise LattqeError(f"the features have {sets[0].dim} columns and the network {config.network.dim}")
    class_numbers(_labels(sets, config.shared_labels), config.shared_labels)
    for pair in held_out:
        for one in pair:
            for trained in sets:
                check_apart(trained, one, config.shared_labels)
        check_held_out(pair[0], pair[-1], config)
    stored = _graphs(sets, graphs, config.graph_k)
    inputs = {f"features-{number}": one.as_input() for number, one in enumerate(sets)}
    if config.start:
        config, inputs["start"] = _with_start(config)
    inputs |= {f"neighbors-{number}": one.as_input() for number, one in enumerate(stored)}
    for number, pair in enumerate(held_out):
        inputs |= {f"validation-{number}-{role}": one.as_input() for role, one in zip(("database", "queries"), pair)}
    return TrainingPlan(
        open_place(destination).uri,
        config,
        [one.uri for one in sets],
        [(pair[0].uri, pair[1].uri if len(pair) > 1 else None) for pair in held_out],
        [one.uri for one in stored],
        node_folder(cache),
        inputs,
    )


def _graphs(sets: list[FeatureSet], graphs: list[str], k: int | None) -> list[NeighborGraph]:
    """The graphs given, one for each set; without any, refuse a set that is too large for one made on the way."""
    if graphs:
        return [open_graph(uri, one, k) for uri, one in zip(graphs, sets)]
    for one in sets:
        if k is not None and one.rows > LARGEST_GRAPH:
            raise LattqeError(
                f"{one.uri} has {one.rows} rows: make its graph once with "
                f"`lattqe neighbors {one.uri} -k {k} --to GRAPH` and give --neighbors GRAPH"
            )
    return []


def check_held_out(database: FeatureSet, queries: FeatureSet, config: TrainingConfig) -> None:
    """Refuse a validation database that is too small to choose on, and queries that do not belong to it."""
    check_same_naming(database, queries)
    for name, fitting in zip(("choose_qe", "choose_dba"), config.choices(database.rows)):
        if not fitting:
            raise LattqeError(
                f"{database.uri} has {database.rows} rows, too few to choose on: give a larger --val, or numbers of "
                f"neighbors below {database.rows} with --set {name}=..."
            )


def _with_start(config: TrainingConfig) -> tuple[TrainingConfig, dict[str, Any]]:
    """The configuration with the address of the model that training starts with, and that model as an input."""
    address = open_place(model_address(config.start)).uri
    manifest = check_input_kind(address, "model")
    found, wanted = LAttQE.load(address).config, config.network
    if found.any_width:
        found = dataclasses.replace(found, dim=wanted.dim)
    if found != wanted:
        name = next(f.name for f in dataclasses.fields(found) if getattr(found, f.name) != getattr(wanted, f.name))
        raise LattqeError(
            f"start={config.start}: its network has {name} {getattr(found, name)}, this training "
            f"{getattr(wanted, name)}: use the preset and settings that it was trained with"
        )
    return dataclasses.replace(config, start=address), {"uri": address, "digest": manifest.digest, "kind": "model"}


def check_apart(trained: FeatureSet, held_out: FeatureSet, shared_labels: bool) -> None:
    """Refuse images in both sets, by id and vector, and, where labels can be compared, classes in both.

    Labels can be compared when both sets name their classes, when they were read from one file, or when the user says
    so; otherwise label 7 of one set has nothing to do with label 7 of another.
    """
    rows = own_rows(trained, held_out)
    if rows is not None:
        both = np.flatnonzero(rows >= 0)
        raise LattqeError(
            f"{len(both)} images of {held_out.uri} are also in {trained.uri} "
            f"(id {min(held_out.gather_ids(both))!r}): "
            "validate on images that training does not see"
        )
    named = trained.label_names is not None and held_out.label_names is not None
    sources = [one.manifest.inputs.get("labels", {}).get("digest") for one in (trained, held_out)]
    if not named and not shared_labels and (sources[0] is None or sources[0] != sources[1]):
        return
    classes = set.intersection(
        *({label for label in set(labels.tolist()) if label >= 0} for labels in comparable_labels(trained, held_out))
    )
    if classes:
        one = min(classes) if trained.label_names is None else trained.label_names[min(classes)]
        raise LattqeError(
            f"{len(classes)} classes of {held_out.uri} are also in {trained.uri} "
            f"({one!r} for one): validate on classes that training does not see"
        )
