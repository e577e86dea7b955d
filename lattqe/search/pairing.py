"""Which pairs of blocks may be compared now: never two that share a block, those with most left to do first.

Both threads (tiles of a block) and cluster workers (blocks of a set) take their pairs here. A pair changes the lists
of both its blocks, so while it runs nobody else may touch them; with at least four blocks for each worker there is
always a free pair, and the busiest blocks first leaves no long tail.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
