"""Hops on Ray: `lattqe.augmentation.bands.run_hops` with many workers, the same bytes."""

import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import ray

from cluster.blocks import BlockPolicy, check_parts, run_blocks
from cluster.metrics import Work
from lattqe.augmentation import AugmentSummary
from lattqe.augmentation.bands import HopTask, HopWorker, Item, Schedule, rows_of, until_sound
from lattqe.cost.augment import hop_buffers
from lattqe.store import Edges, FeatureSet, Pending
from lattqe.store.parts import RESIDENT_BYTES


def default_workers() -> int:
    """One worker for each core: hops have no use for a GPU."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def predict_memory(task: HopTask, process: int) -> int:
    """Bytes of a worker, mapped files included, in a process that has so many before it does anything."""
    features, edges = FeatureSet.open(task.features), Edges.open(task.edges)
    cut = task.cut(features.rows, features.dim)
    files = 0
    for stored in (features, edges):
        size = stored.manifest.total_bytes
        files += size if stored.place.is_local or task.cache is not None else min(size, RESIDENT_BYTES)
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

    An actor asks for a core. What it took is added to `summary`. `pending` knows which parts were checked already.
    The manifest is the caller's.
    """
    started = time.monotonic()
    pending = pending or Pending.attach(task.to)
    check_parts(pending)
    workers = workers or default_workers()
    actors = ray.remote(**(resources or {"num_cpus": 1}))(HopWorker).options(scheduling_strategy="SPREAD")

    def attempt() -> None:
        schedule = Schedule(task, pending)

        def on_done(item: Item, result: dict[str, Any]) -> list[Item]:
            summary.add(result)
            on_rows(rows_of(item, schedule.cut))
            return schedule.done(item)

        ran = run_blocks(
            lambda _: actors.remote(task),
            workers,
            schedule.ready(),
            on_done=on_done,
            policy=policy,
            work=Work("hops", lambda item: rows_of(item, schedule.cut), traffic=itemgetter("traffic")),
            most_at_once=schedule.most_at_once,
        )
        summary.retries += ran.retries
        summary.workers_lost += ran.actors_lost
        summary.spare_copies += ran.spare_copies

    until_sound(attempt)
    summary.took = time.monotonic() - started
    return summary
