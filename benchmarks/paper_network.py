"""What a network has learned, beside plain averaging: mAP at each nQE, its weights, and what its loss still sees.

    python benchmarks/paper_network.py MODEL --data DATA --to results              # the val sets of DATA
    python benchmarks/paper_network.py MODEL --data DATA --split test --to results

DATA is what `lattqe dataset photos` makes. mAP and weights come from `lattqe benchmark`; the share of hard negatives
within the margin of the paper's contrastive loss (0.1) comes from the expanded queries of `lattqe.expand`: beyond it a
negative has no gradient.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

import lattqe
from lattqe.datasets.labelled import PHOTO_SETS

NQE = (1, 2, 4, 8, 16, 32, 48, 64)
MARGIN, HARD = 0.1, 5  # the paper's: the distance, and the number of negatives of each query
BANDS = ((1, 1), (2, 4), (5, 8), (9, 16), (17, 32), (33, 64))


def database(data: Path, name: str, split: str) -> str:
    return str(data / f"{name}-{split}")


def measure(model: str, data: Path, split: str, to: Path) -> dict:
    """`lattqe benchmark` of the model and of AQE at every nQE; its results.json."""
    lines = ['title = "A network beside averaging"', f"nqe_sweep = {list(NQE)}", "bootstrap = 100"]
    for name in PHOTO_SETS:
        uri = database(data, name, split)
        lines += ["[[dataset]]", f'name = "{name}"', f'database = "{uri}"', f'queries = "{uri}-queries"']
    for method in ('"aqe"', f'"lattqe"\nmodel = "{model}"'):
        lines += ["[[method]]", f"method = {method}", f"nqe = {list(NQE)}", 'choose = "test"']
    to.mkdir(parents=True, exist_ok=True)
    (to / "run.toml").write_text("\n".join(lines) + "\n")
    subprocess.run(
        [sys.executable, "-m", "jobs.cli", "benchmark", str(to / "run.toml"), "--to", str(to / "results")], check=True
    )
    return json.loads((to / "results" / "results.json").read_text())


def within_margin(model: str, data: Path, split: str, k: int) -> tuple[float, float]:
    """Of the hardest negatives of all expanded queries: the share nearer than the margin, and the median distance."""
    distances = []
    for name in PHOTO_SETS:
        rows, queries = lattqe.load(database(data, name, split)), lattqe.load(f"{database(data, name, split)}-queries")
        scores = lattqe.expand(queries.x, rows.x, model=model, k=k) @ rows.x.T
        scores[queries.labels[:, None] == rows.labels] = -1
        hard = -np.sort(-scores, axis=1)[:, :HARD]
        distances.append(np.sqrt(np.maximum(2 - 2 * hard, 0)).ravel())
    found = np.concatenate(distances)
    return float((found < MARGIN).mean()), float(np.median(found))


def show(results: dict) -> None:
    """The curves over nQE, each the mean of the sets; and the weights in bands of ranks."""
    curves, weights = results["figure3"], results["weights"]
    print(f"no expansion {curves['no_qe']:.2f}\n{'nQE':<36}" + "".join(f"{k:<8}" for k in NQE))
    for line in curves["series"]:
        print(f"{line['label']:<36}" + "".join(f"{value:<8.2f}" for value in line["map"]))
    print(f"weights on {weights['dataset']}, of {weights['k']} neighbors")
    print(f"{'ranks':<36}" + "".join(f"{f'{first}-{last}':<8}" for first, last in BANDS))
    for profile in weights["profiles"]:
        for kind in ("relevant", "irrelevant"):
            count, mean = np.array(profile[kind]["count"]), np.array(profile[kind]["mean"])
            bands = [
                (mean * count)[first - 1 : last].sum() / max(count[first - 1 : last].sum(), 1) for first, last in BANDS
            ]
            print(f"{profile['label'] + ', ' + kind:<36}" + "".join(f"{value:<8.3f}" for value in bands))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", choices=("val", "test"), default="val")
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    model, data = str(Path(arguments.model).resolve()), arguments.data.resolve()
    show(measure(model, data, arguments.split, arguments.to))
    for k in (8, 64):
        share, median = within_margin(model, data, arguments.split, k)
        print(f"nQE {k}: of the {HARD} hardest negatives {100 * share:.2f} % are within {MARGIN}; median {median:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
