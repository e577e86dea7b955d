"""The kNN graph beside `faiss.IndexFlatIP` searching itself: same rows, same k, same threads, one run, as ratios.

    python -m benchmarks.knn_graph                 # the full table, some twenty minutes on two quiet cores
    python -m benchmarks.knn_graph --sizes 5000x2048,20000x128 --rounds 1 --ray
    python -m benchmarks.knn_graph --sizes 50000x128 --k 64,256 --clock cpu --no-ray    # on a machine with other work
    python -m benchmarks.knn_graph --sizes 50000x2048 --jobs-only    # only two Ray workers beside one process
    python -m benchmarks.knn_graph --search 1000 --sizes 1000000x128 --k 100     # a search of 1,000 queries instead
    python -m benchmarks.knn_graph --rows-from rows.npy --k 64,256 --no-ray    # real rows instead of random ones

Every measurement is a process of its own that loads the rows and runs twice; the second run counts (the first also
pays for memory that was never touched before, a second and more on some virtual machines). Contenders take turns, so
that a noisy neighbour disturbs them alike. Two Ray workers are compared with the same job in one process: both are
fresh, read a stored feature set and publish its graph; the clock starts when their packages are imported.
`--clock cpu` counts seconds of processor time instead of the wall's, which other processes disturb less. Bare products
are those of half the matrix by the faster of numpy and torch. Our kind of products is measured before the clock starts,
as `lattqe neighbors` does, and named. `parts_seconds` are wall seconds summed over threads, whatever the clock;
`after_products_seconds` is what choosing, scoring and merging the lists takes of them, with several k also as a ratio
to that of the first.
Goals: 1.9 times faster than faiss at 50,000 x 2048; at 128-D 1.5 times for k = 64 and 1.3 times for k = 256; 0.95 of
the bare products at 50,000 x 2048; a search of 1,000 queries in 1,000,000 x 128 float16 as fast as faiss flat, whose
rows are float32 (both indexes are there before the clock starts); no more memory than the vectors + 1 GiB; through Ray
with two workers at most 5-10 % over one process with two threads.
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

SIZES = "20000x2048,50000x2048,50000x128"
AFTER_PRODUCTS = ("selection", "scoring", "merging", "searching again")
ONE_FAISS = """
import faiss
x = np.load(path)
faiss.omp_set_num_threads(threads)
index = faiss.IndexFlatIP(x.shape[1])
for _ in range(2):
    index.reset()
    start = clock()
    index.add(x)
    index.search(x, k)
