"""`lattqe augment` beside the bare network: rows/s, memory of a worker beside the plan's prediction, growth with rows.

    python -m benchmarks.augment                      # some fifteen minutes on two quiet cores
    python -m benchmarks.augment --sizes 4000 --rounds 1 --networks paper

The job is the real command on a local Ray with a given graph and one worker for each core. Its seconds count from the
moment its first worker is up: starting Ray and importing torch take the same few seconds for any number of rows.
The rival is the network alone: the same lists, gathered into memory and widened to float32 before the clock starts, in
one process with as many threads; where the job shares first products, so does the rival, table included; in turns.
Goals: at least 0.85 of the rival's rows/s; the workers' peak memory within 20 % of the plan; seconds in proportion to
rows (10k, 20k, 40k) at fixed k. CPU seconds are given too: on a machine that others use they are the fairer ratio.

    python -m benchmarks.augment --paths --sizes 4096 -k 48 --rounds 5

measures LAttDBA of the model that ships by the mean of long lists beside the path that gathers all of their vectors, in
turns in one process (goal: 2.5 times the rows/s).

    python -m benchmarks.augment --hops 8 -k 50 --sizes 20000,40000,80000 --workers 1 --rounds 1

measures hops instead: on the smallest set, what they take beside the pass of the network that makes their edges, in
one run (goal: a quarter at the most); on all, with alphaQE's edges, seconds and bytes for each row (goal: the same).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

PATHS = """
import json, statistics, sys, time
import numpy as np, torch
from lattqe.expansion import create
from lattqe.expansion.rows import _expand, augment_rows
from lattqe.model import fast
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, NeighborGraph
folder, k, threads, rounds, sample = sys.argv[1], *map(int, sys.argv[2:6])
torch.set_num_threads(threads)
index = FlatIndex(FeatureSet.open(folder + "/features").read())
method = create("lattqe", dba=True)
rows = np.arange(min(sample, index.rows))
depth = method.depth(k)
I, D = (each[rows, :depth] for each in NeighborGraph.open(folder + "/graph").read())

def gathered(tokens):
    fast.TOKENS_OF_LISTS, kept = tokens, fast.TOKENS_OF_LISTS
    try:
        return _expand(index, index.gather(rows), rows, D, I, method, k)
    finally:
        fast.TOKENS_OF_LISTS = kept


# The last one is how it all began: every vector of a list, in batches for the paper's wide tokens.
paths = {"means": lambda: augment_rows(index, rows, D, I, method, k),
         "gathered": lambda: gathered(fast.TOKENS_OF_LISTS),
         "gathered, small batches": lambda: gathered(fast.TOKENS)}
first = list(paths)[-1]
spent = {name: ([], []) for name in paths}
found = {}
for turn in range(rounds + 1):
    for name, run in paths.items():
        clocks = time.perf_counter(), time.process_time()
        found[name] = run().vectors
        if turn:  # the first warms up
            spent[name][0].append(time.perf_counter() - clocks[0])
            spent[name][1].append(time.process_time() - clocks[1])
wall, cpu = ({name: statistics.median(each[clock]) for name, each in spent.items()} for clock in (0, 1))
print(json.dumps({
    "rows": len(rows), "dim": index.dim, "k": k, "depth": depth, "threads": threads, "rounds": rounds,
    "rows_per_second": {name: round(len(rows) / each) for name, each in wall.items()},
    "ratio_wall": {name: round(wall[first] / each, 2) for name, each in wall.items()},
    "ratio_cpu": {name: round(cpu[first] / each, 2) for name, each in cpu.items()},
    "largest_difference": float(np.abs(found["means"] - found["gathered"]).max())}))
