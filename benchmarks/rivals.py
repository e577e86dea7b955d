"""Diffusion and propagation at the size that they are offered for: seconds, processor seconds and memory of each part.

    python benchmarks/rivals.py                      20,000 rows
    python benchmarks/rivals.py --rows 100000        the most that they take

Rows are random clusters; all methods have the settings that their classes give, and work in one process, as they do in
a benchmark run. Each part is one line of JSON, printed when it is done, so that a run that is ended early has told what
it measured. `peak_bytes` is the most that the process has had until then, which is why the hungriest part comes last.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lattqe.expansion.diffusion import MOST_ROWS, Diffusion, GraphRows, OfflineDiffusion, Propagation, Ranker

CLUSTER = 50  # rows of one, in the mean
NOISE = 0.8  # length of what a row adds to its center of length 1: two rows of a cluster have a cosine of about .6


def clusters(rows: int, queries: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (rows, columns) and (queries, columns) float32 around the same random centers."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((max(1, rows // CLUSTER), columns), dtype=np.float32) / np.sqrt(columns)
    found = []
    for count in (rows, queries):
        noise = rng.standard_normal((count, columns), dtype=np.float32) * (NOISE / np.sqrt(columns))
        x = centers[rng.integers(0, len(centers), count)] + noise
        found.append(x / np.linalg.norm(x, axis=1, keepdims=True))
    return found[0], found[1]


def measured(part: str, work: Callable[[], object]) -> dict[str, Any]:
    """Do one part; its seconds, its processor seconds, and the most memory of the process so far."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return {
        "part": part,
        "seconds": round(time.perf_counter() - clock, 2),
        "cpu_seconds": round(time.process_time() - processor, 2),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def parts(x: np.ndarray, xq: np.ndarray) -> list[tuple[str, Callable[[], object]]]:
    """What is measured, in order; graphs apart from what uses them."""
    rows = GraphRows(x)
    diffusion, offline, propagation = Diffusion(), OfflineDiffusion(), Propagation()

    def rank(ranker: Ranker) -> None:
        for _ in ranker.rankings(rows, xq):
            pass

    return [
        (f"graph, {diffusion.kd} neighbors", lambda: rows.lists(diffusion.kd)),
        (f"propagation of all rows, {propagation.hops} hops", lambda: propagation.augment(rows)),
        ("diffusion: affinities", lambda: diffusion.prepare(rows)),
        (f"diffusion of {len(xq)} queries", lambda: rank(diffusion)),
        (f"graph, {offline.truncation:,} neighbors", lambda: rows.lists(offline.truncation)),
        ("offline diffusion: flows of all rows", lambda: offline.prepare(rows)),
        (f"offline diffusion of {len(xq)} queries", lambda: rank(offline)),
    ]


def main() -> None:
    """Measure all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help=f"Rows, at most {MOST_ROWS:,}.")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    x, xq = clusters(given.rows, given.queries, given.columns, given.seed)
    print(json.dumps({"rows": len(x), "queries": len(xq), "columns": x.shape[1], "seed": given.seed}), flush=True)
    for part, work in parts(x, xq):
        print(json.dumps(measured(part, work)), flush=True)


if __name__ == "__main__":
    main()
