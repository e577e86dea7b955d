"""What made an augmented index: its manifest names the method, and its inputs by address and digest."""

from dataclasses import dataclass
from typing import Any

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, NeighborGraph, read_manifest
from lattqe.store.place import open_place

JOB = "augment"
# What a job made on the way lies in the index itself, so that it is copied and moved together with it.
GRAPH, ORIGINALS = "neighbors", "originals"


def describe(method: str, k: int, params: dict[str, Any]) -> dict[str, Any]:
    """The configuration that an augmented index carries in its manifest; a model is named among the inputs."""
    return {"job": JOB, "method": method, "k": k,
            "params": {name: value for name, value in params.items() if name != "model"}}


@dataclass(frozen=True)
class Recipe:
    """Method and inputs of one augmented index, found again and checked by digest."""

    method: str
    k: int
    params: dict[str, Any]
    features: FeatureSet
    graph: NeighborGraph
    inputs: dict[str, dict[str, str]]

    @classmethod
    def of(cls, index: FeatureSet, cache: str | None = None) -> "Recipe":
        """Read the recipe of an index; one that no augmentation made is refused."""
        config, inputs = index.manifest.config, index.manifest.inputs
        if config.get("job") != JOB or not {"features", "neighbors"} <= set(inputs):
            raise LattqeError(f"{index.uri} was not made by `lattqe augment`: its manifest names no method and graph")
        params = dict(config["params"])
        if "model" in inputs:
            params["model"] = _find(index, "model", "model")
        features = FeatureSet.open(_find(index, "features", ORIGINALS), cache)
        graph = NeighborGraph.open(_find(index, "neighbors", GRAPH), cache)
        return cls(config["method"], int(config["k"]), params, features, graph, inputs)


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
    raise LattqeError(f"the {name} that made {index.uri} are not to be found: {seen[-1]}")
