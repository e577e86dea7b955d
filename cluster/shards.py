"""Exact search in shards on Ray: every shard answers every block of queries, and the answers are merged exactly.

A shard is an actor that owns a range of rows. It is built from URIs and row numbers alone, so Ray can build it again
anywhere by running its constructor once more. Its methods change nothing: a block whose shard died is asked again, and
the caller sees whole answers only. The rows of several feature sets count through: those of the first, then those of
the second, and so on (a database, then its distractors).
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.blocks import ACTOR_LOST, ask_actors, user_error
from cluster.graph_worker import threads_for
from cluster.monitor import Watch
from cluster.session import gpus_available
from lattqe.cost.work import Stored
from lattqe.errors import LattqeError
from lattqe.search.exact import merge, published
from lattqe.search.rows import check_queries, tiles
from lattqe.store import FeatureSet
from lattqe.store.features import rows_of_ids
from lattqe.store.place import node_folder, traffic

QUERY_BLOCK = 1024  # queries put into the object store at once: 8 MiB at 2048-D
MAX_ROWS = 2**31 - 1  # row numbers are int32
ROWS_PER_SHARD = 100_000  # below this a further CPU shard costs more than it saves


@dataclass(frozen=True)
class ShardPolicy:
    """How patient an index is with its cluster."""

    start_timeout: float = 120.0  # for resources to be granted
    load_timeout: float = 1800.0  # for a shard that has them to come up and load its rows: minutes on a crowded node
    max_failures: int = 3  # of one shard, over the life of the index
    window: int = 4  # query blocks in flight: shards differ in speed, memory for answers is bounded


@dataclass(frozen=True)
class RowRange:
    """Rows start..stop of one feature set."""

    uri: str
    start: int
    stop: int
    ids: bool = False  # whether their ids are kept, too


class Shard:
    """The actor: rows of one or several feature sets in this process's memory, numbered from `first_row`."""

    def __init__(
        self, pieces: Sequence[RowRange], first_row: int, threads: int, cache: str | None, device: str = "auto"
    ) -> None:
        import torch

        from lattqe.device import pick_device
        from lattqe.search import FlatIndex
        from lattqe.search.rows import in_one

        torch.set_num_threads(threads)
        parts: list[np.ndarray] = []
        self.ids: list[pa.Array] = []  # of the first rows
        for piece in pieces:
            keep = self.ids.append if piece.ids else None
            parts += FeatureSet.open(piece.uri, cache).pieces(piece.start, piece.stop, keep)
        self.index = FlatIndex(in_one(parts), pick_device(device), first_row)

    def loaded(self) -> tuple[int, int]:
        """Say that the rows are there, and which bytes were read and written for that."""
        return traffic.take()

    def search(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best rows of this shard: (nq, k) float64, (nq, k) int32."""
        return self.index.search_exact(xq, k)

    def score(self, xq: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Exact scores (nq, m) float64 of the rows that are here, 0 elsewhere."""
        return self.index.score(xq, np.where(self._here(rows), rows, -1))

    def count_above(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """How many rows of this shard stand before each (score, row): (nq, m) int64."""
        return self.index.count_above(xq, scores, rows)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Vectors (n, D) of those of `rows` (m,) that are here, in their order and as stored: half travels as half."""
        return self.index.gather_stored(rows[self._here(rows)])

    def find_ids(self, ids: pa.Array) -> np.ndarray:
        """Rows (n,) int64 of ids that are here, -1 for the others."""
        stored = pa.chunked_array(self.ids, pa.string())
        return rows_of_ids(ids, lambda least: [(self.index.first_row, stored)])

    def peak(self) -> int:
        """The most memory that this process ever had, mapped files included."""
        from lattqe.device import peak_bytes

        return peak_bytes()

    def _here(self, rows: np.ndarray) -> np.ndarray:
        return (rows >= self.index.first_row) & (rows < self.index.first_row + self.index.rows)


class ShardedIndex:
    """Feature sets, one after the other, as one exact index over shards; `with` it, or `close` it, to free them.

    `shards`: default one for each GPU; without GPUs one for each 100,000 rows, as many as there are CPUs at most.
    `cpus`: of one shard; default its share of the cluster's. `by_memory`: shards that only hold rows for others take
    memory instead of CPUs and GPUs. `ids`: the ids of the first set are kept, for `find_ids`.
    """

    def __init__(
        self,
        uris: str | Sequence[str],
        shards: int | None = None,
        *,
        cpus: int | None = None,
        cache: str | None = None,
        policy: ShardPolicy | None = None,
        query_block: int = QUERY_BLOCK,
        by_memory: bool = False,
        ids: bool = False,
    ) -> None:
        self.uris = [uris] if isinstance(uris, str) else list(uris)
        self.policy, self._query_block = policy or ShardPolicy(), query_block
        sets = [FeatureSet.open(uri) for uri in self.uris]
        self.rows, self.dim = _joint_shape(sets)
        self._stored = [Stored.of(each.manifest) for each in sets]
        self._fetched = cache is None and not sets[0].place.is_local
        self.shards = min(shards or default_shards(self.rows), self.rows)
        self.cuts = [self.rows * shard // self.shards for shard in range(self.shards + 1)]
        self.shard_bytes = -(-self.rows // self.shards) * self.dim * max(np.dtype(each.dtype).itemsize for each in sets)
        self.bundle = {"memory": float(self.shard_bytes)} if by_memory else shard_resources(self.shards, cpus)
        check_memory(self.shard_bytes, self.shards)
        self._failures: Counter[int] = Counter()
        self._watch = Watch("search")
        self._group = reserve(self.bundle, self.shards, self.policy.start_timeout)
        spans = [(each.uri, each.rows) for each in sets]
        self._actors = [
            self._start(shard, cut_ranges(spans, *cut, ids), node_folder(cache))
            for shard, cut in enumerate(pairwise(self.cuts))
        ]
        try:
            for shard in range(self.shards):
                self._wait_ready(shard)
        except BaseException:
            self.close()
            raise

    def _start(self, shard: int, pieces: list[RowRange], cache: str | None) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=shard)
        threads = max(int(self.bundle.get("CPU", 1)), 1)
        actor = ray.remote(
            num_cpus=self.bundle.get("CPU", 0),
            num_gpus=self.bundle.get("GPU", 0),
            memory=self.bundle.get("memory"),
            max_restarts=-1,
        )(Shard)
        device = "cpu" if "memory" in self.bundle else "auto"
        return actor.options(scheduling_strategy=place).remote(pieces, self.cuts[shard], threads, cache, device)

    def _wait_ready(self, shard: int) -> None:
        """Wait until a shard has loaded its rows; a bad feature set, or a cluster without room, is reported as such."""
        deadline = time.monotonic() + self.policy.load_timeout
        while True:
            ready = self._actors[shard].loaded.remote()
            done, _ = ray.wait([ready], timeout=max(deadline - time.monotonic(), 0))
            if not done:
                raise LattqeError(
                    f"shard {shard} (rows {self.cuts[shard]}..{self.cuts[shard + 1]}) did not load within "
                    f"{self.policy.load_timeout:.0f} s: look at the load of its node and at the storage, then "
                    "run the same command again"
                )
            try:
                self._watch.count_traffic(*ray.get(ready))
                self._watch.started(shard)
                return
            except ActorUnavailableError:  # Ray is building it again
                time.sleep(0.1)
            except RayError as error:
                self._note_failure(shard, error)

    def _note_failure(self, shard: int, error: RayError) -> None:
        """Count a failure; raise what the user should know."""
        fixable = user_error(error)
        if fixable is not None:
            raise fixable from None
        if not isinstance(error, ACTOR_LOST):
            raise error
        self._failures[shard] += 1
        self._watch.lost(shard, error)
        if self._failures[shard] > self.policy.max_failures:
            reason = str(error).strip().rsplit("\n", 1)[-1].strip()
            raise LattqeError(
                f"shard {shard} (rows {self.cuts[shard]}..{self.cuts[shard + 1]}) died "
                f"{self._failures[shard]} times, last with: {reason} (often too little memory: use more "
                "shards on more nodes)"
            )

    def _ask(self, method: str, requests: Sequence[tuple[Any, ...]]) -> Iterator[list[Any]]:
        """Ask all shards for each request; yield the answers of all shards, request by request, in order."""

        def shared() -> Iterator[dict[int, list[Any]]]:
            for request in requests:
                parts = [ray.put(part) if isinstance(part, np.ndarray) else part for part in request]
                yield dict.fromkeys(range(self.shards), parts)

        for answers in ask_actors(self._actors, method, shared(), self._recover, self.policy.window, self._watch):
            yield [answers[shard] for shard in range(self.shards)]

    def _recover(self, shard: int, error: RayError) -> None:
        """Wait until Ray has built a shard again; raise what the user should know, or a shard that dies too often."""
        self._note_failure(shard, error)
        self._wait_ready(shard)

    def search(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the k best rows of all shards: D (nq, k) float32, I (nq, k) int32. See lattqe.search.Index."""
        return published(*self._best(xq, k))

    def lowest(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the k rows with the lowest scores, ascending. See lattqe.search.Index."""
        scores, ids = self._best(-np.asarray(xq), k)
        return published(-scores, ids)

    def _best(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        xq = check_queries(xq, self.dim)
        if k < 1:
            raise LattqeError(f"k must be at least 1, got {k}")
        blocks = self._blocks(xq)
        lists = []
        for block, parts in zip(blocks, self._ask("search", [(block, k) for block in blocks])):
            lists.append(merge(parts, k))
            self._watch.count_rows(len(block))
        if not lists:
            return np.empty((0, k)), np.empty((0, k), dtype=np.int32)
        return np.concatenate([part[0] for part in lists]), np.concatenate([part[1] for part in lists])

    def score(self, xq: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Exact scores of rows (nq, m), -1 padding: (nq, m) float64. See lattqe.search.Index."""
        xq, rows = check_queries(xq, self.dim), self._check_rows(rows)
        requests = list(zip(self._blocks(xq), self._blocks(rows)))
        sums = [sum(parts) for parts in self._ask("score", requests)]
        return np.concatenate(sums) if sums else np.zeros(rows.shape)

    def count_above(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Count rows before each (score, row) in exact order: (nq, m) int64. See lattqe.search.Index."""
        xq, rows = check_queries(xq, self.dim), np.asarray(rows)
        requests = list(zip(self._blocks(xq), self._blocks(np.asarray(scores)), self._blocks(rows)))
        sums = [sum(parts) for parts in self._ask("count_above", requests)]
        return np.concatenate(sums) if sums else np.zeros(rows.shape, dtype=np.int64)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Vectors of rows (n,): (n, D) float32."""
        rows = self._check_rows(rows)
        if rows.size and rows.min() < 0:
            raise LattqeError(f"row {int(rows.min())} requested: rows count from 0")
        vectors = np.empty((len(rows), self.dim), dtype=np.float32)
        blocks = self._blocks(rows)
        for number, parts in enumerate(self._ask("gather", [(block,) for block in blocks])):
            block, out = blocks[number], vectors[number * self._query_block :][: len(blocks[number])]
            for shard, part in enumerate(parts):
                out[(block >= self.cuts[shard]) & (block < self.cuts[shard + 1])] = part
        return vectors

    def find_ids(self, ids: pa.ChunkedArray) -> np.ndarray:
        """Rows (n,) int64 of ids in the first set, -1 where there is none: looked up where the rows are."""
        return np.max(next(self._ask("find_ids", [(ids.combine_chunks(),)])), axis=0)

    def _blocks(self, array: np.ndarray) -> list[np.ndarray]:
        return [np.ascontiguousarray(array[lo:hi]) for lo, hi in tiles(len(array), self._query_block)]

    def _check_rows(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows)
        if rows.size and rows.max() >= self.rows:
            raise LattqeError(f"row {int(rows.max())} requested, but the index has {self.rows} rows")
        return rows

    @property
    def actors(self) -> list[Any]:
        """The shards' handles, in the order of their rows."""
        return list(self._actors)

    def memory(self, asked: int, k: int) -> dict[str, int]:
        """Bytes of a shard, mapped files included: predicted for that many queries and k results, and the most that
        one had; of one that was built again, since then.
        """
        from lattqe.cost.stages import shard_memory

        return {
            "predicted_worker_bytes": sum(shard_memory(self._stored, self.shards, asked, k, self._fetched)),
            "peak_worker_bytes": max(next(self._ask("peak", [()]))),
        }

    @property
    def failures(self) -> int:
        """How often a shard died and was built again."""
        return self._failures.total()

    def close(self) -> None:
        """Free the shards and what was reserved for them."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        self._watch.close()
        remove_placement_group(self._group)

    def __enter__(self) -> "ShardedIndex":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _joint_shape(sets: list[FeatureSet]) -> tuple[int, int]:
    """Rows and dimensions of all sets together."""
    for other in sets[1:]:
        if other.dim != sets[0].dim:
            raise LattqeError(
                f"{other.uri} has {other.dim} dimensions and {sets[0].uri} {sets[0].dim}: use features of one extractor"
            )
    rows = sum(each.rows for each in sets)
    if rows > MAX_ROWS:
        raise LattqeError(f"{rows} rows are more than an index can number ({MAX_ROWS}): search the sets one by one")
    return rows, sets[0].dim


def cut_ranges(spans: Sequence[tuple[str, int]], start: int, stop: int, ids: bool = False) -> list[RowRange]:
    """The parts of feature sets (uri, rows), laid end to end, that make up rows start..stop; with ids of the first."""
    pieces, first = [], 0
    for uri, rows in spans:
        low, high = max(start, first), min(stop, first + rows)
        if low < high:
            pieces.append(RowRange(uri, low - first, high - first, ids and not first))
        first += rows
    return pieces


def default_shards(rows: int) -> int:
    """One for each GPU; without GPUs as many CPUs as have enough rows to be worth it."""
    cpus = int(ray.cluster_resources().get("CPU", 1))
    return gpus_available() or max(min(rows // ROWS_PER_SHARD, cpus), 1)


def shard_resources(shards: int, cpus: int | None = None) -> dict[str, float]:
    """What one shard asks for: a GPU where there are any, and its share of the CPUs, as far as the nodes have room."""
    resources: dict[str, float] = {"CPU": cpus or threads_for(shards)}
    return resources | {"GPU": 1} if gpus_available() else resources


def check_memory(shard_bytes: int, shards: int) -> None:
    """Refuse rows that the nodes' memory cannot hold."""
    owned = sum(node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"])
    if shard_bytes * shards > owned:
        raise LattqeError(
            f"{shards} shards of {shard_bytes >> 20} MiB do not fit the cluster's {int(owned) >> 20} "
            "MiB: add nodes, or store the features as float16"
        )


def reserve(bundle: dict[str, float], count: int, timeout: float) -> PlacementGroup:
    """Reserve `count` bundles spread over the nodes, or say what is missing after `timeout` seconds."""
    group = placement_group([dict(bundle) for _ in range(count)], strategy="SPREAD")
    if group.wait(timeout):
        return group
    owned = ray.cluster_resources()
    asked = ", ".join(
        f"{amount * count:g} {name} (the cluster has {owned.get(name, 0):g}, free is {free_resources().get(name, 0):g})"
        for name, amount in bundle.items()
    )
    remove_placement_group(group)
    raise LattqeError(
        f"{count} shards need {asked}, not granted within {timeout:.0f} s: ask for fewer with --workers, "
        "wait for other jobs to end, or add nodes"
    )


def free_resources() -> dict[str, float]:
    """CPUs and GPUs that are free now."""
    return {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
