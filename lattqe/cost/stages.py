"""The cost of the other stages: search, growth, training, extraction, import.

Each function counts what the code of its stage does, in this process or on workers.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import exp

from lattqe.adaptation import LEARNED_BYTES, NEAR, centre_count, sample_rows
from lattqe.augmentation.recipe import BLOCK_ROWS
from lattqe.cost.augment import NETWORK_SHARE, PROCESS_BYTES, Weighing, joined_rows, weighing
from lattqe.cost.graph import BASE_BYTES, bytes_per_row, graph_products, product_seconds, scoring_seconds
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
    held_bytes,
)
from lattqe.model.network import LAttQEConfig
from lattqe.search.compare import rows_per_block

# Values that one core normalises in float64 and stores as float16 in a second: benchmarks/cost.py.
IMPORT_VALUES_PER_SECOND = 120e6
# Bytes of a shard: without data, for a row beside the stored one, and for an entry of the answers to a block of queries
# (candidates, lists, and those on their way). Measured with 30,000 and 100,000 rows on disk, 500,000 on S3, k of 100
# and 1,000.
SHARD_BYTES, SHARD_ROW_BYTES, SHARD_ENTRY_BYTES = 373 << 20, 60, 117
SHARD_QUERIES = 1024  # of a block that all shards are asked at once
ROOM_BYTES = 512 << 20  # of a process with torch and what it has at hand, where no more is known
CELL_BYTES, CELL_QUERY_BYTES = 500, 105  # of a stored cell, and for each query, judged in two ways
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
    fetched: bool = False,
) -> Work:
    """Each query against each row, twice where it is expanded; shards hold the rows, or map them unless `fetched`."""
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
    memory, mapped = ROOM_BYTES + rows * dim * (itemsize + 4), 0
    if not here:
        deepest = k if expansion is None else max(k, expansion.depth)
        memory, mapped = shard_memory(database, shards, asked, deepest, fetched)
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
        worker_bytes=memory,
        mapped=mapped,
        stored=ranks.bytes,
    )


def shard_memory(database: Sequence[Stored], shards: int, asked: int, k: int, fetched: bool) -> tuple[int, int]:
    """Memory of one of so many shards, and bytes of the files that it maps: whole parts, of which it has some rows.

    asked, k: queries, and the longest lists that are asked for.
    """
    rows = sum(each.rows for each in database)
    parts = 0
    for start, stop in pairwise(rows * shard // shards for shard in range(shards + 1)):
        touched, first = 0, 0
        for each in database:
            low, high = max(start - first, 0), min(stop - first, each.rows)
            touched += sum(each.within(low, high)) if low < high else 0
            first += each.rows
        parts = max(parts, touched)
    memory = SHARD_BYTES + -(-rows // shards) * SHARD_ROW_BYTES + min(asked, SHARD_QUERIES) * k * SHARD_ENTRY_BYTES
    if not fetched:
        return memory, parts
    return memory + parts + max(max(each.part_bytes) for each in database), 0


def measuring(
    database: Sequence[Stored],
    queries: Stored,
    dim: int,
    cells: int,
    machines: Machines,
    *,
    depth: int,
    itemsize: int = 2,
    here: bool = True,
    fetched: bool = False,
) -> Work:
    """Cells of a benchmark over the same rows: one search for all, then each one's ranks of its labelled rows.

    depth: of the longest lists that an expansion looks at.
    """
    rows, asked = sum(each.rows for each in database), queries.rows
    products = rows * asked * (1 + cells)
    # In this process rows are read into one array, and held in float64 too.
    memory, mapped = BASE_BYTES + rows * dim * (2 * itemsize + 8), 0
    if not here:
        memory, mapped = shard_memory(database, machines.workers, asked, depth, fetched)
    return Work(
        "cells",
        cells,
        products,
        2.0 * products * dim,
        queries.bytes + sum(each.bytes + each.manifest for each in database),
        cells * (CELL_BYTES + asked * CELL_QUERY_BYTES),
        requests=sum((each.loading() for each in (*database, queries)), OPEN * len(database)) + PUT * cells,
        worker_seconds=products * product_seconds(dim, machines),
        worker_bytes=memory,
        mapped=mapped,
    )


def maps_bytes(rows: int, dim: int) -> int:
    """Of the stored maps of that many rows."""
    return MAPS_BYTES + 4 * centre_count(rows, dim) * dim * (dim + 1)


def adapting_memory(features: Stored, adapted: Stored, dim: int, workers: int, fetched: bool) -> tuple[int, int]:
    """Memory of the larger one of a shard that finds near neighbors and of a worker that maps rows, and bytes of the
    files that it maps. The maps are learned by the command itself (`learning_bytes`).
    """
    sampled = len(sample_rows(features.rows, dim))
    held = held_bytes([features]) if fetched else 0
    # A part as an array and as the bytes of its file; its rows in float32, once for each of a few steps.
    mapping = PROCESS_BYTES + held + 2 * max(adapted.part_bytes) + 3 * maps_bytes(features.rows, dim)
    shard = shard_memory([features], workers, sampled, NEAR + 1, fetched)
    return max(shard, (mapping, 0 if fetched else features.bytes), key=sum)


def learning_bytes(rows: int, dim: int) -> int:
    """Memory of the process that learns the maps: its sample with near neighbors, and differences at once."""
    sampled = len(sample_rows(rows, dim))
    return PROCESS_BYTES + sampled * (1 + NEAR) * dim * 4 + 2 * LEARNED_BYTES + 3 * maps_bytes(rows, dim)


def adaptation(
    features: Stored,
    adapted: Stored,
    dim: int,
    machines: Machines,
    *,
    itemsize: int = 2,
    here: bool = True,
    fetched: bool = False,
) -> Work:
    """A sample of the rows meets all rows, then every row goes through the maps of all centres.

    Features are read once to learn and once to be mapped; each worker that maps opens the stored maps.
    """
    rows = features.rows
    sampled, centres = len(sample_rows(rows, dim)), centre_count(rows, dim)
    products, holders = sampled * rows, 1 if here else machines.workers
    maps = Stored((0, 0, 0), (maps_bytes(rows, dim), 0, 0), MANIFEST_BYTES + 3 * PART_ENTRY)
    loads = 1 + holders  # of the maps: by whom they are handed out, and by each worker
    learning, mapping = (2.0 * count * centres * dim * dim for count in (sampled * NEAR, rows))
    opens = 1 if here else 2 * holders
    facts = {"rows looked at": f"{sampled:,}", "centres": f"{centres}"}
    memory, mapped = learning_bytes(rows, dim) + rows * dim * (itemsize + 4), 0
    if not here:
        memory, mapped = adapting_memory(features, adapted, dim, holders, fetched)
        facts["memory of the command, which learns"] = f"{learning_bytes(rows, dim) >> 20:,} MiB"
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
        worker_bytes=memory,
        mapped=mapped,
        stored=adapted.bytes + maps.bytes,
        facts=facts,
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
    hopping: bool = False,
) -> Work:
    """Rows that join and leave an augmented index: new rows meet all rows, lists that lost a member are searched again.

    Which lists those are is known only when they are read: a row is taken to stand in k lists, as it does on average.
    On workers newcomers and old rows meet twice, once for each side, and searched rows pass all rows by groups.
    `hopping`: edges are made, not the index, which the hops make.
    """
    rows = features.rows + joined - removed
    stale = round(features.rows * (1 - exp(-removed * k / max(features.rows, 1))))
    touched = joined + round(features.rows * (1 - exp(-(joined + removed) * weighs.depth / max(features.rows, 1))))
    products = joined * (rows - joined) + graph_products(joined) + stale * rows
    originals, joining, rewriting = joined_rows(features, joined, removed)
    grown, edges = Stored.kind("neighbors", rows, k=k), Stored.kind("edges", rows, k=weighs.k)
    made, width = (edges, 4 * (1 + 2 * weighs.k)) if hopping else (originals, dim * itemsize)
    passes, memory = 1, rows * (dim * itemsize + 8 * k * 2)
    if not here:
        products = joined * (rows - joined) + (joined + stale) * rows
        block = rows_per_block(dim, k + 1)
        passes = 1 + -(-(joined + stale) // block)
        memory = block * bytes_per_row(dim, k, itemsize) + 3 * max(grown.part_bytes)
    seconds = products * product_seconds(dim, machines) + scoring_seconds(joined * k * 2, dim, machines.threads)
    pieces = sum(part for part in made.part_rows if part > BLOCK_ROWS) * width
    # Manifests, and the first part of the originals for its columns.
    opened = 8 * (features.manifest + originals.manifest + grown.manifest) + (not hopping) * originals.part_bytes[0]
    graphs = (1 + (not here and bool(removed))) * graph.bytes + grown.bytes
    return Work(
        "growth",
        rows,
        products,
        2.0 * products * dim + touched * weighs.flops,
        joining + graphs + (1 + passes) * originals.bytes + made.bytes + pieces + 16 * rows + opened,
        rewriting + grown.written + pieces + made.written + 8 * rows,
        requests=(features.loading() + originals.loading()) * 3
        + graph.loading()
        + grown.loading()
        + made.loading()
        + OPEN * 20
        + claim()
        + PUT * (originals.parts + 2)
        + grown.publishing()
        + made.publishing(),
        worker_seconds=seconds + weighs.seconds(touched, dim, machines),
        worker_bytes=ROOM_BYTES + memory + 2 * max(made.part_bytes),
        stored=originals.bytes + grown.bytes + made.bytes,
        facts={"rows touched": f"about {touched:,} of {rows:,}", "rows searched again": f"about {stale:,}"},
    )


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
        worker_bytes=ROOM_BYTES + stored + 16 * parameters(network) + batch * (1 + k) * dim * 4 * 4 * network.layers,
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
        worker_bytes=ROOM_BYTES * 2 + max(blocks.part_bytes),
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
        worker_bytes=ROOM_BYTES // 2 + 2 * max(features.part_bytes),
        stored=features.bytes,
        facts={"bytes of the files": f"{source_bytes:,}"},
    )


def _name(itemsize: int) -> str:
    return {2: "float16", 4: "float32"}[itemsize]
