"""Database-side augmentation on Ray: `build_index` and `run_hops` of `lattqe.augmentation` with many workers.

What blocks, pieces and parts are, and why any process may die at any time, is said in `lattqe.augmentation.index`.
Workers reach all vectors mapped on their node, or gather them from shards where a node cannot hold them.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.blocks import ACTOR_LOST, BlockPolicy, ask_actors, check_parts, run_blocks, user_error
from cluster.monitor import Tally
from cluster.session import gpus_available
from cluster.shards import ShardedIndex
from lattqe.augmentation.bands import HopItem, HopSchedule, HopWorker, until_sound
from lattqe.augmentation.bands import rows_of as hop_rows
from lattqe.augmentation.index import Item, items_to_do, rows_of, worker_class
from lattqe.augmentation.recipe import ADAPTATION, ADAPTED, Augmentation, AugmentSummary, HopTask, adapt
from lattqe.cost.augment import WorkerMemory, augmentation_memory, hop_buffers, weighing_of
from lattqe.cost.plans import PlannedRows
from lattqe.cost.stages import adapting_memory
from lattqe.cost.work import Stored, held_bytes
from lattqe.errors import LattqeError
from lattqe.expansion import Method
from lattqe.search.exact import merge, published
from lattqe.store import Edges, FeatureSet, NeighborGraph, Pending
from lattqe.store.parts import RESIDENT_BYTES
from lattqe.whitening import WhitenWorker, begin_whitened

SHARD_SHARE = 0.5  # of a node's memory that shards may take: the workers are there too
PATIENCE = 300.0  # seconds for a shard that died to be built again elsewhere
PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Reach:
    """`map` or `shards`, and why."""

    how: str
    reason: str
    shards: int = 0


@dataclass(frozen=True)
class Nodes:
    """What the cluster offers, in bytes: memory of the smallest node and of all, free disk of the fullest node."""

    count: int
    least_memory: int
    all_memory: int
    least_disk: int | None = None  # where the cache is; None: not asked, or no answer


def look_at_nodes(cache: str | None) -> Nodes:
    """Ask the connected cluster; with a `cache`, every node for the free bytes of its disk."""
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    memory = [int(node["Resources"].get("memory", 0)) for node in alive] or [0]
    disk = None
    if cache is not None:
        ask = ray.remote(num_cpus=0)(free_disk)
        asked = [
            ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(cache)
            for node in alive
        ]
        disk = min(_answers(asked), default=None)
    return Nodes(max(len(alive), 1), min(memory), sum(memory), disk)


def _answers(asked: list[Any]) -> list[int]:
    """What nodes say; one that is dying now, or too busy to answer, is left out."""
    answers = []
    for reference in ray.wait(asked, num_returns=len(asked), timeout=PROBE_SECONDS)[0]:
        with suppress(RayError):
            answers.append(ray.get(reference))
    return answers


def free_disk(folder: str) -> int:
    """Free bytes of the disk that a folder is on, or will be."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def choose_reach(wanted: str, features: FeatureSet, cache: str | None) -> Reach:
    """Choose for the connected cluster; an explicit wish is granted."""
    remote = not features.place.is_local
    nodes = look_at_nodes(cache if remote and wanted == "auto" else None)
    size = vector_bytes(features)
    shards = max(nodes.count, -(-size // max(int(SHARD_SHARE * nodes.least_memory), 1)))
    if wanted != "auto":
        return Reach(wanted, "as asked", shards if wanted == "shards" else 0)
    how, reason = decide(size, features.manifest.total_bytes, nodes, remote, cache)
    return Reach(how, reason, shards if how == "shards" else 0)


def vector_bytes(features: FeatureSet) -> int:
    """Bytes of the vectors as they are stored."""
    return features.rows * features.dim * np.dtype(features.dtype).itemsize


def decide(size: int, stored: int, nodes: Nodes, remote: bool, cache: str | None) -> tuple[str, str]:
    """The rule, in bytes of vectors and of stored parts: `map` wherever every node can hold them."""
    vectors = f"{_mib(size)} of vectors"
    fits_shards = size <= SHARD_SHARE * nodes.all_memory
    if not remote:
        if size <= nodes.least_memory:
            return "map", f"{vectors}, mapped in place, fit in the memory of every node ({_mib(nodes.least_memory)})"
        if nodes.count > 1 and fits_shards:
            return "shards", f"{vectors} are more than the memory of a node ({_mib(nodes.least_memory)})"
        return "map", f"{vectors} are more than this cluster's memory: they will be read from disk repeatedly"
    if cache is None:
        if stored <= RESIDENT_BYTES:  # whole parts are held: with one too many, every block reads all of them again
            return "map", f"{vectors} from S3 are held by each worker"
        if fits_shards:
            return "shards", f"{vectors} are on S3 and no --cache folder was given"
        raise LattqeError(
            f"{vectors} on S3 are too many for shards in {_mib(nodes.all_memory)} of memory: give "
            "--cache, a folder on every node's disk"
        )
    if nodes.least_disk is not None and stored > nodes.least_disk:
        if fits_shards:
            return "shards", f"{_mib(stored)} do not fit on the disk of every node ({_mib(nodes.least_disk)} free)"
        raise LattqeError(
            f"{_mib(stored)} fit neither the disk below {cache} ({_mib(nodes.least_disk)} free on the "
            f"fullest node) nor the cluster's memory ({_mib(nodes.all_memory)}): add disk or nodes"
        )
    if size > nodes.least_memory and nodes.count > 1 and fits_shards:
        return "shards", f"{vectors} are more than the memory of a node ({_mib(nodes.least_memory)})"
    return "map", f"{vectors}, copied once per node into {cache}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def open_shards(features: FeatureSet, reach: Reach) -> AbstractContextManager[ShardedIndex | None]:
    """The shards of a reach, placed by memory alone (they take no core from the workers); None where it has none."""
    if reach.how == "map":
        return nullcontext()
    return ShardedIndex(features.uri, reach.shards, by_memory=True)


class ShardReader:
    """Reads from the shards of a `ShardedIndex` in whichever process it is sent to: actors and row numbers only."""

    def __init__(self, index: ShardedIndex) -> None:
        self.rows, self.dim, self.cuts = index.rows, index.dim, index.cuts
        self._actors = index.actors

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Vectors (n, D) float32 of rows (n,); each different row travels once."""
        different, places = np.unique(rows, return_inverse=True)
        shards = np.searchsorted(self.cuts, different, side="right") - 1
        wanted = {int(shard): different[shards == shard] for shard in np.unique(shards)}
        vectors = np.empty((len(different), self.dim), dtype=np.float32)
        for shard, found in self._ask("gather", {shard: (some,) for shard, some in wanted.items()}).items():
            vectors[shards == shard] = found
        return vectors[places]

    def lowest(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k rows with the lowest scores, ascending. See lattqe.search.Index."""
        lists = self._ask("search", dict.fromkeys(range(len(self._actors)), (-np.asarray(xq), k)))
        scores, ids = merge([lists[shard] for shard in sorted(lists)], k)
        return published(-scores, ids)

    def _ask(self, method: str, questions: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Ask some shards at once; one that died is asked again when Ray has built it elsewhere."""
        deadline = time.monotonic() + PATIENCE

        def wait(shard: int, error: RayError) -> None:
            if not isinstance(error, ACTOR_LOST):
                raise user_error(error) or error from None
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.5)

        return next(ask_actors(self._actors, method, [questions], wait))


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
        schedule = HopSchedule(task, pending)

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
    rows, fetched = PlannedRows.of(original), cache is None and not original.place.is_local
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
