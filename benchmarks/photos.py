"""The photographs from one command: cut the sets, train the preset, test it beside its rivals, leave sets out.

    python benchmarks/photos.py --to photos-run                    # train on all four, then look at test
    python benchmarks/photos.py --to photos-run --leave-out        # also train on three and test on the fourth

Everything is chosen on the val splits; the rivals are tuned on test, which flatters them.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lattqe import augment, expand
from lattqe.datasets.labelled import PHOTO_SETS, load_photos
from lattqe.expansion import create
from lattqe.store import FeatureWriter, load_model
from lattqe.training.validation import ValidationSet, ranking_index

PROJECT = Path(__file__).resolve().parent.parent
NQE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def write_features(folder: Path, name: str, vectors: np.ndarray, ids: list[str], labels: np.ndarray) -> str:
    """A labelled feature set, unless it is there already."""
    writer = FeatureWriter(str(folder / name), vectors.shape[1], "float32", labels=True, config={"photos": name})
    if writer.finished is None:
        with writer:
            writer.append(vectors, ids, labels)
    return str(folder / name)


def cut(data: Path, folder: Path, columns: int) -> dict[str, dict[str, str]]:
    """Train sets, and databases and queries of val, as feature sets: {set: {role: uri}}."""
    found: dict[str, dict[str, str]] = {}
    for name in PHOTO_SETS:
        train, val = (load_photos(name, split, data, columns=columns) for split in ("train", "val"))
        found[name] = {
            "train": write_features(folder, f"{name}-train", train.xb, train.ids, train.labels),
            "val": write_features(folder, name, val.xb, val.ids, val.labels),
            "queries": write_features(folder, f"{name}-queries", val.xq, val.query_ids, val.query_labels),
        }
    return found


def train(sets: dict[str, dict[str, str]], names: list[str], to: Path, options: argparse.Namespace) -> float:
    """`lattqe train` on the sets named, validated on the val splits of the same; seconds of the command."""
    words = [sets[name]["train"] for name in names]
    words += [word for name in names for word in ("--val", sets[name]["val"], "--queries", sets[name]["queries"])]
    settings = [word for setting in ["shared_labels=true", *options.set] for word in ("--set", setting)]
    started = time.monotonic()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "jobs.train",
            *words,
            "--preset",
            options.preset,
            "--to",
            str(to),
            "--threads",
            str(options.threads),
            *settings,
        ],
        check=True,
        cwd=PROJECT,
    )
    return time.monotonic() - started


def load_test(name: str, data: Path, columns: int, distractors: bool = False) -> ValidationSet:
    """A test split; with distractors, the other sets' databases are appended, relevant to no query."""
    split = load_photos(name, "test", data, columns=columns)
    xb, labels = [split.xb], [split.labels]
    if distractors:
        others = [load_photos(other, "test", data, columns=columns) for other in PHOTO_SETS if other != name]
        xb += [other.xb for other in others]
        labels += [np.full(len(other.xb), -1, dtype=np.int32) for other in others]
    return ValidationSet(name, np.concatenate(xb), np.concatenate(labels), split.xq, split.query_labels)


def rivals(dba: bool = False) -> Iterator[tuple[str, dict[str, Any], int]]:
    """The settings among which each rival may choose on test."""
    for k in (4, 8, 12, 16, 24) if dba else (2, 4, 6, 8, 12, 16, 24):
        yield "aqe", {}, k
        yield "aqewd", {}, k
    for k, alpha in itertools.product((8, 16) if dba else (6, 10, 16, 36, 72), (1.0, 3.0)):
        yield "alphaqe", {"alpha": alpha}, k
    if dba:
        return
    yield "aqewd", {}, 10
    for k, C, negatives in itertools.product((4, 8, 12), (0.1, 1.0), (5, 50)):
        yield "dqe", {"C": C, "negatives": negatives}, k


def best_rivals(sets: list[ValidationSet]) -> dict[str, Any]:
    """Each rival's best setting by the mean over the test sets."""
    best: dict[str, Any] = {}
    for name, params, k in rivals():
        method = create(name, **params)
        values = [one.mean_ap(expand(one.xq, one.xb, method, k), one.index) for one in sets]
        if name not in best or np.mean(values) > best[name]["mean"]:
            best[name] = {"mean": float(np.mean(values)), "sets": values, "k": k, **params}
    return best


def best_rivals_dba(sets: list[ValidationSet]) -> dict[str, Any]:
    """Each rival's best (nDBA, nQE) by the mean over the test sets, with its alpha the same on both sides."""
    best: dict[str, Any] = {}
    for name, params, m in rivals(dba=True):
        method = create(name, **params)
        databases = [augment(one.xb, method, m) for one in sets]
        for k in (4, 8, 12, 16):
            values = [one.mean_ap(expand(one.xq, xb, method, k), ranking_index(xb)) for one, xb in zip(sets, databases)]
            if name not in best or np.mean(values) > best[name]["mean"]:
                best[name] = {"mean": float(np.mean(values)), "sets": values, "ndba": m, "nqe": k, **params}
    return best


def learned(model: str, sets: list[ValidationSet], ks: tuple[int, ...]) -> dict[str, Any]:
    """LAttQE on each set for each number of neighbors."""
    method = create("lattqe", model=model, device="cpu")
    result: dict[str, Any] = {}
    for k in ks:
        values = [one.mean_ap(expand(one.xq, one.xb, method, k), one.index) for one in sets]
        result[str(k)] = {"mean": float(np.mean(values)), "sets": values}
    return result


