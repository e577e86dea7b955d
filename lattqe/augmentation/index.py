"""Building an augmented index: every row of a feature set replaced by its expansion from its neighbors.

`build_index` does it in this process, `cluster.augmentation.build_index` with the same worker on Ray: the same bytes.
The work is cut twice, by row numbers alone. A *block* is what one worker computes between two looks at the queue; its
vectors go to `_work/pieces/`. A *part* is a file of the result; a worker assembles it when its last piece is there.
Both are written atomically and do not depend on who makes them, so any process may die at any time, nothing is lost
but the block it was in, and two drivers on one destination give one result.

An index of several hops is made in two stages (`Augmentation.stages`): the edges, an artifact of their own within the
index, by the same map of blocks; then the hops over them (`lattqe.augmentation.bands`).
"""

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from lattqe.augmentation.bands import run_hops, with_vectors
from lattqe.augmentation.recipe import ADAPTATION, Augmentation, AugmentSummary, describe, read_reusable
from lattqe.device import peak_bytes
from lattqe.errors import CorruptDataError
from lattqe.expansion import Method, create
from lattqe.expansion.attention import model_inputs
from lattqe.expansion.base import Expanded, RowSource, resident
from lattqe.expansion.rows import augment_rows, list_lengths, shared_table, shares
from lattqe.search.index import StoredIndex
from lattqe.search.rows import Clock
from lattqe.store import (
    Edges,
    FeatureSet,
    MissingFileError,
    NeighborGraph,
    Pending,
    edges_table,
    part_row_counts,
    row_bytes,
)
from lattqe.store.manifest import seal_bytes, unseal_bytes
from lattqe.store.place import traffic

