"""One worker of the kNN graph: it compares pairs of blocks and assembles parts, from storage to storage."""

import resource
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray

from cluster.lists import StaleListsError, delete_lists, file_name, read_lists, write_lists
from lattqe.cost import Cut
from lattqe.cost.rows import visitor_rows
from lattqe.search.exact import exact_scores, published
from lattqe.search.graph import Lists, compare_between, compare_one_way, compare_within
from lattqe.search.pairing import Clock
from lattqe.search.rows import Rows, in_one
from lattqe.search.stored import GraphTask, open_sets
from lattqe.search.update import join_lists
from lattqe.store import NeighborGraph, Pending, neighbors_table
from lattqe.store.place import traffic

# (a, b, seen by a, seen by b): compare two blocks, or a block that is owned, which is a and b; (part,): assemble it.
Item = tuple[int, ...]


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
        """Do one piece of work; tell what it took, and whether its lists were gone (`stale`)."""
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
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
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
        from lattqe.search.products import lanes_on

        return lanes_on(self.device, self.task.kind) if self.task.engine == "lattqe" else lanes_on()

    def by_faiss(self, rows: Any, others: Any, hidden: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The exact lists of rows among others by the second engine."""
        from lattqe.search.second import faiss_lists

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
            # Duplicates are looked for anew: unfinished lists must not depend on which blocks stood together.
            return block if held == (start, stop) else block.part(start - held[0], stop - held[0]).without(self.task.k)

    def rows(self, start: int, stop: int) -> Rows:
        """Vectors of rows start..stop, which lie in one of the sets, as they are mapped."""
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
