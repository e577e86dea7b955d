"""Rows of vectors, and threads that work on them.

Rows are checked; they are in one array or in several. Several, such as the mapped parts of a feature set, are used as
if they were one: copying them together would cost every worker of a machine its own memory; mapped rows are shared,
and cost none. Which of many equal rows can never be a neighbor is known before anything is compared.

Both threads (tiles of a block) and cluster workers (blocks of a set) take their pairs here: never two that share a
block, those with most left to do first. A pair changes the lists of both its blocks, so while it runs no other may
touch them; with at least four blocks for each worker there is always a free pair, and the busiest blocks first leaves
no long tail.
"""

import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from numbers import Integral
from typing import TypeVar

import numpy as np
import torch
import xxhash

from lattqe.errors import LattqeError

Item = TypeVar("Item")
Result = TypeVar("Result")
Lane = TypeVar("Lane")
# Lists longer than there are rows are padded. So much padding is a slip in k, which would fill the memory or the disk.
MOST_PADDED = 100_000
Pair = tuple[int, int]


class Pieces:
    """Rows (n, D) of one dtype in several arrays; a slice or a row list of it is an array, if possible a view."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        if len({(array.dtype, array.shape[1:]) for array in arrays}) > 1:
            raise LattqeError(
                f"vectors of {sorted({array.shape[1] for array in arrays})} dimensions do not belong "
                "together: use features of one extractor"
            )
        self.arrays = list(arrays)
        self.starts = np.cumsum([0, *map(len, self.arrays)])
        self.dtype = self.arrays[0].dtype
        self.shape = (int(self.starts[-1]), int(self.arrays[0].shape[1]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            found = self.within(start, stop)
            if step == 1:
                return found[0] if len(found) == 1 else np.concatenate(found)
            rows = np.arange(start, stop, step)
        out = np.empty((len(rows), self.shape[1]), self.dtype)
        for places, piece, within in split_rows(self, rows):
            out[places] = piece[within]
        return out

    def within(self, start: int, stop: int) -> list[np.ndarray]:
        """Views of what each piece has of the rows start..stop; at least one, maybe empty."""
        spans = [(max(start - low, 0), min(stop - low, len(array))) for low, array in zip(self.starts, self.arrays)]
        found = [array[lo:hi] for array, (lo, hi) in zip(self.arrays, spans) if lo < hi]
        return found or [self.arrays[0][:0]]

    def part(self, start: int, stop: int) -> "Rows":
        """Rows start..stop, without a copy."""
        return in_one(self.within(start, stop))


Rows = np.ndarray | Pieces


def in_one(arrays: Sequence[np.ndarray]) -> Rows:
    """Arrays (n_i, D), at least one, one after the other: without a copy if they are of one dtype."""
    if len(arrays) == 1:
        return arrays[0]
    return Pieces(arrays) if len({array.dtype for array in arrays}) == 1 else np.concatenate(arrays)


def pieces_of(x: Rows) -> list[np.ndarray]:
    """The arrays that hold the rows."""
    return x.arrays if isinstance(x, Pieces) else [x]


def split_rows(x: Rows, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A row list (m,) piece by piece: the places in the list whose rows one piece has, the piece, its rows there."""
    if not isinstance(x, Pieces):
        yield np.arange(len(rows)), x, rows
        return
    for start, piece in zip(x.starts.tolist(), x.arrays):
        places = np.flatnonzero((rows >= start) & (rows < start + len(piece)))
        if places.size:
            yield places, piece, rows[places] - start


def row_range(x: Rows, start: int, stop: int) -> Rows:
    """Rows start..stop, without a copy."""
    return x.part(start, stop) if isinstance(x, Pieces) else x[start:stop]


def check_rows(x: Rows) -> Rows:
    """As `check_vectors`; rows in pieces were checked when they were put together."""
    return x if isinstance(x, Pieces) else check_vectors(x)