"""
BARE = """
import json, sys, time
import numpy as np, torch
from lattqe.expansion import create
from lattqe.expansion.rows import shared_table, shares
from lattqe.store import FeatureSet, NeighborGraph
folder, k, threads, sample = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
features, graph = FeatureSet.open(folder + "/features"), NeighborGraph.open(folder + "/graph")
method = create("lattqe", model=folder + "/model", dba=True)
vectors, rows = features.read(), min(sample, features.rows)
lists = np.concatenate([np.arange(rows)[:, None], graph.read(0, rows)[0][:, : method.depth(k)]], axis=1)
valid = torch.ones((1024, lists.shape[1]), dtype=torch.bool)
method.fast.weights(torch.from_numpy(vectors[lists[:64]].astype(np.float32)), valid[:64], True, k=k)
wall = cpu = 0.0
table = None
if shares(method, features.rows):
    clocks = time.perf_counter(), time.process_time()
    table = shared_table(method, features.rows, [vectors])
    # The table is for all rows; this many of its seconds belong to the sample.
    wall += (time.perf_counter() - clocks[0]) * rows / features.rows
    cpu += (time.process_time() - clocks[1]) * rows / features.rows
for start in range(0, rows, 1024):
    part = lists[start : start + 1024]
    items = torch.from_numpy(vectors[part].astype(np.float32))
    known = None if table is None else lambda batch: torch.from_numpy(np.take(table, part[batch], axis=0))
    clocks = time.perf_counter(), time.process_time()
    method.fast.weights(items, valid[: len(part)], True, known, k=k)
    wall, cpu = wall + time.perf_counter() - clocks[0], cpu + time.process_time() - clocks[1]
