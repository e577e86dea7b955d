"""The kNN graph of a large set on Ray: pairs of row blocks, each multiplied once, feeding the lists of both.

The rows are cut into blocks, and every pair of blocks is one piece of work. A worker loads both, continues their lists
and writes them back, so it holds two blocks and their running top-k and nothing else; and no two workers have the same
block at once (`lattqe.search.rows.Pairing`). All progress is in storage, in files that depend on nothing but which
blocks were compared (`cluster.graph_worker`): any process may die at any time, and the same command continues where it
stopped.

Lists are rewritten after every pair. Where moving them would take longer than the products, blocks have owners
instead (the schedule "rows"): a piece of work is one block, all other rows pass it, and its lists are written once.

With a second set whose own graph is known, rows of that set are not compared with each other again: they only meet the
rows of the first set, and what they find is merged into their known lists at the end.

Of an approximate graph the driver finds the clusters; then each worker makes parts by itself.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import ray

from cluster.blocks import BlockPolicy, BlockSummary, check_parts, run_blocks
from cluster.graph_worker import (
    GraphWorker,
    Item,
    agree_on_cut,
    check_disk,
    find_lists,
    measure_worker,
    places,
    threads_for,
    worker_budget,
)
from cluster.monitor import Tally, connected_machines, require_resources
from cluster.session import gpus_available
from lattqe.cost.graph import Cut
from lattqe.cost.rows import COSTS, clusters_memory, graph_on_ray
from lattqe.cost.work import Machines, Stored, Work
from lattqe.errors import LattqeError
from lattqe.search.rows import Pairing, in_one
from lattqe.search.stored import (
    Approximated,
    ClusterWorker,
    GraphTask,
    agree_on_clusters,
    begin_graph,
    check_sets,
    open_sets,
)
from lattqe.store import Pending, find_manifest

ROWS_PER_WORKER = 12_288  # for a further worker to be worth starting
MAX_STALE = 100


@dataclass(frozen=True)
class GraphPlan:
    """The plan, in numbers; `cut` may be replaced by that of an earlier run."""

    sets: tuple[Stored, ...]
    dim: int
    dtype: str
    k: int
    cut: Cut
    work: Work  # what is computed, moved and held
    machines: Machines  # with as many workers as there will be
    resources: dict[str, float]
    kind: str  # of products, the fastest on a sample of the rows
    grows: bool  # whether nodes that join get workers too
    facts: dict[str, Any]  # what else decides the cost, as `lattqe.cost.graph.graph_of_pairs` takes it

    def continued(self, cut: Cut) -> "GraphPlan":
        """The plan of a run that continues with the cut of an earlier one."""
        if cut == self.cut:
            return self
        work = COSTS[cut.schedule](self.sets, self.dim, self.k, cut, self.machines, **self.facts)
        told = {"schedule": f"{cut.schedule}: an earlier run began with it"}
        return replace(self, cut=cut, work=replace(work, facts=work.facts | told))

    @property
    def products_per_second(self) -> float:
        """Of one worker, with selection and exact scores."""
        return self.facts["products_per_second"]

    @property
    def rows(self) -> int:
        """Rows of all sets."""
        return self.work.rows

    @property
    def workers(self) -> int:
        """Workers at the start."""
        return self.machines.workers

    @property
    def threads(self) -> int:
        """Cores of each worker."""
        return int(self.resources["num_cpus"])

    @property
    def products(self) -> int:
        """Products of two vectors, all pairs together, each once."""
        return self.cut.products

    @property
    def seconds(self) -> float:
        """Expected time."""
        return self.work.worker_seconds / self.workers


def plan_graph(
    task: GraphTask, workers: int | None = None, block_rows: int | None = None, schedule: str = "auto"
) -> GraphPlan:
    """Plan a graph for the connected cluster; LattqeError with advice where it cannot fit.

    `schedule`: "pairs", "rows", or "auto" for the one that costs less time.
    """
    sets = open_sets(task)
    check_sets(task)
    cpus = int(ray.cluster_resources().get("CPU", 0))
    grows = workers is None
    workers = workers or gpus_available() or max(min(cpus, sets[0].rows // ROWS_PER_WORKER), 1)
    threads = threads_for(workers)  # candidates are scored on the CPU, beside a GPU too
    resources: dict[str, float] = {"num_cpus": threads}
    if gpus_available():
        resources["num_gpus"] = 1
    require_resources({"CPU": threads} | ({"GPU": 1} if gpus_available() else {}), workers)
    speed = measure_worker(replace(task, threads=threads), resources)
    stored, machines = tuple(Stored.of(each.manifest) for each in sets), connected_machines(workers)
    facts: dict[str, Any] = {
        "itemsize": np.dtype(sets[0].dtype).itemsize,
        "products_per_second": speed["products_per_second"],
        "cached": task.cache is not None,
        "remote": not sets[0].place.is_local,
    }
    budget = worker_budget(workers, speed["device_bytes"])
    cut, work = graph_on_ray(
        stored, sets[0].dim, task.k, machines, schedule=schedule, block_rows=block_rows, budget=budget, **facts
    )
    check_disk(task.to, work.scratch + work.stored)
    return GraphPlan(
        stored, sets[0].dim, sets[0].dtype, task.k, cut, work, machines, resources, speed["kind"], grows, facts
    )


@dataclass
class GraphSummary:
    """What it took, over all workers."""

    blocks: BlockSummary
    seconds: dict[str, float]  # of threads: loading, products, selection, scoring, merging, writing; waiting for work
    busy: list[float]  # seconds that each worker was at work
    working: float  # seconds from when the workers were up until the last was done
    peak_bytes: int

    @property
    def balance(self) -> float:
        """The least busy worker's time over the busiest one's; 1 is perfect."""
        return min(self.busy) / max(max(self.busy), 1e-9) if self.busy else 1.0


class _Finished(Exception):
    """Another driver has published the graph meanwhile."""


@dataclass
class Progress:
    """The driver's view: what each block has seen, which pairs are left, which parts can be assembled."""

    task: GraphTask
    cut: Cut
    pending: Pending
    workers: int
    on_products: Callable[[int], None]
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    alive: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peak_bytes: int = 0
    stale: int = 0

    def __post_init__(self) -> None:
        self.parts = set(self.pending.missing())
        self.look()

    def look(self) -> None:
        """Read from storage what is done."""
        self.seen = find_lists(self.pending.place, self.cut.blocks)
        left = [pair for pair in self.cut.work() if not self.compared(*pair)] if self.parts else []
        self.pairing = Pairing(left, first=[pair for pair in left if self.cut.siblings(*pair)])
        self.in_flight: set[Item] = set()
        self.waiting = {part: self.blocks_of(part) for part in self.parts}

    def compared(self, a: int, b: int) -> bool:
        """Whether both sides have it."""
        gain_a, gain_b = self.cut.gain(a, b)  # of a block with an owner: all there is to see
        return self.seen[a] & gain_a == gain_a and self.seen[b] & gain_b == gain_b

    def blocks_of(self, part: int) -> set[int]:
        """The unfinished blocks that a part overlaps."""
        high = int(np.cumsum(self.pending.part_rows)[part])
        low = high - self.pending.part_rows[part]
        return {
            block
            for block in range(self.cut.blocks)
            if self.cut.rows(block)[0] < high
            and low < self.cut.rows(block)[1]
            and self.seen[block] != self.cut.complete(block)
        }

    def rows_of(self, item: Item) -> int:
        """Rows whose lists are published with a piece of work."""
        return self.pending.part_rows[item[0]] if len(item) == 1 else 0

    def products_left(self) -> int:
        """Products still to compute."""
        return sum(self.cut.cost(*pair) for pair in self.cut.work() if not self.compared(*pair)) if self.parts else 0

    def grow(self, places: int) -> int:
        """The cluster has room for `places` workers now: how many there shall be, given the pairs that are left."""
        at_once = self.cut.blocks // 2 if self.cut.schedule == "pairs" else self.cut.blocks
        self.workers = max(self.workers, min(places, at_once))
        return self.workers

    def possible(self) -> list[Item]:
        """Pieces of work that can start now: pairs of free blocks, parts whose blocks are all done."""
        items: list[Item] = [(part,) for part, blocks in self.waiting.items() if not blocks]
        for (part,) in items:
            del self.waiting[part]
        while len(self.in_flight) < self.workers and (pair := self.pairing.take()) is not None:
            item = (*pair, *(self.seen[block] for block in pair))
            items.append(item)
            self.in_flight.add(item)
        return items

    def done(self, item: Item, result: dict[str, Any]) -> list[Item]:
        """Take note of a finished piece of work; return what has become possible."""
        self.peak_bytes = max(self.peak_bytes, result["peak_bytes"])
        self.busy[result["worker"]] += result["busy"]
        self.alive[result["worker"]] += result["busy"] + result["seconds"]["waiting"]
        for name, spent in result["seconds"].items():
            self.seconds[name] += spent
        if result["stale"]:
            self.start_over()
        elif len(item) == 1:
            self.parts.discard(item[0])
        else:
            self.note_pair(item)
        return self.possible()

    def note_pair(self, item: Item) -> None:
        """Two blocks were compared."""
        if item not in self.in_flight:  # from before we looked again: storage has told us already
            return
        self.in_flight.discard(item)
        a, b = item[:2]
        self.pairing.finish((a, b))
        for block, gain in zip((a, b), self.cut.gain(a, b)):
            self.seen[block] |= gain
            if self.seen[block] == self.cut.complete(block):
                for blocks in self.waiting.values():
                    blocks.discard(block)
        self.on_products(self.cut.cost(a, b))

    def start_over(self) -> None:
        """Lists were gone or damaged: another driver is at work, or has finished, or a file was lost."""
        self.stale += 1
        if find_manifest(self.pending.place) is not None:
            raise _Finished
        if self.stale > MAX_STALE:
            raise LattqeError(
                f"unfinished lists in {self.task.to} keep vanishing: is another job, or a clean-up, at "
                "work there? Wait for it, then run the same command again"
            )
        self.look()


