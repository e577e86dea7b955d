"""The cost of the other stages: search, growth, training, extraction, import.

Each function counts what the code of its stage does, in this process or on workers.
"""

from collections.abc import Sequence
from math import exp
from typing import Any

from lattqe.adaptation import LEARNED_BYTES, NEAR, centre_count, sample_rows
from lattqe.cost.augment import NETWORK_SHARE, PROCESS_BYTES, Weighing, weighing
from lattqe.cost.graph import BASE_BYTES, OPENS_HERE, bytes_per_row, graph_products, product_seconds, scoring_seconds
from lattqe.cost.work import (
    ATTACH,
    CLAIM_BYTES,
    DELETE,
    LOOK,
    MANIFEST_BYTES,
    MISSING,
    OPEN,
    PART_ENTRY,
    PART_QUERIES,
    PUT,
    Machines,
    Requests,
    Stored,
    Work,
    claim,
)
from lattqe.model.config import LAttQEConfig
from lattqe.search.approximate import (
    BUFFER_BYTES,
    DEPTH,
    ITERATIONS,
    MEASURED_ROWS,
    PER_CENTROID,
    PLANNED_ROWS,
    cluster_count,
)
from lattqe.search.compare import rows_per_block

# Values that one core normalises in float64 and stores as float16 in a second: benchmarks/cost.py.
IMPORT_VALUES_PER_SECOND = 120e6
# Clusters that a row of an approximate graph searches, as rows like photographs took for a recall of 0.95, and by how
# much clusters of unequal size have more pairs than equal ones: benchmarks/approximate.py.
ASSUMED_SEARCHED, UNEVEN = 14, 1.2
# Bytes of the process that finds them, for a value of a row beside its stored one, and for a row: measured at 100,000,
# 300,000 and 1,000,000 rows.
FINDING_VALUE_BYTES, FINDING_ROW_BYTES = 12, 48 * DEPTH
MAPS_BYTES = 300  # of stored maps beside their numbers
BACKWARD = 3  # times the work of going forward that an update of a network takes: forward, and back for both factors