print(json.dumps({"wall": wall / rows, "cpu": cpu / rows}))
"""


def make_world(folder: Path, kind: str, rows: int, dim: int, k: int) -> None:
    """Clustered float16 rows, an untrained network of the paper's kind or of the preset `photos`, and the graph."""
    import torch

    from lattqe.model import LAttQE, LAttQEConfig
    from lattqe.search.stored import publish_graph
    from lattqe.store import FeatureSet, FeatureWriter
    from lattqe.training.config import preset

    rng = np.random.default_rng(0)
    centres = rng.standard_normal((max(rows // 50, 1), dim))
    x = centres[rng.integers(0, len(centres), rows)] + 0.8 * rng.standard_normal((rows, dim))
    with FeatureWriter(str(folder / "features"), dim) as writer:
        writer.append(x, [f"r{row}" for row in range(rows)])
    torch.manual_seed(0)
    config = LAttQEConfig(dim=dim, heads=4, positional_start="small") if kind == "paper" else preset(kind, dim).network
    network = LAttQE(config)
    network.save(str(folder / "model"))
    publish_graph(FeatureSet.open(str(folder / "features")), network.depth(k), str(folder / "graph"))


def run_bare(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(options.workers)}
    command = [sys.executable, "-c", BARE, str(folder), str(options.k), str(options.workers), str(options.sample)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def run_job(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The whole job: its summary, with seconds a row from when its workers were up, and their CPU seconds."""
    with tempfile.TemporaryDirectory() as to:
        command = [
            sys.executable,
            "-m",
            "jobs.augment",
            f"{folder}/features",
            "--model",
            f"{folder}/model",
            "-k",
            str(options.k),
            "--neighbors",
            f"{folder}/graph",
            "--to",
            f"{to}/index",
            "--workers",
            str(options.workers),
            "--json",
        ]
        told = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        )
    return told | {"wall": told["seconds_after_start"] / told["rows"], "cpu": told["worker_cpu_seconds"] / told["rows"]}


def compare(kind: str, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Turns of both on one set."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_world(folder, kind, rows, options.dim, options.k)
        turns = [(run_bare(folder, options), run_job(folder, options)) for _ in range(options.rounds)]
    jobs = [job for _, job in turns]
    return {
        "network": kind,
        "rows": rows,
        "dim": options.dim,
        "k": options.k,
        "workers": options.workers,
        "job_rows_per_second": round(1 / statistics.median(job["wall"] for job in jobs)),
        "bare_rows_per_second": round(1 / statistics.median(bare["wall"] for bare, _ in turns)),
        "ratio_wall": round(statistics.median(bare["wall"] / job["wall"] for bare, job in turns), 3),
        "ratio_cpu": round(statistics.median(bare["cpu"] / job["cpu"] for bare, job in turns), 3),
        "cpu_seconds": round(statistics.median(job["cpu"] for job in jobs) * rows, 1),
        "seconds": round(statistics.median(job["wall"] for job in jobs) * rows, 1),
        "peak_mib": round(max(job["peak_worker_bytes"] for job in jobs) / 2**20),
        "predicted_mib": round(max(job["predicted_worker_bytes"] for job in jobs) / 2**20),
        "shared": jobs[0]["shared_products"],
    }


HOPPING = ("start", "turn", "fold", "hop", "part")


def run_hops(folder: Path, rows: int, options: argparse.Namespace, method: list[str]) -> dict[str, Any]:
    """One job of several hops: seconds of the pass that makes edges and of the hops, and what a hop moves."""
    with tempfile.TemporaryDirectory() as to:
        command = [
            sys.executable,
            "-m",
            "jobs.augment",
            f"{folder}/features",
            *method,
            "-k",
            str(options.k),
            "--hops",
            str(options.hops),
            "--neighbors",
            f"{folder}/graph",
            "--to",
            f"{to}/index",
            "--workers",
            str(options.workers),
            "--json",
        ]
        told = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        )
    spent = told["worker_seconds"]
    hopping = sum(spent.get(name, 0.0) for name in HOPPING)
    edges = sum(spent.values()) - hopping
    return {
        "method": method[1],
        "rows": rows,
        "hops": options.hops,
        "k": options.k,
        "dim": options.dim,
        "edges_seconds": round(edges, 2),
        "hops_seconds": round(hopping, 2),
        "hops_to_edges": round(hopping / edges, 3),
        "hops_seconds_by_step": {n: spent.get(n) for n in HOPPING},
        "hops_microseconds_a_row": round(1e6 * hopping / rows, 1),
        "bytes_read_a_row_and_hop": round(told["bytes_read_for_each_hop"] / rows),
        "bytes_written_a_row_and_hop": round(told["bytes_written_for_each_hop"] / rows),
        "peak_mib": round(told["peak_hop_worker_bytes"] / 2**20),
        "predicted_mib": round(told["predicted_hop_worker_bytes"] / 2**20),
    }


def compare_hops(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The network that ships on the smallest set, alphaQE on all."""
    results = []
    for rows in sorted(map(int, options.sizes.split(","))):
        with tempfile.TemporaryDirectory() as name:
            make_world(Path(name), "photos", rows, options.dim, options.k)
            methods = [["--method", "lattqe"]] * (not results) + [["--method", "alphaqe"]]
            for method in methods:
                results.append(run_hops(Path(name), rows, options, method))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def compare_paths(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both paths of the model that ships; the graph is as deep as its lists."""
    with tempfile.TemporaryDirectory() as name:
        make_world(Path(name), "photos", rows, options.dim, options.k)
        numbers = (options.k, options.workers, options.rounds, options.sample)
        command = [sys.executable, "-c", PATHS, name, *map(str, numbers)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,20000,40000")
    parser.add_argument("--networks", default="paper,photos")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("-k", type=int, default=48)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sample", type=int, default=8192, help="rows that the bare network is timed on")
    parser.add_argument("--hops", type=int, help="measure so many hops instead")
    parser.add_argument("--paths", action="store_true", help="measure the two paths of LAttDBA instead")
    options = parser.parse_args()
    if options.paths:
        print(json.dumps([compare_paths(int(rows), options) for rows in options.sizes.split(",")], indent=2))
        return
    if options.hops:
        print(json.dumps(compare_hops(options), indent=2))
        return
    results = []
    for kind in options.networks.split(","):
        for rows in map(int, options.sizes.split(",")):
            results.append(compare(kind, rows, options))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
