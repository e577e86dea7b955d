"""A graph before it is computed: how its rows are cut into blocks, and what it will cost, or why it cannot.

The cost is known before anything is allocated: workers, blocks, memory, products and time.
"""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from cluster.session import gpus_available, only_this_machine, require_resources
from lattqe.cost.graph import Cut
from lattqe.cost.rows import COSTS, graph_on_ray
from lattqe.cost.work import Machines, Stored, Work
from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.search.stored import GraphTask, check_sets, open_sets
from lattqe.store import Place, open_place

MEASURING_SECONDS = 300.0  # for a worker that measures to be placed, to start on a crowded node and to be done
ROWS_PER_WORKER = 12_288  # for a further worker to be worth starting
CUT = "_work/cut.json"


def agree_on_cut(place: Place, cut: Cut) -> Cut:
    """Use this cut, or the one that an earlier run of the same job has begun with: its files belong to that."""
    try:
        place.create(CUT, json.dumps({"bounds": cut.bounds, "own": cut.own, "schedule": cut.schedule}).encode())
        return cut
    except AlreadyExistsError:
        there = json.loads(place.read(CUT))
        return Cut(tuple(there["bounds"]), there["own"], there.get("schedule", "pairs"))


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
        """The plan of a run that goes on with the cut of an earlier one."""
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


def connected_machines(workers: int | None = None) -> Machines:
    """The connected cluster, its nodes taken as equal; `workers`: as many as will share the work."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    count = max(len(nodes), 1)
    cpus, gpus, memory = (sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU", "memory"))
    return Machines(count, max(int(cpus // count), 1), int(gpus // count), memory / count, asked=workers)


def worker_budget(workers: int, device_bytes: int | None) -> int:
    """Memory that one worker may use: its share of the nodes' memory, and its GPU's."""
    memory = [node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]]
    share = int(min(0.8 * sum(memory) / workers, 0.8 * max(memory, default=0)))
    return share if device_bytes is None else min(share, int(0.8 * device_bytes))


def places(threads: int) -> int:
    """How many workers with so many CPUs, and a GPU each where there are any, the nodes have room for."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
    return sum(int(min(node.get("CPU", 0) // threads, node.get("GPU", 0) if gpus else math.inf)) for node in nodes)


def threads_for(workers: int) -> int:
    """The CPUs of each worker: its share of all, but no more than leave room for all workers on the nodes."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    share = min(sum(cpus) // workers, max(cpus, default=1))
    return next((threads for threads in range(share, 1, -1) if places(threads) >= workers), 1)


def measure_worker(task: GraphTask, resources: dict[str, float], timeout: float = MEASURING_SECONDS) -> dict[str, Any]:
    """Measure where a worker will run; on this machine alone that is here, and the processes Ray holds ready stay for
    workers. A cluster too busy to place one is an error, not a silent wait.
    """
    if only_this_machine() and not gpus_available():
        return probe(task)
    measuring = ray.remote(**resources)(probe).remote(task)
    try:
        return ray.get(measuring, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(measuring, force=True)
        asked = ", ".join(f"{amount:g} {name[4:]}" for name, amount in resources.items())
        free = ray.available_resources()
        raise LattqeError(
            f"a worker with {asked} found no place on any node within {timeout:.0f} s (free: "
            f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs): ask for more workers with "
            "--workers, each of which takes less, or wait for other jobs to end"
        ) from None


def probe(task: GraphTask) -> dict[str, Any]:
    """Measure one worker on a sample of the rows: the fastest kind of products, how many of them it makes in a second
    with their selection, and its GPU's free bytes.
    """
    import torch

    from lattqe.device import pick_device
    from lattqe.search.stored import measure_products

    torch.set_num_threads(task.threads)
    device = pick_device()
    kind, rate = measure_products(task)
    free = None if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])
    return {"kind": kind, "products_per_second": rate, "device_bytes": free}


def check_disk(uri: str, needed: int) -> None:
    """Refuse a local destination whose disk cannot hold the graph and its unfinished lists."""
    place = open_place(uri)
    if not place.is_local:
        return
    folder = Path(place.uri.removeprefix("file://")).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise LattqeError(
            f"the graph and its unfinished lists need {needed >> 20} MiB in {uri}, its disk has "
            f"{free >> 20} MiB free: choose another destination or a smaller k"
        )