PIECES = "_work/pieces/"
# A block is (part, start, stop) in row numbers; the assembling of a part is (part,).
Item = tuple[int, ...]


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

    def __init__(self, task: Augmentation, shards: RowSource | None = None) -> None:
        torch.set_num_threads(1)  # a block is one thread's work: its last bits do not depend on the machine
        self.task = task
        cache = task.cache if shards is None else None
        self.features = FeatureSet.open(task.features, cache=cache)
        self.graph = NeighborGraph.open(task.graph, cache=cache)
        self.index: RowSource = StoredIndex([self.features]) if shards is None else shards
        self.pending = Pending.attach(task.to)
        self.method = create(task.method, **task.params)
        self.previous: Any = self.open_previous(task.previous) if task.previous else None
        self.reusable: tuple[int, np.ndarray] = -1, np.empty(0, np.int64)  # of one part of the graph
        self.clock = Clock()
        # First products are shared where all rows are computed; for the few rows of a grown index they do not pay.
        self.share = task.previous is None and shares(self.method, self.features.rows)
        self._table: np.ndarray | None = None
        self.width, self.dtype = self.features.dim, np.dtype(self.features.dtype)  # of what is made of a row

    def open_previous(self, uri: str) -> Any:
        """What rows may be taken over from."""
        return FeatureSet.open(uri, cache=self.task.cache)

    def run(self, item: Item) -> dict[str, Any]:
        """Compute one block, or assemble one part; returns what it took."""
        self.clock = Clock()
        started, cpu = time.perf_counter(), time.process_time()
        if len(item) == 3:
            self.write_piece(item[1], self.expand(item[1], item[2]))
        else:
            self.assemble(item[0])
        counts = self.clock.counts
        return {
            "seconds": dict(self.clock.seconds),
            "peak_bytes": peak_bytes(),
            "expanded": counts["expanded"],
            "tables": counts["tables"],
            "kind": "rows",
            "busy": time.perf_counter() - started,
            "cpu": time.process_time() - cpu,
            "traffic": traffic.take(),
        }

    def expand(self, start: int, stop: int) -> np.ndarray:
        """Vectors (n, D) of rows start..stop in the stored dtype: expanded, or taken over from the previous index.

        (Or whatever else is made of a row: see `EdgeWorker`.)
        """
        if self.previous is None:
            return self.expand_rows(np.arange(start, stop))
        taken = self.taken_from(start, stop)
        out = np.empty((stop - start, self.width), self.dtype)
        out[taken >= 0] = self.taken_over(start + np.flatnonzero(taken >= 0), taken[taken >= 0])
        out[taken < 0] = self.expand_rows(start + np.flatnonzero(taken < 0))
        return out

    def expand_rows(self, rows: np.ndarray) -> np.ndarray:
        """Expanded vectors of some rows (n,), rounded to the stored dtype."""
        with self.clock("reading"):
            I, D = self.graph.gather(rows)
        table = self.table() if self.share else None
        with self.clock("expanding"):
            expanded = augment_rows(self.index, rows, D, I, self.method, self.task.k, table)
        self.clock.count("expanded", len(rows))
        return self.made_of(expanded)

    def made_of(self, expanded: Expanded) -> np.ndarray:
        """What is stored of expanded rows."""
        return expanded.vectors.astype(self.dtype)

    def taken_from(self, start: int, stop: int) -> np.ndarray:
        """The rows (n,) of the previous index that rows start..stop may be taken from, -1: none."""
        starts, found = self.graph.parts.starts, []
        for part in range(int(np.searchsorted(starts, start, side="right")) - 1, len(starts) - 1):
            if starts[part] >= stop:
                break
            if self.reusable[0] != part:
                self.reusable = part, read_reusable(self.pending.place, part)
            found.append(self.reusable[1][max(start - starts[part], 0) : stop - starts[part]])
        return np.concatenate(found)

    def taken_over(self, rows: np.ndarray, before: np.ndarray) -> np.ndarray:
        """What is stored of rows (n,), from what they were `before` (n,) in the previous artifact."""
        return self.previous.gather(before)

    def part_table(self, start: int, stop: int, made: np.ndarray) -> pa.Table:
        """Rows start..stop as they are stored."""
        return with_vectors(self.features, start, stop, made)

    def table(self) -> np.ndarray:
        """The first products of all rows, computed once by each worker: a small part of what they save it."""
        if self._table is None:
            with self.clock("sharing"):
                blocks = (block for _, block in self.features.blocks(self.task.block_rows))
                self._table = shared_table(self.method, self.features.rows, blocks)
            self.clock.count("tables", 1)
        return self._table

    def write_piece(self, start: int, vectors: np.ndarray) -> None:
        """Store a block's vectors behind their digest."""
        with self.clock("writing"):
            data = np.ascontiguousarray(vectors).tobytes()
            self.pending.place.write(piece_name(start), seal_bytes(data))

    def read_piece(self, start: int, stop: int) -> np.ndarray:
        """A block's vectors; computed here and now where its piece is damaged or gone."""
        try:
            data = unseal_bytes(self.pending.place.read(piece_name(start)), piece_name(start))
        except (MissingFileError, CorruptDataError):
            return self.expand(start, stop)
        shape = (stop - start, self.width)
        if len(data) != shape[0] * shape[1] * self.dtype.itemsize:
            return self.expand(start, stop)
        return np.frombuffer(data, self.dtype).reshape(shape)

    def assemble(self, part: int) -> None:
        """Publish a part: the rows as they are, their vectors replaced; then its pieces may go."""
        start, stop = part_spans(self.pending.part_rows)[part]
        spans = block_spans(start, stop, self.task.block_rows)
        made = np.empty((stop - start, self.width), self.dtype)
        for first, last in spans:
            piece = self.expand(first, last) if len(spans) == 1 else self.read_piece(first, last)
            made[first - start : last - start] = piece
        with self.clock("writing"):
            self.pending.publish(part, self.part_table(start, stop, made))
            for row, _ in spans if len(spans) > 1 else ():
                self.pending.place.delete(piece_name(row))