def learned_dba(model: str, sets: list[ValidationSet], m: int, k: int) -> dict[str, Any]:
    """LAttDBA with m neighbors, and LAttQE with k on top of it."""
    rows, queries = (create("lattqe", model=model, dba=dba, device="cpu") for dba in (True, False))
    values = []
    for one in sets:
        xb = augment(one.xb, rows, m)
        xq = expand(one.xq, xb, queries, k) if k else one.xq
        values.append(one.mean_ap(xq, ranking_index(xb)))
    return {"mean": float(np.mean(values)), "sets": values, "ndba": m, "nqe": k}


def show(title: str, rows: dict[str, Any]) -> None:
    """Print one table: the mean, then each set."""
    print(f"\n{title}: mean | {' '.join(PHOTO_SETS)}")
    for name, found in rows.items():
        setting = ", ".join(f"{key} {value}" for key, value in found.items() if key not in ("mean", "sets"))
        print(f"  {name:12s} {found['mean']:6.2f} | " + " ".join(f"{v:6.2f}" for v in found["sets"]) + f"   {setting}")
    sys.stdout.flush()


def look_at_test(model: str, data: Path, columns: int, results: Path) -> dict[str, Any]:
    """All that is measured on test; sections that an interrupted look has written are not measured again."""
    sets = [load_test(name, data, columns) for name in PHOTO_SETS]
    crowded = [load_test(name, data, columns, distractors=True) for name in PHOTO_SETS]
    metrics = load_model(model)[2]
    n_qe, n_dba, n_qe_dba = (metrics[name] for name in ("nqe", "ndba", "nqe_with_dba"))
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "lattqe": lambda: learned(model, sets, NQE),
        "dba": lambda: {
            "lattdba": learned_dba(model, sets, n_dba, 0),
            "lattdba+qe": learned_dba(model, sets, n_dba, n_qe_dba),
        },
        "rivals": lambda: {"none": none(sets), **best_rivals(sets), "(rocchio)": rocchio(sets)},
        "aqe": lambda: sweep("aqe", sets),
        "rivals with dba": lambda: best_rivals_dba(sets),
        "distractors": lambda: {
            "none": none(crowded),
            "lattqe": learned(model, crowded, (n_qe,))[str(n_qe)],
            **best_rivals(crowded),
        },
        "distractors, dba": lambda: {
            "lattdba+qe": learned_dba(model, crowded, n_dba, n_qe_dba),
            **best_rivals_dba(crowded),
        },
    }
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for title, measure in sections.items():
        if title not in found:
            found[title] = measure()
            results.write_text(json.dumps(found, indent=1))
        show(title, found[title])
    return found


def none(sets: list[ValidationSet]) -> dict[str, Any]:
    """Without expansion."""
    values = [one.mean_ap(one.xq, one.index) for one in sets]
    return {"mean": float(np.mean(values)), "sets": values}


def rocchio(sets: list[ValidationSet]) -> dict[str, Any]:
    """A control, no rival: AQEwD 16 minus a fixed share of the mean of 256 neighbors, the share tuned on test.

    What the background is worth without any learning.
    """
    method = create("aqewd")
    best: dict[str, Any] = {"mean": 0.0}
    for beta in (0.4, 0.6, 0.8, 1.0):
        values = []
        for one in sets:
            near = one.nearest(one.index, 256)[1]
            xq = expand(one.xq, one.xb, method, 16) - beta * one.xb[near].mean(1)
            values.append(one.mean_ap(xq / np.linalg.norm(xq, axis=1, keepdims=True), one.index))
        if np.mean(values) > best["mean"]:
            best = {"mean": float(np.mean(values)), "sets": values, "beta": beta}
    return best


def sweep(name: str, sets: list[ValidationSet]) -> dict[str, Any]:
    """A rival over the same numbers of neighbors as LAttQE."""
    method = create(name)
    result: dict[str, Any] = {}
    for k in NQE:
        values = [one.mean_ap(expand(one.xq, one.xb, method, k), one.index) for one in sets]
        result[str(k)] = {"mean": float(np.mean(values)), "sets": values}
    return result


def leave_out(sets: dict[str, dict[str, str]], data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train on three sets, test on the fourth, beside the best small-k rival tuned on that fourth set's test."""
    result = {}
    for name in PHOTO_SETS:
        to = options.to / f"without-{name}"
        train(sets, [other for other in PHOTO_SETS if other != name], to, options)
        one = [load_test(name, data, options.columns)]
        found, best = learned(str(to), one, (16, 32, 64, 128)), best_rivals(one)
        result[name] = {
            "chosen": load_model(str(to))[2]["nqe"],
            "lattqe": {k: v["mean"] for k, v in found.items()},
            "rivals": {rival: (v["mean"], v["k"]) for rival, v in best.items()},
        }
        print(name, json.dumps(result[name]), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("LATTQE_DATA", PROJECT.parent / "shared/data"))
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--preset", default="photos")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--no-test", action="store_true", help="train only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = options.data / "photos"
    sets = cut(data, options.to / "features", options.columns)
    seconds = train(sets, list(PHOTO_SETS), options.to / "model", options)
    if options.no_test:
        return
    print(f"trained in {seconds:.0f} s")
    look_at_test(str(options.to / "model"), data, options.columns, options.to / "results.json")
    if options.leave_out:
        (options.to / "leave_out.json").write_text(json.dumps(leave_out(sets, data, options), indent=1))


if __name__ == "__main__":
    main()
