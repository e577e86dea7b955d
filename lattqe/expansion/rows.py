"""Expanding rows whose neighbors are row numbers: vectors are gathered a batch ahead of the method that uses them."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from lattqe.errors import LattqeError
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.base import Method, blocks

# What one process keeps of shared projections at the most: 1M rows of a 64-wide network, 40,000 of the paper's.
SHARED_BYTES = 1 << 30
# Vectors in the method at once, in float32: they stay near the cache, and the allocator uses such blocks again, while
# every larger one is fresh memory from the system.
GATHER_BYTES = 8 << 20

Gather = Callable[[np.ndarray], np.ndarray]


def expand_rows(method: Method, x: np.ndarray, I: np.ndarray, D: np.ndarray, gather: Gather,  # noqa: E741
                negatives: np.ndarray | None = None, shared: tuple[np.ndarray, np.ndarray] | None = None,
                k: int | None = None) -> np.ndarray:
    """Expand x (n, D) from the lists I, D (n, k) of row numbers (-1: none) and scores; returns (n, D) float32.

    `gather(rows (m,)) -> (m, D)` reads original vectors; `negatives` (n, m) are row numbers too. `shared` is what
    `shared_table` gave for all rows, and the row numbers (n,) of x itself. One batch of vectors is in the method
    while the next is being gathered, so two batches of `GATHER_BYTES` are held. `k`: neighbors to weigh, where the
    lists are as long as `method.depth(k)`.
    """
    out = np.empty(x.shape, dtype=np.float32)
    width = 1 + I.shape[1] + (0 if negatives is None else negatives.shape[1])
    batches = list(blocks(len(x), width * x.shape[1] * 4, GATHER_BYTES))
    lists = [I] if negatives is None else [I, negatives]
    for batch, vectors in zip(batches, _gathered(batches, lists, gather)):
        if shared is not None and isinstance(method, AttentionExpansion):
            rows = np.concatenate([shared[1][batch, None], I[batch]], axis=1)
            out[batch] = method.expand_shared(x[batch], vectors[0], D[batch], shared[0], rows).vectors
            continue
        more = {} if negatives is None else {"negatives": vectors[1], "negatives_valid": negatives[batch] >= 0}
        out[batch] = method.expand(x[batch], vectors[0], D[batch], valid=I[batch] >= 0, k=k, **more).vectors
    return out


def shares(method: Method, rows: int) -> bool:
    """Whether the first products of so many database rows are computed once and kept in memory.

    Decided by the numbers alone, never by the machine: sharing changes the last bits of a result.
    """
    return 0 < 4 * rows * method.shared_width <= SHARED_BYTES


def shared_table(method: Method, rows: int, blocks_of_rows: Iterable[np.ndarray]) -> np.ndarray:
    """What all lists share of so many rows, given as blocks (n, D): (rows, shared_width) float32, held once."""
    if not isinstance(method, AttentionExpansion):
        raise LattqeError(f"{method.name} shares nothing between lists")
    table, start = np.empty((rows, method.shared_width), dtype=np.float32), 0
    for block in blocks_of_rows:
        table[start : start + len(block)] = method.shared_rows(block)
        start += len(block)
    return table


def _gathered(batches: list[slice], lists: list[np.ndarray], gather: Gather) -> Iterator[list[np.ndarray]]:
    """The vectors (n, k, D) of each list for each batch, read one batch ahead by a thread."""
    def read(batch: slice) -> list[np.ndarray]:
        vectors = []
        for rows in (numbers[batch] for numbers in lists):
            flat = gather(np.maximum(rows, 0).ravel())
            vectors.append(flat.reshape(*rows.shape, flat.shape[1]))
        return vectors

    reader = _reader(os.getpid())
    ahead = reader.submit(read, batches[0]) if batches else None
    for following in [*batches[1:], None]:
        if ahead is None:
            return
        ready = ahead.result()
        ahead = reader.submit(read, following) if following is not None else None
        yield ready


@cache
def _reader(process: int) -> ThreadPoolExecutor:
    """The thread of a process that reads ahead. One that lasts: of many, glibc keeps each one's buffers for itself."""
    return ThreadPoolExecutor(1)
