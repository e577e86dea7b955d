"""What growing an index costs beside making it anew, counted: products of two vectors, and rows through the network.

    python -m benchmarks.append                     # 20,000 rows, k = 48: some three minutes on two cores
    python -m benchmarks.append --rows 5000 --dim 32 --workers 2       # append on Ray

The real commands: `lattqe augment` once, then `lattqe append` with 20 rows, with 200 rows, and with 20 rows leaving;
each result is held against `lattqe neighbors` and `lattqe augment` of the joined set. Goals: at most 1.1 times the
touched share of the cost from scratch, plus the search for each new row (and of each row whose list lost a member; on
workers new rows meet the old ones twice); the graph equal row number for row number, the vectors (stored in float32
here) within 1e-6.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph


def call(verb: str, *arguments: object) -> dict[str, Any]:
    """Run one of our commands with --json: its summary, and the seconds of the whole process."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", f"jobs.{verb}", *map(str, arguments), "--json"], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"error: {verb} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout) | {"process_seconds": time.perf_counter() - started}


def write(uri: Path, x: np.ndarray, first: int = 0) -> None:
    with FeatureWriter(str(uri), x.shape[1], dtype="float32") as writer:
        writer.append(x, [f"r{first + i}" for i in range(len(x))])


def make_world(folder: Path, options: argparse.Namespace) -> np.ndarray:
    """Clustered rows, a network of the paper's kind, the first graph and index; returns rows and newcomers."""
    import torch

    from lattqe.model import LAttQE, LAttQEConfig

    torch.manual_seed(0)
    config = LAttQEConfig(dim=options.dim, heads=4, max_k=options.k, positional_start="small")
    LAttQE(config).save(str(folder / "model"))
    rng = np.random.default_rng(0)
    count = options.rows + 200
    centres = rng.standard_normal((options.rows // 50, options.dim))
    x = centres[rng.integers(0, len(centres), count)] + 0.8 * rng.standard_normal((count, options.dim))
    write(folder / "features", x[: options.rows])
    make_index(folder / "features", folder / "index", folder, options.k)
    return x


def make_index(features: Path, to: Path, folder: Path, k: int) -> dict[str, Any]:
    call("neighbors", features, "-k", k, "--to", f"{to}-graph")
    return call("augment", features, "--model", folder / "model", "-k", k, "--neighbors", f"{to}-graph", "--to", to)


def grow(folder: Path, x: np.ndarray, new: int, removed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Append or remove, make the same from scratch, and compare."""
    name = f"{new}-{removed}"
    arguments: list[object] = []
    if new:
        write(folder / f"new-{name}", x[options.rows : options.rows + new], options.rows)
        arguments.append(folder / f"new-{name}")
    if removed:
        gone = np.linspace(0, options.rows - 1, removed).astype(int)
        (folder / f"gone-{name}").write_text("".join(f"r{row}\n" for row in gone))
        arguments += ["--remove", folder / f"gone-{name}"]
    grown, scratch = folder / f"grown-{name}", folder / f"scratch-{name}"
    on_ray = ["--workers", options.workers] if options.workers else []
    told = call("append", folder / "index", *arguments, "--to", grown, *on_ray)
    make_index(grown / "originals", scratch, folder, options.k)
    graphs = [NeighborGraph.open(uri).read() for uri in (f"{grown}/neighbors", f"{scratch}-graph")]
    vectors = [FeatureSet.open(str(uri)).read() for uri in (grown, scratch)]
    rows, touched = told["rows"], told["rows_touched"]
    allowed = (
        1.1 * touched / rows * told["products_from_scratch"]
        + ((2 if options.workers else 1) * told["rows_joined"] + told["rows_searched_again"]) * rows
    )
    counted = told["products"] + told["pairs_scored_again"]
    deviation = float(np.abs(vectors[0] - vectors[1]).max())
    return {
        "joined": new,
        "removed": removed,
        "touched": touched,
        "touched_share": round(touched / rows, 4),
        "products": counted,
        "products_allowed": round(allowed),
        "products_of_scratch": round(counted / told["products_from_scratch"], 4),
        "network_rows": told["expanded_rows"],
        "network_rows_allowed": round(1.1 * touched),
        "graph_equal": bool(all((a == b).all() for a, b in zip(*graphs))),
        "largest_deviation": deviation,
        "met": counted <= allowed
        and told["expanded_rows"] <= 1.1 * touched
        and deviation <= 1e-6
        and bool((graphs[0][0] == graphs[1][0]).all()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("-k", type=int, default=48)
    parser.add_argument("--workers", type=int, default=0, help="Ray workers of append; 0: as the command chooses")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x = make_world(folder, options)
        results = []
        for new, removed in ((20, 0), (200, 0), (0, 20)):
            results.append(grow(folder, x, new, removed, options))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps(results, indent=2))
    raise SystemExit(0 if all(result["met"] for result in results) else 1)


if __name__ == "__main__":
    main()
