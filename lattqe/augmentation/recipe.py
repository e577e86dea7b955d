"""An augmented index as a task and by its manifest: what is to be made, what made it, whether it is what that makes."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lattqe.adaptation import Adaptation, adapt_to
from lattqe.device import gpu_or_none
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.expansion import create
from lattqe.expansion.base import HOP_ALPHA, Expanded, check_hops
from lattqe.expansion.rows import augment_rows
from lattqe.search import Index
from lattqe.search.index import StoredIndex
from lattqe.store import Edges, FeatureSet, NeighborGraph, Place, find_manifest, read_manifest
from lattqe.store.manifest import seal_bytes, unseal_bytes
from lattqe.store.place import absolute, node_folder, open_place
from lattqe.whitening import whiten_features

BAND_ROWS = 16_384  # 20 MiB of edges at k = 50: some seconds of work between two looks at the queue
MOST_BANDS = 256  # their transposition reads the square of that many pieces
GROUP_BYTES = 512 << 20  # of all rows of a group of columns, held by a worker
JOB = "augment"
# What a job made on the way is stored in the index itself, so that it is copied and moved together with it.
GRAPH, ORIGINALS, EDGES = "neighbors", "originals", "edges"
# The map of the space, the rows that went through it, and those that joined later.
ADAPTATION, ADAPTED, ARRIVALS = "adaptation", "adapted", "arrivals"
# Between a vector computed again on another machine and the stored one, before the stored one's own rounding.
TOLERANCE = 2e-5
EDGE_TOLERANCE = 2e-4  # of a weight, beside the largest of its row: shared first products differ that much
COARSE_TOLERANCE = 0.05  # of both, where the network was computed in half or int8: the check is made in float32
MOST_HOPPED_AGAIN = 100_000
ROUNDING = {"float16": 2.0**-11, "float32": 2.0**-24}
REUSABLE = "_work/reusable/"
# Rows a worker expands between two looks at the queue: seconds at 128-D, some minutes at 2048-D on one CPU core.
BLOCK_ROWS = 2048


@dataclass(frozen=True)
class HopTask:
    """What to compute: all that decides the result, and nothing larger than a line, for it goes to every worker."""

    features: str  # URI of the original rows
    edges: str  # URI of their edges
    to: str  # where a Pending has been begun
    hops: int
    alpha: float
    cache: str | None = None  # node-local folder that keeps remote rows
    band_rows: int = BAND_ROWS
    group_bytes: int = GROUP_BYTES
    device: str = "cpu"  # the kind that hops are computed on: it decides the last bits

    def __post_init__(self) -> None:
        """Make addresses absolute, for the workers."""
        for name in ("features", "edges", "to"):
            object.__setattr__(self, name, absolute(getattr(self, name)))
        object.__setattr__(self, "cache", node_folder(self.cache))

    def cut(self, rows: int, dim: int) -> "HopCut":
        """The cut of that many rows and columns."""
        return HopCut.of(rows, dim, self.band_rows, self.group_bytes)


@dataclass(frozen=True)
class HopCut:
    """Bands of rows and groups of columns."""

    rows: int
    dim: int
    band_rows: int
    group_bytes: int

    @classmethod
    def of(cls, rows: int, dim: int, band_rows: int = BAND_ROWS, group_bytes: int = GROUP_BYTES) -> "HopCut":
        """The cut by these sizes, with larger bands where there would be too many."""
        return cls(rows, dim, max(band_rows, -(-rows // MOST_BANDS)), group_bytes)

    @cached_property
    def bands(self) -> list[tuple[int, int]]:
        """First and last+1 row of each band."""
        return [(start, min(start + self.band_rows, self.rows)) for start in range(0, self.rows, self.band_rows)]

    @cached_property
    def groups(self) -> list[slice]:
        """The columns of each group."""
        from lattqe.expansion.diffusion import column_groups  # and scipy, which a search need not wait for

        return column_groups(self.rows, self.dim, self.group_bytes)

    @property
    def band_sizes(self) -> list[int]:
        """Rows of each band."""
        return [stop - first for first, stop in self.bands]

    @property
    def group_sizes(self) -> list[int]:
        """Columns of each group."""
        return [group.stop - group.start for group in self.groups]


def describe(
    method: str,
    k: int,
    params: dict[str, Any],
    hops: int = 1,
    hop_alpha: float = 0.0,
    device: str = "cpu",
    adapt: bool = False,
) -> dict[str, Any]:
    """The configuration that an augmented index carries in its manifest; a model is named among the inputs.

    A device other than the CPU is named, because the last bits of the vectors depend on it.
    """
    described = {
        "job": JOB,
        "method": method,
        "k": k,
        "params": {name: value for name, value in params.items() if name != "model"},
    }
    described |= {"device": device} if device != "cpu" else {}
    described |= {"adapt": True} if adapt else {}
    return described | ({"hops": hops, "hop_alpha": hop_alpha} if hops > 1 else {})


def is_augmented(features: FeatureSet) -> bool:
    """Whether a feature set is an index that an augmentation made."""
    return features.manifest.config.get("job") == JOB


def adaptation_of(rows: FeatureSet) -> Adaptation | None:
    """What the rows of a set went through, and queries must go through before they search it; None: nothing."""
    return Adaptation.load(find_input(rows, ADAPTATION, ADAPTATION))[0] if ADAPTATION in rows.manifest.inputs else None


def adaptation_for(rows: FeatureSet, others: FeatureSet) -> Adaptation | None:
    """What another set has to go through to be compared with some rows; None: nothing, or it has been already."""
    ours, theirs = (each.manifest.inputs.get(ADAPTATION, {}).get("digest") for each in (rows, others))
    if theirs is not None and theirs != ours:
        raise LattqeError(f"{others.uri} was adapted to another collection than {rows.uri}: give it as it was before")
    return adaptation_of(rows) if theirs is None else None


def adapt(original: FeatureSet, index: Index, to: str) -> None:
    """Learn the adaptation of an index in `to` from its rows, or find the one that an earlier run learned."""
    place = open_place(f"{to.rstrip('/')}/{ADAPTATION}")
    inputs = {"features": original.as_input()}
    if (there := find_manifest(place)) is None:
        adapt_to(index).save(place.uri, inputs)
    elif there.inputs.get("features", {}).get("digest") != original.digest:
        raise LattqeError(f"{place.uri} is of other features: choose another destination or delete {to}")


def adapted_rows(original: FeatureSet, to: str, on_rows: Callable[[int], None]) -> FeatureSet:
    """The rows of an index in `to`, adapted to their collection in this process, or found where an earlier run was.

    `cluster.augmentation.adapted_rows` does it on Ray, with the same bytes. `on_rows(n)` after each n rows.
    """
    base = to.rstrip("/")
    adapt(original, StoredIndex([original], gpu_or_none()), to)
    whiten_features(original, f"{base}/{ADAPTATION}", f"{base}/{ADAPTED}", on_part=lambda rows, _: on_rows(rows))
    return FeatureSet.open(f"{base}/{ADAPTED}")


@dataclass(frozen=True)
class Recipe:
    """Method and inputs of one augmented index, found again and checked by digest."""

    method: str
    k: int
    params: dict[str, Any]
    features: FeatureSet
    graph: NeighborGraph
    inputs: dict[str, dict[str, str]]
    hops: int = 1
    hop_alpha: float = HOP_ALPHA
    edges: Edges | None = None  # of an index of several hops
    adapt: bool = False  # whether the features are adapted ones

    @classmethod
    def of(cls, index: FeatureSet, cache: str | None = None) -> "Recipe":
        """Read the recipe of an index; one that no augmentation made is refused."""
        config, inputs = index.manifest.config, index.manifest.inputs
        if not is_augmented(index) or not {"features", "neighbors"} <= set(inputs):
            raise LattqeError(f"{index.uri} was not made by `lattqe augment`: its manifest names no method and graph")
        _check_config(config, index.uri)
        params = dict(config["params"])
        if "model" in inputs:
            params["model"] = find_input(index, "model", "model")
        features = FeatureSet.open(find_input(index, "features", ORIGINALS, ADAPTED), cache)
        graph = NeighborGraph.open(find_input(index, "neighbors", GRAPH), cache)
        adapted = bool(config.get("adapt", False))
        recipe = cls(config["method"], int(config["k"]), params, features, graph, inputs, adapt=adapted)
        if config.get("hops", 1) == 1:
            return recipe
        edges = Edges.open(find_input(index, "edges", EDGES), cache)
        return replace(recipe, hops=int(config["hops"]), hop_alpha=float(config["hop_alpha"]), edges=edges)


def _check_config(config: dict[str, Any], uri: str) -> None:
    """Refuse a configuration, whose checksum may fit, that no augmentation writes."""
    kinds = {"method": str, "k": int, "params": dict, "hops": int, "hop_alpha": float, "adapt": bool}
    for name, kind in kinds.items():
        value = config.get(name)
        missing = value is None and (name in ("hops", "adapt") or (name == "hop_alpha" and config.get("hops", 1) == 1))
        if not missing and type(value) is not kind:
            raise CorruptDataError(f"the manifest of {uri} names {name} {value!r}, which is no {kind.__name__}")


def find_input(index: FeatureSet, name: str, *inside: str) -> str:
    """The address of an input: within the index, or where it was when the index was made; the digest decides."""
    recorded = index.manifest.inputs[name]
    seen = []
    for uri in (*(f"{index.uri.rstrip('/')}/{each}" for each in inside), recorded["uri"]):
        try:
            found = read_manifest(open_place(uri)).digest
        except LattqeError as error:
            seen.append(str(error))
            continue
        if found == recorded["digest"]:
            return uri
        seen.append(f"{uri} has another digest ({found[:12]} instead of {recorded['digest'][:12]})")
    raise LattqeError(f"the {name} that made {index.uri} could not be found: {seen[-1]}")


def hops_again(index: FeatureSet) -> bool:
    """Whether `recompute` computes all hops again: not of more rows than fit one process."""
    return index.manifest.config.get("hops", 1) > 1 and index.rows <= MOST_HOPPED_AGAIN


def recompute(index: FeatureSet, count: int, seed: int = 0, cache: str | None = None) -> float:
    """Compute `count` random rows again; return the largest deviation, or raise CorruptDataError with the row.

    Of an index of several hops, the edges of these rows; then, where `hops_again`, all hops over all recorded edges,
    for a row after them depends on rows far away.
    """
    recipe = Recipe.of(index, cache)
    coarse = COARSE_TOLERANCE if recipe.params.get("precision", "float32") != "float32" else 0.0
    method = create(recipe.method, **{name: value for name, value in recipe.params.items() if name != "precision"})
    rows = np.sort(np.random.default_rng(seed).permutation(index.rows)[:count])
    I, D = recipe.graph.gather(rows)
    done = augment_rows(StoredIndex([recipe.features]), rows, D, I, method, recipe.k)
    expected = done.vectors
    if recipe.edges is not None:
        off = _check_edges(recipe.edges, rows, done, max(EDGE_TOLERANCE, coarse))
        if not hops_again(index):
            return off
        from lattqe.expansion.diffusion import hop

        expected = hop(*recipe.edges.read(), recipe.features.read(), recipe.hop_alpha, recipe.hops)[rows]
    deviation = np.abs(index.gather(rows).astype(np.float32) - expected).max(axis=1, initial=0.0)
    worst = int(deviation.argmax()) if len(rows) else 0
    if len(rows) and deviation[worst] > max(TOLERANCE, coarse) + ROUNDING[index.dtype]:
        raise CorruptDataError(
            f"row {rows[worst]} of {index.uri} is not what its recipe gives: off by {deviation[worst]:.2g}"
        )
    return float(deviation.max(initial=0.0))


def _check_edges(edges: Edges, rows: np.ndarray, again: Expanded, tolerance: float) -> float:
    """Hold stored edges of some rows against the same computed again; the largest deviation of a weight."""
    weights, neighbors = edges.gather(rows)
    t = neighbors.shape[1]
    scale = np.maximum(1, np.abs(again.weights[:, :t]).max(axis=1, initial=0.0))
    off = np.abs(weights - again.weights[:, :t]).max(axis=1, initial=0.0) / scale
    wrong = np.flatnonzero((off > tolerance) | (neighbors != again.rows[:, :t]).any(axis=1))
    if len(wrong):
        raise CorruptDataError(
            f"the edges of row {rows[wrong[0]]} in {edges.uri} are not what their recipe gives: "
            f"off by {off[wrong[0]]:.2g}"
        )
    return float(off.max(initial=0.0))


@dataclass(frozen=True)
class Augmentation:
    """What to compute: all that decides the result, and nothing larger than a line, for it goes to every worker."""

    features: str  # URI of the original rows
    graph: str  # URI of their neighbors
    to: str  # where a Pending has been begun
    method: str
    k: int
    params: dict[str, Any] = field(default_factory=dict)
    cache: str | None = None  # node-local folder that keeps remote rows
    block_rows: int = BLOCK_ROWS
    previous: str | None = None  # an index (or its edges) whose rows may be taken over, as `write_reusable` said
    hops: int = 1  # 1: each row from its own neighbors; above: features flow that many times over all rows' edges
    hop_alpha: float = HOP_ALPHA  # share of a hop that comes from the neighbors
    only_edges: bool = False  # `to` is not an index, but the edges of one
    device: str = "cpu"  # the kind that workers compute on: it decides the last bits
    adapt: bool = False  # whether `features` are adapted ones

    def __post_init__(self) -> None:
        """Make addresses absolute, for the workers."""
        for name in ("features", "graph", "to", "previous"):
            value = getattr(self, name)
            object.__setattr__(self, name, value and absolute(value))
        object.__setattr__(self, "cache", node_folder(self.cache))
        if isinstance(self.params.get("model"), str):
            object.__setattr__(self, "params", {**self.params, "model": absolute(self.params["model"])})
        check_hops(self.hops, self.hop_alpha)

    @property
    def hopping(self) -> bool:
        """Whether what is to be made are hops over finished edges."""
        return self.hops > 1 and not self.only_edges

    @property
    def edges(self) -> str:
        """Where the edges of an index are."""
        return f"{self.to}/{EDGES}"

    def stages(self) -> "list[Augmentation]":
        """What to begin, build and finish, one after the other."""
        if not self.hopping:
            return [self]
        return [replace(self, to=self.edges, only_edges=True), replace(self, previous=None)]

    def hop_task(self) -> HopTask:
        """The hops over the edges."""
        return HopTask(self.features, self.edges, self.to, self.hops, self.hop_alpha, self.cache, device=self.device)


def write_reusable(place: Place, part: int, reusable: np.ndarray) -> None:
    """Say for the rows (n,) of one part of the graph which row of the previous index each may be taken from, -1:
    expand it.
    """
    place.write(f"{REUSABLE}{part:05d}.bin", seal_bytes(reusable.astype("<i8").tobytes()))


def read_reusable(place: Place, part: int) -> np.ndarray:
    """What `write_reusable` wrote, (n,) int64."""
    name = f"{REUSABLE}{part:05d}.bin"
    return np.frombuffer(unseal_bytes(place.read(name), f"{place.uri}/{name}"), "<i8")


@dataclass
class AugmentSummary:
    """What it took, added up block by block."""

    items: int = 0  # blocks and parts
    took: float = 0.0  # seconds, from beginning to end
    retries: int = 0  # items asked again after a failure, on Ray
    workers_lost: int = 0
    spare_copies: int = 0  # stragglers that were started a second time
    read: Counter[str] = field(default_factory=Counter)  # bytes from storage, by what was done with them
    written: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)  # of all workers, by what they did
    peak_bytes: int = 0  # of the largest worker, mapped files included
    expanded: int = 0  # rows that went through the method; the others were taken over
    tables: int = 0  # of shared first products, one for each worker that made one
    cpu: float = 0.0  # processor seconds of all workers
    working: float = 0.0  # seconds from when the first worker was up
    _since: float | None = None

    def then(self, after: "AugmentSummary") -> "AugmentSummary":
        """The sum of this and of what was done after it."""
        joint = {
            name: getattr(self, name) + getattr(after, name)
            for name in (
                "items",
                "took",
                "retries",
                "workers_lost",
                "spare_copies",
                "read",
                "written",
                "expanded",
                "tables",
                "cpu",
                "working",
            )
        }
        return AugmentSummary(
            seconds={**self.seconds, **after.seconds}, peak_bytes=max(self.peak_bytes, after.peak_bytes), **joint
        )

    def add(self, result: dict[str, Any]) -> None:
        """Add what a worker says of an item."""
        now = time.monotonic()
        self.items += 1
        self._since = now - result["busy"] if self._since is None else self._since
        self.working = now - self._since
        self.peak_bytes = max(self.peak_bytes, result["peak_bytes"])
        self.expanded += result["expanded"]
        self.tables += result["tables"]
        self.cpu += result["cpu"]
        for name, spent in result["seconds"].items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
        self.read[result["kind"]] += result["traffic"][0]
        self.written[result["kind"]] += result["traffic"][1]
