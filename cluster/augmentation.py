"""Database-side augmentation on Ray: every row replaced by its expansion from its neighbors among the original rows.

What blocks, pieces and parts are, and why any process may die at any time, is said in `cluster.augment_worker`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import ray

from cluster.augment_worker import (
    Augmentation,
    AugmentWorker,
    Item,
    block_spans,
    part_spans,
    piece_name,
    write_reusable,
)
from cluster.blocks import BlockPolicy, BlockSummary, run_blocks
from cluster.metrics import Work
from cluster.session import gpus_available
from lattqe.augmentation import describe
from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, Pending

if TYPE_CHECKING:
    from cluster.reach import ShardReader

__all__ = ["AugmentSummary", "AugmentWorker", "Augmentation", "begin_index", "default_workers", "items_to_do",
           "piece_name", "run_augmentation", "run_augmentation_here", "worker_resources", "write_reusable"]


@dataclass
class AugmentSummary:
    """What it took, added up block by block."""

    blocks: BlockSummary = field(default_factory=BlockSummary)
    seconds: dict[str, float] = field(default_factory=dict)  # of all workers, by what they did
    peak_bytes: int = 0  # of the largest worker, mapped files included
    expanded: int = 0  # rows that went through the method; the others were taken over
    tables: int = 0  # of shared first products, one for each worker that made one
    cpu: float = 0.0  # processor seconds of all workers
    working: float = 0.0  # seconds from when the first worker was up
    _since: float | None = None

    def add(self, result: dict[str, Any]) -> None:
        """Add what a worker says of an item."""
        now = time.monotonic()
        self._since = now - result["busy"] if self._since is None else self._since
        self.working = now - self._since
        self.peak_bytes = max(self.peak_bytes, result["peak_bytes"])
        self.expanded += result["expanded"]
        self.tables += result["tables"]
        self.cpu += result["cpu"]
        for name, spent in result["seconds"].items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def begin_index(task: Augmentation, inputs: dict[str, dict[str, str]]) -> Pending:
    """Claim the destination of an index of the rows of `task.features`, or join an earlier run of the same task."""
    features = FeatureSet.open(task.features)
    part_rows = [part.rows for part in features.manifest.parts]
    return Pending.begin(task.to, "features", features.content_fields(), part_rows, schema=features.table(0, 1).schema,
                         config=describe(task.method, task.k, task.params), inputs=inputs)


def items_to_do(pending: Pending, block_rows: int) -> tuple[list[Item], dict[int, set[int]]]:
    """The items that can start now, and for each unfinished part the first rows of the blocks it still waits for."""
    there = set(pending.place.sizes())
    items: list[Item] = []
    waiting: dict[int, set[int]] = {}
    spans = part_spans(pending.part_rows)
    for part in pending.missing():
        blocks = block_spans(*spans[part], block_rows)
        missing = [span for span in blocks if piece_name(span[0]) not in there] if len(blocks) > 1 else []
        waiting[part] = {start for start, _ in missing}
        items.extend([(part, *span) for span in missing] or [(part,)])
    return items, waiting


def run_augmentation(task: Augmentation, workers: int, on_rows: Callable[[int], None], *,
                     resources: dict[str, float] | None = None, policy: BlockPolicy | None = None,
                     shards: "ShardReader | None" = None) -> AugmentSummary:
    """Compute and publish all missing parts of `task.to` with `workers` actors; `on_rows(n)` after each n rows.

    `resources` is what one actor asks Ray for, as in `{"num_cpus": 1, "num_gpus": 1}`. The manifest is the caller's.
    With `shards`, workers gather vectors from these instead of mapping them.
    """
    pending = Pending.attach(task.to)
    items, waiting = items_to_do(pending, task.block_rows)
    summary = AugmentSummary()
    actor_class = ray.remote(**(resources or {"num_cpus": 1}))(AugmentWorker)

    def rows_of(item: Item) -> int:
        """Rows that are done with an item; a part of several blocks has no more to do than to be assembled."""
        if len(item) == 3:
            return item[2] - item[1]
        rows = pending.part_rows[item[0]]
        return rows if rows <= task.block_rows else 0

    def on_done(item: Item, result: dict[str, Any]) -> list[Item]:
        summary.add(result)
        on_rows(rows_of(item))
        if len(item) == 1:
            return []
        waiting[item[0]].discard(item[1])
        return [] if waiting[item[0]] else [(item[0],)]

    # A spread strategy uses every node's cores and disks before doubling up on one.
    actors = actor_class.options(scheduling_strategy="SPREAD")
    summary.blocks = run_blocks(lambda _: actors.remote(task, shards), workers, items, on_done=on_done, policy=policy,
                                work=Work("augment", rows_of, traffic=itemgetter("traffic")))
    return summary


def run_augmentation_here(task: Augmentation) -> int:
    """Compute and publish all missing parts in this process: for sets too small to be worth starting workers.

    Returns how many rows went through the method.
    """
    items, waiting = items_to_do(Pending.attach(task.to), task.block_rows)
    if not items:
        return 0
    worker = AugmentWorker(task)
    for item in [*items, *((part,) for part, missing in waiting.items() if missing)]:
        worker.run(item)
    return worker.expanded


def worker_resources() -> dict[str, float]:
    """What one worker asks Ray for: a GPU and a core where the cluster has GPUs, else a core."""
    return {"num_cpus": 1, "num_gpus": 1} if gpus_available() else {"num_cpus": 1}


def default_workers() -> int:
    """One worker for each GPU, or for each CPU where there are none."""
    count = gpus_available() or int(ray.cluster_resources().get("CPU", 0))
    if count < 1:
        raise LattqeError("the Ray cluster has neither CPUs nor GPUs free for work: add a worker node")
    return count
