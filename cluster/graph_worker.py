"""One worker of the kNN graph, from storage to storage: where it fits, how fast it is, what it does and what it leaves.

It compares pairs of blocks and assembles parts. Unfinished neighbor lists are in storage in
`_work/lists/<block>-<which blocks it has seen>.bin`. The lists of a block after it was compared with a set of blocks
are the exact k best among their rows: a function of that set alone, no matter which worker computed it and in whatever
order. So the set is the file's name, two writers of one name write the same bytes, and what a killed job has achieved
can be read from the names of its files.
"""

import re
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray

from cluster.monitor import fitting_threads, room_for
from cluster.session import gpus_available
from lattqe.cost.graph import Cut
from lattqe.cost.rows import visitor_rows
from lattqe.device import peak_bytes
from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.search.compare import Lists, compare_between, compare_one_way, compare_within
from lattqe.search.exact import exact_scores, published
from lattqe.search.graph import join_lists
from lattqe.search.rows import Clock, Rows, in_one
from lattqe.search.stored import GraphTask, open_sets
from lattqe.store import MissingFileError, NeighborGraph, Pending, Place, neighbors_table, open_place
from lattqe.store.manifest import seal_bytes, seal_json, unseal_bytes, unseal_json
from lattqe.store.place import traffic

MEASURING_SECONDS = 300.0  # for a worker that measures to be placed, to start on a crowded node and to be done
CUT = "_work/cut.json"
FOLDER = "_work/lists/"
_NAME = re.compile(re.escape(FOLDER) + r"(\d{5})-([0-9a-f]+)\.bin")
# (a, b, seen by a, seen by b): compare two blocks, or a block that is owned, which is a and b; (part,): assemble it.
Item = tuple[int, ...]


def worker_budget(workers: int, device_bytes: int | None) -> int:
    """Memory that one worker may use: its share of the nodes' memory, and its GPU's."""
    memory = [node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]]
    share = int(min(0.8 * sum(memory) / workers, 0.8 * max(memory, default=0)))
    return share if device_bytes is None else min(share, int(0.8 * device_bytes))


def places(threads: int) -> int:
    """How many workers with that many CPUs, and a GPU each where there are any, the nodes have room for."""
    return room_for({"CPU": threads, "GPU": 1 if gpus_available() else 0})


def threads_for(workers: int) -> int:
    """The CPUs of each worker: its share of all, but no more than leave room for all workers on the nodes."""
    return fitting_threads(workers, {"GPU": 1 if gpus_available() else 0})


