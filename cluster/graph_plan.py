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

from cluster.lists import MAX_BLOCKS
from cluster.session import gpus_available, only_this_machine, require_resources
from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.search.pairing import Pair
from lattqe.search.stored import GraphTask, check_sets, open_sets
from lattqe.search.topk import capacity_for
from lattqe.store import Place, open_place

PAIR_SECONDS = 120.0  # the longest piece of work, and so the most that a death can cost
SMALL_BLOCK = 20_000  # rows; with smaller blocks than this, fewer of them: candidates are scored for each anew
LEAST_BLOCK = 512  # rows; smaller ones would only move data about
BASE_BYTES = 512 << 20  # of a worker process with torch, and its tiles
OVERHEAD = 1.1  # loading, merging and writing beside what is measured
MEASURING_SECONDS = 300.0  # for a worker that measures to be placed, to start on a crowded node and to be done
ROWS_PER_WORKER = 12_288  # for a further worker to be worth starting
CUT = "_work/cut.json"


@dataclass(frozen=True)
class Cut:
    """How the rows are cut into blocks: bounds[b] is where block b begins; the first `own` blocks are compared
    with all, the others (of a second set whose graph is known) with the first ones only.
    """

    bounds: tuple[int, ...]
    own: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.bounds) - 1

    def rows(self, block: int) -> tuple[int, int]:
        """First and last + 1 row of a block."""
        return self.bounds[block], self.bounds[block + 1]

    def siblings(self, a: int, b: int) -> bool:
        """Whether a and b are compared as one block twice as large, which scores their candidates once."""
        return a == b or (b < self.own and a % 2 == 0 and b == a + 1)

    def pairs(self) -> list[Pair]:
        """All comparisons; a block meets itself together with its sibling, the last of an odd number alone."""
        alone = [(self.own - 1, self.own - 1)] if self.own % 2 else []
        return alone + [(a, b) for a in range(self.own) for b in range(a + 1, self.blocks)]

    def gain(self, a: int, b: int) -> tuple[int, int]:
        """The bits that comparing a and b adds to what a and what b have seen."""
        both = (1 << a) | (1 << b)
        return (both, both) if self.siblings(a, b) else (1 << b, 1 << a)

    def complete(self, block: int) -> int:
        """What a block has seen when it is done."""
        return (1 << self.blocks) - 1 if block < self.own else (1 << self.own) - 1

    def cost(self, a: int, b: int) -> int:
        """Products of one comparison."""
        n, m = (stop - start for start, stop in (self.rows(a), self.rows(b)))
        if a == b:
            return n * n // 2
        return (n + m) ** 2 // 2 if self.siblings(a, b) else n * m


def agree_on_cut(place: Place, cut: Cut) -> Cut:
    """Use this cut, or the one that an earlier run of the same job has begun with: its files belong to that."""
    try:
        place.create(CUT, json.dumps({"bounds": cut.bounds, "own": cut.own}).encode())
        return cut
    except AlreadyExistsError:
        there = json.loads(place.read(CUT))
        return Cut(tuple(there["bounds"]), there["own"])


@dataclass(frozen=True)
class GraphPlan:
    """The plan, in numbers; `cut` may be replaced by that of an earlier run."""

    rows: int
    dim: int
    dtype: str
    cut: Cut
    workers: int
    resources: dict[str, float]
    threads: int
    row_bytes: int  # of one row in a worker's memory
    list_bytes: int  # of one row's unfinished list
    products_per_second: float  # of one worker, with selection and exact scores
    kind: str  # of products, the fastest on a sample of the rows
    grows: bool  # whether nodes that join get workers too

    @property
    def largest(self) -> int:
        """Rows of the largest block."""
        return max(stop - start for start, stop in map(self.cut.rows, range(self.cut.blocks)))

    @property
    def worker_bytes(self) -> int:
        """Memory of one worker: two blocks and what belongs to them."""
        return BASE_BYTES + 2 * self.largest * self.row_bytes

    @property
    def work_bytes(self) -> int:
        """Unfinished lists in storage at the most: one for each row, and those that are being replaced."""
        return self.list_bytes * (self.rows + 2 * self.workers * self.largest)

    @property
    def products(self) -> int:
        """Products of two vectors, all pairs together."""
        return sum(self.cut.cost(*pair) for pair in self.cut.pairs())

    @property
    def flops(self) -> float:
        """Floating-point operations of the products."""
        return 2.0 * self.products * self.dim

    @property
    def seconds(self) -> float:
        """Expected time."""
        return OVERHEAD * self.products / (self.products_per_second * self.workers)


