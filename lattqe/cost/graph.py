"""The cost of a neighbor graph: in this process, or by pairs of row blocks on a cluster (`cluster.graph`).

Also how rows are cut into those blocks, for that decides what is read and written.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lattqe.cost.work import (
    ATTACH,
    DELETE,
    LOOK,
    MISSING,
    OPEN,
    PUT,
    Machines,
    Requests,
    Stored,
    Work,
    gets_of,
    held_bytes,
    load_part,
)
from lattqe.errors import LattqeError
from lattqe.search.compare import rows_per_block
from lattqe.search.rows import Pair, tiles
from lattqe.search.topk import capacity_for
from lattqe.store.parts import RESIDENT_BYTES

PAIR_SECONDS = 120.0  # the longest piece of work, and so the most that a death can cost
SMALL_BLOCK = 20_000  # rows; with smaller blocks than this, fewer of them: candidates are scored again for each
LEAST_BLOCK = 512  # rows; smaller ones would only move data about
MAX_BLOCKS = 512  # a set of blocks is that many bits of the name of an unfinished list
# Of a worker process with torch; and of a tile, for each of its products: scores, masks, what passes. Fitted, with what
# `bytes_per_row` counts, to the peaks of ten graphs: 2,000 to 1,000,000 rows, 64 to 2048 columns, k from 16 to 256, on
# disk and on S3, a core for each worker (docs/results/scale.md).
BASE_BYTES, TILE_BYTES = 347 << 20, 12
OVERHEAD = 1.1  # loading, merging and writing beside what is measured
TILE, LEAST_TILE = 2048, 256  # rows of a diagonal tile, both halves of which are multiplied
SEAL = 16  # bytes before each unfinished list
OPENS_HERE = 6  # times that `lattqe neighbors` opens its sets

# Seconds of one core for each product beside its multiplications: comparing it with two thresholds. And for each
# candidate that is scored in float64 and merged, and for each of its columns. Fitted as CORE_FLOPS: benchmarks/cost.py.
SELECT_SECONDS = 2.4e-9
SCORE_SECONDS, SCORE_COLUMN_SECONDS = 0.42e-6, 2.0e-9


@dataclass(frozen=True)
class Cut:
    """How the rows are cut into blocks: bounds[b] is where block b begins; the first `own` blocks are compared
    with all, the others (of a second set whose graph is known) with the first ones only.

    By the schedule "pairs" two blocks are compared once, for both of them; by "rows" each block is compared with all
    others by the one worker that owns it (`lattqe.cost.rows`).
    """

    bounds: tuple[int, ...]
    own: int
    schedule: str = "pairs"

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.bounds) - 1

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each block."""
        return [stop - start for start, stop in pairwise(self.bounds)]

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
        if self.schedule == "rows":
            return self.complete(a), self.complete(a)
        both = (1 << a) | (1 << b)
        return (both, both) if self.siblings(a, b) else (1 << b, 1 << a)

    def complete(self, block: int) -> int:
        """What a block has seen when it is done."""
        return (1 << self.blocks) - 1 if block < self.own else (1 << self.own) - 1

    def work(self) -> list[Pair]:
        """The pieces of work by the schedule; a block that is owned is written as the pair of it with itself."""
        return self.pairs() if self.schedule == "pairs" else [(block, block) for block in range(self.blocks)]

    def visitors(self, block: int, size: int) -> list[tuple[int, int]]:
        """The rows that pass a block that is owned, at most `size` at a time: from the next block on, all around."""
        start, stop = self.rows(block)
        own, last = self.bounds[self.own], self.bounds[-1]
        spans = [(stop, own), (own, last), (0, start)] if block < self.own else [(0, own)]
        return [(low + lo, low + hi) for low, high in spans for lo, hi in tiles(high - low, size)]

    def cost(self, a: int, b: int) -> int:
        """Products of one comparison."""
        if self.schedule == "rows":
            n = self.sizes[a]
            return n * (self.bounds[-1] - n) + n * n // 2 if a < self.own else n * self.bounds[self.own]
        n, m = (stop - start for start, stop in (self.rows(a), self.rows(b)))
        if a == b:
            return n * n // 2
        return (n + m) ** 2 // 2 if self.siblings(a, b) else n * m

    @cached_property
    def products(self) -> int:
        """Products of all comparisons."""
        return sum(self.cost(*pair) for pair in self.work())


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


def bytes_per_row(dim: int, k: int, itemsize: int, fetched: bool = False) -> int:
    """Memory for one row of each of the two blocks that a worker compares.

    Widened to float32, half as much again for a third block that stays from before; its candidates, whose memory their
    exact scores take over; its lists as they were read and as they are merged. Rows as they are stored are held or
    mapped (`reached_bytes`); `fetched`: from S3.
    """
    return 3 * wide_bytes(dim, itemsize, fetched) // 2 + 8 * capacity_for(k) + 24 * k


