"""Blocks of rows compared: each pair of blocks is multiplied once and feeds both sides' running top-k.

A block's tiles are every T-th row of it, so that each is a fair sample of the whole, however the rows are ordered (a
collection's classes often stand together). A row's first tile then tells what its k-th best of all will about be:
below that guess nothing is kept, and from what is kept of the first tiles it is guessed anew, which leaves some three
candidates for two neighbors instead of twelve. A guess that proves too high costs a search of that one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lattqe.search.device_topk import DeviceTopK
from lattqe.search.exact import merge
from lattqe.search.index import search_block
from lattqe.search.lanes import with_room
from lattqe.search.products import Block, Products
from lattqe.search.rows import Clock, all_pairs, in_lanes, in_threads, run_pairs, tiles
from lattqe.search.topk import RunningTopK, capacity_for, running_topk

WIDE_BYTES = 256 << 20  # of one block's float32 copy
CANDIDATE_BYTES = 384 << 20  # of one block's running top-k
SHARPER = 1 / 8, 3 / 8  # shares of a block that its rows have seen when their guess is made anew, from more of it
GUESS_DEVIATIONS = 3  # how far above the expected rank in a sample a guess is taken: about one in 500 is too high
FINISH_ROWS = 1024  # scored and merged at once by one thread
MIRROR_DIM = 512  # from which on looking a pair up in the other's list is cheaper than scoring it again
Running = RunningTopK | DeviceTopK
Redone = Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]  # row numbers, their scores, their ids


@dataclass
class Lists:
    """The exact k best so far of the rows of one block: scores (n, k) float64 (-inf missing), ids (n, k) int32."""

    scores: np.ndarray
    ids: np.ndarray

    @classmethod
    def empty(cls, rows: int, k: int) -> "Lists":
        """Lists that have seen nothing: read-only, and without memory of their own."""
        return cls(np.broadcast_to(-np.inf, (rows, k)), np.broadcast_to(np.int32(-1), (rows, k)))

    def add(self, scores: np.ndarray, ids: np.ndarray, first_row: int) -> "Lists":
        """Merge exact lists whose row numbers count from `first_row`."""
        ids = np.where(ids < 0, -1, ids + np.int32(first_row)).astype(np.int32)
        if (self.ids < 0).all():
            return Lists(scores, ids)
        k = self.ids.shape[1]
        found = np.flatnonzero((ids >= 0).any(axis=1))
        if len(found) == len(ids):
            return Lists(*merge([(self.scores, self.ids), (scores, ids)], k))
        joined = Lists(self.scores.copy(), self.ids.copy())  # late in a large set, few rows find anything better
        joined.scores[found], joined.ids[found] = merge(
            [(self.scores[found], self.ids[found]), (scores[found], ids[found])], k
        )
        return joined


def rows_per_block(dim: int, k: int, copied: bool = True) -> int:
    """How many rows fit the memory of one block; rows that are not copied count for their candidates only."""
    rows = CANDIDATE_BYTES // (8 * capacity_for(k))
    return max(min(rows, WIDE_BYTES // (4 * max(dim, 1))) if copied else rows, 1)


def compare_within(
    rows: Block, lists: Lists, first_row: int, lanes: Sequence[Products], clock: Clock, *, alone: bool = False
) -> Lists:
    """Compare a block with itself: diagonal tiles first, so that every row has a threshold, then one triangle.

    `alone`: it is the only block, so its lists are finished and may stay in the memory of their candidates, which is
    up to twice as large as they are.
    """

    def attempt() -> Lists:
        running = running_topk(lanes[0], rows, rows, lists.ids.shape[1], _known(lists))
        cuts = samples(len(rows), tile_rows(len(rows), lanes))
        met = [0] * len(cuts)  # tiles that each has been compared with; no two threads work on one of them at a time
        moments = {round(share * len(cuts)) for share in SHARPER} - {0, 1}

        def compare(products: Products, pair: tuple[int, int]) -> None:
            a, b = pair
            _feed(rows, rows, cuts[a], cuts[b], running, None if a == b else running, products, clock, diagonal=a == b)
            for tile in {a, b}:
                met[tile] += 1
                if met[tile] in moments:
                    with clock("selection"):
                        running.sharpen(cuts[tile], guess_rank(running.k, met[tile] / len(cuts)))

        run_pairs(all_pairs(len(cuts)), compare, lanes)
        _score([running], running, lanes[0].threads, clock)
        redone = _search_again(rows, running, lanes, clock)
        return _merge(running, lists, first_row, lanes[0].threads, clock, redone, running.room() if alone else None)

    return with_room(attempt, lanes)


def _search_again(rows: Block, running: Running, lanes: Sequence[Products], clock: Clock) -> Redone:
    """Search the rows whose guessed threshold was too high: their numbers, and their lists."""
    again = running.unproven()
    with clock("searching again"):
        parts = [again[start:stop] for start, stop in tiles(len(again), max(-(-len(again) // len(lanes)), FINISH_ROWS))]
        found = in_lanes(
            lambda products, part: search_block(rows.take(part), rows, running.k, products, part), parts, lanes
        )
    clock.count("products", len(again) * len(rows))
    return [(part, *lists) for part, lists in zip(parts, found)]


def compare_between(
    rows: Block,
    visitors: Block,
    lists: Lists,
    visitor_lists: Lists,
    first_row: int,
    first_visitor: int,
    lanes: Sequence[Products],
    clock: Clock,
    visitor_floor: np.ndarray | None = None,
) -> tuple[Lists, Lists]:
    """Compare two different blocks, which start at the given row numbers; return both sides' lists.

    `visitor_floor` (n,) float64: scores below which visitors take no row, whatever their lists say.
    """

    def attempt() -> tuple[Lists, Lists]:
        k, threads = lists.ids.shape[1], lanes[0].threads
        running = running_topk(lanes[0], rows, visitors, k, _known(lists))
        returning = running_topk(lanes[0], visitors, rows, k, _known(visitor_lists), visitor_floor)
        cuts = samples(len(rows), tile_rows(len(rows), lanes))
        visiting = samples(len(visitors), tile_rows(len(visitors), lanes))

        def compare(products: Products, pair: tuple[int, int]) -> None:
            a, b = pair[0], pair[1] - len(cuts)
            _feed(rows, visitors, cuts[a], visiting[b], running, returning, products, clock)

        run_pairs([(a, len(cuts) + b) for a in range(len(cuts)) for b in range(len(visiting))], compare, lanes)
        _score([running, returning], returning, threads, clock)
        return (
            _merge(running, lists, first_visitor, threads, clock),
            _merge(returning, visitor_lists, first_row, threads, clock),
        )

    return with_room(attempt, lanes)


def compare_one_way(
    rows: Block,
    visitors: Block,
    lists: Lists,
    first_visitor: int,
    lanes: Sequence[Products],
    clock: Clock,
    floor: np.ndarray | None = None,
) -> Lists:
    """Continue the lists of a block by visitors that start at the given row number; those learn nothing of it.

    `floor` (n,) float64: scores below which rows take no visitor, whatever their lists say.
    """

    def attempt() -> Lists:
        running = running_topk(lanes[0], rows, visitors, lists.ids.shape[1], _known(lists), floor)
        visiting = samples(len(visitors), tile_rows(len(visitors), lanes))

        def compare(products: Products, cut: slice) -> None:
            for visit in visiting:
                _feed(rows, visitors, cut, visit, running, None, products, clock)

        in_lanes(compare, samples(len(rows), tile_rows(len(rows), lanes)), lanes)
        _score([running], None, lanes[0].threads, clock)
        return _merge(running, lists, first_visitor, lanes[0].threads, clock)

    return with_room(attempt, lanes)


def tile_rows(rows: int, lanes: Sequence[Products]) -> int:
    """Rows of a tile: what suits the cache, but at least four tiles for each of several threads."""
    if len(lanes) == 1:
        return lanes[0].tile
    return int(np.clip(-(-rows // (4 * len(lanes))), 256, lanes[0].tile))


def samples(n: int, size: int) -> list[slice]:
    """Cut 0..n into interleaved slices of at most `size`."""
    count = -(-n // size)
    return [slice(start, None, count) for start in range(count)]


def _feed(
    rows: Block,
    visitors: Block,
    cut: slice,
    visiting: slice,
    running: Running,
    returning: Running | None,
    products: Products,
    clock: Clock,
    diagonal: bool = False,
) -> None:
    """Multiply one tile; offer its entries to the rows and, where there is a `returning`, to the visitors."""
    with clock("products"):
        tile = products.multiply(rows.held[cut], visitors.held[visiting])
    height, width = len(range(len(rows))[cut]), len(range(len(visitors))[visiting])
    clock.count("products", height * width)
    with clock("selection"):
        if diagonal:  # symmetric, and a row must not find itself
            products.blank(tile, np.arange(height), np.arange(height))
            _lift(running, cut, tile, height - 1, len(rows) - 1, products)
        else:
            _lift(running, cut, tile, width, width, products)
            if returning is not None:
                _lift(returning, visiting, tile, height, height, products, columns=True)
        if returning is None:
            i, j, scores = products.passing(tile, running.threshold[cut])
            running.offer(cut, i, visiting.start + visiting.step * j, scores)
            return
        (i, j, scores), (p, q, back) = products.passing_both(
            tile, running.threshold[cut], returning.threshold[visiting]
        )
        running.offer(cut, i, visiting.start + visiting.step * j, scores)
        returning.offer(visiting, p, cut.start + cut.step * q, back)


def guess_rank(k: int, share: float) -> int:
    """Which rank in a fair sample, that share of all, stands about for the k-th of all, rather a later than an
    earlier one.
    """
    expected = k * share
    return int(np.ceil(expected + GUESS_DEVIATIONS * np.sqrt(expected) + 1))


def _lift(
    running: Running, cut: slice, tile: object, entries: int, total: int, products: Products, columns: bool = False
) -> None:
    """Give rows without a threshold one, from this tile, of which they see `entries` of `total`: its k-th best, or
    what is about the k-th best of all.
    """
    if not running.bare(cut):
        return
    rank = guess_rank(running.k, entries / max(total, 1))
    if rank < min(running.k, entries):
        running.lift(cut, products.kth(tile, rank, columns=columns), guess=True)
    elif entries >= running.k:
        running.lift(cut, products.kth(tile, running.k, columns=columns))


def _known(lists: Lists) -> np.ndarray | None:
    """The lists' scores, or None where nothing is known yet."""
    return None if np.isneginf(lists.scores[:, 0]).all() else lists.scores