def plan_graph(task: GraphTask, workers: int | None = None, block_rows: int | None = None) -> GraphPlan:
    """Plan a graph for the connected cluster; LattqeError with advice where it cannot fit."""
    sets = open_sets(task)
    check_sets(task)
    rows = sum(each.rows for each in sets)
    own = sets[0].rows
    cpus = int(ray.cluster_resources().get("CPU", 0))
    grows = workers is None
    workers = workers or gpus_available() or max(min(cpus, own // ROWS_PER_WORKER), 1)
    threads = threads_for(workers)  # candidates are scored on the CPU, beside a GPU too
    resources: dict[str, float] = {"num_cpus": threads}
    if gpus_available():
        resources["num_gpus"] = 1
    require_resources({"CPU": threads} | ({"GPU": 1} if gpus_available() else {}), workers)
    speed = measure_worker(replace(task, threads=threads), resources)
    row_bytes = bytes_per_row(sets[0].dim, task.k, np.dtype(sets[0].dtype).itemsize)
    budget = worker_budget(workers, speed["device_bytes"])
    if budget - BASE_BYTES < 2 * LEAST_BLOCK * row_bytes:
        raise LattqeError(
            f"{workers} workers have {budget >> 20} MiB each, but two blocks of {LEAST_BLOCK} rows with "
            f"k = {task.k} need {(BASE_BYTES + 2 * LEAST_BLOCK * row_bytes) >> 20} MiB: use fewer "
            "workers, a smaller k, or nodes with more memory"
        )
    fit = min((budget - BASE_BYTES) // (2 * row_bytes), int(math.sqrt(PAIR_SECONDS * speed["products_per_second"])))
    cut = cut_rows(own, rows - own, workers, block_rows or fit, exact=block_rows is not None)
    if cut.blocks > MAX_BLOCKS:
        raise LattqeError(
            f"{rows} rows would be cut into {cut.blocks} blocks, more than {MAX_BLOCKS}: use more memory "
            f"for each worker (now {budget >> 20} MiB), or fewer workers"
        )
    plan = GraphPlan(
        rows,
        sets[0].dim,
        sets[0].dtype,
        cut,
        workers,
        resources,
        threads,
        row_bytes,
        12 * task.k,
        speed["products_per_second"],
        speed["kind"],
        grows,
    )
    check_disk(task.to, plan.work_bytes + 8 * task.k * rows)
    return plan


def cut_rows(own: int, others: int, workers: int, fit: int, exact: bool = False) -> Cut:
    """Cut `own` rows, and `others` of a set whose graph is known, into blocks of at most `fit` rows.

    Enough blocks that every worker finds a free pair: four for each, three where blocks are small, and then two for
    two workers, who have one pair each in every round; `exact` takes `fit` as it is.
    """

    def count(rows: int, wanted: int) -> int:
        least = -(-rows // max(fit, 1))
        return least if exact else max(least, min(wanted, max(rows // LEAST_BLOCK, 1)))

    small = own < 4 * workers * SMALL_BLOCK
    plenty = (2 if workers == 2 else 3) if small else 4
    blocks = count(own, plenty * workers if workers > 1 else 1)
    if blocks > 1 and not exact:
        blocks += blocks % 2  # siblings are compared as one
    more = count(others, 2 * workers) if others else 0
    bounds = [own * block // blocks for block in range(blocks)]
    bounds += [own + others * block // more for block in range(more)] if more else []
    return Cut((*bounds, own + others), blocks)


def bytes_per_row(dim: int, k: int, itemsize: int) -> int:
    """Memory for one row of each of the two blocks that a worker compares.

    As stored and widened to float32, half as much again for a third block that stays from before; its candidates,
    their exact scores, and its lists while they are read and merged.
    """
    return 3 * dim * (itemsize + 4) // 2 + 8 * capacity_for(k) + 8 * k + 4 * 12 * k


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
