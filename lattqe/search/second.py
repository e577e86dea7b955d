"""faiss as a second engine and as a referee: its candidates, our certificate, the same answer.

faiss gives k + m candidates of each row in float32. Whatever it left out has a float32 score not above its last
candidate's, so an exact score not above that plus the error bound of float32. Where the exact k-th score of the
candidates is above this, the list is certain; the other rows (ties, near ties, duplicates) are searched by our own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lattqe.errors import LattqeError
from lattqe.search.exact import best_of, exact_scores, float32_error
from lattqe.search.pairing import Clock
from lattqe.search.products import Block, lanes_on
from lattqe.search.rows import Rows, check_rows, tiles
from lattqe.search.topk import search_block

SPARE = 32  # candidates beyond k: enough that few rows of ordinary data go without a certificate
GPU_CANDIDATES = 2048  # the most that faiss selects on a GPU
CHUNK = 4096  # rows whose candidates are scored at once


def faiss_lists(
    rows: Block,
    others: Block,
    k: int,
    *,
    hidden: np.ndarray | None = None,
    device: torch.device | None = None,
    clock: Clock | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact k best of `others` for each of `rows`, but for row `hidden` (n,) of them (-1: none), by way of faiss.

    (n, k) float64 (-inf missing), (n, k) int32 (-1 missing): the same as `search_block` gives. Both blocks are held
    as float32 on the CPU. `clock` counts the rows that had no certificate as "uncertain".
    """
    clock = clock or Clock()
    scores, ids = np.full((len(rows), k), -np.inf), np.full((len(rows), k), -1, dtype=np.int32)
    if not len(rows) or not len(others):
        return scores, ids
    with clock("faiss"):
        found, candidates = _candidates(rows, others, min(k + SPARE + (hidden is not None), len(others)), device)
    certain = np.zeros(len(rows), dtype=bool)
    error = float32_error(rows.dim, rows.norms, others.norms.max(initial=0.0))
    with clock("scoring"):
        for start, stop in tiles(len(rows), CHUNK):
            part = slice(start, stop)
            own = None if hidden is None else hidden[part, None]
            real = candidates[part] >= 0 if own is None else (candidates[part] >= 0) & (candidates[part] != own)
            i, slot = np.nonzero(real)
            exact = np.full(real.shape, -np.inf)
            exact[i, slot] = exact_scores(rows.stored, others.stored, start + i, candidates[start + i, slot])
            scores[part], ids[part] = best_of(exact, np.where(real, candidates[part], -1).astype(np.int32), k)
            left_out = found[part, -1].astype(np.float64) + error[part]
            certain[part] = (scores[part, -1] > left_out) | (candidates.shape[1] == len(others))
    again = np.flatnonzero(~certain)
    clock.count("uncertain", len(again))
    with clock("searching again"), lanes_on() as lanes:
        database = others.without(k)
        for start, stop in tiles(len(again), CHUNK):
            few = again[start:stop]
            scores[few], ids[few] = search_block(
                rows.take(few), database, k, lanes[0], None if hidden is None else hidden[few]
            )
    return scores, ids


def faiss_graph(
    xb: Rows, k: int, *, device: torch.device | None = None, clock: Clock | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same as `knn_graph` gives, by way of faiss: I (n, k) int32, D (n, k) float32."""
    with lanes_on() as lanes:
        block = Block.load(check_rows(xb), lanes[0], widen=True)
    scores, ids = faiss_lists(block, block, k, hidden=np.arange(len(block)), device=device, clock=clock)
    if clock is not None:
        clock.count("products", len(block) ** 2 // 2)  # of which faiss makes both halves
    return ids, np.where(ids < 0, 0.0, scores).astype(np.float32)


def _candidates(rows: Block, others: Block, count: int, device: torch.device | None) -> tuple[np.ndarray, np.ndarray]:
    """Scores (n, count) float32 descending and row numbers (n, count), as faiss finds them."""
    import faiss

    xq, xb = (np.ascontiguousarray(block.held[:]) for block in (rows, others))
    if device is not None and device.type == "cuda":
        if not hasattr(faiss, "StandardGpuResources"):
            raise LattqeError("this faiss has no GPU support: pip install 'lattqe[gpu]', or leave --engine faiss out")
        return faiss.knn_gpu(
            faiss.StandardGpuResources(),
            xq,
            xb,
            min(count, GPU_CANDIDATES),
            metric=faiss.METRIC_INNER_PRODUCT,
            device=device.index or 0,
        )
    with faiss_threads(torch.get_num_threads()):
        return faiss.knn(xq, xb, count, metric=faiss.METRIC_INNER_PRODUCT)


@contextmanager
def faiss_threads(count: int) -> Iterator[None]:
    """Faiss with `count` threads."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