def check_vectors(x: np.ndarray) -> np.ndarray:
    """Return x (n, D) as a contiguous float16 or float32 array, or say what is wrong with it."""
    x = np.asarray(x)
    if x.ndim != 2:
        raise LattqeError(f"vectors must be a matrix (rows, dimensions), got shape {x.shape}")
    if x.dtype not in (np.float16, np.float32):
        if not np.issubdtype(x.dtype, np.floating):
            raise LattqeError(f"vectors must be float16 or float32, got {x.dtype}: convert them first")
        x = x.astype(np.float32)
    return np.ascontiguousarray(x)


def check_queries(xq: np.ndarray, dim: int) -> np.ndarray:
    """Return queries (nq, D) ready for use, or say why they do not fit a database of `dim` dimensions."""
    xq = check_vectors(xq)
    if xq.shape[1] != dim:
        raise LattqeError(f"queries have {xq.shape[1]} dimensions and the database {dim}: use one extractor for both")
    return xq


def check_k(k: int, rows: int | None = None) -> int:
    """Return the length of a list of the best of `rows` rows (None: not known here), or say why it cannot be that."""
    if isinstance(k, bool) or not isinstance(k, Integral):
        raise LattqeError(f"k must be a whole number, got {k!r}")
    if k < 1:
        raise LattqeError(f"k must be at least 1, got {k}")
    if rows is not None and k > max(rows, MOST_PADDED):
        raise LattqeError(f"k is {k:,}, far more than the {rows:,} rows: use a k up to the number of rows")
    return int(k)


