"""Hops over graphs of any size, in files: the work of `lattqe.expansion.diffusion` cut into bands of rows and groups of
columns, by the numbers of rows and columns alone.

First W is transposed: the edges of each band of rows are sorted by the band that they lead to (`turn`), and each band
collects what leads to it and normalises its rows of S (`fold`). The original vectors are cut into groups of columns
(`start`). A hop of a band and a group reads its rows of S and all rows of the group after the hop before, which the
worker holds (`hop`); columns never mix, so a group is as wide as a worker's memory allows, however many rows there are.
At last the groups of a part's rows are joined, normalised and published (`part`).

Every file is written whole behind its checksum and has the same bytes whichever worker makes it, so any process may
die at any time. All of them are in the `_work` of the index, which its publication removes.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import scipy.sparse as sparse

from lattqe.augmentation.recipe import HopCut, HopTask
from lattqe.device import SparseSums, peak_bytes, planned_device
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.expansion.diffusion import directed, hopped, transition, unit_rows
from lattqe.store import Edges, FeatureSet, MissingFileError, Pending, UnavailableError
from lattqe.store.manifest import SEAL_BYTES, seal_bytes, unseal_bytes
from lattqe.store.parts import matrix_column
from lattqe.store.place import traffic

if TYPE_CHECKING:
    from lattqe.augmentation.recipe import AugmentSummary

FOLDER = "_work/hops/"
READS_AT_ONCE = 8
UNIT_ROWS = 4096  # normalised at once, in float64
RESCANS = 8  # of what is there, after a file was found damaged or gone
# ("turn", band), ("start", band), ("fold", band), ("hop", group, hop, band) or ("part", part)
HopItem = tuple[Any, ...]


class StaleHopsError(LattqeError):
    """A file that was to be read is damaged, or another driver has gone on and removed it: look again what is there."""


def _turned(band: int) -> str:
    return f"{FOLDER}turned-{band:05d}.bin"


def _folded(band: int) -> str:
    return f"{FOLDER}rows-{band:05d}.bin"


def _vectors(group: int, hop: int, band: int) -> str:
    return f"{FOLDER}h{hop:03d}-g{group:04d}-b{band:05d}.bin"


class HopWorker:
    """Does items, in any order that their files allow. Built from URIs only."""

    def __init__(self, task: HopTask) -> None:
        self.task = task
        self.features = FeatureSet.open(task.features, cache=task.cache)
        self.edges = Edges.open(task.edges, cache=task.cache)
        self.pending = Pending.attach(task.to)
        self.place = self.pending.place
        self.cut = task.cut(self.features.rows, self.features.dim)
        if self.edges.rows != self.features.rows:
            raise LattqeError(
                f"{task.edges} has edges of {self.edges.rows} rows, but {task.features} has "
                f"{self.features.rows}: these are edges of other features"
            )
        device = planned_device(task.device)
        self.sums = None if device is None else SparseSums(device)
        self._held: tuple[tuple[int, int] | None, np.ndarray] = (None, np.empty((0, 0), np.float32))

    def run(self, item: HopItem) -> dict[str, Any]:
        """Do an item and say what it took."""
        started, cpu = time.perf_counter(), time.process_time()
        getattr(self, item[0])(*item[1:])
        took = time.perf_counter() - started
        return {
            "kind": item[0],
            "seconds": {item[0]: took},
            "busy": took,
            "cpu": time.process_time() - cpu,
            "peak_bytes": peak_bytes(),
            "traffic": traffic.take(),
            "expanded": 0,
            "tables": 0,
        }

    def turn(self, band: int) -> None:
        """Sort the edges of a band by the bands that they lead to: how many there are, then each band's, sealed."""
        first, stop = self.cut.bands[band]
        W = directed(*self.edges.read(first, stop), self.cut.rows)
        turned = W.T.tocsr()
        targets = np.repeat(np.arange(self.cut.rows, dtype=np.int32), np.diff(turned.indptr))
        sources, weights = (turned.indices + first).astype(np.int32), turned.data
        ends = turned.indptr[[stop for _, stop in self.cut.bands]]
        pieces, begin = [seal_bytes(np.diff(ends, prepend=0).astype("<i8").tobytes())], 0
        for end in ends:
            pieces.append(seal_bytes(b"".join(each[begin:end].tobytes() for each in (targets, sources, weights))))
            begin = end
        self.place.write(_turned(band), b"".join(pieces))

    def fold(self, band: int) -> None:
        """Rows of S: the band's own edges, and those of all bands that lead to it."""
        first, stop = self.cut.bands[band]
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            pieces = list(pool.map(lambda source: self._piece(source, band), range(len(self.cut.bands))))
        targets, sources, weights = (np.concatenate(each) for each in zip(*pieces))
        own, rows = self.edges.read(first, stop)
        W = directed(own, rows, self.cut.rows)
        incoming = sparse.csr_array((weights, (targets - first, sources)), shape=W.shape)
        S = transition(W, incoming, own[:, 0], first)
        self._write(_folded(band), np.array([S.nnz], "<i8"), S.indptr.astype("<i8"), S.indices.astype("<i4"), S.data)

    def _piece(self, source: int, band: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What leads from one band to another: targets, sources, weights, by target and source."""
        name, bands = _turned(source), len(self.cut.bands)
        try:
            table = unseal_bytes(self.place.read_range(name, 0, SEAL_BYTES + 8 * bands), name)
            counts = np.frombuffer(table, "<i8")
            begin = SEAL_BYTES * (1 + band) + 8 * bands + 12 * int(counts[:band].sum())
            body = unseal_bytes(self.place.read_range(name, begin, SEAL_BYTES + 12 * int(counts[band])), name)
        except UnavailableError:
            raise
        except LattqeError as error:  # gone, damaged or cut short
            raise self._stale(name) from error
        n = 4 * int(counts[band])
        return (
            np.frombuffer(body[:n], np.int32),
            np.frombuffer(body[n : 2 * n], np.int32),
            np.frombuffer(body[2 * n :], np.float32),
        )

    def start(self, band: int) -> None:
        """Cut the original vectors of a band into groups of columns."""
        x = self.features.read(*self.cut.bands[band]).astype(np.float32)
        for group, columns in enumerate(self.cut.groups):
            self._write(_vectors(group, 0, band), x[:, columns])

    def hop(self, group: int, hop: int, band: int) -> None:
        """The vectors of a band, in a group of columns, after one more hop."""
        before = self._all_rows(group, hop - 1)
        S = self._rows_of_s(band)
        first, stop = self.cut.bands[band]
        x = before[first:stop] if hop == 1 else self._read_vectors(group, 0, band)
        flowed = S @ before if self.sums is None else self.sums.multiply(S)
        self._write(_vectors(group, hop, band), hopped(flowed, x, self.task.alpha))

    def _all_rows(self, group: int, hop: int) -> np.ndarray:
        """All rows of a group after a hop (n, c), held until another is requested; read band by band."""
        key, held = self._held
        if key == (group, hop):
            return held
        columns = self.cut.groups[group]
        shape = (self.cut.rows, columns.stop - columns.start)
        self._held = (None, held)
        if held.shape != shape:
            del held
            self._held = (None, np.empty((0, 0), np.float32))  # the old one goes before the new one comes
            held = np.empty(shape, np.float32)
        for band, (first, stop) in enumerate(self.cut.bands):
            held[first:stop] = self._read_vectors(group, hop, band)
        if self.sums is not None:
            self.sums.take(held)
        self._held = ((group, hop), held)
        return held

    def _rows_of_s(self, band: int) -> sparse.csr_array:
        first, stop = self.cut.bands[band]
        body = self._read(_folded(band))
        count, rows = int(np.frombuffer(body[:8], "<i8")[0]), stop - first
        cuts = np.cumsum([8, 8 * (rows + 1), 4 * count, 4 * count])
        if len(body) != cuts[-1]:
            raise self._stale(_folded(band))
        starts, columns, values = (
            np.frombuffer(body[low:high], kind) for low, high, kind in zip(cuts, cuts[1:], ("<i8", "<i4", "<f4"))
        )
        return sparse.csr_array(
            (values, columns, starts.astype(np.int32 if count < 2**31 else np.int64)), shape=(rows, self.cut.rows)
        )

    def part(self, number: int) -> None:
        """Publish a part: its rows as they are, with the vectors after the last hop, normalised."""
        stop = int(np.cumsum(self.pending.part_rows)[number])
        start = stop - self.pending.part_rows[number]
        H = np.empty((stop - start, self.cut.dim), np.float32)
        for band, (first, last) in enumerate(self.cut.bands):
            low, high = max(first, start), min(last, stop)
            for group, columns in enumerate(self.cut.groups if low < high else ()):
                done = self._read_vectors(group, self.task.hops, band)
                H[low - start : high - start, columns] = done[low - first : high - first]
        vectors = np.empty(H.shape, self.features.dtype)
        for low in range(0, len(H), UNIT_ROWS):
            some = slice(low, min(low + UNIT_ROWS, len(H)))
            vectors[some] = unit_rows(H[some], self.features.read(start + some.start, start + some.stop))
        self.pending.publish(number, with_vectors(self.features, start, stop, vectors))

    def _write(self, name: str, *arrays: np.ndarray) -> None:
        self.place.write(name, seal_bytes(b"".join(np.ascontiguousarray(each).tobytes() for each in arrays)))

    def _read(self, name: str) -> memoryview:
        try:
            return unseal_bytes(memoryview(self.place.fetch(name)), f"{self.place.uri}/{name}")
        except (MissingFileError, CorruptDataError) as error:
            raise self._stale(name) from error

    def _read_vectors(self, group: int, hop: int, band: int) -> np.ndarray:
        columns, (first, stop) = self.cut.groups[group], self.cut.bands[band]
        shape = (stop - first, columns.stop - columns.start)
        body = self._read(_vectors(group, hop, band))
        if len(body) != 4 * shape[0] * shape[1]:
            raise self._stale(_vectors(group, hop, band))
        return np.frombuffer(body, np.float32).reshape(shape)

    def _stale(self, name: str) -> StaleHopsError:
        """A damaged file is removed, so that it is made again."""
        self.place.delete(name)
        return StaleHopsError(f"{self.place.uri}/{name} is damaged or missing: run the same command again")


def with_vectors(features: FeatureSet, start: int, stop: int, vectors: np.ndarray) -> pa.Table:
    """Rows start..stop of a feature set as they are, with other vectors (n, D)."""
    table = features.table(start, stop).combine_chunks()
    column = table.column_names.index("vector")
    return table.set_column(column, table.schema.field(column), matrix_column(vectors))


class HopSchedule:
    """Which items can start: made from what is there, then told what is done."""

    def __init__(self, task: HopTask, pending: Pending | None = None) -> None:
        features = FeatureSet.open(task.features)
        self.task, self.cut = task, task.cut(features.rows, features.dim)
        self.pending = pending or Pending.attach(task.to)
        self.parts = self.pending.missing()
        self.waiting: set[HopItem] = set()
        self.folds: list[HopItem] = []
        there = set(self.pending.place.sizes()) if self.parts else set()
        bands, groups = range(len(self.cut.bands)), range(len(self.cut.groups))
        self.missing = {
            (group, hop): {band for band in bands if _vectors(group, hop, band) not in there}
            for group in groups
            for hop in range(task.hops + 1)
        }
        self.level = {
            group: max((hop for hop in range(task.hops + 1) if not self.missing[group, hop]), default=0)
            for group in groups
        }
        if not self.parts or self.finished_hopping:
            return
        self.folds = [("fold", band) for band in bands if _folded(band) not in there]
        turns = [("turn", band) for band in bands if _turned(band) not in there] if self.folds else []
        starts = [("start", band) for band in bands if any(band in self.missing[group, 0] for group in groups)]
        self.waiting = {*turns, *starts}

    @property
    def finished_hopping(self) -> bool:
        """Whether every group has made its last hop."""
        return all(level == self.task.hops for level in self.level.values())

    @property
    def most_at_once(self) -> int:
        """Items that can be possible together: a hop of every band in every group, or all parts."""
        return max(len(self.cut.bands) * len(self.cut.groups), len(self.parts))

    def ready(self) -> list[HopItem]:
        """What can start at once."""
        if not self.parts:
            return []
        if self.finished_hopping:
            return [("part", part) for part in self.parts]
        return sorted(self.waiting) or self._after_cutting()

    def _after_cutting(self) -> list[HopItem]:
        """When everything is turned: fold. When everything is folded: hop."""
        folds, self.folds = self.folds, []
        self.waiting = {*folds}
        if folds:
            return folds
        for band in range(len(self.cut.bands)):
            self.pending.place.delete(_turned(band))
        return [item for group in self.level for item in self._next_hop(group)]

    def _next_hop(self, group: int) -> list[HopItem]:
        hop = self.level[group] + 1
        return [("hop", group, hop, band) for band in sorted(self.missing[group, hop])] if hop <= self.task.hops else []

    def done(self, item: HopItem) -> list[HopItem]:
        """What has become possible."""
        if item[0] in ("turn", "start", "fold"):
            self.waiting.discard(item)
            return [] if self.waiting else self._after_cutting()
        if item[0] != "hop":
            return []
        _, group, hop, band = item
        self.missing[group, hop].discard(band)
        if self.missing[group, hop]:
            return []
        self.level[group] = hop
        if hop > 2:  # the hop before may still be read by a spare copy, or by another driver
            for each in range(len(self.cut.bands)):
                self.pending.place.delete(_vectors(group, hop - 2, each))
        return [("part", part) for part in self.parts] if self.finished_hopping else self._next_hop(group)

    def rows_left(self) -> int:
        """Rows times groups that are still to hop."""
        sizes = self.cut.band_sizes
        return (
            sum(
                sizes[band]
                for group, level in self.level.items()
                for hop in range(level + 1, self.task.hops + 1)
                for band in self.missing[group, hop]
            )
            if self.parts
            else 0
        )


def rows_of(item: HopItem, cut: HopCut) -> int:
    """Rows that an item brings forward by one hop."""
    if item[0] != "hop":
        return 0
    first, stop = cut.bands[item[3]]
    return stop - first


def until_sound(attempt: Callable[[], None]) -> None:
    """Run an attempt, again where a file turned out damaged or gone: what is there is looked at again."""
    for _ in range(RESCANS):
        try:
            return attempt()
        except StaleHopsError:
            continue
    return attempt()


def run_hops(task: HopTask, on_rows: Callable[[int], None], summary: "AugmentSummary") -> "AugmentSummary":
    """Do all that is missing of `task.to` in this process; `on_rows(n)` after each n rows of a group of columns.

    What it took is added to `summary`. The manifest is the caller's.
    """
    started = time.monotonic()

    def attempt() -> None:
        schedule = HopSchedule(task)
        queue: Sequence[HopItem] = schedule.ready()
        worker = HopWorker(task) if queue else None
        while queue and worker is not None:
            item, *rest = queue
            summary.add(worker.run(item))
            on_rows(rows_of(item, schedule.cut))
            queue = [*schedule.done(item), *rest]

    until_sound(attempt)
    summary.took = time.monotonic() - started
    return summary