"""
ONE_OURS = """
import torch
from lattqe.search import knn_graph
from lattqe.search.graph import fastest_kind, sample_size
from lattqe.search.rows import Clock
x = np.load(path)
torch.set_num_threads(threads)
size = sample_size(x.shape[1])
sample = x[:: max(len(x) // size, 1)][:size]
kind = fastest_kind(sample, k, len(x), seconds=0.5 if len(x) > len(sample) else 0.0)[0]
for _ in range(2):
    parts = Clock()
    start = clock()
    knn_graph(x, k, clock=parts, kind=kind)
more = {"kind": kind, "parts": dict(parts.seconds)}
"""
SEARCH_FAISS = """
import faiss
x, queries = np.load(path), int(sys.argv[5])
faiss.omp_set_num_threads(threads)
index = faiss.IndexFlatIP(x.shape[1])
index.add(x)
xq = x[:: max(len(x) // queries, 1)][:queries].copy()
for _ in range(2):
    start = clock()
    index.search(xq, k)
"""
SEARCH_OURS = """
import torch
from lattqe.search import FlatIndex
x, queries = np.load(path), int(sys.argv[5])
torch.set_num_threads(threads)
index = FlatIndex(x.astype(np.float16))
xq = x[:: max(len(x) // queries, 1)][:queries].astype(np.float16)
for _ in range(2):
    start = clock()
    index.search(xq, k)
"""
ONE_JOB = """
import tempfile, torch
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet
torch.set_num_threads(threads)
with tempfile.TemporaryDirectory() as folder:
    start = clock()
    publish_graph(FeatureSet.open(path), k, folder + "/graph")
"""
ONE_GEMM = """
from threadpoolctl import threadpool_limits
import torch
torch.set_num_threads(threads)
x = np.load(path)
best = None
with threadpool_limits(threads):
    step = 2048
    out = np.empty((step, step), dtype=np.float32)
    for multiply in (lambda a, b, to: np.matmul(a, b.T, out=to),
                     lambda a, b, to: torch.mm(torch.from_numpy(a), torch.from_numpy(b).T, out=torch.from_numpy(to))):
        multiply(x[:256], x[:256], np.empty((256, 256), dtype=np.float32))
        start = clock()
        for i in range(0, len(x), step):
            for j in range(i, len(x), step):
                a, b = x[i:i + step], x[j:j + step]
                multiply(a, b, out.reshape(-1)[:len(a) * len(b)].reshape(len(a), len(b)))
        best = clock() - start if best is None else min(best, clock() - start)
start = clock() - best
"""
FRAME = """
import json, resource, sys, time
import numpy as np
path, k, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
clock = time.process_time if sys.argv[4] == "cpu" else time.perf_counter
more = {{}}
{body}
seconds = clock() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"seconds": seconds, "peak_bytes": peak}} | more))
"""


def measure(body: str, path: Path, k: int, threads: int, clock: str, queries: int = 0) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", FRAME.format(body=body), str(path), str(k), str(threads), clock, str(queries)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def measure_ray(features: Path, k: int, workers: int) -> dict[str, float]:
    """Time the job from when its workers are up; their start (importing torch) does not grow with the rows."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "jobs.neighbors",
            str(features),
            "-k",
            str(k),
            "--to",
            f"{folder}/graph",
            "--workers",
            str(workers),
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    return {"seconds": facts["seconds_after_start"], "peak_bytes": facts["peak_worker_bytes"]}


def make_rows(rows: int, dim: int, folder: Path, ray: bool, source: Path | None = None) -> tuple[Path, Path]:
    """Random unit vectors, or those of an .npy file, normalised, as .npy, float32, and as a feature set."""
    if source is None:
        x = np.random.default_rng(0).standard_normal((rows, dim), dtype=np.float32)
    else:
        x = np.load(source).astype(np.float32)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    array, features = folder / f"{rows}x{dim}.npy", folder / f"{rows}x{dim}"
    np.save(array, x)
    if ray and not features.exists():
        from lattqe.store import FeatureWriter

        with FeatureWriter(str(features), dim, dtype="float32") as writer:
            writer.append(x, [str(row) for row in range(rows)])
    return array, features


def compare(rows: int, dim: int, k: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    array, features = make_rows(rows, dim, folder, options.ray, options.rows_from)
    kernels = {} if options.jobs_only else {"faiss": ONE_FAISS, "lattqe": ONE_OURS, "gemm": ONE_GEMM}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kernels}
    if options.ray:
        runs |= {"job": [], "ray": []}
    for _ in range(options.rounds):
        for name, body in kernels.items():
            runs[name].append(measure(body, array, k, options.threads, options.clock))
        if options.ray:
            runs["job"].append(measure(ONE_JOB, features, k, options.threads, "wall"))
            runs["ray"].append(measure_ray(features, k, options.threads))
    array.unlink()
    seconds = {name: statistics.median(run["seconds"] for run in results) for name, results in runs.items()}
    result: dict[str, Any] = {
        "rows": rows,
        "dim": dim,
        "k": k,
        "clock": options.clock,
        "threads": options.threads,
        "rounds": options.rounds,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }
    if kernels:
        peak = max(run["peak_bytes"] for run in runs["lattqe"])
        result["speedup_over_faiss"] = round(seconds["faiss"] / seconds["lattqe"], 2)
        result["of_bare_products"] = round(seconds["gemm"] / seconds["lattqe"], 2)
        result["memory_beyond_vectors_mib"] = round((peak - 4 * rows * dim) / 2**20)
        result["kinds"] = sorted({run["kind"] for run in runs["lattqe"]})
        parts = [run["parts"] for run in runs["lattqe"]]
        names = sorted({name for each in parts for name in each})
        median = {name: statistics.median(each.get(name, 0.0) for each in parts) for name in names}
        result["parts_seconds"] = {name: round(value, 2) for name, value in median.items()}
        result["after_products_seconds"] = float(f"{sum(median.get(name, 0.0) for name in AFTER_PRODUCTS):.3g}")
    if options.ray:
        result["ray_over_one_process"] = round(seconds["ray"] / seconds["job"], 2)
        if kernels:
            result["ray_over_warm_kernel"] = round(seconds["ray"] / seconds["lattqe"], 2)
        result["worker_peak_mib"] = round(max(run["peak_bytes"] for run in runs["ray"]) / 2**20)
    return result


def compare_search(rows: int, dim: int, k: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One search of some queries, rows of the set themselves, in turns."""
    array, _ = make_rows(rows, dim, folder, ray=False, source=options.rows_from)
    bodies = {"faiss": SEARCH_FAISS, "lattqe": SEARCH_OURS}
    runs: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(options.rounds):
        for name, body in bodies.items():
            done = measure(body, array, k, options.threads, options.clock, options.search)
            runs[name].append(done["seconds"])
    array.unlink()
    seconds = {name: statistics.median(each) for name, each in runs.items()}
    return {
        "search": options.search,
        "rows": rows,
        "dim": dim,
        "k": k,
        "clock": options.clock,
        "threads": options.threads,
        "rounds": options.rounds,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "speedup_over_faiss": round(seconds["faiss"] / seconds["lattqe"], 2),
    }


def sizes(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Rows and columns of each set that is measured."""
    if options.rows_from is None:
        return [tuple(map(int, size.split("x"))) for size in (options.sizes or SIZES).split(",")]
    return [np.load(options.rows_from, mmap_mode="r").shape]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", help=f"ROWSxCOLUMNS, one or several, with commas; default {SIZES}")
    parser.add_argument("--rows-from", type=Path, help="an .npy file (rows, columns) to measure instead of random rows")
    parser.add_argument("--k", default="64", help="one or several, with commas")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ray", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--jobs-only", action="store_true", help="compare only the job in one process and on Ray")
    parser.add_argument("--search", type=int, default=0, help="search so many queries in the rows instead")
    options = parser.parse_args()
    if options.jobs_only and not options.ray:
        parser.error("--jobs-only compares with Ray: leave out --no-ray")
    if options.rows_from is not None and options.sizes is not None:
        parser.error("--rows-from has a size of its own: leave out --sizes")
    one = compare_search if options.search else compare
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for rows, dim in sizes(options):
            first = len(results)
            for k in map(int, options.k.split(",")):
                results.append(one(rows, dim, k, options, Path(folder)))
                if len(results) > first + 1 and results[first].get("after_products_seconds"):
                    ratio = results[-1]["after_products_seconds"] / results[first]["after_products_seconds"]
                    results[-1]["after_products_over_first_k"] = round(ratio, 2)
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