def tiles(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut 0..n into (start, stop) of at most `size`; a share of nothing has size 0."""
    for start in range(0, n, max(size, 1)):
        yield start, min(start + size, n)


def surplus_rows(x: Rows, k: int) -> np.ndarray | None:
    """Find rows of x (n, D) with more than k identical rows before them: (n,) bool, or None where there are none.

    Equal vectors have equal scores and ties go to the lower row, so with k + 1 of them in front (one of which may be
    the query itself) such a row is in no list. Without this, a database of equal vectors would have to be scored
    pair by pair in float64.
    """
    n = len(x)
    if n <= k + 1:
        return None
    crowded = _in_large_groups(_leading_bytes(x), k + 1)
    if not crowded.size:
        return None
    digests = [xxhash.xxh3_128_digest(np.ascontiguousarray(x[row : row + 1]).data) for row in crowded]
    hashes = np.array(digests, dtype="V16")
    order, rank = _rank_in_groups(hashes.view("u8").reshape(-1, 2))
    surplus = np.zeros(n, dtype=bool)
    surplus[crowded[order[rank > k]]] = True
    return surplus if surplus.any() else None


def _leading_bytes(x: Rows) -> np.ndarray:
    """Eight bytes from the start of each row: most data is told apart by them at once. (n,) uint64."""
    columns = 8 // x.dtype.itemsize
    leading = np.concatenate([piece[:, :columns] for piece in pieces_of(x)])
    key = np.zeros((len(x), columns), dtype=x.dtype)
    key[:, : leading.shape[1]] = leading
    return key.view(np.uint64).ravel()


def _in_large_groups(key: np.ndarray, size: int) -> np.ndarray:
    """Row numbers, ascending, whose key occurs more than `size` times."""
    _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    return np.flatnonzero(counts[inverse] > size)


def _rank_in_groups(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort (n, 2) keys stably; return the order and, in that order, each item's position within its equal keys."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    begins = np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)]
    starts = np.flatnonzero(begins)
    return order, np.arange(len(keys)) - starts[np.cumsum(begins) - 1]


def as_tensor(x: np.ndarray) -> torch.Tensor:
    """View an array as a tensor that is only read: Arrow's and Ray's arrays are read-only, which torch warns about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(x if all(step >= 0 for step in x.strides) else np.ascontiguousarray(x))


def together(x: Rows, out: torch.Tensor) -> torch.Tensor:
    """Copy rows (n, D), which may be in pieces, into `out`, converting them to its dtype."""
    start = 0
    for piece in pieces_of(x):
        out[start : start + len(piece)] = as_tensor(piece)
        start += len(piece)
    return out


class Pairing:
    """The pairs (a, b), a <= b, still to be compared; (a, a) compares a block with itself. Some go `first`."""

    def __init__(self, pairs: Iterable[Pair], first: Iterable[Pair] = ()) -> None:
        self._first = set(first)
        self._partners: dict[int, set[int]] = {}
        for a, b in pairs:
            self._partners.setdefault(a, set()).add(b)
            self._partners.setdefault(b, set()).add(a)
        self._busy: set[int] = set()

    def take(self) -> Pair | None:
        """Take a pair of free blocks, or None where there is none now."""
        free = [block for block, partners in self._partners.items() if partners and block not in self._busy]
        free.sort(key=lambda block: (-len(self._partners[block]), block))
        for a in free:
            pairs = [(min(a, b), max(a, b)) for b in self._partners[a] if b not in self._busy]
            if pairs:
                pair = min(pairs, key=lambda pair: (pair not in self._first, -self._left_of(pair), pair))
                self._busy |= set(pair)
                return pair
        return None

    def _left_of(self, pair: Pair) -> int:
        return len(self._partners[pair[0]]) + len(self._partners[pair[1]])

    def finish(self, pair: Pair) -> None:
        """The pair is compared, and both blocks' lists are up to date."""
        a, b = pair
        self._partners[a].discard(b)
        self._partners[b].discard(a)
        self.release(pair)

    def release(self, pair: Pair) -> None:
        """Give the pair back undone."""
        self._busy -= set(pair)

    @property
    def left(self) -> int:
        """Pairs not yet finished."""
        return sum(len(partners) + (block in partners) for block, partners in self._partners.items()) // 2


def all_pairs(blocks: int) -> list[Pair]:
    """Every block with itself and with every other, each pair once."""
    return [(a, b) for a in range(blocks) for b in range(a, blocks)]


def run_pairs(pairs: Sequence[Pair], compare: Callable[[Lane, Pair], None], lanes: Sequence[Lane]) -> None:
    """Call compare(lane, pair) for every pair, one thread for each lane, no two at once on one block.

    Blocks meet themselves first.
    """
    pairing, changed = Pairing(pairs, first=[(a, b) for a, b in pairs if a == b]), threading.Condition()

    def work(lane: Lane) -> None:
        while True:
            with changed:
                while (pair := pairing.take()) is None:
                    if not pairing.left or failed:
                        return
                    changed.wait()
            try:
                compare(lane, pair)
            except BaseException:
                failed.append(pair)
                raise
            finally:
                with changed:
                    pairing.finish(pair)
                    changed.notify_all()

    failed: list[Pair] = []
    if len(lanes) == 1:
        work(lanes[0])
        return
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(work, lanes))


def in_threads(function: Callable[[int, int], Result], cuts: Sequence[tuple[int, int]], threads: int) -> list[Result]:
    """Call function(start, stop) for all cuts with that many threads: CPU work, whatever the device."""
    if threads == 1 or len(cuts) == 1:
        return [function(*cut) for cut in cuts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, *zip(*cuts)))


def in_lanes(function: Callable[[Lane, Item], Result], items: Sequence[Item], lanes: Sequence[Lane]) -> list[Result]:
    """Call function(lane, item) for all items, each lane in its own thread; results in the order of items."""
    if len(lanes) == 1 or len(items) == 1:
        return [function(lanes[0], item) for item in items]
    free = list(lanes)

    def call(item: Item) -> Result:
        lane = free.pop()  # there are as many threads as lanes
        try:
            return function(lane, item)
        finally:
            free.append(lane)

    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(call, items))


class Clock:
    """Seconds by name, summed over threads; `with clock("products"): ...` adds to one.

    `counts`: "products" of two vectors in float32, and pairs "scored" exactly, in float64.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:
                self.seconds[name] += spent

    def count(self, name: str, amount: int) -> None:
        """Add to a count."""
        with self._lock:
            self.counts[name] += amount