def run_graph(
    task: GraphTask,
    cut: Cut,
    workers: int,
    on_products: Callable[[int], None],
    *,
    resources: dict[str, float] | None = None,
    policy: BlockPolicy | None = None,
    grows: bool = False,
    pending: Pending | None = None,
) -> GraphSummary:
    """Compute and publish all missing parts of `task.to` with `workers` actors; the manifest is the caller's.

    `on_products(n)` is called after each n products (of two vectors); `resources` is what one actor asks Ray for.
    With `grows`, nodes that join while it runs get actors too. `pending` knows which parts were checked already.
    """
    pending = pending or Pending.attach(task.to)
    check_parts(pending)
    progress = Progress(task, cut, pending, workers, on_products)
    actor_class = ray.remote(**(resources or {"num_cpus": 1}))(GraphWorker)
    started = time.monotonic()
    # One piece of work at a time for each worker: a second one in its queue would lock two blocks for nothing.
    policy = policy or BlockPolicy(window=1, straggler_seconds=120.0)
    summary = BlockSummary()
    try:
        summary = run_blocks(
            lambda _: actor_class.options(scheduling_strategy="SPREAD").remote(task, cut),
            workers,
            progress.possible(),
            on_done=progress.done,
            policy=policy,
            room=(lambda left: progress.grow(places(task.threads))) if grows else None,
            work=Tally("neighbors", progress.rows_of, lambda item: item[:2], itemgetter("traffic")),
        )
    except _Finished:
        summary.seconds = time.monotonic() - started
    return GraphSummary(
        summary,
        dict(progress.seconds),
        list(progress.busy.values()),
        max(progress.alive.values(), default=0.0),
        progress.peak_bytes,
    )


