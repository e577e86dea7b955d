"""The one road of every expansion: nearest rows, negatives, vectors, weights, sum; for queries and for database rows.

`expand_queries` and `augment_rows` are all there is: the verbs, the benchmark, validation, `verify --recompute` and the
Python API call them, with rows in this process (`FlatIndex`, `StoredIndex`) or in shards on a cluster.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from numbers import Integral
from typing import TypeVar

import numpy as np
import torch

from lattqe.device import Sender, pick_device
from lattqe.errors import LattqeError
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.base import BLOCK_BYTES_GPU, Expanded, Method, RowSource, blocks, resident
from lattqe.expansion.classic import lowest_outside
from lattqe.search import Index

# What one process keeps of shared projections at most: 1M rows of a 64-wide network, 40,000 of the paper's.
SHARED_BYTES = 1 << 30
# Vectors in the method at once, in float32: they stay near the cache, and the allocator uses such blocks again, while
# every larger one is fresh memory from the system. On a GPU `BLOCK_BYTES_GPU`.
GATHER_BYTES = 8 << 20
# The same where long lists are only averaged: the more rows at once, the more of their neighbors are the same ones. On
# a GPU nothing is gained by staying near a cache. By the kind of device alone: the last bits depend on it.
MEANS_BYTES = 64 << 20
MEANS_BYTES_GPU = 512 << 20
# Queries searched and expanded at once, so that their lists never need much memory.
QUERY_BLOCK = 1024

Item = TypeVar("Item")
Result = TypeVar("Result")
Found = tuple[np.ndarray, np.ndarray]  # D (n, k) float32 descending, I (n, k) int32, -1 where there are fewer


def list_lengths(method: Method, k: int, candidates: int) -> tuple[int, int]:
    """How many neighbors are weighed, and how many must be listed for that, where there are `candidates` of them."""
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
        raise LattqeError(f"k is {k!r}: use a whole number of neighbors, at least 1")
    method.check_k(k)
    return min(k, candidates), min(method.depth(k), candidates)


def candidates(index: Index, exclude: np.ndarray | None = None) -> int:
    """How many rows there are to be neighbors, without one that each query must not find; a list needs an entry."""
    return max(index.rows - (exclude is not None), 1)


def nearest(index: Index, xq: np.ndarray, k: int, exclude: np.ndarray | None = None) -> Found:
    """The k nearest rows of xq (nq, D): D and I (nq, k). `exclude` (nq,): a row that each query must not find, or -1.

    A query that is itself in the database would be its own best neighbor.
    """
    return index.search(xq, k) if exclude is None else without_own(*index.search(xq, k + 1), exclude)


def without_own(D: np.ndarray, I: np.ndarray, exclude: np.ndarray) -> Found:
    """Lists D and I (nq, k + 1) without the row `exclude` (nq,) of each, or without the last one: (nq, k)."""
    itself = (exclude[:, None] == I) & (I >= 0)
    itself[~itself.any(axis=1), -1] = True  # not among them: the last one is too many
    kept, shape = ~itself, (len(I), I.shape[1] - 1)
    return D[kept].reshape(shape), I[kept].reshape(shape)


def expand_queries(
    index: Index,
    xq: np.ndarray,
    method: Method,
    k: int,
    *,
    found: Found | None = None,
    exclude: np.ndarray | None = None,
    on_done: Callable[[int], None] | None = None,
) -> Expanded:
    """Expand queries xq (nq, D) from their k nearest rows of an index.

    The result's `weights` (nq, 1 + t + m) belong to its `rows` (nq, 1 + t + m): -1 for the query
    itself, the t rows that the method asked for (`method.depth(k)`), and m negatives; -1 where there are fewer.
    found: D and I (nq, t or more) where the search was done before, as `nearest` gives them. exclude (nq,): the row
    of each query that is itself in the index, -1 for the others. on_done(n): called after each n queries.
    """
    method.check_width(xq.shape[1])
    k, depth = list_lengths(method, k, candidates(index, exclude))
    if found is not None and found[1].shape[1] < depth:
        raise LattqeError(
            f"lists of {found[1].shape[1]} neighbors, but {method.name} needs {depth} to weigh {k}: search for more"
        )
    parts = []
    for start in range(0, len(xq), QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        own = None if exclude is None else exclude[block]
        D, I = nearest(index, xq[block], depth, own) if found is None else (each[block] for each in found)
        parts.append(_expand(index, xq[block], own, D[:, :depth], I[:, :depth], method, k))
        parts[-1].rows[:, 0] = -1
        if on_done is not None:
            on_done(len(parts[-1].vectors))
    return Expanded.joined(parts, xq.shape[1], 1 + depth + method.negatives)


def augment_rows(
    index: RowSource,
    rows: np.ndarray,
    D: np.ndarray,
    I: np.ndarray,
    method: Method,
    k: int,
    table: np.ndarray | None = None,
) -> Expanded:
    """Expand rows (n,) of an index from their k nearest other rows, as their graph lists them in D and I (n, t).

    The lists may be longer than the method needs. Only original vectors are read. `table`: what `shared_table` gave
    for all rows. `weights` and `rows` as in `expand_queries`, the row itself in column 0: the edges of the graph.
    """
    k, depth = list_lengths(method, k, index.rows - 1) if index.rows > 1 else (1, 1)
    if I.shape[1] < depth:
        raise LattqeError(
            f"a graph of {I.shape[1]} neighbors per row, but {method.name} needs {depth} to weigh "
            f"{k}: compute a longer one with `lattqe neighbors -k {depth}`"
        )
    x = index.gather(rows)
    method.check_width(x.shape[1])
    if isinstance(method, AttentionExpansion) and method.means_suffice and depth > k:
        return _augment_by_means(index, x, rows, D[:, :depth], I[:, :depth], method, k)
    return _expand(index, x, rows, D[:, :depth], I[:, :depth], method, k, table, keep=True)


def _augment_by_means(
    index: RowSource, x: np.ndarray, rows: np.ndarray, D: np.ndarray, I: np.ndarray, method: AttentionExpansion, k: int
) -> Expanded:
    """Expand x (n, D) where the long lists' vectors are only averaged: each row that a batch names is read once."""
    device = method.fast.device

    def expand(batch: slice, table: torch.Tensor, lists: np.ndarray) -> Expanded:
        return method.expand_rows(x[batch], table, lists, D[batch], k)

    at_once = MEANS_BYTES if device.type == "cpu" else MEANS_BYTES_GPU
    listed = np.concatenate([rows[:, None], I], axis=1).astype(np.int32)
    return _batch_by_batch(index, listed, x.shape[1], at_once // max(1, I.shape[1] * x.shape[1] * 4), device, expand)


def _batch_by_batch(
    index: RowSource,
    rows: np.ndarray,
    dim: int,
    step: int,
    device: torch.device,
    expand: Callable[[slice, torch.Tensor, np.ndarray], Expanded],
    keep: bool = True,
) -> Expanded:
    """expand(batch, table, lists) for batches of `step` items: rows (n, 1 + t) are each item's own and its list, table
    and lists what `_tables` gives. Where the device has no memory for a batch, it and those after it are half as large:
    the last bits may depend on that, nothing else does.
    """
    lists, step, start = rows[:, 1:], max(1, step), 0
    vectors, weights = np.empty((len(rows), dim), dtype=np.float32), np.zeros(rows.shape, dtype=np.float32)

    def work(step: int) -> None:  # what it holds on the device is gone when it has failed
        nonlocal start
        batches = [slice(first, first + step) for first in range(start, len(rows), step)]
        for batch, (table, places) in zip(batches, _tables(index, [lists[batch] for batch in batches], device, keep)):
            done = expand(batch, table, places)
            vectors[batch], weights[batch] = done.vectors, done.weights
            start = batch.stop

    while start < len(rows):
        try:
            work(step)
        except torch.OutOfMemoryError as error:
            step = min(step, len(rows) - start) // 2
            if not step:
                raise LattqeError(
                    f"{device} has no memory left, even for one list of {lists.shape[1]} vectors: end what else uses "
                    "it, or set LATTQE_DEVICE=cpu"
                ) from error
    return Expanded(vectors, weights, rows)


def _tables(
    index: RowSource, batches: list[np.ndarray], device: torch.device, keep: bool = True
) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """For lists (n, t) of rows, -1 missing: the rows that they name (m, D) float32 on a device, and the lists as places
    among these. The same numbers whether all rows are there already or each batch's are sent: then, to another device
    than this one, the next batch's while this one is in use. keep: all rows may be brought there, to stay.
    """
    there = resident(index, device) if keep else None
    sender = Sender(device)

    def read(I: np.ndarray) -> tuple[Callable[[], torch.Tensor], np.ndarray]:
        named, places = np.unique(np.maximum(I, 0), return_inverse=True)
        lists = np.where(I < 0, -1, places.reshape(I.shape))
        if there is not None:
            return partial(torch.index_select, there, 0, torch.from_numpy(named).to(device)), lists
        return sender.send(torch.from_numpy(index.gather(named))), lists

    prepared = map(read, batches) if device.type == "cpu" or there is not None else _ahead(read, batches)
    for table, lists in prepared:
        yield table().float(), lists


def _expand(
    index: RowSource,
    x: np.ndarray,
    own: np.ndarray | None,
    D: np.ndarray,
    I: np.ndarray,
    method: Method,
    k: int,
    table: np.ndarray | None = None,
    keep: bool = False,
) -> Expanded:
    """Expand x (n, D) from lists that are exactly as long as they must be; `own` (n,): which rows these are.

    keep: all rows may be brought to another device, to stay there. Few queries are not worth that.
    """
    first = np.full(len(x), -1) if own is None else own
    listed = [first[:, None], I]
    if method.negatives:
        listed.append(lowest_outside(index, x, I, method.negatives, own))
    rows = np.concatenate(listed, axis=1).astype(np.int32)
    device, item_bytes = pick_device(method.device), rows.shape[1] * x.shape[1] * 4
    if device.type != "cpu" and table is None:
        return _expand_there(index, x, rows, D, method, k, device, keep)
    vectors, weights = np.empty(x.shape, dtype=np.float32), np.zeros(rows.shape, dtype=np.float32)
    batches = list(blocks(len(x), item_bytes, GATHER_BYTES if device.type == "cpu" else BLOCK_BYTES_GPU))
    # One batch of vectors is in the method while the next is being gathered, so two of them are held.
    for batch, gathered in zip(batches, _gathered(batches, listed[1:], index.gather)):
        if table is not None and isinstance(method, AttentionExpansion):
            done = method.expand_shared(x[batch], gathered[0], D[batch], table, rows[batch])
        else:
            more = {"negatives": gathered[1], "negatives_valid": listed[2][batch] >= 0} if method.negatives else {}
            done = method.expand(x[batch], gathered[0], D[batch], valid=I[batch] >= 0, k=k, **more)
        vectors[batch], weights[batch] = done.vectors, done.weights
    return Expanded(vectors, weights, rows)


def _expand_there(
    index: RowSource,
    x: np.ndarray,
    rows: np.ndarray,
    D: np.ndarray,
    method: Method,
    k: int,
    device: torch.device,
    keep: bool,
) -> Expanded:
    """As `_expand`, on another device than this one: each row that a batch names is sent once, the next batch's while
    this one is computed. rows (n, 1 + t + m): what the weights will belong to.
    """
    step = BLOCK_BYTES_GPU // max(1, rows.shape[1] * x.shape[1] * 4)

    def expand(batch: slice, table: torch.Tensor, lists: np.ndarray) -> Expanded:
        return method.expand_places(x[batch], table, lists, D[batch], k)

    return _batch_by_batch(index, rows, x.shape[1], step, device, expand, keep)


def shares(method: Method, rows: int) -> bool:
    """Whether the first products of that many database rows are computed once and kept in memory.

    Decided by the numbers alone, never by the machine: sharing changes the last bits of a result.
    """
    return 0 < 4 * rows * method.shared_width <= SHARED_BYTES


def sharing(method: Method, rows: int, again: bool = False) -> str:
    """What is shared, or why nothing is, for the plan; `again`: only a few rows are computed, for a grown index."""
    if not method.shared_width:
        return (
            "none: in this network the first products differ from list to list"
            if method.learned
            else f"none: {method.name} has no first products that lists share"
        )
    if again:
        return "none: only the touched rows are computed"
    size = f"{4 * rows * method.shared_width / 2**20:,.0f} MiB for each worker"
    return size if shares(method, rows) else f"none: they would need {size}, more than {SHARED_BYTES >> 20} MiB"


def spared(method: Method, k: int, rows: int, expanded: int, tables: int) -> int:
    """Floating-point operations that sharing spared: in each list for each item, less the tables themselves."""
    return 2 * method.shared_products * (expanded * (1 + k) - tables * rows)


def shared_table(method: Method, rows: int, blocks_of_rows: Iterable[np.ndarray]) -> np.ndarray:
    """What all lists share of that many rows, given as blocks (n, D): (rows, shared_width) float32, held once."""
    if not isinstance(method, AttentionExpansion):
        raise LattqeError(f"{method.name} shares nothing between lists")
    table, start = np.empty((rows, method.shared_width), dtype=np.float32), 0
    for block in blocks_of_rows:
        table[start : start + len(block)] = method.shared_rows(block)
        start += len(block)
    return table


def _gathered(
    batches: list[slice], lists: list[np.ndarray], gather: Callable[[np.ndarray], np.ndarray]
) -> Iterator[list[np.ndarray]]:
    """The vectors (n, k, D) of each list for each batch, read one batch ahead by a thread."""

    def read(batch: slice) -> list[np.ndarray]:
        vectors = []
        for rows in (numbers[batch] for numbers in lists):
            flat = gather(np.maximum(rows, 0).ravel())
            vectors.append(flat.reshape(*rows.shape, flat.shape[1]))
        return vectors

    return _ahead(read, batches)


def _ahead(read: Callable[[Item], Result], items: list[Item]) -> Iterator[Result]:
    """read(item) for each item, one item ahead, by a thread."""
    reader = _reader(os.getpid())
    ahead = reader.submit(read, items[0]) if items else None
    for number in range(1, len(items) + 1):
        if ahead is None:
            return
        ready = ahead.result()
        ahead = reader.submit(read, items[number]) if number < len(items) else None
        yield ready


@cache
def _reader(process: int) -> ThreadPoolExecutor:
    """The thread of a process that reads ahead. One that lasts: of many, glibc keeps each one's buffers for itself."""
    return ThreadPoolExecutor(1)
