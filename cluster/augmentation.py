"""Database-side augmentation on Ray: `build_index` and `run_hops` of `lattqe.augmentation` with many workers.

How workers reach all vectors is said in `cluster.reach`; what blocks, pieces and parts are, and why any process may die
at any time, in `lattqe.augmentation.index`.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import ray

from cluster.blocks import BlockPolicy, check_parts, run_blocks
from cluster.monitor import Tally
from cluster.reach import Reach, ShardReader, choose_reach, open_shards
from cluster.session import gpus_available
from cluster.shards import ShardedIndex
from lattqe.augmentation.bands import HopWorker, Schedule, until_sound
from lattqe.augmentation.bands import Item as HopItem
from lattqe.augmentation.bands import rows_of as hop_rows
from lattqe.augmentation.index import Item, items_to_do, rows_of, worker_class
from lattqe.augmentation.recipe import ADAPTATION, ADAPTED, Augmentation, AugmentSummary, HopTask, adapt
from lattqe.cost.augment import WorkerMemory, augmentation_memory, hop_buffers, weighing_of
from lattqe.cost.plans import Rows
from lattqe.cost.stages import adapting_memory
from lattqe.cost.work import Stored, held_bytes
from lattqe.errors import LattqeError
from lattqe.expansion import Method
from lattqe.store import Edges, FeatureSet, NeighborGraph, Pending
from lattqe.whitening import WhitenWorker, begin_whitened


def hop_workers(device: str = "cpu") -> int:
    """One worker for each core, or for each GPU where hops run on these."""
    return max(1, gpus_available() if device != "cpu" else int(ray.cluster_resources().get("CPU", 1)))


def predict_hop_memory(task: HopTask, process: int) -> int:
    """Bytes of a worker, mapped files included, in a process that already has that many before it starts."""
    features, edges = FeatureSet.open(task.features), Edges.open(task.edges)
    cut, kept = task.cut(features.rows, features.dim), task.cache is not None
    files = 0
    for local in (True, False):
        there = [Stored.of(each.manifest) for each in (features, edges) if (each.place.is_local or kept) == local]
        files += sum(each.bytes for each in there) if local else held_bytes(there)
    part = max(part.rows for part in features.manifest.parts)
    return process + files + hop_buffers(features.rows, features.dim, edges.k, cut.band_sizes, cut.group_sizes, part)


def run_hops(
    task: HopTask,
    on_rows: Callable[[int], None],
    summary: AugmentSummary,
    *,
    workers: int | None = None,
    resources: dict[str, float] | None = None,
    policy: BlockPolicy | None = None,
    pending: Pending | None = None,
) -> AugmentSummary:
    """Do all that is missing of `task.to` with `workers` actors; `on_rows(n)` after each n rows of a group of columns.

    Without `workers` there is one for each core or GPU, of nodes that join later too. An actor asks for a core, and for
    a GPU where hops run on these. What it took is added to `summary`. `pending` knows which parts were checked already.
    The manifest is the caller's.
    """
    started = time.monotonic()
    pending = pending or Pending.attach(task.to)
    check_parts(pending)
    grows, workers = workers is None, workers or hop_workers(task.device)
    resources = resources or ({"num_cpus": 1} if task.device == "cpu" else {"num_cpus": 1, "num_gpus": 1})
    actors = ray.remote(**resources)(HopWorker).options(scheduling_strategy="SPREAD")

    def attempt() -> None:
        schedule = Schedule(task, pending)

        def on_done(item: HopItem, result: dict[str, Any]) -> list[HopItem]:
            summary.add(result)
            on_rows(hop_rows(item, schedule.cut))
            return schedule.done(item)

        ran = run_blocks(
            lambda _: actors.remote(task),
            workers,
            schedule.ready(),
            on_done=on_done,
            policy=policy,
            work=Tally("hops", lambda item: hop_rows(item, schedule.cut), traffic=itemgetter("traffic")),
            room=(lambda left: min(hop_workers(task.device), max(left, schedule.most_at_once))) if grows else None,
            most_at_once=schedule.most_at_once,
        )
        summary.retries += ran.retries
        summary.workers_lost += ran.actors_lost
        summary.spare_copies += ran.spare_copies

    until_sound(attempt)
    summary.took = time.monotonic() - started
    return summary


def build_index(
    task: Augmentation,
    on_rows: Callable[[int], None] = lambda rows: None,
    *,
    workers: int | None = None,
    resources: dict[str, float] | None = None,
    policy: BlockPolicy | None = None,
    reach: Reach | None = None,
    shards: ShardReader | None = None,
    pending: Pending | None = None,
) -> AugmentSummary:
    """Compute and publish all missing parts of `task.to` with `workers` actors; `on_rows(n)` after each n rows.

    As `lattqe.augmentation.index` does in this process, with the same bytes. Without `workers` there is one for each
    GPU or core, of nodes that join later too. `resources` is what one actor asks Ray for, as in
    `{"num_cpus": 1, "num_gpus": 1}`. `reach` says how workers reach the vectors, by default as
    `choose_reach` does; with `shards` they gather them from shards that are there. `pending` knows which parts were
    checked already. The manifest is the caller's.
    """
    if task.hopping:
        return run_hops(task.hop_task(), on_rows, AugmentSummary(), workers=workers, policy=policy, pending=pending)
    pending = pending or Pending.attach(task.to)
    check_parts(pending)
    items, waiting = items_to_do(pending, task.block_rows)
    summary = AugmentSummary()
    rows = partial(rows_of, part_rows=pending.part_rows, block_rows=task.block_rows)
    actor_class = ray.remote(**(resources or worker_resources()))(worker_class(task))

    def on_done(item: Item, result: dict[str, Any]) -> list[Item]:
        summary.add(result)
        on_rows(rows(item))
        if len(item) == 1:
            return []
        waiting[item[0]].discard(item[1])
        return [] if waiting[item[0]] else [(item[0],)]

    # A spread strategy uses every node's cores and disks before doubling up on one.
    actors = actor_class.options(scheduling_strategy="SPREAD")
    opened: AbstractContextManager[ShardedIndex | None] = nullcontext()
    if shards is None and items:  # parts from S3 that a worker cannot hold would be read again for every block
        original = FeatureSet.open(task.features)
        opened = open_shards(original, reach or choose_reach("auto", original, task.cache))
    with opened as index:
        reader = shards if index is None else ShardReader(index)
        ran = run_blocks(
            lambda _: actors.remote(task, reader),
            workers or default_workers(),
            items,
            on_done=on_done,
            policy=policy,
            work=Tally("augment", rows, traffic=itemgetter("traffic")),
            room=(lambda left: min(_places(), left)) if workers is None else None,
        )
    summary.took, summary.retries = ran.seconds, ran.retries
    summary.workers_lost, summary.spare_copies = ran.actors_lost, ran.spare_copies
    return summary


def adapted_rows(
    original: FeatureSet,
    to: str,
    on_rows: Callable[[int], None],
    *,
    workers: int | None = None,
    cache: str | None = None,
) -> tuple[FeatureSet, dict[str, int]]:
    """As `lattqe.augmentation.recipe` does in this process, with the same bytes; and the memory of the largest worker,
    predicted and real, mapped files included.
    """
    whitening, adapted = (f"{to.rstrip('/')}/{each}" for each in (ADAPTATION, ADAPTED))
    with ShardedIndex(original.uri, workers, cache=cache) as index:
        adapt(original, index, to)
        peak, shards = index.memory(0, 0)["peak_worker_bytes"], index.shards
    rows, fetched = Rows.of(original), cache is None and not original.place.is_local
    predicted = sum(adapting_memory(rows.stored, rows.rewritten().stored, original.dim, shards, fetched))
    pending = begin_whitened(original, whitening, adapted)
    check_parts(pending)
    actors = ray.remote(num_cpus=1)(WhitenWorker).options(scheduling_strategy="SPREAD")
    on_rows(sum(pending.part_rows) - sum(pending.part_rows[part] for part in pending.missing()))

    def on_done(part: int, result: dict[str, Any]) -> None:
        nonlocal peak
        peak = max(peak, result["peak_bytes"])
        on_rows(pending.part_rows[part])

    run_blocks(
        lambda _: actors.remote(original.uri, whitening, adapted, cache),
        workers or hop_workers(),
        pending.missing(),
        on_done=on_done,
        work=Tally("adapt", lambda part: pending.part_rows[part], traffic=itemgetter("traffic")),
        room=(lambda left: min(hop_workers(), left)) if workers is None else None,
    )
    pending.finish()
    return FeatureSet.open(adapted), {"predicted_worker_bytes": predicted, "peak_worker_bytes": peak}


def worker_resources() -> dict[str, float]:
    """What one worker asks Ray for: a GPU and a core where the cluster has GPUs, else a core."""
    return {"num_cpus": 1, "num_gpus": 1} if gpus_available() else {"num_cpus": 1}


def default_workers() -> int:
    """One worker for each GPU, or for each CPU where there are none."""
    count = _places()
    if count < 1:
        raise LattqeError("the Ray cluster has no free CPUs or GPUs: add a worker node")
    return count


def _places() -> int:
    return gpus_available() or int(ray.cluster_resources().get("CPU", 0))


def predict_memory(
    task: Augmentation, features: FeatureSet, graph: NeighborGraph, method: Method, reach: Reach, process: int
) -> WorkerMemory:
    """Predict from the sizes of everything; `process` is what `resident_bytes` says once the method is created."""
    kept = task.cache is not None and reach.how == "map"
    weighs = weighing_of(method, task.k, features.dim, features.rows, again=task.previous is not None)
    return augmentation_memory(
        Stored.of(features.manifest),
        Stored.of(graph.manifest),
        features.dim,
        weighs,
        itemsize=np.dtype(features.dtype).itemsize,
        block_rows=task.block_rows,
        process=process,
        shards=reach.how == "shards",
        fetched=not features.place.is_local and not kept,
        graph_fetched=not graph.place.is_local and not kept,
    )
