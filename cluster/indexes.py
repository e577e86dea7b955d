"""An augmented index from beginning to end, in this process or on Ray: adaptation, graph, edges, hops.

`lattqe augment`, `lattqe append`, the demonstration and the benchmark all make their indexes here. They differ in where
the graph comes from and in what they show: both are given. Ray is imported only where it is used.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from lattqe.augmentation import recipe
from lattqe.augmentation.index import begin_index, build_index
from lattqe.augmentation.recipe import Augmentation, AugmentSummary
from lattqe.device import pick_device, resident_bytes
from lattqe.expansion import create
from lattqe.search.rows import Clock
from lattqe.store import FeatureSet, Manifest, NeighborGraph, Pending

if TYPE_CHECKING:
    from cluster.augmentation import Reach

OnRows = Callable[[int], None]


@dataclass(frozen=True)
class Workplace:
    """Where an index is made.

    here: in this process, else on the connected Ray with so many workers (None: as many as there is room for), which
    reach the vectors by `reach`. process: bytes of this process without data, which a worker has too.
    """

    here: bool
    workers: int | None = None
    reach: str = "auto"
    process: int = field(default_factory=resident_bytes)


@dataclass(frozen=True)
class IndexStage:
    """Rows, edges or hops that are about to be made, as `pending` says what is missing of them.

    On Ray: how many workers it begins with, the bytes of one, mapped files included, and what these are, and how
    workers reach the vectors (hops need not).
    """

    task: Augmentation
    pending: Pending
    here: bool = True
    workers: int = 0
    predicted: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    reach: "Reach | None" = None


class Follower(Protocol):
    """Is told of each stage before it begins, and of its rows while it lasts."""

    def adapting(self, original: FeatureSet, to: str) -> AbstractContextManager[OnRows]:
        """The rows of an index in `to` are adapted to their collection."""

    def building(self, stage: IndexStage) -> AbstractContextManager[OnRows]:
        """The index, its edges or its hops are made."""


@dataclass(frozen=True)
class Built:
    """A finished stage: what it made, and what it took."""

    stage: IndexStage
    manifest: Manifest
    summary: AugmentSummary

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the largest worker, mapped files included, predicted and real; of a stage in this process none."""
        if self.stage.here:
            return {}
        return {"predicted_worker_bytes": self.stage.predicted, "peak_worker_bytes": self.summary.peak_bytes}


@dataclass(frozen=True)
class Made:
    """An index: its stages, and the bytes of the workers that adapted its rows on Ray."""

    stages: list[Built]
    adaptation: dict[str, int] = field(default_factory=dict)


def make_index(
    task: Augmentation,
    features: FeatureSet,
    graph_of: Callable[[FeatureSet], NeighborGraph],
    where: Workplace,
    *,
    adapting: bool,
    follower: Follower,
    clock: Clock | None = None,
    done: Manifest | None = None,
) -> Made:
    """Make an index, or finish what an earlier run left of it.

    features: the task's, opened. graph_of: gives the graph of the rows, after any adaptation. adapting: the rows are to
    be adapted first. clock: counts the seconds of "adapt", "graph", "augment". done: what an earlier run has published.
    """
    clock, memory = clock or Clock(), dict[str, int]()
    task = placed(task, where.here, done)  # before a graph is computed for nothing
    if adapting:
        with clock("adapt"), follower.adapting(features, task.to) as on_rows:
            features, memory = adapted_rows(features, task.to, on_rows, where, task.cache)
    with clock("graph"):
        graph = graph_of(features)
    with clock("augment"):
        stages = build_stages(replace(task, features=features.uri, graph=graph.uri), where, follower)
    return Made(stages, memory)


def placed(task: Augmentation, here: bool, done: Manifest | None = None) -> Augmentation:
    """The task for the device of this process, or of the workers on Ray; one that cannot do it is refused.

    done: what an earlier run, on whatever device, has published: nothing is left to compute.
    """
    if done is not None:
        return replace(task, device=done.config.get("device", "cpu"))
    if here:
        device = pick_device()
    else:
        from cluster.session import worker_device

        device = torch.device(worker_device())
    create(task.method, **task.params).check_device(device)
    return replace(task, device=device.type)


def adapted_rows(
    original: FeatureSet, to: str, on_rows: OnRows, where: Workplace, cache: str | None = None
) -> tuple[FeatureSet, dict[str, int]]:
    """The rows of an index in `to`, adapted to their collection, or found where an earlier run was; and the bytes of
    the workers that did it on Ray.
    """
    if where.here:
        return recipe.adapted_rows(original, to, on_rows), {}
    from cluster.augmentation import adapted_rows as on_workers

    return on_workers(original, to, on_rows, workers=where.workers, cache=cache)


def build_stages(task: Augmentation, where: Workplace, follower: Follower) -> list[Built]:
    """The index of a task whose graph is there: of several hops first the edges."""
    return [_built_here(stage, follower) if where.here else _built(stage, where, follower) for stage in task.stages()]


def _built_here(task: Augmentation, follower: Follower) -> Built:
    pending = begin_index(task)
    stage = IndexStage(task, pending)
    with follower.building(stage) as on_rows:
        summary = build_index(task, on_rows)
    return Built(stage, pending.finish(), summary)


def _built(task: Augmentation, where: Workplace, follower: Follower) -> Built:
    from cluster import augmentation as on_ray
    from cluster.blocks import check_parts

    pending = begin_index(task)
    check_parts(pending)
    reach, parts = None, dict[str, int]()
    if task.hopping:
        workers = where.workers or on_ray.hop_workers(
            task.device
        )  # more where nodes join later, unless these were asked
        predicted = on_ray.predict_hop_memory(task.hop_task(), where.process)
    else:
        workers = where.workers or on_ray.default_workers()
        features, graph = FeatureSet.open(task.features), NeighborGraph.open(task.graph)
        reach = on_ray.choose_reach(where.reach, features, task.cache)
        method = create(task.method, **task.params)
        memory = on_ray.predict_memory(task, features, graph, method, reach, where.process)
        predicted, parts = memory.total, memory.parts()
    stage = IndexStage(task, pending, False, workers, predicted, parts, reach)
    with follower.building(stage) as on_rows:
        summary = on_ray.build_index(task, on_rows, workers=where.workers, reach=reach, pending=pending)
    return Built(stage, pending.finish(), summary)