class EdgeWorker(AugmentWorker):
    """Makes edges instead of vectors: of each row its neighbors, then as bits of int32 its weights."""

    def __init__(self, task: Augmentation, shards: RowSource | None = None) -> None:
        super().__init__(task, shards)
        self.k = edge_count(self.method, task.k, self.features.rows)
        self.width, self.dtype = 1 + 2 * self.k, np.dtype(np.int32)

    def open_previous(self, uri: str) -> Any:
        """See AugmentWorker."""
        return Edges.open(uri, cache=self.task.cache)

    def made_of(self, expanded: Expanded) -> np.ndarray:
        """See AugmentWorker; only the neighbors that are weighed are edges, and no negatives."""
        weights = np.ascontiguousarray(expanded.weights[:, : 1 + self.k], dtype=np.float32)
        return np.concatenate([expanded.rows[:, 1 : 1 + self.k], weights.view(np.int32)], axis=1)

    def taken_over(self, rows: np.ndarray, before: np.ndarray) -> np.ndarray:
        """See AugmentWorker: the same weights, for neighbors that may have new numbers."""
        if not len(rows):  # lists may have had another length when there were fewer rows
            return np.empty((0, self.width), self.dtype)
        neighbors = self.graph.gather(rows)[0][:, : self.k]
        return np.concatenate([neighbors, self.previous.gather(before)[0].view(np.int32)], axis=1)

    def part_table(self, start: int, stop: int, made: np.ndarray) -> pa.Table:
        """See AugmentWorker."""
        return edges_table(made[:, : self.k], np.ascontiguousarray(made[:, self.k :]).view(np.float32))


def edge_count(method: Method, k: int, rows: int) -> int:
    """Edges of each row among that many rows: the neighbors that are weighed, not all that the method looks at."""
    return list_lengths(method, k, rows - 1)[0] if rows > 1 else 1


def worker_class(task: Augmentation) -> type[AugmentWorker]:
    """What does the blocks of a task."""
    return EdgeWorker if task.only_edges else AugmentWorker


def begin_index(task: Augmentation) -> Pending:
    """Claim the destination of an index of the rows of `task.features`, or join an earlier run of the same task.

    Of an index of several hops the edges must be finished: see `Augmentation.stages`.
    """
    features = FeatureSet.open(task.features)
    fields: dict[str, Any] = {"dim": features.dim, "dtype": features.dtype}
    if features.label_names is not None:
        fields["label_names"] = features.label_names
    part_rows = [part.rows for part in features.manifest.parts]
    inputs = {
        "features": features.as_input(),
        "neighbors": NeighborGraph.open(task.graph).as_input(),
        **model_inputs(task.params),
        **{name: each for name, each in features.manifest.inputs.items() if name == ADAPTATION},
    }
    if task.only_edges:
        fields = {"k": edge_count(create(task.method, **task.params), task.k, features.rows)}
        return Pending.begin(
            task.to,
            "edges",
            fields,
            part_row_counts(features.rows, row_bytes("edges", fields)),
            config={**describe(task.method, task.k, task.params, device=task.device), "job": "edges"},
            inputs=inputs,
        )
    if task.hopping:
        inputs["edges"] = Edges.open(task.edges).as_input()
    return Pending.begin(
        task.to,
        "features",
        fields,
        part_rows,
        schema=features.table(0, 1).schema,
        config=describe(task.method, task.k, task.params, task.hops, task.hop_alpha, task.device, task.adapt),
        inputs=inputs,
    )


def items_to_do(pending: Pending, block_rows: int) -> tuple[list[Item], dict[int, set[int]]]:
    """The items that can start now, and for each unfinished part the first rows of the blocks it still waits for."""
    there = set(pending.place.sizes())
    items: list[Item] = []
    waiting: dict[int, set[int]] = {}
    spans = part_spans(pending.part_rows)
    for part in pending.missing():
        blocks = block_spans(*spans[part], block_rows)
        missing = [span for span in blocks if piece_name(span[0]) not in there] if len(blocks) > 1 else []
        waiting[part] = {start for start, _ in missing}
        items.extend([(part, *span) for span in missing] or [(part,)])
    return items, waiting


