"""The cost of a neighbor graph whose blocks have owners (the schedule "rows"), and which schedule costs less.

A worker that owns a block reads all other rows past it and writes its lists once: twice the products of pairs, but
lists are not moved after every comparison.
"""

from collections.abc import Sequence
from dataclasses import replace

from lattqe.cost.graph import (
    BASE_BYTES,
    LEAST_BLOCK,
    MAX_BLOCKS,
    OPENS_HERE,
    OVERHEAD,
    SEAL,
    Cut,
    bytes_per_row,
    fitting_rows,
    graph_of_pairs,
    harmonic,
    overlaps,
    plan_pairs,
    product_seconds,
    scoring_seconds,
)
from lattqe.cost.work import GB, MISSING, OPEN, PUT, Cost, Machines, Requests, Stored, Work, gets_of
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
    rows, each = own + others, row_bytes(schedule, dim, k, itemsize)
    if schedule == "pairs":
        fit = fitting_rows(budget, each, products_per_second)
        return plan_pairs(own, others, workers, fit, budget, each, block_rows)
    fixed = fixed_bytes(schedule, rows, dim, itemsize)
    fit = (budget - fixed) // each
    if fit < LEAST_BLOCK:
        raise LattqeError(
            f"{workers} workers have {budget >> 20} MiB each, but a block of {LEAST_BLOCK} rows with its lists and the "
            f"rows streamed past it need {(fixed + LEAST_BLOCK * each) >> 20} MiB: use fewer workers, a smaller k, or "
            "nodes with more memory"
        )
    timely = max(int(OWNER_SECONDS * products_per_second / rows), -(-rows // MAX_BLOCKS))
    cut = cut_owned(own, others, workers, block_rows or min(fit, timely), block_rows is not None)
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


COSTS = {"pairs": graph_of_pairs, "rows": graph_of_rows}


def graph_on_ray(
    sets: Sequence[Stored],
    dim: int,
    k: int,
    machines: Machines,
    *,
    schedule: str = "auto",
    block_rows: int | None = None,
    budget: int | None = None,
    itemsize: int = 2,
    products_per_second: float | None = None,
    cached: bool = False,
    remote: bool = True,
) -> tuple[Cut, Work]:
    """The graph on a cluster, by the schedule requested or by the one that takes less time: how the rows are cut, and
    what it costs; among its facts is why. LattqeError with advice where neither fits the memory of a worker.

    budget: bytes of that memory; other arguments as those of `graph_of_pairs` and `cut_for`.
    """
    own, others = sets[0].rows, sum(each.rows for each in sets[1:])
    found: list[tuple[Cut, Work]] = []
    refusals: list[LattqeError] = []
    for name in ("pairs", "rows") if schedule == "auto" else (schedule,):
        try:
            cut = cut_for(
                name,
                own,
                others,
                machines.workers,
                dim,
                k,
                itemsize=itemsize,
                budget=machines.budget if budget is None else budget,
                products_per_second=products_per_second or 1 / product_seconds(dim, machines),
                block_rows=block_rows,
            )
        except LattqeError as refusal:
            refusals.append(refusal)
            continue
        work = COSTS[name](
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
        found.append((cut, work))
    if not found:
        raise refusals[0]
    if len(found) == 1:
        (cut, work), reason = found[0], "the other does not fit" if refusals else "as asked for"
    else:
        (cut, work), reason = _shorter(found, machines, remote)
    return cut, replace(work, facts=work.facts | {"schedule": f"{cut.schedule}: {reason}"})


def _shorter(found: Sequence[tuple[Cut, Work]], machines: Machines, remote: bool) -> tuple[tuple[Cut, Work], str]:
    """The schedule that takes less time, and why."""
    seconds = [Cost((work,), machines, remote).seconds for _, work in found]
    best, other = sorted(range(len(found)), key=seconds.__getitem__)
    moved = [(work.read + work.written) / GB for _, work in found]
    (_, work), (slower, more) = found[best], found[other]
    return found[best], (
        f"by {slower.schedule} {seconds[other] / max(seconds[best], 1e-9):.3g} times as long, with "
        f"{more.products / work.products:.2g} times the products and {moved[other]:,.3g} GB moved instead of "
        f"{moved[best]:,.3g}"
    )
