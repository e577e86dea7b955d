"""How the rows of a graph are cut into blocks, and which pairs of blocks are compared."""

import json
from dataclasses import dataclass

from lattqe.errors import AlreadyExistsError
from lattqe.search.pairing import Pair
from lattqe.store import Place

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
