"""The stages of each job, from what it is given: feature sets that are there, or only their sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lattqe.augmentation.bands import Cut
from lattqe.cost import stages
from lattqe.cost.augment import Weighing, augmentation, hops, weighing_of
from lattqe.cost.graph import graph_here
from lattqe.cost.rows import graph_on_ray
from lattqe.cost.work import Machines, Stored, Work
from lattqe.store.parts import RESIDENT_BYTES

if TYPE_CHECKING:
    from lattqe.expansion import Method
    from lattqe.store import FeatureSet, NeighborGraph
    from lattqe.training import Plan

SHARD_SHARE = 0.5  # of a node's memory that shards may take: the workers are there too


@dataclass(frozen=True)
class Rows:
    """A feature set, there or not: its parts, columns, bytes of a number; `remote`: on S3."""

    stored: Stored
    dim: int
    itemsize: int = 2
    remote: bool = True

    @classmethod
    def of(cls, features: "FeatureSet") -> "Rows":
        """A set that is there."""
        itemsize = np.dtype(features.dtype).itemsize
        return cls(Stored.of(features.manifest), features.dim, itemsize, not features.place.is_local)

    @classmethod
    def sized(cls, rows: int, dim: int, dtype: str = "float16") -> "Rows":
        """A set that is not there."""
        return cls(Stored.kind("features", rows, dim=dim, dtype=dtype), dim, np.dtype(dtype).itemsize)

    @property
    def vector_bytes(self) -> int:
        """Of the vectors alone."""
        return self.stored.rows * self.dim * self.itemsize


@dataclass(frozen=True)
class Setting:
    """Where a job runs: on which machines, in this process or on workers, with a cache on each node or without."""

    machines: Machines
    here: bool = False
    cached: bool = False
    products_per_second: float | None = None  # of one worker in the graph, where it was measured
    block_rows: int | None = None
    schedule: str = "auto"  # of the graph


def neighbors(sets: Sequence[Rows], k: int, where: Setting, approximate: bool = False) -> Work:
    """The graph of one set, or of a set and its distractors, whose own graph is known."""
    first, stored = sets[0], [each.stored for each in sets]
    if approximate:
        return stages.approximate_graph(first.stored, first.dim, k, where.machines, itemsize=first.itemsize)
    rate = where.products_per_second
    if where.here:
        return graph_here(stored, first.dim, k, where.machines, itemsize=first.itemsize, products_per_second=rate)
    return graph_on_ray(
        stored,
        first.dim,
        k,
        where.machines,
        schedule=where.schedule,
        block_rows=where.block_rows,
        itemsize=first.itemsize,
        products_per_second=rate,
        cached=where.cached,
        remote=first.remote,
    )[1]


def needs_shards(rows: Rows, where: Setting) -> bool:
    """Whether workers gather vectors from each other: a node cannot hold them, or has nowhere to keep them."""
    if where.here:
        return False
    too_many = where.machines.nodes > 1 and rows.vector_bytes > where.machines.memory
    return too_many or (rows.remote and not where.cached and rows.vector_bytes > RESIDENT_BYTES)


def augment(
    rows: Rows,
    weighs: Weighing,
    number: int,
    where: Setting,
    *,
    graph: Stored | None = None,
    shards: bool | None = None,
) -> list[Work]:
    """The graph, unless it is given, then the index; of several hops the edges and the hops."""
    found = []
    if graph is None:
        found.append(neighbors([rows], weighs.depth, where))
        graph = Stored.kind("neighbors", rows.stored.rows, k=weighs.depth)
    shards = needs_shards(rows, where) if shards is None else shards
    fetched = rows.remote and not where.cached
    edges = Stored.kind("edges", rows.stored.rows, k=weighs.k) if number > 1 else None
    found.append(
        augmentation(
            rows.stored,
            graph,
            rows.dim,
            weighs,
            where.machines,
            itemsize=rows.itemsize,
            edges=edges,
            here=where.here,
            shards=shards,
            fetched=fetched,
        )
    )
    if edges is not None:
        cut = Cut.of(rows.stored.rows, rows.dim)
        found.append(
            hops(
                rows.stored,
                edges,
                rows.dim,
                weighs.k,
                number,
                cut.band_sizes,
                cut.group_sizes,
                where.machines,
                here=where.here,
                fetched=fetched,
            )
        )
    return found


def augment_by(
    features: "FeatureSet",
    method: "Method",
    k: int,
    number: int,
    where: Setting,
    *,
    graph: "NeighborGraph | None" = None,
    shards: bool | None = None,
) -> list[Work]:
    """The augmentation of a set that is there by a method, with so many hops; `graph`: where it is there already."""
    weighs = weighing_of(method, k, features.dim, features.rows)
    stored = None if graph is None else Stored.of(graph.manifest)
    return augment(Rows.of(features), weighs, number, where, graph=stored, shards=shards)


def append(
    rows: Rows, graph: Stored, k: int, joined: int, removed: int, method: "Method", weighed: int, where: Setting
) -> Work:
    """Rows that join and leave an augmented index."""
    weighs = weighing_of(method, weighed, rows.dim, rows.stored.rows, again=True)
    return stages.growth(
        rows.stored,
        graph,
        joined,
        removed,
        rows.dim,
        weighs,
        where.machines,
        k=k,
        itemsize=rows.itemsize,
        here=where.here,
    )


def search(database: Sequence[Rows], queries: Rows, k: int, where: Setting, expansion: Weighing | None = None) -> Work:
    """Ranks of all queries."""
    first = database[0]
    return stages.search(
        [each.stored for each in database],
        queries.stored,
        first.dim,
        k,
        where.machines,
        itemsize=first.itemsize,
        expansion=expansion,
        here=where.here,
    )


def train(plan: "Plan", machines: Machines) -> Work:
    """A training as its plan describes it."""
    from lattqe.store import FeatureSet

    config = plan.config
    sets = [Stored.of(FeatureSet.open(uri).manifest) for uri in plan.features]
    held_out = [Stored.of(FeatureSet.open(database).manifest) for database, _ in plan.validation]
    return stages.training(
        sets,
        held_out,
        config.network.dim,
        config.network,
        machines,
        steps=config.steps + config.temperature_steps,
        batch=config.batch,
        k=config.k_max,
        checks=max(config.steps // config.validate_every, 1) + 1,
        graph_k=None if plan.graphs else plan.graph_k,
    )
