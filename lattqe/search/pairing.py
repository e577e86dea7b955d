"""Work in threads: which pairs of blocks may be compared now, lanes that each have a thread, and where the seconds go.

Both threads (tiles of a block) and cluster workers (blocks of a set) take their pairs here: never two that share a
block, those with most left to do first. A pair changes the lists of both its blocks, so while it runs no other may
touch them; with at least four blocks for each worker there is always a free pair, and the busiest blocks first leaves
no long tail.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Lane = TypeVar("Lane")
Pair = tuple[int, int]


class Pairing:
    """The pairs (a, b), a <= b, still to be compared; (a, a) compares a block with itself. Some go `first`."""

    def __init__(self, pairs: Iterable[Pair], first: Iterable[Pair] = ()) -> None:
        self._first = set(first)
        self._partners: dict[int, set[int]] = {}
        for a, b in pairs:
            self._partners.setdefault(a, set()).add(b)
            self._partners.setdefault(b, set()).add(a)
        self._busy: set[int] = set()

    def take(self) -> Pair | None:
        """Take a pair of free blocks, or None where there is none now."""
        free = [block for block, partners in self._partners.items() if partners and block not in self._busy]
        free.sort(key=lambda block: (-len(self._partners[block]), block))
        for a in free:
            pairs = [(min(a, b), max(a, b)) for b in self._partners[a] if b not in self._busy]
            if pairs:
                pair = min(pairs, key=lambda pair: (pair not in self._first, -self._left_of(pair), pair))
                self._busy |= set(pair)
                return pair
        return None

    def _left_of(self, pair: Pair) -> int:
        return len(self._partners[pair[0]]) + len(self._partners[pair[1]])

    def finish(self, pair: Pair) -> None:
        """The pair is compared, and both blocks' lists are up to date."""
        a, b = pair
        self._partners[a].discard(b)
        self._partners[b].discard(a)
        self.release(pair)

    def release(self, pair: Pair) -> None:
        """Give the pair back undone."""
        self._busy -= set(pair)

    @property
    def left(self) -> int:
        """Pairs not yet finished."""
        return sum(len(partners) + (block in partners) for block, partners in self._partners.items()) // 2


def all_pairs(blocks: int) -> list[Pair]:
    """Every block with itself and with every other, each pair once."""
    return [(a, b) for a in range(blocks) for b in range(a, blocks)]


def run_pairs(pairs: Sequence[Pair], compare: Callable[[Lane, Pair], None], lanes: Sequence[Lane]) -> None:
    """Call compare(lane, pair) for every pair, one thread for each lane, no two at once on one block.

    Blocks meet themselves first.
    """
    pairing, changed = Pairing(pairs, first=[(a, b) for a, b in pairs if a == b]), threading.Condition()

    def work(lane: Lane) -> None:
        while True:
            with changed:
                while (pair := pairing.take()) is None:
                    if not pairing.left or failed:
                        return
                    changed.wait()
            try:
                compare(lane, pair)
            except BaseException:
                failed.append(pair)
                raise
            finally:
                with changed:
                    pairing.finish(pair)
                    changed.notify_all()

    failed: list[Pair] = []
    if len(lanes) == 1:
        work(lanes[0])
        return
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(work, lanes))


def in_threads(function: Callable[[int, int], Result], cuts: Sequence[tuple[int, int]], threads: int) -> list[Result]:
    """Call function(start, stop) for all cuts with so many threads: CPU work, whatever the device."""
    if threads == 1 or len(cuts) == 1:
        return [function(*cut) for cut in cuts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, *zip(*cuts)))


def in_lanes(function: Callable[[Lane, Item], Result], items: Sequence[Item], lanes: Sequence[Lane]) -> list[Result]:
    """Call function(lane, item) for all items, each lane in its own thread; results in the order of items."""
    if len(lanes) == 1 or len(items) == 1:
        return [function(lanes[0], item) for item in items]
    free = list(lanes)

    def call(item: Item) -> Result:
        lane = free.pop()  # there are as many threads as lanes
        try:
            return function(lane, item)
        finally:
            free.append(lane)

    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(call, items))


class Clock:
    """Seconds by name, summed over threads; `with clock("products"): ...` adds to one.

    `counts`: "products" of two vectors in float32, and pairs "scored" exactly, in float64.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:
                self.seconds[name] += spent

    def count(self, name: str, amount: int) -> None:
        """Add to a count."""
        with self._lock:
            self.counts[name] += amount
