"""The cost of augmentation: every row expanded from its list, and features that flow over the edges in hops."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lattqe.augmentation.bands import UNIT_ROWS
from lattqe.augmentation.growth import small_parts
from lattqe.cost.work import (
    ARROW_BYTES,
    ATTACH,
    CLAIM_BYTES,
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
from lattqe.expansion import Method
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.rows import GATHER_BYTES, list_lengths, shares
from lattqe.model.network import LAttQEConfig
from lattqe.store.manifest import part_row_counts

# Python, Ray, torch and a small model, where the process itself cannot be asked; and what the first products of a
# process bring in: pages of the mathematical libraries, and their buffers, more of them for a network. Fitted to the
# peaks of augmentations of 12,000, 30,000, 60,000 and 1,000,000 rows (docs/results/scale.md).
PROCESS_BYTES = 343 << 20
WARM_BYTES, NETWORK_BYTES = 48 << 20, 82 << 20
SEAL = 16  # bytes before each unfinished piece
OPENS = 9  # times that `lattqe augment` opens its sets and their graph
# Share of a core's speed in products that the network that ships reaches, and bytes of vectors that a core gathers and
# averages in a second: fitted by benchmarks/cost.py to 3,000 rows of 128 and of 512 columns. The paper's network, whose
# products are wider, reaches 0.4 (docs/results/augment.md).
NETWORK_SHARE = 0.24
GATHER_BYTES_PER_SECOND = 1.0e9
# Bytes of vectors that a core adds up in a hop: 20,000 rows of 128 columns, 32 edges each (benchmarks/cost.py).
HOP_BYTES_PER_SECOND = 3.2e9
# Share of edges that run both ways: 0.55 to 0.60 of the photographs' graphs, 128 columns, k = 32.
MUTUAL = 0.57
FOLD_BYTES = 80  # for each edge from or to a band, while its rows of S are put together


@dataclass(frozen=True)
class Weighing:
    """What a method does with one list: how many neighbors it weighs and looks at, and the work of that."""

    k: int
    depth: int
    flops: float  # of one list
    shared_width: int = 0  # columns of the table of first products that lists share; 0: none
    shared_flops: float = 0.0  # of one row of that table
    network: bool = False
    negatives: int = 0  # rows with the lowest scores that it looks at, too

    def seconds(self, lists: int, dim: int, machines: Machines) -> float:
        """Of one worker for that many lists: the network, and gathering vectors."""
        speed = machines.flops if machines.gpus or not self.network else machines.flops * NETWORK_SHARE
        gathered = lists * (1 + self.depth) * dim * 4 / (GATHER_BYTES_PER_SECOND * machines.threads)
        return lists * self.flops / speed + gathered


def weighing(dim: int, k: int, depth: int, network: LAttQEConfig | None = None, shared: bool = False) -> Weighing:
    """The work of one list of k neighbors, `depth` of which are looked at; `shared`: first products are looked up."""
    t, aggregate = 1 + k, 2.0 * (1 + depth) * dim
    if network is None:
        return Weighing(k, depth, aggregate)
    w, f = network.token_width, network.hidden
    if network.gated:
        t += 1  # the background is a token too
    flops = network.layers * (4.0 * t * w * f + (8.0 * t * w * w + 4.0 * t * t * w) * network.attention)
    projected = 2.0 * dim * w if network.visual and network.width else 0.0
    first = 6.0 * w * w + projected if shared else 0.0
    flops += t * (projected - first)
    flops += 2.0 * t * t * dim * (network.relation_bias + network.relational)
    return Weighing(k, depth, flops + aggregate, (3 + bool(projected)) * w if shared else 0, first, network=True)


def weighing_of(method: Method, k: int, dim: int, rows: int, again: bool = False) -> Weighing:
    """The work of one list of a method among that many rows; `again`: only some rows of a grown index are computed."""
    k, depth = list_lengths(method, k, rows) if rows else (k, method.depth(k))
    network = method.fast.config if isinstance(method, AttentionExpansion) else None
    shared = not again and shares(method, rows)
    return replace(weighing(dim, k, depth, network, shared), negatives=method.negatives)


@dataclass(frozen=True)
class WorkerMemory:
    """Predicted memory of one worker, in bytes; `mapped` is shared by all workers of a node."""

    process: int  # Python, Ray, torch and the model
    mapped: int  # files: the vectors and the graph
    held: int  # what was fetched from S3, and vectors in one piece for DQE's search
    table: int  # shared first products
    buffers: int  # a batch of lists, or a part while it is put together

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """By name, for the plan."""
        return {
            "process and model": self.process,
            "mapped files (one copy per node)": self.mapped,
            "held": self.held,
            "shared products": self.table,
            "buffers": self.buffers,
        }


def augmentation_memory(
    features: Stored,
    graph: Stored,
    dim: int,
    weighs: Weighing,
    *,
    itemsize: int = 2,
    block_rows: int = 2048,
    process: int = PROCESS_BYTES,
    shards: bool = False,
    fetched: bool = False,
    graph_fetched: bool = False,
) -> WorkerMemory:
    """Memory of one worker. fetched: vectors are held from S3, not mapped; with `shards` they are with others."""
    held = held_bytes([stored for stored, remote in ((features, fetched), (graph, graph_fetched)) if remote])
    mapped = (0 if fetched or shards else features.bytes) + (0 if graph_fetched else graph.bytes)
    if weighs.negatives and not shards and features.parts > 1:
        held += features.rows * dim * itemsize
    # In float32 in the method, and as stored: one batch in use, one being read, and what reading it takes.
    batch = max(GATHER_BYTES, (1 + weighs.depth) * dim * 4)
    k = (graph.bytes // graph.rows) // 8
    block = min(block_rows, features.rows) * (dim * (8 + itemsize) + 2 * 8 * k)
    # A part as an array, and as the bytes of its file.
    part = 2 * max(features.part_bytes)
    table = 4 * features.rows * weighs.shared_width
    warm = NETWORK_BYTES if weighs.network else WARM_BYTES
    return WorkerMemory(process + warm, mapped, held, table, max(batch + 3 * batch * itemsize // 4 + block, part))


def augmentation(
    features: Stored,
    graph: Stored,
    dim: int,
    weighs: Weighing,
    machines: Machines,
    *,
    itemsize: int = 2,
    edges: Stored | None = None,
    here: bool = True,
    shards: bool = False,
    fetched: bool = False,
    block_rows: int = 2048,
) -> Work:
    """Every row expanded from its list; with `edges` its weights are stored instead of its vector.

    Blocks of rows are written as pieces and assembled to parts. Workers map the vectors, or hold what they `fetched`
    from S3; with `shards` they gather them from each other.
    """
    rows, made = features.rows, edges or features
    width = 4 * (1 + 2 * weighs.k) if edges is not None else dim * itemsize
    cut = [(part, -(-part // block_rows)) for part in made.part_rows if part > block_rows]  # else a part is one block
    pieces = sum(count for _, count in cut)
    piece_bytes = sum(part for part, _ in cut) * width + SEAL * pieces
    holders = 1 if here else machines.workers
    tables = holders if weighs.shared_width else 0
    readings = 1 if shards else holders + tables
    # Blocks go to workers in turn, so that a part of the graph is read by all that get one of its blocks.
    lists = min(holders, -(-max(graph.part_rows) // block_rows))
    loading = features.loading() * readings + graph.loading() * lists
    first = 0
    if edges is None:  # the schema of its first part is looked at
        first, loading = features.part_bytes[0], loading + load_part(features.part_bytes[0])
    moving = (PUT + DELETE + Requests(gets=gets_of(block_rows * width))) * pieces
    opens = OPENS + (0 if here else 2 * holders)
    memory = augmentation_memory(
        features,
        graph,
        dim,
        weighs,
        itemsize=itemsize,
        block_rows=block_rows,
        shards=shards,
        fetched=fetched,
        graph_fetched=fetched,
    )
    held = -(-features.bytes // machines.workers) if shards else 0  # of the shards beside the workers
    return Work(
        "edges" if edges is not None else "augmentation",
        rows,
        flops=rows * weighs.flops + tables * rows * weighs.shared_flops,
        read=readings * features.bytes + lists * graph.bytes + piece_bytes + first + opens * features.manifest,
        written=piece_bytes + made.written,
        gathered=rows * (1 + weighs.depth) * dim * 4 if shards else 0,
        # and whether the destination holds anything else
        requests=loading + moving + OPEN * opens + LOOK * 5 + MISSING + ATTACH + made.publishing(),
        worker_seconds=weighs.seconds(rows, dim, machines) + tables * rows * weighs.shared_flops / machines.flops,
        worker_bytes=memory.total - memory.mapped + held,
        mapped=memory.mapped,
        scratch=piece_bytes,
        stored=made.bytes,
    )


def joined_rows(features: Stored, joined: int, removed: int) -> tuple[Stored, int, int]:
    """A set after rows joined and left it; bytes read and written for that. Parts copied by the storage are neither.

    Rows that leave are taken to be spread evenly; parts that stay whole are put first.
    """
    row = max((features.bytes - ARROW_BYTES * features.parts) // max(features.rows, 1), 1)
    whole = features.parts - small_parts(features.part_bytes)
    whole = round(whole * (1 - 1 / features.parts) ** removed)
    rest = features.rows + joined - removed - sum(features.part_rows[:whole])
    made = Stored.planned([*features.part_rows[:whole], *(part_row_counts(rest, row) if rest > 0 else ())], row)
    looks = bool(joined) + bool(removed)  # through all ids
    # Newcomers are read for their ids twice, too. The first part stays in memory once it was read.
    read = looks * features.bytes + 3 * joined * row + sum(features.part_bytes[max(whole, 1) :])
    return made, read, sum(made.part_bytes[whole:]) + CLAIM_BYTES + made.manifest


def hop_buffers(rows: int, dim: int, k: int, bands: Sequence[int], groups: Sequence[int], part_rows: int) -> int:
    """Buffers of a worker: all rows of a group of columns, with a band in the making or a part of the index.

    A band has as many edges to its rows as from them, unless they are hubs.
    """
    band, columns = max(bands), max(groups)
    made = max(band * (1 + 2 * k) * FOLD_BYTES, 16 * band * columns, 8 * band * dim)
    part = 12 * part_rows * dim + 40 * min(UNIT_ROWS, part_rows) * dim
    return 4 * rows * columns + max(made, part)


def hops(
    features: Stored,
    edges: Stored,
    dim: int,
    k: int,
    number: int,
    bands: Sequence[int],
    groups: Sequence[int],
    machines: Machines,
    *,
    mutual: float = MUTUAL,
    here: bool = True,
    fetched: bool = False,
) -> Work:
    """Features that flow `number` times over the edges: bands of rows × groups of columns (`augmentation.bands`).

    bands: rows of each; groups: columns of each; mutual: share of edges that run both ways.
    """
    rows, cut, files = features.rows, len(bands), len(bands) * len(groups)
    links = rows * k
    matrix = round(rows + links * (2 - mutual))  # entries of S: both directions once, and each row itself
    matrix_bytes = 8 * matrix + 8 * rows + cut * (SEAL + 16)
    vectors = 4 * rows * dim + SEAL * files
    turned = 12 * links + cut * (SEAL * (1 + cut) + 8 * cut)
    folding = 12 * links + cut * cut * (2 * SEAL + 8 * cut)
    # Every worker reads all rows of the hop before, every group reads S, and x is read again but for the first hop.
    readers = 1 if here else min(machines.workers, cut)
    again = number * readers + number - 1
    holders = 1 if here else machines.workers
    loading = (features.loading() + edges.loading() + OPEN * 2) * holders
    hop = (vectors * readers + vectors + len(groups) * matrix_bytes, vectors)
    return Work(
        "hops",
        rows,
        flops=2.0 * matrix * dim * number,
        read=holders * (features.bytes + edges.bytes)
        + features.part_bytes[0]
        + folding
        + number * len(groups) * matrix_bytes
        + vectors * again
        + _spread(features.part_rows, bands, 4 * dim),
        written=turned + vectors * (1 + number) + matrix_bytes + features.written,
        requests=loading + _hop_requests(features, number, bands, groups, matrix_bytes // cut, again),
        worker_seconds=4.0 * matrix * dim * number / (HOP_BYTES_PER_SECOND * machines.threads),
        worker_bytes=PROCESS_BYTES
        + (held_bytes((features, edges)) if fetched else 0)
        + hop_buffers(rows, dim, k, bands, groups, max(features.part_rows)),
        mapped=0 if fetched else features.bytes + edges.bytes,
        scratch=4 * vectors + matrix_bytes,
        stored=features.bytes,
        facts={
            "cut": f"{_counted(cut, 'band')} of rows × {_counted(len(groups), 'group')} of columns",
            "moved per hop": f"{_mib(hop[0])} read at most, {_mib(hop[1])} written",
        },
    )


def _hop_requests(
    features: Stored, number: int, bands: Sequence[int], groups: Sequence[int], band_of_matrix: int, again: int
) -> Requests:
    """Of `number` hops beyond what every worker loads; vectors of a band are read `again` times."""
    cut, files = len(bands), len(bands) * len(groups)
    band_gets = Requests(gets=gets_of(max(bands) * 4 * max(groups) + SEAL))
    return (
        PUT * (2 * cut + files * (1 + number))
        + Requests(gets=4 * cut * cut)
        + band_gets * (files * again + len(groups) * _meetings(features.part_rows, bands))
        + Requests(gets=gets_of(band_of_matrix)) * (number * files)
        + DELETE * (cut + files * max(number - 2, 0))
        + OPEN * OPENS
        + ATTACH
        + LOOK * 4
        + features.publishing(cut + files * min(1 + number, 3))
        + load_part(features.part_bytes[0])
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _meetings(parts: Sequence[int], bands: Sequence[int]) -> int:
    """How many pairs of a part and a band share rows."""
    return len({*accumulate(parts), *accumulate(bands)})


def _spread(parts: Sequence[int], bands: Sequence[int], row: int) -> int:
    """Bytes read where each part reads all bands that it overlaps, whole."""
    total = low = 0
    for size in parts:
        start = 0
        for band in bands:
            total += band * row if start < low + size and low < start + band else 0
            start += band
        low += size
    return total