def wide_bytes(dim: int, itemsize: int, fetched: bool = False) -> int:
    """Memory of one row in float32: none where it is mapped as that already."""
    return 4 * dim if fetched or itemsize < 4 else 0


def reached_bytes(sets: Sequence[Stored], fetched: bool) -> tuple[int, int]:
    """Bytes of parts that a worker holds because it `fetched` them from S3, and of those that it maps."""
    return (held_bytes(sets), 0) if fetched else (0, sum(each.bytes for each in sets))


def tile_bytes(rows: int, machines: Machines) -> int:
    """Memory of the tiles that a worker's threads multiply, of blocks of that many rows."""
    return TILE_BYTES * min(rows, TILE) ** 2 * (1 if machines.gpus else machines.threads)


def product_seconds(dim: int, machines: Machines) -> float:
    """Of one worker for one product of two vectors and its selection; exact scores come on top."""
    return 2 * dim / machines.flops + (0.0 if machines.gpus else SELECT_SECONDS / machines.threads)


def fitting_rows(budget: int, fixed: int, row_bytes: int, products_per_second: float) -> int:
    """Rows of a block so that two fit a worker's memory beside what is `fixed`, and comparing them takes no longer than
    a death may cost.
    """
    return int(min((budget - fixed) // (2 * row_bytes), (PAIR_SECONDS * products_per_second) ** 0.5))


def harmonic(n: int) -> float:
    """1 + 1/2 + … + 1/n: of a list's k best in block after block, that many times k are candidates."""
    return sum(1 / each for each in range(1, n + 1))


def scoring_seconds(candidates: float, dim: int, threads: int) -> float:
    """Of one worker with that many cores, for pairs scored in float64 and merged into their lists."""
    return candidates * (SCORE_SECONDS + SCORE_COLUMN_SECONDS * dim) / threads


def graph_of_pairs(
    sets: Sequence[Stored],
    dim: int,
    k: int,
    cut: Cut,
    machines: Machines,
    *,
    itemsize: int = 2,
    products_per_second: float | None = None,
    cached: bool = False,
    remote: bool = True,
) -> Work:
    """The graph by pairs of blocks: both blocks are read, and both blocks' lists are read and written, for each pair.

    sets: the feature sets whose rows count through. products_per_second: of one worker, selection and scores included,
    where it was measured. cached: nodes keep what they have read from S3; local files are only mapped.
    """
    rows, pairs = cut.bounds[-1], cut.pairs()
    graph = Stored.kind("neighbors", rows, k=k)
    visits = _visits(cut)
    read, written, requests = _list_traffic(cut, k, visits, graph.part_rows)
    loaded, loading = _vectors(sets, cut, visits, machines, cached, remote)
    opens = len(sets) * (machines.workers + OPENS_HERE)
    scored = k * sum(size * harmonic(visits[block]) for block, size in enumerate(cut.sizes))
    seconds = graph_seconds(cut, dim, scored, machines, products_per_second)
    largest, fetched = max(cut.sizes), remote and not cached
    held, mapped = reached_bytes(sets, fetched)
    products = sum(
        graph_products(cut.rows(b)[1] - cut.rows(a)[0], 1, machines.threads) if cut.siblings(a, b) else cut.cost(a, b)
        for a, b in pairs
    )
    return Work(
        "graph",
        rows,
        products,
        2.0 * products * dim,
        read + loaded + opens * sum(each.manifest for each in sets),
        written + graph.written,
        requests=requests
        + MISSING * len(pairs)
        + loading
        + OPEN * opens
        + ATTACH * machines.workers
        + LOOK * 3
        + graph.publishing(cut.blocks + 1),
        worker_seconds=OVERHEAD * seconds,
        worker_bytes=BASE_BYTES
        + tile_bytes(largest, machines)
        + held
        + 2 * largest * bytes_per_row(dim, k, itemsize, fetched),
        mapped=mapped,
        scratch=12 * k * (rows + 2 * machines.workers * largest),
        stored=graph.bytes,
        facts={
            "blocks": f"{cut.blocks} of up to {largest:,} rows, {len(pairs):,} pairs",
            "candidates scored in float64": f"{scored:.3g}",
        },
    )


def graph_seconds(cut: Cut, dim: int, scored: float, machines: Machines, products_per_second: float | None) -> float:
    """Seconds of one worker for all products and scores, by their measured rate where there is one."""
    if products_per_second is not None:
        return cut.products / products_per_second
    return cut.products * product_seconds(dim, machines) + scoring_seconds(scored, dim, machines.threads)


def _list_traffic(cut: Cut, k: int, visits: Sequence[int], part_rows: Sequence[int]) -> tuple[int, int, Requests]:
    """Bytes read and written, and requests, of unfinished lists: read and replaced in every visit but the first."""
    # A part of the graph is assembled from the whole lists of each block that it overlaps.
    assembled = overlaps(cut, part_rows)
    read, written, requests = 0, 0, Requests()
    for size, visited, needed in zip(cut.sizes, visits, assembled):
        stored = SEAL + 12 * k * size
        loading = Requests(gets=gets_of(stored))
        read += (visited - 1 + needed) * stored
        written += visited * stored
        requests += (PUT + DELETE + loading) * (visited - 1) + PUT + loading * needed
    return read, written, requests


def _visits(cut: Cut) -> list[int]:
    """Comparisons that each block takes part in: with every other one, its sibling among them."""
    alone = cut.own - 1 if cut.own % 2 else -1
    return [cut.blocks - 1 + (block == alone) if block < cut.own else cut.own for block in range(cut.blocks)]


def overlaps(cut: Cut, part_rows: Sequence[int]) -> list[int]:
    """Parts of the graph that each block is needed for."""
    counts, low = [0] * cut.blocks, 0
    for size in part_rows:
        high = low + size
        for block in range(bisect_right(cut.bounds, low) - 1, bisect_left(cut.bounds, high)):
            counts[block] += 1
        low = high
    return counts


def _vectors(
    sets: Sequence[Stored], cut: Cut, visits: Sequence[int], machines: Machines, cached: bool, remote: bool
) -> tuple[int, Requests]:
    """Bytes and requests of all vectors that workers load: whole parts, again for each pair where nothing is kept."""
    everything = sum(each.bytes for each in sets)
    once = sum((each.loading() for each in sets), Requests())
    if not remote:
        return everything * machines.workers, once * machines.workers
    if cached:
        return everything * machines.nodes, once * machines.nodes
    if all(each.bytes <= RESIDENT_BYTES for each in sets):
        return everything * machines.workers, once * machines.workers
    read, requests, first = 0, Requests(), 0
    for each in sets:
        for block in range(cut.blocks):
            start, stop = (max(row - first, 0) for row in cut.rows(block))
            parts = each.within(start, min(stop, each.rows)) if start < min(stop, each.rows) else []
            read += visits[block] * sum(parts)
            requests += sum(map(load_part, parts), Requests()) * visits[block]
        first += each.rows
    return read, requests


def plan_pairs(
    own: int, others: int, workers: int, fit: int, budget: int, fixed: int, row_bytes: int, block_rows: int | None
) -> Cut:
    """The cut for that many workers with that much memory; LattqeError with advice if there is none.

    fit: rows of a block as `fitting_rows` says; block_rows: what was requested instead.
    """
    if budget - fixed < 2 * LEAST_BLOCK * row_bytes:
        raise LattqeError(
            f"{workers} workers have {budget >> 20} MiB each, but two blocks of {LEAST_BLOCK} rows with their lists "
            f"need {(fixed + 2 * LEAST_BLOCK * row_bytes) >> 20} MiB: use fewer workers, a smaller k, or nodes "
            "with more memory"
        )
    cut = cut_rows(own, others, workers, block_rows or fit, exact=block_rows is not None)
    if cut.blocks > MAX_BLOCKS:
        raise LattqeError(
            f"{own + others} rows would be cut into {cut.blocks} blocks, more than {MAX_BLOCKS}: use more memory "
            f"for each worker (now {budget >> 20} MiB), or fewer workers"
        )
    return cut


def graph_here(
    sets: Sequence[Stored],
    dim: int,
    k: int,
    machines: Machines,
    *,
    itemsize: int = 2,
    products_per_second: float | None = None,
) -> Work:
    """The graph in this process, as `lattqe.search.stored.build_graph` makes it: the rows are read twice, once to
    measure, and everything else is in memory.
    """
    rows = sum(each.rows for each in sets)
    blocks = -(-rows // rows_per_block(dim, k))
    graph = Stored.kind("neighbors", rows, k=k)
    products = graph_products(rows, blocks, machines.threads)
    scored = k * rows * harmonic(blocks)
    if products_per_second is None:
        seconds = products * product_seconds(dim, machines) + scoring_seconds(scored, dim, machines.threads)
    else:
        seconds = products / products_per_second
    reads = 2 * sum(each.bytes for each in sets) + OPENS_HERE * sum(each.manifest for each in sets)
    loading = sum((each.loading() for each in sets), Requests())
    return Work(
        "graph",
        rows,
        products,
        2.0 * products * dim,
        reads,
        graph.written,
        requests=loading * 2 + OPEN * (OPENS_HERE * len(sets)) + MISSING + ATTACH + LOOK + graph.publishing(),
        worker_seconds=seconds,
        worker_bytes=BASE_BYTES + sum(each.bytes for each in sets) + 12 * k * rows,
        stored=graph.bytes,
        facts={"candidates scored in float64": f"{scored:.3g}"},
    )


def graph_products(rows: int, blocks: int = 1, threads: int = 1) -> int:
    """Products of a graph in blocks: each pair once, and the second half of the tiles on the diagonal."""
    block = -(-rows // blocks)
    tile = TILE if threads == 1 else min(max(-(-block // (4 * threads)), LEAST_TILE), TILE)
    return rows * (rows + block // -(-block // tile)) // 2