def search(
    database: Sequence[Stored],
    queries: Stored,
    dim: int,
    k: int,
    machines: Machines,
    *,
    itemsize: int = 2,
    expansion: Weighing | None = None,
    here: bool = True,
) -> Work:
    """Each query against each row, twice where it is expanded; shards hold the rows."""
    rows, asked = sum(each.rows for each in database), queries.rows
    rounds = 1 if expansion is None else 2
    products = rounds * rows * asked
    # Their ids are those of the queries, whatever is in a row of these beside its vector.
    beside = max(queries.bytes // asked - dim * itemsize, 0)
    ranks = Stored.planned(
        [min(PART_QUERIES, asked - start) for start in range(0, asked, PART_QUERIES)], 8 * k + beside
    )
    shards = 1 if here else machines.workers
    candidates = asked * shards * (k + (0 if expansion is None else expansion.depth))
    seconds = products * product_seconds(dim, machines) + scoring_seconds(candidates, dim, machines.threads)
    flops = 2.0 * products * dim
    if expansion is not None:
        seconds += expansion.seconds(asked, dim, machines)
        flops += asked * expansion.flops
    stored = sum(each.bytes for each in database)
    return Work(
        "search",
        asked,
        products,
        flops,
        stored + queries.bytes + sum(each.manifest for each in (*database, queries)),
        ranks.written,
        requests=sum((each.loading() for each in (*database, queries)), OPEN * (1 + len(database)))
        + LOOK * 3
        + ranks.publishing(),
        worker_seconds=seconds,
        worker_bytes=BASE_BYTES + -(-rows // shards) * dim * (itemsize + (4 if here else 0)),
        stored=ranks.bytes,
    )


def measuring(rows: int, queries: int, dim: int, cells: int, machines: Machines) -> Work:
    """Cells of a benchmark over the same rows: one search for all, then each one's ranks of its labelled rows."""
    products = rows * queries * (1 + cells)
    return Work(
        "cells",
        cells,
        products,
        2.0 * products * dim,
        worker_seconds=products * product_seconds(dim, machines),
        worker_bytes=BASE_BYTES + rows * dim * 8,
    )


def adaptation(
    features: Stored, adapted: Stored, dim: int, machines: Machines, *, itemsize: int = 2, here: bool = True
) -> Work:
    """A sample of the rows meets all rows, then every row goes through the maps of all centres.

    Features are read once to learn and once to be mapped; each worker that maps opens the stored maps.
    """
    rows = features.rows
    sampled, centres = len(sample_rows(rows, dim)), centre_count(rows, dim)
    products, holders = sampled * rows, 1 if here else machines.workers
    maps = Stored((0, 0, 0), (MAPS_BYTES + 4 * centres * dim * (dim + 1), 0, 0), MANIFEST_BYTES + 3 * PART_ENTRY)
    loads = 1 + holders  # of the maps: by whom they are handed out, and by each worker
    learning, mapping = (2.0 * count * centres * dim * dim for count in (sampled * NEAR, rows))
    opens = 1 if here else 2 * holders
    vectors = sampled * NEAR * dim * 4 + 2 * LEARNED_BYTES  # neighbors; differences at once, and these weighted
    return Work(
        "adaptation",
        rows,
        products,
        2.0 * products * dim + learning + mapping,
        2 * features.bytes
        + opens * features.manifest
        + adapted.manifest
        + loads * (maps.bytes + maps.manifest)
        # What was stored is read again before it is published.
        + maps.bytes,
        adapted.written + maps.bytes + CLAIM_BYTES + maps.manifest,
        requests=features.loading() * 2
        + (maps.loading() + OPEN) * loads
        + OPEN * (1 + opens)
        + ATTACH * holders
        + LOOK
        + adapted.publishing()
        # The maps: a look whether they are there, the claim, three files read again, the manifest, the claim removed.
        + MISSING
        + claim()
        + PUT * 3
        + maps.loading()
        + PUT * 2
        + LOOK
        + DELETE,
        # One thread learns, each worker maps with one.
        worker_seconds=products * product_seconds(dim, machines)
        + (learning * machines.workers + mapping) / (machines.gflops * 1e9),
        worker_bytes=BASE_BYTES
        + -(-rows // holders) * dim * (itemsize + 4)
        + max(vectors, 2 * max(adapted.part_bytes))
        + 3 * maps.bytes,
        stored=adapted.bytes + maps.bytes,
        facts={"rows looked at": f"{sampled:,}", "centres": f"{centres}"},
    )


def growth(
    features: Stored,
    graph: Stored,
    joined: int,
    removed: int,
    dim: int,
    weighs: Weighing,
    machines: Machines,
    *,
    k: int,
    itemsize: int = 2,
    here: bool = True,
) -> Work:
    """Rows that join and leave an augmented index: new rows meet all rows, lists that lost a member are searched again.

    Which lists those are is known only when they are read: a row is taken to stand in k lists, as it does on average.
    On workers newcomers and old rows meet twice, once for each side, and searched rows pass all rows by groups.
    """
    rows = features.rows + joined - removed
    stale = round(features.rows * (1 - exp(-removed * k / max(features.rows, 1))))
    touched = joined + round(features.rows * (1 - exp(-(joined + removed) * weighs.depth / max(features.rows, 1))))
    products = joined * (rows - joined) + graph_products(joined) + stale * rows
    row = features.bytes // max(features.rows, 1)
    grown = Stored.kind("neighbors", rows, k=k)
    originals, index = (Stored.planned(_scaled(features.part_rows, rows), row) for _ in range(2))
    passes, memory = 1, rows * (dim * itemsize + 8 * k * 2)
    if not here:
        products = joined * (rows - joined) + (joined + stale) * rows
        block = rows_per_block(dim, k + 1)
        passes = 1 + -(-(joined + stale) // block)
        memory = block * bytes_per_row(dim, k, itemsize) + 3 * max(grown.part_bytes)
    seconds = products * product_seconds(dim, machines) + scoring_seconds(joined * k * 2, dim, machines.threads)
    return Work(
        "growth",
        rows,
        products,
        2.0 * products * dim + touched * weighs.flops,
        3 * features.bytes
        + (2 + (not here and bool(removed))) * graph.bytes
        + (2 + passes) * originals.bytes
        + grown.bytes,
        originals.written + grown.written + 2 * index.written + 8 * rows,
        requests=features.loading() * 3
        + graph.loading() * 2
        + originals.loading() * 3
        + grown.loading()
        + OPEN * 20
        + originals.publishing()
        + grown.publishing()
        + index.publishing(),
        worker_seconds=seconds + weighs.seconds(touched, dim, machines),
        worker_bytes=BASE_BYTES + memory + 2 * max(index.part_bytes),
        stored=originals.bytes + grown.bytes + index.bytes,
        facts={"rows touched": f"about {touched:,} of {rows:,}", "rows searched again": f"about {stale:,}"},
    )


def finding_bytes(rows: int, dim: int, itemsize: int = 2) -> int:
    """Memory of the process that finds the clusters of an approximate graph: all rows, and what each may search."""
    return PROCESS_BYTES + rows * (dim * (FINDING_VALUE_BYTES + itemsize) + FINDING_ROW_BYTES)


def approximate_graph(features: Stored, dim: int, k: int, machines: Machines, *, itemsize: int = 2) -> Work:
    """An approximate graph before its clusters are found. How many of them a row searches is assumed: that shows only
    when they are there, and products grow with it, up to those of an exact graph.
    """
    rows, clusters = features.rows, cluster_count(features.rows, k)
    finding = clusters * min(PER_CENTROID * clusters, rows) * ITERATIONS + rows * clusters
    finding += rows * (PLANNED_ROWS + MEASURED_ROWS)
    inside = min(round(UNEVEN * ASSUMED_SEARCHED * rows * rows / clusters), rows * rows // 2)
    graph, products = Stored.kind("neighbors", rows, k=k), finding + inside
    assigned = 4 * DEPTH * rows
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
        worker_bytes=BASE_BYTES
        + features.bytes
        + 4 * assigned
        + BUFFER_BYTES * machines.threads
        + 2 * max(graph.part_bytes),
        scratch=assigned,
        stored=graph.bytes,
        facts={
            "not exact": f"{clusters:,} clusters; a row is assumed to search {ASSUMED_SEARCHED} of them. How many "
            "the recall needs is known once they are found; products grow with it, up to an exact graph's",
            "products to find them, and to measure the recall": f"{finding:.3g}",
            "memory of the command, which finds them": f"{finding_bytes(rows, dim, itemsize) >> 20:,} MiB",
        },
    )


def _scaled(part_rows: Sequence[int], rows: int) -> list[int]:
    """Parts as large as these for another number of rows."""
    each = max(part_rows)
    return [min(each, rows - start) for start in range(0, max(rows, 1), each)]


def training(
    sets: Sequence[Stored],
    validation: Sequence[Stored],
    dim: int,
    network: LAttQEConfig,
    machines: Machines,
    *,
    steps: int,
    batch: int,
    k: int,
    checks: int,
    graph_k: int | None = None,
) -> Work:
    """Updates of a network by batches of lists; beside them the graphs that the sampler needs and the validations."""
    rows, held_out = sum(each.rows for each in sets), sum(each.rows for each in validation)
    weighs = weighing(dim, k, network.background or k, network)
    graphs = sum(graph_products(each.rows) for each in sets) if graph_k else 0
    lists = BACKWARD * steps * batch + checks * held_out
    searched = checks * sum(each.rows**2 for each in validation)
    products = graphs + searched
    stored = sum(each.bytes for each in (*sets, *validation))
    weights = 4 * parameters(network)
    readings = machines.workers
    return Work(
        "training",
        rows,
        products,
        lists * weighs.flops + 2.0 * products * dim,
        stored * readings,
        weights * 3 * (checks + 1),
        requests=sum((each.loading() for each in (*sets, *validation)), Requests()) * readings
        + (PUT * 2 + DELETE) * (checks + 1)
        + MISSING,
        worker_seconds=weighs.seconds(lists, dim, machines) + products * product_seconds(dim, machines),
        worker_bytes=BASE_BYTES + stored + 16 * parameters(network) + batch * (1 + k) * dim * 4 * 4 * network.layers,
        stored=weights,
        facts={"updates": f"{steps:,} of {batch} queries", "validations": f"{checks:,}"},
    )


def parameters(network: LAttQEConfig) -> int:
    """Numbers that a network learns, but for its small head."""
    w = network.token_width
    encoder = 2 * w * network.hidden + network.hidden + 5 * w + network.attention * (4 * w * w + 6 * w)
    projected = network.dim * w if network.visual and network.width else 0
    return network.layers * encoder + projected + network.positional * (1 + network.max_k) * w


def extraction(
    images: int,
    image_bytes: int,
    dim: int,
    machines: Machines,
    *,
    itemsize: int,
    flops: float,
    block_rows: Sequence[int],
) -> Work:
    """Every image through a network, which takes `flops` for one image at all scales; blocks, then the feature set."""
    row = dim * itemsize + 24
    blocks, features = Stored.planned(block_rows, row), Stored.kind("features", images, dim=dim, dtype=_name(itemsize))
    return Work(
        "extraction",
        images,
        flops=images * flops,
        read=image_bytes + blocks.bytes,
        written=blocks.written + features.written,
        requests=Requests(gets=images) + blocks.publishing() + blocks.loading() + features.publishing() + OPEN * 2,
        worker_seconds=images * flops / (machines.flops * (1 if machines.gpus else NETWORK_SHARE)),
        worker_bytes=BASE_BYTES * 2 + max(blocks.part_bytes),
        scratch=blocks.bytes,
        stored=features.bytes,
    )


def importing(rows: int, dim: int, source_bytes: int, dtype: str, labels: bool) -> Work:
    """Foreign files, read twice (their digest, their vectors) and written as a feature set."""
    features = Stored.kind("features", rows, dim=dim, dtype=dtype, labels=labels)
    return Work(
        "import",
        rows,
        read=0,
        written=features.bytes + CLAIM_BYTES + features.manifest,
        requests=Requests(puts=5 + features.parts, gets=4, deletes=1),
        worker_seconds=rows * dim / IMPORT_VALUES_PER_SECOND,
        worker_bytes=BASE_BYTES // 2 + 2 * max(features.part_bytes),
        stored=features.bytes,
        facts={"bytes of the files": f"{source_bytes:,}"},
    )


def _name(itemsize: int) -> str:
    return {2: "float16", 4: "float32"}[itemsize]


def summed(stage: str, works: Sequence[Work], **facts: Any) -> Work:
    """Many like stages as one: everything is added, memory is the most that one needs."""
    sums = {
        name: sum(getattr(work, name) for work in works)
        for name in ("rows", "products", "flops", "read", "written", "gathered", "worker_seconds", "stored")
    }
    return Work(
        stage,
        requests=sum((work.requests for work in works), Requests()),
        worker_bytes=max((work.worker_bytes for work in works), default=0),
        scratch=max((work.scratch for work in works), default=0),
        facts=dict(facts),
        **sums,
    )
