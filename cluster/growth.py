"""The graph of an index that grows or shrinks, on Ray: what `lattqe.augmentation.growth.grow_here` does, same bytes.

Rows that joined, and rows whose list lost a member, are searched among all rows: some of them at a time meet a
slab of rows, and what they find is a file. All others keep their lists; they only meet the rows that joined, and a
list is ordered again only where one of those may enter. A worker makes one part of the graph from both. So products
are in proportion to what changed; the rows and the old graph are read by the workers, never by the driver, which knows
the numbers of the rows that are searched and nothing else of them.

All that was found is in storage: any process may die at any time, and the same command continues.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import ray

from cluster.blocks import BlockPolicy, check_parts, run_blocks
from cluster.graph_worker import StaleListsError, file_name, places, read_lists, threads_for, write_lists
from cluster.monitor import Tally, require_resources
from lattqe.augmentation.growth import Growth, reusable_rows
from lattqe.augmentation.recipe import write_reusable
from lattqe.cost.rows import visitor_rows
from lattqe.device import peak_bytes
from lattqe.errors import CorruptDataError
from lattqe.search.compare import Lists, compare_one_way, rows_per_block
from lattqe.search.exact import exact_scores, just_below, merge, published
from lattqe.search.graph import join_lists
from lattqe.search.lanes import lanes_on
from lattqe.search.products import Block, Products
from lattqe.search.rows import Clock, in_one, tiles
from lattqe.store import FeatureSet, MissingFileError, NeighborGraph, Pending, neighbors_table
from lattqe.store.features import Kept
from lattqe.store.manifest import WORK, seal_bytes, unseal_bytes
from lattqe.store.place import Place, open_place, traffic

SLAB_ROWS = 1 << 20  # that searched rows meet in one piece of work
REMOVED, SEARCHED = f"{WORK}removed.bin", f"{WORK}searched.bin"
FIND, SEARCH, PUBLISH = range(3)
# (FIND, part): which of its lists lost a member; (SEARCH, group, slab); (PUBLISH, part)
Item = tuple[int, ...]


def grow_graph(
    growth: Growth,
    pending: Pending,
    *,
    workers: int | None = None,
    on_rows: Callable[[int], None] = lambda rows: None,
    policy: BlockPolicy | None = None,
    slab_rows: int = SLAB_ROWS,
) -> Counter[str]:
    """Publish the missing parts of the graph with `workers` actors; `on_rows(n)` after each n rows.

    The counts of "products", pairs "scored" and old rows "searched" again, as far as this run did it.
    """
    check_parts(pending)
    driver = _Driver(growth, pending, on_rows, slab_rows)
    items, grows = driver.begin(), workers is None
    workers = min(workers or int(ray.cluster_resources().get("CPU", 1)), max(driver.most_at_once(), 1))
    threads = threads_for(workers)
    require_resources({"CPU": threads}, workers)
    actors = ray.remote(num_cpus=threads)(GrowthWorker).options(scheduling_strategy="SPREAD")
    sent = replace(growth, kept=Kept(growth.kept.rows, np.empty(0, np.int64)))  # workers read what left from storage
    run_blocks(
        lambda _: actors.remote(sent, threads, slab_rows),
        workers,
        items,
        on_done=driver.done,
        policy=policy,
        work=Tally("append", driver.rows_of, lambda item: item[:3], itemgetter("traffic")),
        room=(lambda left: min(places(threads), max(left, driver.most_at_once()))) if grows else None,
        most_at_once=driver.most_at_once(),
    )
    return driver.counts


class _Driver:
    """What is to be done, in three steps: find lists that lost a member, search, publish."""

    def __init__(self, growth: Growth, pending: Pending, on_rows: Callable[[int], None], slab_rows: int) -> None:
        self.growth, self.pending, self.on_rows, self.slab_rows = growth, pending, on_rows, slab_rows
        self.missing = pending.missing()
        self.rows = sum(pending.part_rows)
        self.counts: Counter[str] = Counter()
        self.stale: list[np.ndarray] = []
        self.waiting: set[Item] = set()
        features = FeatureSet.open(growth.features)
        self.group_rows = group_rows(features.dim, NeighborGraph.open(growth.before).k)

    def begin(self) -> list[Item]:
        """The first pieces of work; none where every part is there."""
        if not self.missing:
            return []
        place = self.pending.place
        write_numbers(place, REMOVED, self.growth.kept.removed)
        try:
            return self.search(read_numbers(place, SEARCHED))
        except (MissingFileError, CorruptDataError):
            pass
        if not len(self.growth.kept.removed):
            return self.found()
        # Every part, those that are published too: rows that are searched are numbered through.
        self.waiting = {(FIND, part) for part in range(len(self.pending.part_rows))}
        return sorted(self.waiting)

    def most_at_once(self) -> int:
        """Pieces of work that may be possible together."""
        return max(len(self.waiting), len(self.missing))

    def found(self) -> list[Item]:
        """It is known which rows are searched."""
        joined = np.arange(len(self.growth.kept), self.rows)
        searched = np.concatenate([np.sort(np.concatenate([np.empty(0, np.int64), *self.stale])), joined])
        write_numbers(self.pending.place, SEARCHED, searched)
        self.counts["searched"] = len(searched) - len(joined)
        return self.search(searched)

    def search(self, searched: np.ndarray) -> list[Item]:
        """What is left to search, then to publish."""
        groups, slabs = -(-len(searched) // self.group_rows), -(-self.rows // self.slab_rows)
        there = set(self.pending.place.sizes())
        left: list[Item] = [
            (SEARCH, group, slab)
            for group in range(groups)
            for slab in range(slabs)
            if file_name(group, 1 << slab) not in there
        ]
        self.waiting = set(left)
        return left or self.publish()

    def publish(self) -> list[Item]:
        """Everything was found."""
        self.waiting = {(PUBLISH, part) for part in self.missing}
        return sorted(self.waiting)

    def rows_of(self, item: Item) -> int:
        """Rows whose lists are published with a piece of work."""
        return self.pending.part_rows[item[1]] if item[0] == PUBLISH else 0

    def done(self, item: Item, result: dict[str, Any]) -> list[Item]:
        """Take note of a finished piece of work; return what has become possible."""
        self.counts.update(result["counts"])
        self.waiting.discard(item)
        if item[0] == PUBLISH:
            self.on_rows(self.rows_of(item))
            return []
        if item[0] == FIND:
            self.stale.append(result["stale"])
        if self.waiting:
            return []
        return self.found() if item[0] == FIND else self.publish()


class GrowthWorker:
    """Searches rows and makes parts of the new graph; built from addresses and numbers only."""

    def __init__(self, growth: Growth, threads: int, slab_rows: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.growth, self.slab_rows = growth, slab_rows
        self.features = FeatureSet.open(growth.features, growth.cache)
        self.before = NeighborGraph.open(growth.before, growth.cache)
        self.pending = Pending.attach(growth.to)
        self.place, self.k = self.pending.place, self.before.k
        self.kept = Kept(growth.kept.rows, read_numbers(self.place, REMOVED))
        self.block_rows = rows_per_block(self.features.dim, self.k)
        self._searched: np.ndarray | None = None
        self.asked: tuple[int, np.ndarray] = -1, np.empty(0)  # a group, and its vectors
        self.clock = Clock()

    def run(self, item: Item) -> dict[str, Any]:
        """Do one piece of work; returns what it took."""
        self.clock, stale = Clock(), None
        if item[0] == FIND:
            stale = self.find(item[1])
        elif item[0] == SEARCH:
            self.search(item[1], item[2])
        else:
            self.publish(item[1])
        return {
            "traffic": traffic.take(),
            "counts": dict(self.clock.counts),
            "stale": stale,
            "peak_bytes": peak_bytes(),
        }

    def span(self, part: int) -> tuple[int, int]:
        """The rows of a part."""
        stop = int(np.cumsum(self.pending.part_rows)[part])
        return stop - self.pending.part_rows[part], stop

    def stayed(self, part: int) -> list[tuple[int, int]]:
        """Those of its rows that were there before, as many at a time as are compared at once."""
        start, stop = self.span(part)
        return [
            (start + lo, start + hi) for lo, hi in tiles(max(min(stop, len(self.kept)) - start, 0), self.block_rows)
        ]

    def find(self, part: int) -> np.ndarray:
        """Rows (n,) int64 of a part whose list lost a member."""
        found = [np.empty(0, np.int64)]
        for start, stop in self.stayed(part):
            I = self.kept.new(self.before.gather(self.kept.old(start, stop))[0])
            found.append(start + np.flatnonzero((I == Kept.LEFT).any(axis=1)))
        return np.concatenate(found)

    @property
    def searched(self) -> np.ndarray:
        """The rows (n,) ascending that are searched among all."""
        if self._searched is None:
            self._searched = read_numbers(self.place, SEARCHED)
        return self._searched

    def group(self, number: int) -> np.ndarray:
        """Those of them that are searched at once."""
        size = group_rows(self.features.dim, self.k)
        return self.searched[number * size : (number + 1) * size]

    def search(self, group: int, slab: int) -> None:
        """Find the best of some rows for a group: one more than k, for a row finds itself too."""
        rows, k = self.group(group), self.k + 1
        if self.asked[0] != group:
            self.asked = group, self.features.gather(rows)
        lists = Lists.empty(len(rows), k)
        first, last = slab * self.slab_rows, min((slab + 1) * self.slab_rows, self.features.rows)
        with lanes_on(dim=self.features.dim, products=float(len(rows)) * (last - first)) as lanes:
            asked = Block.load(self.asked[1], lanes[0], k, widen=True)
            for lo, hi in tiles(last - first, visitor_rows(self.features.dim)):
                visitors = self.load(first + lo, first + hi, k, lanes[0])
                lists = compare_one_way(asked, visitors, lists, first + lo, lanes, self.clock)
        write_lists(self.place, group, 1 << slab, lists)

    def load(self, start: int, stop: int, k: int, products: Products) -> Block:
        """Rows start..stop, to be compared."""
        return Block.load(in_one(self.features.pieces(start, stop)), products, k, widen=True)

    def publish(self, part: int) -> None:
        """Make one part: known lists that newcomers have entered, and the lists of rows that were searched."""
        start, stop = self.span(part)
        I, D = np.empty((stop - start, self.k), np.int32), np.empty((stop - start, self.k), np.float32)
        old = self.kept.old(start, max(min(stop, len(self.kept)), start))
        known = np.empty((len(old), min(self.growth.depth, self.k)), np.int32)
        for lo, hi in self.stayed(part):
            place = slice(lo - start, hi - start)
            ids, scores = self.before.gather(old[place])
            ids = self.kept.new(ids)
            known[place] = ids[:, : known.shape[1]]
            I[place], D[place] = join_lists(ids, scores, self.newcomers(lo, hi, ids, scores), self.rescore(lo))
        first, last = np.searchsorted(self.searched, (start, stop))
        if first < last:
            rows = self.searched[first:last] - start
            D[rows], I[rows] = published(*self.lists_of(int(first), int(last)))
        if self.growth.index is not None:
            taken = reusable_rows(known, I[:, : known.shape[1]], old)
            write_reusable(open_place(self.growth.index), part, taken)
        self.pending.publish(part, neighbors_table(I, D))

    def newcomers(self, start: int, stop: int, ids: np.ndarray, scores: np.ndarray) -> Lists:
        """The rows that joined and may enter the known lists ids, scores (n, k) of rows start..stop."""
        lists = Lists.empty(stop - start, self.k)
        joined = self.features.rows - len(self.kept)
        if not joined:
            return lists
        floor = np.where(ids[:, -1] < 0, -np.inf, just_below(scores[:, -1].astype(np.float64)).astype(np.float64))
        with lanes_on(dim=self.features.dim, products=float(stop - start) * joined) as lanes:
            rows = self.load(start, stop, self.k, lanes[0])
            for lo, hi in tiles(joined, visitor_rows(self.features.dim)):
                first = len(self.kept) + lo
                visitors = self.load(first, len(self.kept) + hi, self.k, lanes[0])
                lists = compare_one_way(rows, visitors, lists, first, lanes, self.clock, floor)
        return lists

    def rescore(self, start: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """Exact scores of rows that count from `start` with others."""

        def score(i: np.ndarray, j: np.ndarray) -> np.ndarray:
            self.clock.count("scored", len(i))
            places = np.arange(len(i))
            return exact_scores(self.features.gather(start + i), self.features.gather(j), places, places)

        return score

    def lists_of(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """What the searched rows first..last have found: scores (n, k) float64, ids (n, k) int32."""
        size, found = group_rows(self.features.dim, self.k), []
        for group in range(first // size, -(-last // size)):
            rows = self.group(group)
            within = slice(max(first - group * size, 0), last - group * size)
            best = None
            for slab in range(-(-self.features.rows // self.slab_rows)):
                lists = self.piece(group, slab, len(rows))
                one = lists.scores[within], lists.ids[within]
                best = one if best is None else merge([best, one], self.k + 1)
            scores, ids = best if best is not None else (np.empty((0, 0)), np.empty((0, 0)))
            # The row itself goes to the end, and there it is cut off; else the last one is.
            order = np.argsort(ids == rows[within, None], axis=1, kind="stable")[:, : self.k]
            found.append((np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)))
        return np.concatenate([scores for scores, _ in found]), np.concatenate([ids for _, ids in found])

    def piece(self, group: int, slab: int, rows: int) -> Lists:
        """What a group found in a slab; searched again where the file was lost or damaged."""
        try:
            return read_lists(self.place, group, 1 << slab, rows, self.k + 1)
        except StaleListsError:
            self.search(group, slab)
            return read_lists(self.place, group, 1 << slab, rows, self.k + 1)


def group_rows(dim: int, k: int) -> int:
    """Rows that are searched at once."""
    return rows_per_block(dim, k + 1)


def write_numbers(place: Place, name: str, rows: np.ndarray) -> None:
    """Keep row numbers (n,) for all workers."""
    place.write(name, seal_bytes(rows.astype("<i8").tobytes()))


def read_numbers(place: Place, name: str) -> np.ndarray:
    """What `write_numbers` wrote, (n,) int64."""
    return np.frombuffer(unseal_bytes(place.read(name), f"{place.uri}/{name}"), "<i8")
