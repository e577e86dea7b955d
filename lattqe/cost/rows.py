"""The cost of a neighbor graph whose blocks have owners (the schedule "rows"), and which schedule costs less; and that
of an approximate graph.

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
    TILE,
    Cut,
    bytes_per_row,
    fitting_rows,
    graph_of_pairs,
    graph_products,
    graph_seconds,
    harmonic,
    overlaps,
    plan_pairs,
    product_seconds,
    reached_bytes,
    scoring_seconds,
    tile_bytes,
    wide_bytes,
)
from lattqe.cost.work import ATTACH, GB, LOOK, MISSING, OPEN, PUT, Cost, Machines, Requests, Stored, Work, gets_of
from lattqe.errors import LattqeError
from lattqe.search.approximate import (
    BUFFER_BYTES,
    DEPTH,
    ITERATIONS,
    MEASURED_ROWS,
    PER_CENTROID,
    PLANNED_ROWS,
    cluster_count,
)
from lattqe.search.topk import capacity_for
from lattqe.store.parts import PARTS_AHEAD, RESIDENT_BYTES

OWNER_SECONDS = 1800.0  # the longest piece of work: longer than a pair's, because all rows are read for each
VISITOR_BYTES = 128 << 20  # of the float32 rows that pass a block at once
VISITORS_HELD = 3  # such pieces: that which passes, the one before, the next, which is loaded meanwhile
# Clusters that a row of an approximate graph searches, as rows like photographs took for a recall of 0.95, and by how
# much clusters of unequal size have more pairs than equal ones: benchmarks/approximate.py.
ASSUMED_SEARCHED, UNEVEN = 14, 1.2
# Bytes of the process that finds them: without data, for a value of a row beside its stored one, for a row, and for an
# entry of the lists that measure the recall. Fitted at 60,000, 120,000 and 1,000,000 rows.
FINDING_BYTES, FINDING_VALUE_BYTES, FINDING_ROW_BYTES, FINDING_LIST_BYTES = 330 << 20, 12, 48 * DEPTH, 330
# Bytes of a worker that makes parts of it, for each cluster that a row may search; more while they come from S3.
# Measured at 60,000 and 120,000 rows on disk and 1,000,000 on disk and S3.
SEARCHED_BYTES, FETCHED_SEARCHED_BYTES = 8, 27


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


def block_row_bytes(schedule: str, dim: int, k: int, itemsize: int, fetched: bool) -> int:
    """Memory for one row of a block: as for pairs, but without a third block that stays from before."""
    if schedule == "pairs":
        return bytes_per_row(dim, k, itemsize, fetched)
    return wide_bytes(dim, itemsize, fetched) + 8 * capacity_for(k) + 24 * k


def fixed_bytes(schedule: str, rows: int, dim: int, itemsize: int, fetched: bool) -> int:
    """Memory of a worker without tiles, parts and blocks: its process, and the rows that pass a block that it owns."""
    passing = min(VISITORS_HELD * visitor_rows(dim), rows) if schedule == "rows" else 0
    return BASE_BYTES + passing * wide_bytes(dim, itemsize, fetched)


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
    fetched: bool = False,
    beside: int = 0,
) -> Cut:
    """Cut `own` and `others` rows for a schedule so that `workers` with `budget` bytes each can do it; LattqeError with
    advice where they cannot. `block_rows`: of a block, instead of as many as fit. `fetched`: rows come from S3;
    `beside`: bytes of their parts and of tiles in each worker.
    """
    rows, each = own + others, block_row_bytes(schedule, dim, k, itemsize, fetched)
    fixed = beside + fixed_bytes(schedule, rows, dim, itemsize, fetched)
    if schedule == "pairs":
        fit = fitting_rows(budget, fixed, each, products_per_second)
        return plan_pairs(own, others, workers, fit, budget, fixed, each, block_rows)
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
    fetched = remote and not cached
    held, mapped = reached_bytes(sets, fetched)
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
    seconds = graph_seconds(cut, dim, scored, machines, products_per_second)
    # A block meets itself by tiles, both halves of which are multiplied on the diagonal.
    within = [(size, graph_products(size, 1, machines.threads)) for size in cut.sizes[: cut.own]]
    products = cut.products + sum(tiled - size * size // 2 for size, tiled in within)
    return Work(
        "graph",
        rows,
        products,
        2.0 * products * dim,
        loaded
        + sum(size * count for size, count in zip(lists, assembled))
        + opens * sum(each.manifest for each in sets),
        sum(lists) + graph.written,
        requests=writing + reading + loading + OPEN * opens + graph.publishing(cut.blocks + 1),
        worker_seconds=OVERHEAD * seconds,
        worker_bytes=fixed_bytes("rows", rows, dim, itemsize, fetched)
        + tile_bytes(largest, machines)
        + held
        + largest * block_row_bytes("rows", dim, k, itemsize, fetched),
        mapped=mapped,
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
                fetched=remote and not cached,
                beside=tile_bytes(TILE, machines) + reached_bytes(sets, remote and not cached)[0],
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


def finding_bytes(rows: int, dim: int, k: int, itemsize: int = 2) -> int:
    """Memory of the process that finds the clusters of an approximate graph: all rows, what each may search, and the
    exact lists that measure the recall.
    """
    lists = (PLANNED_ROWS + MEASURED_ROWS) * k * FINDING_LIST_BYTES
    return FINDING_BYTES + rows * (dim * (FINDING_VALUE_BYTES + itemsize) + FINDING_ROW_BYTES) + lists


def clusters_memory(
    features: Stored, dim: int, k: int, threads: int, fetched: bool, searched: int = DEPTH
) -> tuple[int, int]:
    """Memory of a worker that makes parts of an approximate graph, and bytes of the files that it maps.

    searched: the most clusters that a row searches, known once they are found.
    """
    graph = Stored.kind("neighbors", features.rows, k=k)
    at_once = min(BUFFER_BYTES // (8 * capacity_for(k)), -(-max(graph.part_rows) // threads))
    memory = BASE_BYTES + features.rows * searched * (FETCHED_SEARCHED_BYTES if fetched else SEARCHED_BYTES)
    memory += threads * at_once * (8 * capacity_for(k) + 12 * k + 4 * dim)
    memory += max(graph.part_bytes) * (3 if graph.parts > 1 else 1)  # what was written of one is kept for the next
    if not fetched:
        return memory, features.bytes
    return memory + features.bytes + min(features.parts, 1 + PARTS_AHEAD) * max(features.part_bytes), 0


def approximate_graph(
    features: Stored, dim: int, k: int, machines: Machines, *, itemsize: int = 2, fetched: bool = False
) -> Work:
    """An approximate graph before its clusters are found. How many of them a row searches is assumed: that shows only
    when they are there, and products grow with it, up to those of an exact graph.
    """
    rows, clusters = features.rows, cluster_count(features.rows, k)
    finding = clusters * min(PER_CENTROID * clusters, rows) * ITERATIONS + rows * clusters
    finding += rows * (PLANNED_ROWS + MEASURED_ROWS)
    inside = min(round(UNEVEN * ASSUMED_SEARCHED * rows * rows / clusters), rows * rows // 2)
    graph, products = Stored.kind("neighbors", rows, k=k), finding + inside
    assigned = 4 * DEPTH * rows
    # Never more workers than parts; those that there are share the cores.
    threads = max(machines.nodes * machines.cpus // min(machines.workers, graph.parts), 1)
    memory, mapped = clusters_memory(features, dim, k, min(threads, machines.cpus), fetched)
    return Work(
        "graph",
        rows,
        products,
        2.0 * products * dim,
        features.bytes * machines.workers + OPENS_HERE * features.manifest + assigned * (1 + machines.workers),
        graph.written + assigned,
        requests=features.loading() * machines.workers
        + OPEN * OPENS_HERE
        + MISSING
        + ATTACH
        + LOOK
        + graph.publishing(),
        # Each side of a pair is compared for itself, so a product is looked at once, not twice; the rest is as exact.
        worker_seconds=products * product_seconds(dim, machines) + scoring_seconds(2 * k * rows, dim, machines.threads),
        worker_bytes=memory,
        mapped=mapped,
        scratch=assigned,
        stored=graph.bytes,
        facts={
            "not exact": f"{clusters:,} clusters; a row is assumed to search {ASSUMED_SEARCHED} of them. How many "
            "the recall needs is known once they are found; products grow with it, up to an exact graph's",
            "products to find them, and to measure the recall": f"{finding:.3g}",
            "memory of the command, which finds them": f"{finding_bytes(rows, dim, k, itemsize) >> 20:,} MiB",
        },
    )