def prepare_graph(
    task: GraphTask, workers: int | None = None, block_rows: int | None = None, schedule: str = "auto"
) -> tuple[GraphTask, GraphPlan, Pending]:
    """Plan for the connected cluster and claim the destination: the plan has the cut of an earlier run, if any."""
    plan = plan_graph(task, workers, block_rows, schedule)  # before anything is claimed: it may refuse
    pending = begin_graph(task)
    if pending.finished is None:  # else nothing is left to cut, and nothing may be left behind
        plan = plan.continued(agree_on_cut(pending.place, plan.cut))
        check_parts(pending)
    return replace(task, threads=plan.threads, kind=plan.kind), plan, pending


def products_left(task: GraphTask, plan: GraphPlan, pending: Pending) -> int:
    """Products that no earlier run has done."""
    return Progress(task, plan.cut, pending, plan.workers, lambda _: None).products_left()


def build_graph(
    task: GraphTask,
    on_products: Callable[[int], None] = lambda products: None,
    *,
    plan: GraphPlan,
    pending: Pending | None = None,
) -> GraphSummary:
    """Compute and publish all missing parts, as `lattqe.search.stored.build_graph` does in this process."""
    return run_graph(
        task, plan.cut, plan.workers, on_products, resources=plan.resources, grows=plan.grows, pending=pending
    )


def build_approximate(
    task: GraphTask,
    on_rows: Callable[[int], None] = lambda rows: None,
    *,
    workers: int | None = None,
    policy: BlockPolicy | None = None,
    pending: Pending | None = None,
) -> tuple[Approximated, BlockSummary]:
    """Make and publish all missing parts with `workers` actors, one for each CPU by default, never more than parts.

    As `lattqe.search.stored.build_approximate` does in this process, with the same bytes; the manifest is the caller's.
    `pending` knows which parts were checked already.
    """
    started, pending = time.monotonic(), pending or Pending.attach(task.to)
    check_parts(pending)
    (features,) = open_sets(task)
    found = agree_on_clusters(pending, in_one(features.pieces()), task)
    made = Approximated(found.facts(), planning=time.monotonic() - started)
    missing, grows = pending.missing(), workers is None
    workers = min(workers or int(ray.cluster_resources().get("CPU", 1)), max(len(missing), 1))
    threads = threads_for(workers)
    stored, fetched = Stored.of(features.manifest), not features.place.is_local and task.cache is None
    searched = found.nearest.shape[1]  # clusters of each row, at most
    made.predicted_bytes = sum(clusters_memory(stored, features.dim, task.k, threads, fetched, searched))
    require_resources({"CPU": threads}, workers)
    actors = ray.remote(num_cpus=threads)(ClusterWorker).options(scheduling_strategy="SPREAD")

    def on_done(part: int, result: dict[str, Any]) -> None:
        made.add(result)
        on_rows(pending.part_rows[part])

    ran = run_blocks(
        lambda _: actors.remote(task, threads),
        workers,
        missing,
        on_done=on_done,
        policy=policy,
        room=(lambda left: min(places(threads), left)) if grows else None,
        work=Tally("neighbors", lambda part: pending.part_rows[part], traffic=itemgetter("traffic")),
    )
    made.took = time.monotonic() - started
    return made, ran
