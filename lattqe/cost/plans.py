"""The stages of each job, from what it is given: feature sets that are there, or only their sizes; and machines.

Machines that are not there come in words: `--assume "nodes=16,gpus=1"`, or as the doctor of one measured them.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lattqe.augmentation.recipe import HopCut
from lattqe.cost import stages
from lattqe.cost.augment import Weighing, augmentation, hops, joined_rows, weighing_of
from lattqe.cost.graph import graph_here
from lattqe.cost.rows import approximate_graph, graph_on_ray
from lattqe.cost.work import ARROW_BYTES, GB, LOOK, PUT, Machines, Stored, Work
from lattqe.errors import LattqeError
from lattqe.store.manifest import NOMINAL_ID_BYTES, part_row_counts
from lattqe.store.parts import RESIDENT_BYTES

if TYPE_CHECKING:
    from lattqe.expansion import Method
    from lattqe.store import FeatureSet, NeighborGraph
    from lattqe.training import TrainingPlan

UNITS = {"TB": 10**12, "GB": GB, "MB": 10**6, "TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20}
SPEEDS = {"GB/s": GB, "MB/s": 10**6, "Gbit/s": GB / 8}
SHARD_SHARE = 0.5  # of a node's memory that shards may take: the workers are there too


def _count(least: int) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = int(text)
        if value < least:
            raise ValueError(f"at least {least}")
        return value

    return read


def _number(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("a number from 0")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError("a number above 0")
    return value


def _with_unit(units: Mapping[str, float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        for unit, size in sorted(units.items(), key=lambda item: -len(item[0])):
            if text.lower().endswith(unit.lower()):
                return _positive(text[: -len(unit)]) * size
        raise ValueError("no unit")

    return read


# Each key: how it is read, and what it must look like.
KEYS: dict[str, tuple[Callable[[str], float], str]] = {
    "nodes": (_count(1), "a whole number from 1"),
    "gpus": (_count(0), "a whole number from 0, for each node"),
    "cpus": (_count(1), "a whole number from 1, for each node"),
    "memory": (_with_unit(UNITS), "such as 32GB, of each node"),
    "gpu_memory": (_with_unit(UNITS), "such as 24GB, of each GPU"),
    "tflops": (_positive, "a number above 0, of each GPU"),
    "network": (_with_unit(SPEEDS), "such as 1.2GB/s, of each node"),
    "price": (_number, "dollars per node and hour, from 0"),
    "gflops": (_positive, "a number above 0, of each core"),
}


def _measured(path: str) -> dict[str, float]:
    """What `lattqe doctor --gpu --json` found of a machine: values by key."""
    try:
        found = json.loads(Path(path).read_bytes())
        passed, machine = found["passed"], {key: float(value) for key, value in found["machine"].items()}
    except OSError as error:
        raise LattqeError(f"--assume measured={path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise LattqeError(
            f"--assume measured={path}: not written by doctor: run lattqe doctor --gpu --json > {path}"
        ) from None
    if passed is not True:
        raise LattqeError(f"--assume measured={path}: that machine failed its checks: fix it, and run doctor again")
    wrong = [key for key, value in machine.items() if key not in KEYS or not (math.isfinite(value) and value > 0)]
    if wrong:
        raise LattqeError(f"--assume measured={path}: {wrong[0]} is unknown or not a number above 0: run doctor again")
    return machine


def parse_assumption(text: str) -> Machines:
    """Read "nodes=16,gpus=1,cpus=8,tflops=120,network=1.2GB/s,price=0.5"; what is left out is as `Machines` says, or,
    with "measured=FILE", as the machine that `lattqe doctor --gpu --json` tested.

    LattqeError names the key that is unknown or wrong, and what is accepted.
    """
    values: dict[str, float] = {}
    measured: dict[str, float] | None = None
    for entry in (part.strip() for part in text.split(",")):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if (key not in KEYS and key != "measured") or not equals:
            raise LattqeError(
                f"--assume {entry!r}: keys are {', '.join(KEYS)} and measured, as in nodes=16,network=1.2GB/s"
            )
        if key in values or (key == "measured" and measured is not None):
            raise LattqeError(f"--assume names {key} twice: give it once")
        if key == "measured":
            measured = _measured(value)
            continue
        read, wanted = KEYS[key]
        try:
            values[key] = read(value)
        except ValueError:
            raise LattqeError(f"--assume {entry!r}: {key} is {wanted} (keys: {', '.join(KEYS)})") from None
    known = (measured or {}) | values
    if not known.get("gpus"):
        for key in ("tflops", "gpu_memory"):
            if key in values:
                raise LattqeError(f"--assume {key} needs a GPU, but gpus is 0: add gpus=1, or leave {key} out")
    whole = {each.name for each in fields(Machines) if each.type is int}
    given: dict[str, Any] = {key: int(value) if key in whole else value for key, value in known.items()}
    return Machines(**given)


@dataclass(frozen=True)
class PlannedRows:
    """A feature set, there or not: its parts, columns, bytes of a number; `remote`: on S3."""

    stored: Stored
    dim: int
    itemsize: int = 2
    remote: bool = True

    @classmethod
    def of(cls, features: "FeatureSet") -> "PlannedRows":
        """A set that is there."""
        itemsize = np.dtype(features.dtype).itemsize
        return cls(Stored.of(features.manifest), features.dim, itemsize, not features.place.is_local)

    @classmethod
    def sized(cls, rows: int, dim: int, dtype: str = "float16") -> "PlannedRows":
        """A set that is not there."""
        return cls(Stored.kind("features", rows, dim=dim, dtype=dtype), dim, np.dtype(dtype).itemsize)

    def rewritten(self) -> "PlannedRows":
        """The same rows, with what stands beside their vectors, in parts of the usual size."""
        rows, vector = self.stored.rows, self.dim * self.itemsize
        row = max(self.stored.bytes - ARROW_BYTES * self.stored.parts, 0) // max(rows, 1)
        stored = Stored.planned(part_row_counts(rows, vector + NOMINAL_ID_BYTES), max(row, vector))
        return replace(self, stored=stored)

    @property
    def vector_bytes(self) -> int:
        """Of the vectors alone."""
        return self.stored.rows * self.dim * self.itemsize


@dataclass(frozen=True)
class Placement:
    """Where a job runs: on which machines, in this process or on workers, with a cache on each node or without."""

    machines: Machines
    here: bool = False
    cached: bool = False
    products_per_second: float | None = None  # of one worker in the graph, where it was measured
    block_rows: int | None = None
    schedule: str = "auto"  # of the graph

    def at(self, here: bool) -> "Placement":
        """The same for a stage that is too large for this process, unless it can be `here`: a worker for each core."""
        if here or not self.here:
            return self
        return replace(self, here=False, machines=replace(self.machines, asked=None))


def neighbors(sets: Sequence[PlannedRows], k: int, where: Placement, approximate: bool = False) -> Work:
    """The graph of one set, or of a set and its distractors, whose own graph is known."""
    first, stored = sets[0], [each.stored for each in sets]
    if approximate:
        fetched = first.remote and not where.cached
        return approximate_graph(first.stored, first.dim, k, where.machines, itemsize=first.itemsize, fetched=fetched)
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


def needs_shards(rows: PlannedRows, where: Placement) -> bool:
    """Whether workers gather vectors from each other: a node cannot hold them, or has nowhere to keep them."""
    if where.here:
        return False
    too_many = where.machines.nodes > 1 and rows.vector_bytes > where.machines.memory
    return too_many or (rows.remote and not where.cached and rows.stored.bytes > RESIDENT_BYTES)


def augment(
    rows: PlannedRows,
    weighs: Weighing,
    number: int,
    where: Placement,
    *,
    graph: Stored | None = None,
    shards: bool | None = None,
    adapt: bool = False,
) -> list[Work]:
    """The adaptation, if any; the graph, unless it is given; the index, or of several hops the edges and the hops."""
    found, fetched = [], rows.remote and not where.cached
    if adapt:
        adapted = rows.rewritten()
        found.append(
            stages.adaptation(
                rows.stored,
                adapted.stored,
                rows.dim,
                where.machines,
                itemsize=rows.itemsize,
                here=where.here,
                fetched=fetched,
            )
        )
        rows = adapted
    if graph is None:
        work = neighbors([rows], weighs.depth, where)
        # Its destination is claimed twice: to see whether it is there, and to make it.
        found.append(replace(work, requests=work.requests + LOOK + PUT))
        graph = Stored.kind("neighbors", rows.stored.rows, k=weighs.depth)
    shards = needs_shards(rows, where) if shards is None else shards
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
    return found if edges is None else [*found, _hops(rows, weighs.k, number, where)]


def augment_by(
    features: "FeatureSet",
    method: "Method",
    k: int,
    number: int,
    where: Placement,
    *,
    graph: "NeighborGraph | None" = None,
    shards: bool | None = None,
    adapt: bool = False,
) -> list[Work]:
    """The augmentation of a set that is there by a method, with that many hops; `graph`: where it is there already."""
    weighs = weighing_of(method, k, features.dim, features.rows)
    stored = None if graph is None else Stored.of(graph.manifest)
    return augment(PlannedRows.of(features), weighs, number, where, graph=stored, shards=shards, adapt=adapt)


def append(
    rows: PlannedRows,
    graph: Stored,
    k: int,
    joined: int,
    removed: int,
    method: "Method",
    weighed: int,
    where: Placement,
    number: int = 1,
) -> list[Work]:
    """Rows that join and leave an augmented index; with several hops its edges, and then all hops again."""
    weighs = weighing_of(method, weighed, rows.dim, rows.stored.rows, again=True)
    growth = stages.growth(
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
        hopping=number > 1,
    )
    after = replace(rows, stored=joined_rows(rows.stored, joined, removed)[0])
    return [growth] if number == 1 else [growth, _hops(after, weighs.k, number, where)]


def _hops(rows: PlannedRows, k: int, number: int, where: Placement) -> Work:
    """Features that flow over the edges of these rows."""
    cut = HopCut.of(rows.stored.rows, rows.dim)
    return hops(
        rows.stored,
        Stored.kind("edges", rows.stored.rows, k=k),
        rows.dim,
        k,
        number,
        cut.band_sizes,
        cut.group_sizes,
        where.machines,
        here=where.here,
        fetched=rows.remote and not where.cached,
    )


def search(
    database: Sequence[PlannedRows], queries: PlannedRows, k: int, where: Placement, expansion: Weighing | None = None
) -> Work:
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
        fetched=first.remote and not where.cached,
    )


def cells(database: Sequence[PlannedRows], queries: PlannedRows, number: int, where: Placement, depth: int) -> Work:
    """That many cells of a benchmark over the same rows; depth: of the longest list that an expansion looks at."""
    first = database[0]
    return stages.measuring(
        [each.stored for each in database],
        queries.stored,
        first.dim,
        number,
        where.machines,
        depth=depth,
        itemsize=first.itemsize,
        here=where.here,
        fetched=first.remote and not where.cached,
    )


def train(plan: "TrainingPlan", machines: Machines) -> Work:
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
        graph_k=None if plan.graphs else config.graph_k,
    )
