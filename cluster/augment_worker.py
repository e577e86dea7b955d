"""The worker of an augmentation: holds the method, reaches all vectors, computes blocks and assembles parts.

The work is cut twice, by row numbers alone. A *block* is what one worker computes between two looks at the queue; its
vectors go to `_work/pieces/`. A *part* is a file of the result; a worker assembles it when its last piece is there.
Both are written atomically and are the same whoever makes them, so any process may die at any time, nothing is lost
but the block it was in, and two drivers on one destination give one result.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.augment_plan import peak_bytes
from lattqe.errors import CorruptDataError
from lattqe.store import FeatureSet, MissingFileError, NeighborGraph, Pending, Place
from lattqe.store.manifest import seal_bytes, unseal_bytes
from lattqe.store.place import absolute, node_folder, traffic
from lattqe.store.tables import matrix_column

if TYPE_CHECKING:
    from cluster.reach import ShardReader

# Rows a worker expands between two looks at the queue: seconds at 128-D, some minutes at 2048-D on one CPU core.
BLOCK_ROWS = 2048
PIECES = "_work/pieces/"

REUSABLE = "_work/reusable.bin"

# A block is (part, start, stop) in row numbers; the assembling of a part is (part,).
Item = tuple[int, ...]


@dataclass(frozen=True)
class Augmentation:
    """What to compute: all that decides the result, and nothing larger than a line, for it goes to every worker."""

    features: str  # URI of the original rows
    graph: str  # URI of their neighbors
    to: str  # where a Pending has been begun
    method: str
    k: int
    params: dict[str, Any] = field(default_factory=dict)
    cache: str | None = None  # node-local folder that keeps remote rows
    threads: int = 1
    block_rows: int = BLOCK_ROWS
    share: bool = False  # first products of each row computed once, as `lattqe.expansion.rows.shares` decides
    previous: str | None = None  # an index whose rows may be taken over, where `write_reusable` said so

    def __post_init__(self) -> None:
        """Make addresses absolute, for the workers."""
        for name in ("features", "graph", "to", "previous"):
            value = getattr(self, name)
            object.__setattr__(self, name, value and absolute(value))
        object.__setattr__(self, "cache", node_folder(self.cache))
        if isinstance(self.params.get("model"), str):
            object.__setattr__(self, "params", {**self.params, "model": absolute(self.params["model"])})


def part_spans(part_rows: list[int]) -> list[tuple[int, int]]:
    """First and last+1 row of each part."""
    stops = np.cumsum(part_rows)
    return [(int(stop) - count, int(stop)) for count, stop in zip(part_rows, stops)]


def block_spans(start: int, stop: int, block_rows: int) -> list[tuple[int, int]]:
    """The blocks of one part, as row spans."""
    return [(row, min(row + block_rows, stop)) for row in range(start, stop, block_rows)]


def piece_name(start: int) -> str:
    """The file of the block that begins at this row."""
    return f"{PIECES}{start:012d}.bin"


class AugmentWorker:
    """Holds the method and reaches all vectors; computes blocks and assembles parts. Built from URIs only."""

    def __init__(self, task: Augmentation, shards: "ShardReader | None" = None) -> None:
        import torch

        from lattqe.expansion import create
        from lattqe.search.index import StoredIndex

        torch.set_num_threads(task.threads)
        self.task = task
        cache = task.cache if shards is None else None
        self.features = FeatureSet.open(task.features, cache=cache)
        self.graph = NeighborGraph.open(task.graph, cache=cache)
        self.index = StoredIndex([self.features]) if shards is None else shards
        self.pending = Pending.attach(task.to)
        self.method = create(task.method, **task.params)
        self.previous = FeatureSet.open(task.previous, cache=task.cache) if task.previous else None
        self.reusable = read_reusable(self.pending.place) if task.previous else None
        self.seconds = {"reading": 0.0, "sharing": 0.0, "expanding": 0.0, "writing": 0.0}
        self.expanded = self.tables = 0
        self._table: np.ndarray | None = None

    def run(self, item: Item) -> dict[str, Any]:
        """Compute one block, or assemble one part."""
        before, expanded, tables = dict(self.seconds), self.expanded, self.tables
        started, cpu = time.perf_counter(), time.process_time()
        if len(item) == 3:
            self.write_piece(item[1], self.expand(item[1], item[2]))
        else:
            self.assemble(item[0])
        spent = {name: total - before[name] for name, total in self.seconds.items()}
        return {"seconds": spent, "peak_bytes": peak_bytes(), "expanded": self.expanded - expanded,
                "tables": self.tables - tables, "busy": time.perf_counter() - started,
                "cpu": time.process_time() - cpu,
                "traffic": traffic.take()}

    def expand(self, start: int, stop: int) -> np.ndarray:
        """Vectors (n, D) of rows start..stop in the stored dtype: expanded, or taken over from the previous index."""
        if self.previous is None or self.reusable is None:
            return self.expand_rows(np.arange(start, stop))
        taken = self.reusable[start:stop]
        out = np.empty((stop - start, self.features.dim), self.features.dtype)
        out[taken >= 0] = self.previous.gather(taken[taken >= 0])
        out[taken < 0] = self.expand_rows(start + np.flatnonzero(taken < 0))
        return out

    def expand_rows(self, rows: np.ndarray) -> np.ndarray:
        """Expanded vectors of some rows (n,), rounded to the stored dtype."""
        from lattqe.expansion.rows import augment_rows

        with self.timed("reading"):
            I, D = self.graph.gather(rows)  # noqa: E741
        with self.timed("expanding"):
            table = self.table() if self.task.share else None
            self.expanded += len(rows)
            vectors = augment_rows(self.index, rows, D, I, self.method, self.task.k, table).vectors
        return vectors.astype(self.features.dtype)

    def table(self) -> np.ndarray:
        """The first products of all rows, computed once by each worker: a small part of what they save it."""
        from lattqe.expansion.rows import shared_table

        if self._table is None:
            with self.timed("sharing"):
                blocks = (block for _, block in self.features.blocks(self.task.block_rows))
                self._table = shared_table(self.method, self.features.rows, blocks)
                self.tables += 1
        return self._table

    def write_piece(self, start: int, vectors: np.ndarray) -> None:
        """Store a block's vectors behind their digest."""
        with self.timed("writing"):
            data = np.ascontiguousarray(vectors).tobytes()
            self.pending.place.write(piece_name(start), seal_bytes(data))

    def read_piece(self, start: int, stop: int) -> np.ndarray:
        """A block's vectors; computed here and now where its piece is damaged or gone."""
        try:
            data = unseal_bytes(self.pending.place.read(piece_name(start)), piece_name(start))
        except (MissingFileError, CorruptDataError):
            return self.expand(start, stop)
        shape = (stop - start, self.features.dim)
        if len(data) != shape[0] * shape[1] * np.dtype(self.features.dtype).itemsize:
            return self.expand(start, stop)
        return np.frombuffer(data, self.features.dtype).reshape(shape)

    def assemble(self, part: int) -> None:
        """Publish a part: the rows as they are, their vectors replaced; then its pieces may go."""
        start, stop = part_spans(self.pending.part_rows)[part]
        spans = block_spans(start, stop, self.task.block_rows)
        vectors = np.empty((stop - start, self.features.dim), self.features.dtype)
        for first, last in spans:
            piece = self.expand(first, last) if len(spans) == 1 else self.read_piece(first, last)
            vectors[first - start:last - start] = piece
        with self.timed("writing"):
            table = self.features.table(start, stop).combine_chunks()
            column = table.column_names.index("vector")
            table = table.set_column(column, table.schema.field(column), matrix_column(vectors))
            self.pending.publish(part, table)
            for row, _ in spans if len(spans) > 1 else ():
                self.pending.place.delete(piece_name(row))

    def timed(self, name: str) -> "_Stopwatch":
        """Add the seconds of a `with` body to `seconds[name]`."""
        return _Stopwatch(self.seconds, name)


def write_reusable(place: Place, reusable: np.ndarray) -> None:
    """Say for each row (n,) which row of the previous index it may be taken from, -1: expand it."""
    data = reusable.astype("<i8").tobytes()
    place.write(REUSABLE, seal_bytes(data))


def read_reusable(place: Place) -> np.ndarray:
    """What `write_reusable` wrote, (n,) int64."""
    return np.frombuffer(unseal_bytes(place.read(REUSABLE), f"{place.uri}/{REUSABLE}"), "<i8")


class _Stopwatch:
    """Nested bodies count for the inner one only."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started, self.inner = time.perf_counter(), sum(self.seconds.values())

    def __exit__(self, *_: object) -> None:
        elapsed = time.perf_counter() - self.started
        self.seconds[self.name] += elapsed - (sum(self.seconds.values()) - self.inner)