def only_this_machine() -> bool:
    """Whether the connected cluster has one node, the one that this process runs on."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return nodes == [ray.get_runtime_context().get_node_id()]


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
            f"a worker with {asked} could not be placed on any node within {timeout:.0f} s (free: "
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


def agree_on_cut(place: Place, cut: Cut) -> Cut:
    """Use this cut, or the one that an earlier run of the same job has begun with: its files belong to that."""
    try:
        place.create(CUT, seal_json({"bounds": cut.bounds, "own": cut.own, "schedule": cut.schedule}))
        return cut
    except AlreadyExistsError:
        try:
            there = unseal_json(place.read(CUT), f"{place.uri}/{CUT}")
        except CorruptDataError as error:
            raise CorruptDataError(f"{error}; delete {place.uri}, which is not finished, and begin again") from error
        return Cut(tuple(there["bounds"]), there["own"], there["schedule"])


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


class StaleListsError(LattqeError):
    """The lists that were to be continued are gone or damaged: look again at what is there."""


def file_name(block: int, seen: int) -> str:
    """Where the lists of a block are that has seen the blocks whose bits are set."""
    return f"{FOLDER}{block:05d}-{seen:x}.bin"


def find_lists(place: Place, blocks: int) -> list[int]:
    """For each block the largest set of blocks that it has seen according to its files; 0: nothing yet."""
    best = [0] * blocks
    for name in place.sizes():
        match = _NAME.fullmatch(name)
        if match and int(match[1]) < blocks:
            block, seen = int(match[1]), int(match[2], 16)
            best[block] = max(best[block], seen, key=lambda bits: (bits.bit_count(), bits))
    return best


def write_lists(place: Place, block: int, seen: int, lists: Lists) -> None:
    """Store lists behind their checksum, whole or not at all."""
    data = np.ascontiguousarray(lists.ids).tobytes() + np.ascontiguousarray(lists.scores).tobytes()
    place.write(file_name(block, seen), seal_bytes(data))


def read_lists(place: Place, block: int, seen: int, rows: int, k: int) -> Lists:
    """The lists of a block of `rows` rows; a damaged file is removed, so that no worker trips over it again."""
    if not seen:
        return Lists.empty(rows, k)
    name = file_name(block, seen)
    try:
        body = unseal_bytes(memoryview(place.fetch(name)), f"{place.uri}/{name}")
    except MissingFileError as error:
        raise StaleListsError(f"{place.uri}/{name} is gone") from error
    except CorruptDataError:
        body = memoryview(b"")
    if len(body) != rows * k * 12:
        place.delete(name)
        raise StaleListsError(f"{place.uri}/{name} was damaged")
    ids = np.frombuffer(body[: rows * k * 4], dtype=np.int32).reshape(rows, k)
    scores = np.frombuffer(body[rows * k * 4 :], dtype=np.float64).reshape(rows, k)
    return Lists(scores, ids)


def delete_lists(place: Place, block: int, seen: int) -> None:
    """Remove lists that have been continued."""
    if seen:
        with suppress(MissingFileError):
            place.delete(file_name(block, seen))


class GraphWorker:
    """Compares pairs of blocks and assembles parts; built from URIs and numbers only."""

    def __init__(self, task: GraphTask, cut: Cut) -> None:
        import torch

        from lattqe.device import pick_device

        torch.set_num_threads(task.threads)
        self.task, self.cut, self.device = task, cut, pick_device()
        self.sets = open_sets(task)
        self.known = None if task.known is None else NeighborGraph.open(task.known, task.cache)
        self.pending = Pending.attach(task.to)
        self.place = self.pending.place
        self.loaded: dict[tuple[int, int], Any] = {}
        self.stream_rows = visitor_rows(self.sets[0].dim)
        self.idle_since = time.perf_counter()

    def run(self, item: Item) -> dict[str, Any]:
        """Do one piece of work; returns what it took, and whether its lists were gone (`stale`)."""
        started, self.clock, stale = time.perf_counter(), Clock(), False
        waited = started - self.idle_since
        try:
            if len(item) == 1:
                self.assemble(item[0])
            elif self.cut.schedule == "rows":
                self.own(item[0])
            else:
                self.compare(*item)
        except StaleListsError:
            stale = True
        self.idle_since = time.perf_counter()
        return {
            "traffic": traffic.take(),
            "worker": ray.get_runtime_context().get_actor_id(),
            "stale": stale,
            "seconds": dict(self.clock.seconds) | {"waiting": waited},
            "busy": self.idle_since - started,
            "peak_bytes": peak_bytes(),
        }

    def compare(self, a: int, b: int, seen_a: int, seen_b: int) -> None:
        """Continue the lists of two blocks by comparing them, unless that is in storage already."""
        gain_a, gain_b = self.cut.gain(a, b)
        names = {file_name(a, seen_a | gain_a), file_name(b, seen_b | gain_b)}
        if all(self.place.exists(name) for name in names):
            return
        with self.clock("loading"):
            lists_a, lists_b = self.read(a, seen_a), self.read(b, seen_b)
        if self.cut.siblings(a, b):
            new_a, new_b = self.compare_siblings(a, b, lists_a, lists_b)
        else:
            new_a, new_b = self.compare_pair(a, b, lists_a, lists_b)
        # A crash may have come between the two writes: a side that has this comparison already stays as it is.
        fresh = {
            block: (seen, seen | gain, lists)
            for block, seen, gain, lists in ((a, seen_a, gain_a, new_a), (b, seen_b, gain_b, new_b))
            if gain & ~seen
        }
        with self.clock("writing"):
            for block, (_, seen, lists) in fresh.items():
                write_lists(self.place, block, seen, lists)
            for block, (seen, _, _) in fresh.items():
                delete_lists(self.place, block, seen)

    def compare_siblings(self, a: int, b: int, lists_a: Lists, lists_b: Lists) -> tuple[Lists, Lists]:
        """Compare one block, or two neighboring blocks as one, with itself."""
        start, stop = self.cut.rows(a)[0], self.cut.rows(b)[1]
        middle = len(lists_a.ids)
        with self.lanes() as lanes:
            rows = self.load(start, stop, lanes[0])
            lists = (
                lists_a
                if a == b
                else Lists(np.concatenate([lists_a.scores, lists_b.scores]), np.concatenate([lists_a.ids, lists_b.ids]))
            )
            if self.task.engine == "lattqe":
                lists = compare_within(rows, lists, start, lanes, self.clock)
        if self.task.engine == "faiss":
            lists = lists.add(*self.by_faiss(rows, rows, np.arange(len(rows))), start)
        if a == b:
            return lists, lists
        return Lists(lists.scores[:middle], lists.ids[:middle]), Lists(lists.scores[middle:], lists.ids[middle:])

    def compare_pair(self, a: int, b: int, lists_a: Lists, lists_b: Lists) -> tuple[Lists, Lists]:
        """Compare two different blocks."""
        (first, last), (start, stop) = self.cut.rows(a), self.cut.rows(b)
        floor = self.known_floor(b, start, stop)
        with self.lanes() as lanes:
            rows, visitors = self.load(first, last, lanes[0]), self.load(start, stop, lanes[0])
            if self.task.engine == "lattqe":
                return compare_between(rows, visitors, lists_a, lists_b, first, start, lanes, self.clock, floor)
        return lists_a.add(*self.by_faiss(rows, visitors), start), lists_b.add(*self.by_faiss(visitors, rows), first)

    def own(self, block: int) -> None:
        """Make the lists of one block, by comparing it with all that it is to see; they are written once."""
        complete = self.cut.complete(block)
        if self.place.exists(file_name(block, complete)):
            return
        self.loaded.clear()  # blocks are as large as memory allows: that of before has to go
        start, stop = self.cut.rows(block)
        lists = Lists.empty(stop - start, self.task.k)
        if block < self.cut.own:
            lists, _ = self.compare_siblings(block, block, lists, lists)
        floor = self.known_floor(block, start, stop)
        with self.lanes() as lanes:
            rows = self.load(start, stop, lanes[0])
            for first, visitors in self.passing(block, lanes[0]):
                if self.task.engine == "faiss":
                    lists = lists.add(*self.by_faiss(rows, visitors), first)
                else:
                    lists = compare_one_way(rows, visitors, lists, first, lanes, self.clock, floor)
        with self.clock("writing"):
            write_lists(self.place, block, complete, lists)

    def passing(self, block: int, products: Any) -> Iterator[tuple[int, Any]]:
        """(first row, rows on the device) of all that a block is compared with; the next are loaded meanwhile."""
        from lattqe.search.products import Block

        def load(span: tuple[int, int]) -> Any:
            return Block.load(self.rows(*span), products, self.task.k, widen=True)

        spans = self.cut.visitors(block, self.stream_rows)
        with ThreadPoolExecutor(1) as pool:
            ahead = deque(pool.submit(load, span) for span in spans[:1])
            for (start, _), following in zip(spans, [*spans[1:], None]):
                with self.clock("loading"):
                    visitors = ahead.popleft().result()
                if following is not None:
                    ahead.append(pool.submit(load, following))
                yield start, visitors

    def lanes(self) -> Any:
        """Lanes of the plan's kind of products; faiss takes float32 rows from main memory."""
        from lattqe.search.lanes import lanes_on

        return lanes_on(self.device, self.task.kind) if self.task.engine == "lattqe" else lanes_on()

    def by_faiss(self, rows: Any, others: Any, hidden: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The exact lists of rows among others by the second engine."""
        from lattqe.search.graph import faiss_lists

        return faiss_lists(rows, others, self.task.k, hidden=hidden, device=self.device, clock=self.clock)

    def known_floor(self, b: int, start: int, stop: int) -> np.ndarray | None:
        """What a newcomer must reach to enter the known lists of a block of the second set, (n,) float64."""
        if self.known is None or b < self.cut.own:
            return None
        own_rows = self.sets[0].rows
        ids, scores = self.known.read(start - own_rows, stop - own_rows)
        last = scores[:, self.task.k - 1].astype(np.float64)
        return np.where(ids[:, self.task.k - 1] < 0, -np.inf, last - np.abs(last) * 2.0**-23)  # it was rounded

    def load(self, start: int, stop: int, products: Any) -> Any:
        """Rows start..stop on the device; what the last comparison needed is kept, and parts of it serve too."""
        from lattqe.search.products import Block

        with self.clock("loading"):
            held = next((span for span in self.loaded if span[0] <= start and stop <= span[1]), (start, stop))
            if held not in self.loaded:
                while len(self.loaded) > 1:
                    self.loaded.pop(next(iter(self.loaded)))
                self.loaded[held] = Block.load(self.rows(start, stop), products, self.task.k, widen=True)
            block = self.loaded.pop(held)
            self.loaded[held] = block  # the latest goes last
            # Duplicates are looked for again: unfinished lists must not depend on which blocks stood together.
            return block if held == (start, stop) else block.part(start - held[0], stop - held[0]).without(self.task.k)

    def rows(self, start: int, stop: int) -> Rows:
        """Vectors of rows start..stop, which are in one of the sets, as they are mapped."""
        first = self.sets[0].rows
        return in_one(
            self.sets[0].pieces(start, stop) if stop <= first else self.sets[1].pieces(start - first, stop - first)
        )

    def read(self, block: int, seen: int) -> Lists:
        """The lists of a block as far as they are."""
        start, stop = self.cut.rows(block)
        return read_lists(self.place, block, seen, stop - start, self.task.k)

    def assemble(self, part: int) -> None:
        """Publish one part of the graph from the finished lists of the blocks that it overlaps."""
        stops = np.cumsum(self.pending.part_rows)
        low, high = int(stops[part]) - self.pending.part_rows[part], int(stops[part])
        pieces = []
        with self.clock("merging"):
            for block in range(self.cut.blocks):
                start, stop = self.cut.rows(block)
                if start < high and low < stop:
                    lists = self.read(block, self.cut.complete(block))
                    within = slice(max(low, start) - start, min(high, stop) - start)
                    pieces.append(self.final(block, max(low, start), Lists(lists.scores[within], lists.ids[within])))
        with self.clock("writing"):
            ids, scores = (np.concatenate(column) for column in zip(*pieces))
            self.pending.publish(part, neighbors_table(ids, scores))

    def final(self, block: int, start: int, lists: Lists) -> tuple[np.ndarray, np.ndarray]:
        """Finished lists as they are published: I (n, k) int32, D (n, k) float32."""
        if self.known is None or block < self.cut.own:
            scores, ids = published(lists.scores, lists.ids)
            return ids, scores
        own, k = self.sets[0].rows, self.task.k
        known_ids, known_scores = self.known.read(start - own, start - own + len(lists.ids))
        numbered = np.where(known_ids[:, :k] < 0, -1, known_ids[:, :k] + np.int32(own)).astype(np.int32)

        def rescore(i: np.ndarray, j: np.ndarray) -> np.ndarray:
            xq, xb = self.sets[1].gather(start - own + i), self.sets[1].gather(j - own)
            return exact_scores(xq, xb, np.arange(len(i)), np.arange(len(i)))

        return join_lists(numbered, known_scores[:, :k], lists, rescore)