def _score(sides: Sequence[Running], partner: Running | None, threads: int, clock: Clock) -> None:
    """Score what was kept, rows in parallel; of long vectors, a pair that stands in the first side's lists and in
    those of its `partner` only once.
    """
    running = sides[0]
    mirror: Any = partner if running.rows.dim >= MIRROR_DIM and isinstance(running, RunningTopK) else None
    with clock("scoring"):
        for side in sides:
            in_threads(side.settle, _cuts(side), threads)
            side.prepare_scores()
        if mirror is not None:
            score: Callable[[int, int], int] = partial(running.score, mirror=mirror)
            clock.count("scored", sum(in_threads(score, _cuts(running), threads)))
        for side in sides:
            clock.count("scored", sum(in_threads(side.score, _cuts(side), threads)))


def _merge(
    running: Running,
    lists: Lists,
    first_row: int,
    threads: int,
    clock: Clock,
    redone: Redone = (),
    room: tuple[np.ndarray, np.ndarray] | None = None,
) -> Lists:
    """Merge what was found into the lists, rows in parallel; the row numbers found count from `first_row`.

    `redone`: rows whose lists were found in another way. `room`: memory for the merged lists.
    """
    merged = Lists(*(room or (np.empty(lists.scores.shape), np.empty(lists.ids.shape, dtype=np.int32))))

    def merge_rows(start: int, stop: int) -> None:
        part = Lists(lists.scores[start:stop], lists.ids[start:stop])
        scores, ids = running.lists(start, stop)
        for rows, better, better_ids in redone:
            inside = (rows >= start) & (rows < stop)
            scores[rows[inside] - start], ids[rows[inside] - start] = better[inside], better_ids[inside]
        part = part.add(scores, ids, first_row)
        merged.scores[start:stop], merged.ids[start:stop] = part.scores, part.ids

    with clock("merging"):
        in_threads(merge_rows, _cuts(running), threads)
    return merged


def _cuts(running: Running) -> list[tuple[int, int]]:
    return list(tiles(len(running.rows), FINISH_ROWS))
