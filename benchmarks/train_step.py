"""Seconds of one training step against the bare forward and backward of the network on the same batch.

    python benchmarks/train_step.py [--preset photos] [--threads 2] [--steps 40]

A step is all that training does: waiting for the batch, dropout masks, forward, losses, backward, clipping, update,
running average. Bare is `network(items).weights.sum().backward()` with torch's own dropout. Both run in turns on the
same batches, so that a busy machine slows both; the ratio of the medians must not exceed 1.2.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np
import torch

from lattqe.expansion.base import aggregate
from lattqe.search import knn_graph
from lattqe.training import Team, preset
from lattqe.training.loop import LAttQE, make_sampler
from lattqe.training.plan import TrainingData, join
from lattqe.training.sampling import Batch, prefetched
from lattqe.training.stage import TrainingStage

LIMIT = 1.2


def clusters(rows: int, classes: int, dim: int, graph_k: int | None) -> TrainingData:
    """One labelled set of noisy clusters."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, rows)
    x = rng.normal(size=(classes, dim))[labels] + 1.5 * rng.normal(size=(rows, dim))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    return join([x], [labels], None if graph_k is None else [knn_graph(x, graph_k)[0]])


def bare(network: LAttQE, batch: Batch) -> None:
    """Forward and backward, and nothing else."""
    output = network(batch.items, batch.valid, k=batch.k)
    loss = aggregate(output.weights, batch.items).sum()
    if output.auxiliary is not None:
        loss = loss + output.auxiliary.sum()
    loss.backward()
    network.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="photos")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    config = preset(options.preset, options.dim, options.set)
    sampler = make_sampler(clusters(options.rows, 200, options.dim, config.graph_k), config)
    stage = TrainingStage(LAttQE(config.network), config, Team(device=device))
    plain = LAttQE(config.network).to(device).train()
    plain.head.log_temperature.requires_grad_(False)
    times: dict[str, list[float]] = {"step": [], "bare": [], "waiting": []}
    with prefetched(sampler, range(options.steps), slice(None), device) as batches:
        for step in range(options.steps):
            started = time.perf_counter()
            batch = next(batches).to(device)
            waited = time.perf_counter()
            stage.update(step, batch)
            done = time.perf_counter()
            bare(plain, batch)
            times["bare"].append(time.perf_counter() - done)
            times["step"].append(done - started)
            times["waiting"].append(waited - started)
    medians = {name: statistics.median(values[3:]) for name, values in times.items()}
    ratio = medians["step"] / medians["bare"]
    print(json.dumps({**medians, "ratio": ratio, "limit": LIMIT, "preset": options.preset, "dim": options.dim}))
    sys.exit(ratio > LIMIT)


if __name__ == "__main__":
    main()
