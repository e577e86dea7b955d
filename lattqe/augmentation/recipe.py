"""What made an augmented index, by its manifest, and whether the index is what that makes."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lattqe.augmentation.hops import hop
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.expansion import create
from lattqe.expansion.base import HOP_ALPHA, Expanded
from lattqe.expansion.rows import augment_rows
from lattqe.search.index import StoredIndex
from lattqe.store import Edges, FeatureSet, NeighborGraph, read_manifest
from lattqe.store.place import open_place

JOB = "augment"
# What a job made on the way lies in the index itself, so that it is copied and moved together with it.
GRAPH, ORIGINALS, EDGES = "neighbors", "originals", "edges"

# Between a vector computed again on another machine and the stored one, before the stored one's own rounding.
TOLERANCE = 2e-5
EDGE_TOLERANCE = 2e-4  # of a weight, beside the largest of its row: shared first products differ that much
COARSE_TOLERANCE = 0.05  # of both, where the network was computed in half or int8: the check is made in float32
MOST_HOPPED_AGAIN = 100_000
ROUNDING = {"float16": 2.0**-11, "float32": 2.0**-24}


def describe(
    method: str, k: int, params: dict[str, Any], hops: int = 1, hop_alpha: float = 0.0, device: str = "cpu"
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
    return described | ({"hops": hops, "hop_alpha": hop_alpha} if hops > 1 else {})


def is_augmented(features: FeatureSet) -> bool:
    """Whether a feature set is an index that an augmentation made."""
    return features.manifest.config.get("job") == JOB


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

    @classmethod
    def of(cls, index: FeatureSet, cache: str | None = None) -> "Recipe":
        """Read the recipe of an index; one that no augmentation made is refused."""
        config, inputs = index.manifest.config, index.manifest.inputs
        if not is_augmented(index) or not {"features", "neighbors"} <= set(inputs):
            raise LattqeError(f"{index.uri} was not made by `lattqe augment`: its manifest names no method and graph")
        params = dict(config["params"])
        if "model" in inputs:
            params["model"] = _find(index, "model", "model")
        features = FeatureSet.open(_find(index, "features", ORIGINALS), cache)
        graph = NeighborGraph.open(_find(index, "neighbors", GRAPH), cache)
        recipe = cls(config["method"], int(config["k"]), params, features, graph, inputs)
        if config.get("hops", 1) == 1:
            return recipe
        edges = Edges.open(_find(index, "edges", EDGES), cache)
        return replace(recipe, hops=int(config["hops"]), hop_alpha=float(config["hop_alpha"]), edges=edges)


def _find(index: FeatureSet, name: str, inside: str) -> str:
    """The address of an input: within the index, or where it was when the index was made; the digest decides."""
    recorded = index.manifest.inputs[name]
    seen = []
    for uri in (f"{index.uri.rstrip('/')}/{inside}", recorded["uri"]):
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
