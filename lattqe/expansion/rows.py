"""Expanding rows whose neighbors are row numbers: vectors are gathered a batch ahead of the method that uses them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lattqe.expansion.base import Method, blocks

Gather = Callable[[np.ndarray], np.ndarray]


def expand_rows(method: Method, x: np.ndarray, I: np.ndarray, D: np.ndarray, gather: Gather,  # noqa: E741
                negatives: np.ndarray | None = None) -> np.ndarray:
    """Expand x (n, D) from the lists I, D (n, k) of row numbers (-1: none) and scores; returns (n, D) float32.

    `gather(rows (m,)) -> (m, D)` reads original vectors; `negatives` (n, m) are row numbers too. One batch of
    vectors is in the method while the next is being gathered, so two batches of `BLOCK_BYTES` are held.
    """
    out = np.empty(x.shape, dtype=np.float32)
    width = 1 + I.shape[1] + (0 if negatives is None else negatives.shape[1])
    batches = list(blocks(len(x), width * x.shape[1] * 4))
    lists = [I] if negatives is None else [I, negatives]
    for batch, vectors in zip(batches, _gathered(batches, lists, gather)):
        more = {} if negatives is None else {"negatives": vectors[1], "negatives_valid": negatives[batch] >= 0}
        out[batch] = method.expand(x[batch], vectors[0], D[batch], valid=I[batch] >= 0, **more).vectors
    return out


def _gathered(batches: list[slice], lists: list[np.ndarray], gather: Gather) -> Iterator[list[np.ndarray]]:
    """The vectors (n, k, D) of each list for each batch, read one batch ahead by a thread."""
    def read(batch: slice) -> list[np.ndarray]:
        vectors = []
        for rows in (numbers[batch] for numbers in lists):
            flat = gather(np.maximum(rows, 0).ravel())
            vectors.append(flat.reshape(*rows.shape, flat.shape[1]))
        return vectors

    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(read, batches[0]) if batches else None
        for following in [*batches[1:], None]:
            if ahead is None:
                return
            ready = ahead.result()
            ahead = reader.submit(read, following) if following is not None else None
            yield ready
