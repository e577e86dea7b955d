"""Database-side augmentation on Ray: `lattqe.augmentation.build_index` with many workers, and what they will need.

What blocks, pieces and parts are, and why any process may die at any time, is said in `lattqe.augmentation.index`.
"""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import ray

from cluster.blocks import BlockPolicy, check_parts, run_blocks
from cluster.hops import run_hops
from cluster.metrics import Work
from cluster.reach import Reach, ShardReader
from cluster.session import gpus_available
from lattqe.augmentation import Augmentation, AugmentSummary
from lattqe.augmentation.index import Item, items_to_do, rows_of, worker_class
from lattqe.cost.augment import WorkerMemory, augmentation_memory, weighing_of
from lattqe.cost.work import Stored
from lattqe.errors import LattqeError
from lattqe.expansion import Method
from lattqe.store import FeatureSet, NeighborGraph, Pending


def build_index(
    task: Augmentation,
    on_rows: Callable[[int], None] = lambda rows: None,
    *,
    workers: int | None = None,
    resources: dict[str, float] | None = None,
    policy: BlockPolicy | None = None,
    shards: ShardReader | None = None,
    pending: Pending | None = None,
) -> AugmentSummary:
    """Compute and publish all missing parts of `task.to` with `workers` actors; `on_rows(n)` after each n rows.

    As `lattqe.augmentation.build_index` does in this process, with the same bytes. `resources` is what one actor asks
    Ray for, as in `{"num_cpus": 1, "num_gpus": 1}`. With `shards`, workers gather vectors from these instead of
    mapping them. `pending` knows which parts were checked already. The manifest is the caller's.
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
    ran = run_blocks(
        lambda _: actors.remote(task, shards),
        workers or default_workers(),
        items,
        on_done=on_done,
        policy=policy,
        work=Work("augment", rows, traffic=itemgetter("traffic")),
    )
    summary.took, summary.retries = ran.seconds, ran.retries
    summary.workers_lost, summary.spare_copies = ran.actors_lost, ran.spare_copies
    return summary


def worker_resources() -> dict[str, float]:
    """What one worker asks Ray for: a GPU and a core where the cluster has GPUs, else a core."""
    return {"num_cpus": 1, "num_gpus": 1} if gpus_available() else {"num_cpus": 1}


def default_workers() -> int:
    """One worker for each GPU, or for each CPU where there are none."""
    count = gpus_available() or int(ray.cluster_resources().get("CPU", 0))
    if count < 1:
        raise LattqeError("the Ray cluster has neither CPUs nor GPUs free for work: add a worker node")
    return count


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
