"""A million rows on one machine: write them, build their exact kNN graph, check random rows against brute force.

    python -m benchmarks.million --to million                      # 1,000,000 x 64 float16, k = 32
    python -m benchmarks.million --to small --rows 50000           # to try it
    python -m benchmarks.million --whole --kills 3 --to whole      # the whole pipeline on S3: see benchmarks/whole.py

Killed, the same command goes on. Rows are views of 50,000 places (so that lists mean something), and every thousandth
row is an exact copy of another: the order among equals is checked too. Dot products of float16 unit vectors are exact
in float64, so brute force has to give the same row numbers, not nearly the same.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph

BLOCK = 50_000
PLACES = 50_000
COPY_EVERY = 1000


def rows_of(block: int, count: int, dim: int) -> np.ndarray:
    """Block `block` of the rows, (count, dim) float32, a function of its number."""
    places = np.random.default_rng(0).standard_normal((PLACES, dim)).astype(np.float32)
    rng = np.random.default_rng([1, block])
    rows = places[rng.integers(0, PLACES, count)] + 0.7 * rng.standard_normal((count, dim)).astype(np.float32)
    rows[::COPY_EVERY] = rows[COPY_EVERY // 2]
    return rows


def write_rows(uri: str, rows: int, dim: int) -> None:
    """The feature set, unless it is there already."""
    writer = FeatureWriter(uri, dim, "float16", config={"million": rows})
    if writer.finished is not None:
        return
    with writer:
        for start in range(0, rows, BLOCK):
            block = rows_of(start // BLOCK, min(BLOCK, rows - start), dim)
            writer.append(block, [f"{row:07d}" for row in range(start, start + len(block))])


def check(features: FeatureSet, graph: NeighborGraph, sample: int) -> tuple[int, float]:
    """How many of `sample` random rows have exactly the neighbors and scores of brute force; the share of its neighbors
    that is found.
    """
    rows = np.sort(np.random.default_rng(2).choice(features.rows, sample, replace=False))
    xq = features.gather(rows).astype(np.float64)
    best, where = np.full((sample, 0), 0.0), np.zeros((sample, 0), np.int64)
    for start, block in features.blocks(BLOCK):
        scores = xq @ block.astype(np.float64).T
        inside = (rows >= start) & (rows < start + len(block))
        scores[inside, rows[inside] - start] = -np.inf
        numbers = np.broadcast_to(np.arange(start, start + len(block)), scores.shape)
        best, where = np.concatenate((best, scores), 1), np.concatenate((where, numbers), 1)
        order = np.stack([np.lexsort((w, -b))[: graph.k] for b, w in zip(best, where)])
        best, where = np.take_along_axis(best, order, 1), np.take_along_axis(where, order, 1)
    neighbors, scores = graph.gather(rows)
    right = (neighbors == where).all(1) & (scores == best.astype(np.float32)).all(1)
    recall = np.mean([np.isin(true, found).mean() for true, found in zip(where, neighbors)])
    return int(right.sum()), float(recall)


def parser() -> argparse.ArgumentParser:
    """The options of both modes."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--to", required=True, help="folder for the rows, the graph and the results")
    found.add_argument("--rows", type=int, default=1_000_000)
    found.add_argument("--dim", type=int, default=64)
    found.add_argument("-k", type=int, default=32)
    found.add_argument("--workers", type=int, default=os.cpu_count(), help="Ray workers; --whole: 0 for as jobs choose")
    found.add_argument("--sample", "--check", dest="check", type=int, default=1000, help="rows computed by brute force")
    whole = found.add_argument_group("the whole pipeline, 128 columns, on a real S3 server")
    whole.add_argument("--whole", action="store_true")
    whole.add_argument("--kills", type=int, default=0, help="kill the running command so many times and continue")
    whole.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    whole.add_argument("--block-rows", type=int, default=0, help="of the graph; fewer: less memory; 0: as planned")
    whole.add_argument("--approximate", type=float, default=0.0, metavar="RECALL", help="of the graph; 0: an exact one")
    data = os.environ.get("LATTQE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")
    whole.add_argument("--data", default=data, help="folder of the photographs")
    return found


def main() -> None:
    options = parser().parse_args()
    if options.whole:
        from benchmarks.whole import run_whole

        run_whole(options, check)
    folder = Path(options.to)
    features, graph = str(folder / "features"), str(folder / "graph")
    write_rows(features, options.rows, options.dim)
    started = time.monotonic()
    words = [
        sys.executable,
        "-m",
        "jobs.neighbors",
        features,
        "-k",
        str(options.k),
        "--to",
        graph,
        "--workers",
        str(options.workers),
        "--json",
    ]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    result = {
        **json.loads(done.stdout),
        "wall_seconds": round(time.monotonic() - started, 1),
        "load": [round(value, 1) for value in os.getloadavg()],
    }
    result["checked"] = options.check
    result["right"], _ = check(FeatureSet.open(features), NeighborGraph.open(graph), options.check)
    (folder / "results.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    sys.exit(result["right"] != options.check)


if __name__ == "__main__":
    main()
