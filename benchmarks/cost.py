"""Fit the speeds of `lattqe.cost` to measured stages, in processor time of one core.

    python -m benchmarks.cost

Prints each stage's measured seconds beside what the fitted constants say, and the constants. They stand in
`lattqe/cost/work.py` (CORE_FLOPS), `graph.py` (SELECT_SECONDS, SCORE_SECONDS, SCORE_COLUMN_SECONDS), `augment.py`
(NETWORK_SHARE, GATHER_BYTES_PER_SECOND, HOP_BYTES_PER_SECOND) and `stages.py` (IMPORT_VALUES_PER_SECOND).
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import nnls

from lattqe.cost.augment import weighing_of
from lattqe.expansion import create
from lattqe.expansion.diffusion import directed, hopped, transition
from lattqe.expansion.rows import augment_rows
from lattqe.search import FlatIndex, knn_graph
from lattqe.search.rows import Clock
from lattqe.store.features import normalised

GRAPHS = [
    (10_000, 64, 32),
    (20_000, 64, 64),
    (20_000, 128, 64),
    (20_000, 128, 256),
    (10_000, 512, 64),
    (10_000, 2048, 64),
]
ROWS, DIMS = 3000, (128, 512)


def spent(work: Callable[[], object]) -> float:
    """Processor seconds."""
    started = time.process_time()
    work()
    return time.process_time() - started


def clustered(rows: int, dim: int) -> np.ndarray:
    """Unit vectors in classes of about 20, (rows, dim) float32."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((rows // 20, dim))
    x = centres[rng.integers(0, len(centres), rows)] + 0.8 * rng.standard_normal((rows, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def fit(columns: list[list[float]], seconds: list[float], names: list[str]) -> np.ndarray:
    """Non-negative least squares of relative errors; prints both sides."""
    table = np.array(columns) / np.array(seconds)[:, None]
    scale = table.max(axis=0)
    found = nnls(table / scale, np.ones(len(seconds)))[0] / scale
    for name, took, share in zip(names, seconds, table @ found):
        print(f"  {name:<32} measured {took:7.2f} s   model {took * share:7.2f} s   {share:.2f}")
    return found


def graphs() -> None:
    """Products, selection, exact scores."""
    columns, seconds, names = [], [], []
    for rows, dim, k in GRAPHS:
        x = clustered(rows, dim).astype(np.float16)
        for blocks in (1, 4):
            clock = Clock()
            seconds.append(spent(lambda: knn_graph(x, k, clock=clock, block_rows=-(-rows // blocks))))  # noqa: B023
            made, scored = clock.counts["products"], clock.counts["scored"]
            columns.append([made * dim, made, scored, scored * dim])
            names.append(f"graph {rows} × {dim}, k {k}, {blocks} blocks")
    per_column, select, score, score_column = fit(columns, seconds, names)
    print(f"CORE_FLOPS {2 / max(per_column, 1e-15):.3g}   SELECT_SECONDS {select:.3g}")
    print(f"SCORE_SECONDS {score:.3g}   SCORE_COLUMN_SECONDS {score_column:.3g}")


def networks() -> None:
    """Weighing and gathering lists: methods without a network, and the model that ships."""
    columns, seconds, names = [], [], []
    for dim in DIMS:
        x = clustered(ROWS, dim)
        I, D = knn_graph(x, 256)
        for name, k in (("alphaqe", 10), ("alphaqe", 64), ("lattqe", 32)):
            method = create(name, **({"dba": True} if name == "lattqe" else {}))
            weighs = weighing_of(method, k, dim, ROWS)
            index, rows = FlatIndex(x), np.arange(ROWS)
            seconds.append(spent(lambda: augment_rows(index, rows, D, I, method, k)))  # noqa: B023
            gathered = ROWS * (1 + weighs.depth) * dim * 4
            columns.append([ROWS * weighs.flops if weighs.network else 0.0, gathered])
            names.append(f"{name} {ROWS} × {dim}, k {k}")
    network, gather = fit(columns, seconds, names)
    print(f"network {1 / max(network, 1e-15):.3g} FLOP/s   GATHER_BYTES_PER_SECOND {1 / max(gather, 1e-15):.3g}")


def flowing() -> None:
    """Hops, and normalising what is stored."""
    x = clustered(20_000, 128)
    rows = np.concatenate([np.arange(len(x), dtype=np.int32)[:, None], knn_graph(x, 32)[0]], axis=1)
    weights = np.full(rows.shape, 1 / 33, np.float32)
    W = directed(weights, rows, len(x))
    S = transition(W, W.T.tocsr(), weights[:, 0], 0)
    took = spent(lambda: hopped(S @ x, x, 0.9))
    print(f"HOP_BYTES_PER_SECOND {4 * S.nnz * x.shape[1] / took:.3g}")
    print(f"IMPORT_VALUES_PER_SECOND {x.size / spent(lambda: normalised(x, 'float16')):.3g}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    graphs()
    networks()
    flowing()
