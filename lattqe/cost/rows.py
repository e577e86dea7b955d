"""The cost of a neighbor graph whose blocks have owners (the schedule "rows"), and which schedule costs less.

A worker that owns a block reads all other rows past it and writes its lists once: twice the products of pairs, but
lists are not moved after every comparison.
"""

from collections.abc import Sequence

from lattqe.cost.graph import (
    BASE_BYTES,
    LEAST_BLOCK,
    MAX_BLOCKS,
    OPENS_HERE,
    OVERHEAD,
    SEAL,
    Cut,
    bytes_per_row,
    cut_rows,
    fitting_rows,
    graph_of_pairs,
    harmonic,
    overlaps,
    product_seconds,
    scoring_seconds,
)
from lattqe.cost.work import MISSING, OPEN, PUT, Machines, Requests, Stored, Work, gets_of
from lattqe.errors import LattqeError
from lattqe.search.topk import capacity_for
from lattqe.store.parts import RESIDENT_BYTES

OWNER_SECONDS = 1800.0  # the longest piece of work: longer than a pair's, because all rows are read for each
VISITOR_BYTES = 128 << 20  # of the float32 rows that pass a block at once
VISITORS_HELD = 3  # such pieces: that which passes, the one before, the next, which is loaded meanwhile


def cut_owned(own: int, others: int, workers: int, fit: int, exact: bool = False) -> Cut:
    """Cut the rows into blocks of at most `fit` that each have an owner: few, because all rows pass each of them, and
    the same number for every worker, at least two, so that one that joins finds some; `exact` as in `cut_rows`.
    """
    fit, total = max(fit, 1), own + others
    blocks = -(-total // fit)
    if not exact:
        blocks = max(blocks, min(2 * workers, max(total // LEAST_BLOCK, 1)))
        even = -(-blocks // workers) * workers
        blocks = even if even <= min(MAX_BLOCKS, total // LEAST_BLOCK) else blocks
    more = max(-(-others // fit), round(blocks * others / total)) if others else 0
    first = max(-(-own // fit), blocks - more, 1)
    bounds = [own * block // first for block in range(first)]
    bounds += [own + others * block // more for block in range(more)] if more else []
    return Cut((*bounds, total), first, "rows")


def visitor_rows(dim: int) -> int:
    """Rows that pass a block at once."""
    return max(VISITOR_BYTES // (4 * max(dim, 1)), LEAST_BLOCK)


def row_bytes(schedule: str, dim: int, k: int, itemsize: int) -> int:
    """Memory for one row of a block: as for pairs, but without a third block that stays from before."""
    if schedule == "pairs":
        return bytes_per_row(dim, k, itemsize)
    return dim * (itemsize + 4) + 8 * capacity_for(k) + 8 * k + 4 * 12 * k


def fixed_bytes(schedule: str, rows: int, dim: int, itemsize: int) -> int:
    """Memory of a worker without its blocks: its process, and the rows that pass a block that it owns."""
    passing = VISITORS_HELD * min(visitor_rows(dim), rows) if schedule == "rows" else 0
    return BASE_BYTES + passing * dim * (itemsize + 4)


def cut_for(
    schedule: str,
    own: int,
    others: int,
    workers: int,
    dim: int,
    k: int,
    *,
    itemsize: int,
    budget: int,
    products_per_second: float,
    block_rows: int | None = None,
) -> Cut:
    """Cut `own` and `others` rows for a schedule so that `workers` with `budget` bytes each can do it; LattqeError with
    advice where they cannot. `block_rows`: of a block, instead of as many as fit.
    """
    rows, held = own + others, 1 if schedule == "rows" else 2
    fixed, each = fixed_bytes(schedule, rows, dim, itemsize), row_bytes(schedule, dim, k, itemsize)
    fit = (budget - fixed) // (held * each)
    if fit < LEAST_BLOCK:
        raise LattqeError(
            f"{workers} workers have {budget >> 20} MiB each, but {'one block' if held == 1 else 'two blocks'} of "
            f"{LEAST_BLOCK} rows with k = {k} need {(fixed + held * LEAST_BLOCK * each) >> 20} MiB: use fewer "
            "workers, a smaller k, or nodes with more memory"
        )
    if schedule == "rows":
        timely = max(int(OWNER_SECONDS * products_per_second / rows), -(-rows // MAX_BLOCKS))
        cut = cut_owned(own, others, workers, block_rows or min(fit, timely), block_rows is not None)
    else:
        fit = fitting_rows(budget, each, products_per_second)
        cut = cut_rows(own, others, workers, block_rows or fit, block_rows is not None)
    if cut.blocks > MAX_BLOCKS:
        raise LattqeError(
            f"{rows} rows would be cut into {cut.blocks} blocks, more than {MAX_BLOCKS}: use more memory "
            f"for each worker (now {budget >> 20} MiB), or fewer workers"
        )
    return cut


def graph_of_rows(
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
    """The graph by owners: for each block all rows are read that it is to see, and its lists are written and read once.

    Arguments as those of `graph_of_pairs`.
    """
    rows, largest = cut.bounds[-1], max(cut.sizes)
    graph = Stored.kind("neighbors", rows, k=k)
    lists = [SEAL + 12 * k * size for size in cut.sizes]
    assembled = overlaps(cut, graph.part_rows)
    # Blocks of the first set see all rows, those of a second one the first set's and their own.
    everything = [(each.bytes, each.loading()) for each in sets]
    times = [cut.blocks, cut.own + 1]
    if not remote or all(each.bytes <= RESIDENT_BYTES for each in sets):
        times = [machines.workers] * 2
    elif cached:
        times = [machines.nodes] * 2
    loaded = sum(size * count for (size, _), count in zip(everything, times))
    loading = sum((requests * count for (_, requests), count in zip(everything, times)), Requests())
    writing = (PUT + MISSING) * cut.blocks
    reading = sum((Requests(gets=gets_of(size)) * count for size, count in zip(lists, assembled)), Requests())
    opens = len(sets) * (machines.workers + OPENS_HERE)
    scored = k * rows * harmonic(max(-(-rows // visitor_rows(dim)), 1))
    if products_per_second is None:
        seconds = cut.products * product_seconds(dim, machines) + scoring_seconds(scored, dim, machines.threads)
    else:
        seconds = cut.products / products_per_second
    return Work(
        "graph",
        rows,
        cut.products,
        2.0 * cut.products * dim,
        loaded
        + sum(size * count for size, count in zip(lists, assembled))
        + opens * sum(each.manifest for each in sets),
        sum(lists) + graph.written,
        requests=writing + reading + loading + OPEN * opens + graph.publishing(cut.blocks + 1),
        worker_seconds=OVERHEAD * seconds,
        worker_bytes=fixed_bytes("rows", rows, dim, itemsize) + largest * row_bytes("rows", dim, k, itemsize),
        scratch=12 * k * rows,
        stored=graph.bytes,
        facts={
            "blocks": f"{cut.blocks} of up to {largest:,} rows, each with an owner",
            "candidates scored in float64": f"{scored:.3g}",
        },
    )


def graph_on_ray(
    sets: Sequence[Stored], dim: int, k: int, cut: Cut, machines: Machines, *, itemsize: int = 2,
    products_per_second: float | None = None, cached: bool = False, remote: bool = True,
) -> Work:  # fmt: skip
    """The graph by the schedule of its cut."""
    cost = graph_of_rows if cut.schedule == "rows" else graph_of_pairs
    return cost(
        sets,
        dim,
        k,
        cut,
        machines,
        itemsize=itemsize,
        products_per_second=products_per_second,
        cached=cached,
        remote=remote,
    )
