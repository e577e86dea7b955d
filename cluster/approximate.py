"""An approximate kNN graph on Ray: the driver finds the clusters, then each worker makes parts by itself."""

import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import ray

from cluster.blocks import BlockPolicy, BlockSummary, run_blocks
from cluster.graph_plan import threads_for
from cluster.metrics import Work
from cluster.session import require_resources
from lattqe.search.rows import in_one
from lattqe.search.stored import Approximated, ClusterWorker, GraphTask, agree_on_clusters, open_sets
from lattqe.store import Pending


def build_approximate(
    task: GraphTask,
    on_rows: Callable[[int], None] = lambda rows: None,
    *,
    workers: int | None = None,
    policy: BlockPolicy | None = None,
) -> tuple[Approximated, BlockSummary]:
    """Make and publish all missing parts with `workers` actors, one for each CPU by default, never more than parts.

    As `lattqe.search.stored.build_approximate` does in this process, with the same bytes; the manifest is the caller's.
    """
    started, pending = time.monotonic(), Pending.attach(task.to)
    rows = in_one([piece for each in open_sets(task) for piece in each.pieces()])
    made = Approximated(agree_on_clusters(pending, rows, task).facts(), planning=time.monotonic() - started)
    missing = pending.missing()
    workers = min(workers or int(ray.cluster_resources().get("CPU", 1)), max(len(missing), 1))
    threads = threads_for(workers)
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
        work=Work("neighbors", lambda part: pending.part_rows[part], traffic=itemgetter("traffic")),
    )
    made.took = time.monotonic() - started
    return made, ran
