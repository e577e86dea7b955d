"""What one training is: its inputs, its configuration, its destination; and the claim it lays on the destination."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.model import LAttQE
from lattqe.model.network import VERSION
from lattqe.store import FeatureSet, Manifest, NeighborGraph, open_place
from lattqe.store.features import comparable_labels
from lattqe.store.pending import claim, make_plan
from lattqe.store.place import node_folder
from lattqe.training.config import TrainingConfig
from lattqe.training.data import check_sets


@dataclass(frozen=True)
class Plan:
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
    def graph_k(self) -> int | None:
        """Neighbors of each training row that the sampler needs beforehand."""
        return max(self.config.k_max, self.config.network.background) if self.config.sampler == "tuples" else None

    @property
    def training(self) -> dict[str, Any]:
        """The settings that are stored beside the network's own."""
        return {name: value for name, value in self.config.to_dict().items() if name != "network"}

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**vars(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """The plan written by `to_dict`."""
        pairs = [(database, queries) for database, queries in values["validation"]]
        return cls(**{**values, "validation": pairs, "config": TrainingConfig.from_dict(values["config"])})

    def claim(self) -> Manifest | None:
        """Claim the destination for this training, join an unfinished equal one, or get the finished model."""
        shapes = {
            name: {"shape": list(tensor.shape), "dtype": "float32"}
            for name, tensor in sorted(LAttQE(self.config.network).state_dict().items())
        }
        config = {"version": VERSION, "network": self.config.network.to_dict(), "training": self.training}
        return claim(open_place(self.destination), make_plan("model", {"tensors": shapes}, config, self.inputs, None))


def make(
    destination: str,
    config: TrainingConfig,
    features: list[str],
    validation: list[tuple[str, str | None]],
    graphs: list[str] | None = None,
    cache: str | None = None,
) -> Plan:
    """Open all inputs, refuse what does not fit together, and write down what was found."""
    graphs = graphs or []
    if graphs and len(graphs) != len(features):
        raise LattqeError(f"{len(graphs)} neighbor graphs for {len(features)} feature sets: give one for each")
    sets = [FeatureSet.open(uri) for uri in features]
    held_out = [[FeatureSet.open(uri) for uri in pair if uri is not None] for pair in validation]
    check_sets([*sets, *(one for pair in held_out for one in pair)])
    if sets[0].dim != config.network.dim:
        raise LattqeError(f"the features have {sets[0].dim} columns and the network {config.network.dim}")
    for pair in held_out:
        for one in pair:
            for trained in sets:
                check_apart(trained, one, config.shared_labels)
    inputs = {f"features-{number}": _input(one) for number, one in enumerate(sets)}
    inputs |= {f"neighbors-{number}": _input(NeighborGraph.open(uri)) for number, uri in enumerate(graphs)}
    for number, pair in enumerate(held_out):
        inputs |= {f"validation-{number}-{role}": _input(one) for role, one in zip(("database", "queries"), pair)}
    return Plan(
        open_place(destination).uri,
        config,
        [one.uri for one in sets],
        [(pair[0].uri, pair[1].uri if len(pair) > 1 else None) for pair in held_out],
        [open_place(uri).uri for uri in graphs],
        node_folder(cache),
        inputs,
    )


def check_apart(trained: FeatureSet, held_out: FeatureSet, shared_labels: bool) -> None:
    """Refuse images in both sets and, where labels can be compared, classes in both.

    Labels can be compared when both sets name their classes, when they were read from one file, or when the user says
    so; otherwise label 7 of one set has nothing to do with label 7 of another.
    """
    both = np.flatnonzero(trained.find_ids(held_out.id_column()) >= 0)
    if len(both):
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


def _input(thing: FeatureSet | NeighborGraph) -> dict[str, str]:
    return {"uri": thing.uri, "digest": thing.digest, "kind": thing.manifest.kind}
