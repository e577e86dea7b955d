"""Database-side augmentation on Ray: `lattqe.augmentation.build_index` with many workers, and what they will need.

What blocks, pieces and parts are, and why any process may die at any time, is said in `lattqe.augmentation.index`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import ray

from cluster.blocks import BlockPolicy, check_parts, run_blocks
from cluster.hops import run_hops
from cluster.metrics import Work
from cluster.reach import Reach, ShardReader, vector_bytes
from cluster.session import gpus_available
from lattqe.augmentation import Augmentation, AugmentSummary
from lattqe.augmentation.index import Item, items_to_do, rows_of, worker_class
from lattqe.errors import LattqeError
from lattqe.expansion import Method
from lattqe.expansion.rows import GATHER_BYTES, shares
from lattqe.store import FeatureSet, NeighborGraph, Pending
from lattqe.store.parts import RESIDENT_BYTES

# What the first products of a process bring in: pages of the mathematical libraries, and their buffers.
WARM_BYTES = 48 << 20


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


@dataclass(frozen=True)
class WorkerMemory:
    """Predicted memory of one worker, in bytes; `mapped` is shared by all workers of a node."""

    process: int  # Python, Ray, torch and the model
    mapped: int  # files: the vectors and the graph
    held: int  # what was fetched from S3, and vectors in one piece for DQE's search
    table: int  # shared first products
    buffers: int  # a batch of lists, or a part while it is put together

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """By name, for the plan."""
        return {
            "process and model": self.process,
            "mapped files (one copy for a node)": self.mapped,
            "held": self.held,
            "shared products": self.table,
            "buffers": self.buffers,
        }


def predict_memory(
    task: Augmentation, features: FeatureSet, graph: NeighborGraph, method: Method, reach: Reach, process: int
) -> WorkerMemory:
    """Predict from the sizes of everything; `process` is what `resident_bytes` says once the method is created."""
    mapped = held = 0
    for stored, all_of_it in ((features, reach.how == "map"), (graph, True)):
        size = stored.manifest.total_bytes
        if stored.place.is_local or (task.cache is not None and reach.how == "map"):
            mapped += size if all_of_it else 0
        else:
            held += min(size, RESIDENT_BYTES)
    if method.negatives and reach.how == "map" and len(features.manifest.parts) > 1:
        held += vector_bytes(features)
    itemsize = np.dtype(features.dtype).itemsize
    depth = method.depth(task.k)
    # In float32 in the method, and as stored: one batch in use, one being read, and what reading it takes.
    batch = max(GATHER_BYTES, (1 + depth) * features.dim * 4)
    block = min(task.block_rows, features.rows) * (features.dim * (8 + itemsize) + 2 * 8 * graph.k)
    # A part as an array, and as the bytes of its file.
    part = 2 * max(part.bytes for part in features.manifest.parts)
    table = 4 * features.rows * method.shared_width if task.previous is None and shares(method, features.rows) else 0
    return WorkerMemory(process + WARM_BYTES, mapped, held, table, max(batch + 3 * batch * itemsize // 4 + block, part))
