"""How the workers of an augmentation reach all vectors: mapped on every node, or gathered from shards where a node
cannot hold them.
"""

import shutil
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.blocks import ACTOR_LOST, ask_actors, user_error
from cluster.shards import ShardedIndex
from lattqe.errors import LattqeError
from lattqe.search.exact import merge, published
from lattqe.store import FeatureSet
from lattqe.store.parts import RESIDENT_BYTES

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