def rows_of(item: Item, part_rows: list[int], block_rows: int) -> int:
    """Rows that are done with an item; a part of several blocks has no more to do than to be assembled."""
    if len(item) == 3:
        return item[2] - item[1]
    rows = part_rows[item[0]]
    return rows if rows <= block_rows else 0


def build_index(task: Augmentation, on_rows: Callable[[int], None] = lambda rows: None) -> AugmentSummary:
    """Compute and publish all missing parts of `task.to` in this process; `on_rows(n)` after each n rows.

    One block for each of torch's threads at a time, each computed by one thread as a worker on Ray does: the bytes do
    not depend on how many there are. The manifest is the caller's. Of hops, rows count once for each hop and group of
    columns.
    """
    if task.hopping:
        return run_hops(task.hop_task(), on_rows, AugmentSummary())
    pending, summary = Pending.attach(task.to), AugmentSummary()
    started, cpu = time.monotonic(), time.process_time()
    items, waiting = items_to_do(pending, task.block_rows)
    if not items:
        return summary
    threads = torch.get_num_threads()
    try:
        worker = worker_class(task)(task)
        first = worker.run(items[0])  # also makes the table that all share

        def done(item: Item, result: dict[str, Any]) -> list[Item]:
            summary.add(result)
            on_rows(rows_of(item, pending.part_rows, task.block_rows))
            if len(item) == 1:
                return []
            waiting[item[0]].discard(item[1])
            return [] if waiting[item[0]] else [(item[0],)]

        more = done(items[0], first)
        if threads == 1:
            queue = [*more, *items[1:]]
            while queue:
                queue[:1] = done(queue[0], worker.run(queue[0]))
        else:
            _in_threads(worker, [*more, *items[1:]], threads, done)
    finally:
        torch.set_num_threads(threads)
    summary.took, summary.cpu = time.monotonic() - started, time.process_time() - cpu
    return summary


def _in_threads(
    worker: AugmentWorker, items: list[Item], threads: int, done: Callable[[Item, dict[str, Any]], list[Item]]
) -> None:
    """Run items, and those that `done` returns as possible now, in `threads` threads; an interrupt stops them soon."""
    stop = threading.Event()
    workers = []
    for _ in range(threads):
        one = copy.copy(worker)  # method, files and table are the same
        one.index = _Stoppable(worker.index, stop)
        workers.append(one)

    def run(item: Item) -> dict[str, Any]:
        one = workers.pop()  # there are as many as threads
        try:
            return one.run(item)
        finally:
            workers.append(one)

    with ThreadPoolExecutor(threads) as pool:
        flights: dict[Future[dict[str, Any]], Item] = {pool.submit(run, item): item for item in items}
        try:
            while flights:
                for future in wait(flights, return_when=FIRST_COMPLETED)[0]:
                    item = flights.pop(future)
                    for further in done(item, future.result()):
                        flights[pool.submit(run, further)] = further
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Stopped(Exception):
    """The work is to stop here."""


@dataclass(frozen=True)
class _Stoppable:
    """A row source that gives nothing more once it is stopped: threads cannot be interrupted otherwise."""

    source: RowSource
    stop: threading.Event

    @property
    def rows(self) -> int:
        """See RowSource."""
        return self.source.rows

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """See RowSource."""
        if self.stop.is_set():
            raise _Stopped
        return self.source.gather(rows)

    def lowest(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See RowSource."""
        return self.source.lowest(xq, k)

    def resident(self, device: torch.device) -> torch.Tensor | None:
        """See FlatIndex."""
        return resident(self.source, device)
