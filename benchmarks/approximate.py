"""An approximate graph beside faiss's IVF and the exact graph: same rows, same k, same threads, one run, as ratios.

    python -m benchmarks.approximate --photos shared/data/photos --sizes 50000x128,100000x128
    python -m benchmarks.approximate --sizes 200000x128 --clock cpu --threads 1     # on a machine with other work

Rows are drawn to look like the photographs where these are given: a point between two photographs of one class, and
noise in proportion to each column's deviation; else they come from the synthetic world. faiss has as many lists as
lattqe has clusters, and the smallest `nprobe` that finds as large a share of the true neighbors of the rows that were
measured as was asked for; searching for that `nprobe` is not counted, training and adding are. With photographs, what
database-side augmentation loses in mAP is measured too: all of them that are no queries are one database.
`--clock cpu` counts seconds of processor time, which other processes disturb less.
Goals at recall 0.95 and 1,000,000 rows: 5 times faster than exact, no slower than faiss.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

import lattqe
from lattqe.datasets.labelled import PHOTO_SETS, load_photos
from lattqe.datasets.synthetic import SyntheticWorld
from lattqe.expansion import create
from lattqe.expansion.rows import augment_rows
from lattqe.search import FlatIndex, knn_graph, topk
from lattqe.search.approximate import Recall, approximate_graph, cluster_count, shares_found

NOISE = 0.4  # beside a photograph of length 1: the first neighbors are then as near as those of photographs
MEASURED = 1000
BLOCK = 4096


def photographs(folder: Path, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All photographs that are no queries and their labels; the queries of the test splits and theirs."""
    splits = [
        load_photos(name, split, folder, columns=dim) for name in PHOTO_SETS for split in ("train", "val", "test")
    ]
    test = [one for one in splits if one.split == "test"]
    return (
        np.concatenate([one.xb for one in splits]),
        np.concatenate([one.labels for one in splits]),
        np.concatenate([one.xq for one in test]),
        np.concatenate([one.query_labels for one in test]),
    )


def rows_like(x: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """(count, D) float32 unit rows that look like x (n, D)."""
    rng, order = np.random.default_rng(0), np.argsort(labels, kind="stable")
    x, labels = x[order], labels[order]
    first, last = np.searchsorted(labels, labels, "left"), np.searchsorted(labels, labels, "right")
    one = rng.integers(0, len(x), count)
    other = first[one] + (rng.random(count) * (last - first)[one]).astype(np.int64)
    share = rng.random((count, 1), dtype=np.float32)
    rows = share * x[one] + (1 - share) * x[other]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows += NOISE * x.std(axis=0) * rng.standard_normal(rows.shape, dtype=np.float32)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def make_rows(photos: Path | None, count: int, dim: int) -> np.ndarray:
    if photos is not None:
        return rows_like(*photographs(photos, dim)[:2], count)
    return SyntheticWorld(dim=dim, distractors=count).split("distractors").vectors(0, count)


def similarities(x: np.ndarray) -> list[float]:
    """Mean similarity of the 1st, 10th and 64th neighbor."""
    rows = np.random.default_rng(1).choice(len(x), 300, replace=False)
    return [round(float(value), 3) for value in topk(x[rows], x, 64, exclude=rows)[0].mean(axis=0)[[0, 9, 63]]]


def ivf(
    x: np.ndarray, k: int, lists: int, wanted: float, clock: Callable[[], float], searched: int | None = None
) -> dict[str, Any]:
    """The IVF of faiss searching itself, with the `nprobe` that has the recall wanted.

    searched: so many random rows are searched, and the time of that is scaled to all.
    """
    started = clock()
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(x.shape[1]), x.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    index.add(x)
    made = clock() - started
    rows = np.sort(np.random.default_rng(2).choice(len(x), MEASURED, replace=False))
    truth = topk(x[rows], x, k, exclude=rows)[1]
    for probes in range(1, lists + 1):
        index.nprobe = probes
        found = index.search(x[rows], k + 1)[1]
        found[found == rows[:, None]] = -1
        recall = Recall.of(shares_found(found, truth))
        if recall.mean >= wanted:
            break
    some = np.random.default_rng(4).permutation(len(x))[:searched] if searched else np.arange(len(x))
    started = clock()
    for start in range(0, len(some), 65_536):
        index.search(x[some[start : start + 65_536]], k + 1)
    spent = made + (clock() - started) * len(x) / len(some)
    return {"seconds": spent, "nprobe": probes, "recall": recall.mean, "lists": lists, "searched": len(some)}


def compare(count: int, dim: int, options: argparse.Namespace) -> dict[str, Any]:
    """The three graphs of one size."""
    x, k = make_rows(options.photos, count, dim), options.k
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    started = clock()
    ids, _, how = approximate_graph(x, k, options.recall)
    seconds = {"approximate": clock() - started}
    other = ivf(x, k, cluster_count(count, k), options.recall, clock, options.ivf_rows)
    seconds["faiss IVF"] = other["seconds"]
    result: dict[str, Any] = {"rows": count, "dim": dim, "k": k, "threads": options.threads, "clock": options.clock}
    result |= {"similarities": similarities(x), "approximation": how.facts(), "ivf": other}
    if options.exact:
        started = clock()
        truth = knn_graph(x, k)[0]
        seconds["exact"] = clock() - started
        result["recall_of_all_rows"] = round(float(shares_found(ids, truth).mean()), 4)
        result["faster_than_exact"] = round(seconds["exact"] / seconds["approximate"], 2)
    result["faster_than_ivf"] = round(seconds["faiss IVF"] / seconds["approximate"], 2)
    return result | {"seconds": {name: round(spent, 2) for name, spent in seconds.items()}}


def augmented(x: np.ndarray, ids: np.ndarray, scores: np.ndarray, method: str, k: int) -> np.ndarray:
    """Database-side augmentation from given lists."""
    theta, index = create(method), FlatIndex(x)
    blocks = [np.arange(start, min(start + BLOCK, len(x))) for start in range(0, len(x), BLOCK)]
    return np.concatenate([augment_rows(index, rows, scores[rows], ids[rows], theta, k).vectors for rows in blocks])


def losses(options: argparse.Namespace) -> dict[str, Any]:
    """MAP of photographs after augmentation from the exact and from the approximate graph."""
    x, labels, xq, query_labels = photographs(options.photos, 128)
    some = np.random.default_rng(3).permutation(len(xq))[: options.queries]
    xq, query_labels = xq[some], query_labels[some]
    exact = knn_graph(x, options.k)
    *near, how = approximate_graph(x, options.k, options.recall)

    def score(rows: np.ndarray) -> float:
        order = np.argsort(-(xq @ rows.T), axis=1, kind="stable")
        found = lattqe.evaluate(order, labels=labels, query_labels=query_labels)
        return round(100 * float(next(iter(found.values())).mean_ap), 2)

    result: dict[str, Any] = {"rows": len(x), "queries": len(xq), "approximation": how.facts(), "none": score(x)}
    for method, k in (word.split(":") for word in options.methods.split(",")):
        pair = {name: score(augmented(x, *lists, method, int(k))) for name, lists in (("exact", exact), ("near", near))}
        result[f"{method}, k = {k}"] = pair | {"lost": round(pair["exact"] - pair["near"], 2)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="50000x128", help="one or several, with commas; empty for none")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--photos", type=Path, help="the folder of the photographs, if there are any")
    parser.add_argument("--methods", default="aqewd:6,aqewd:24", help="METHOD:K of the augmentations, with commas")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--map", action=argparse.BooleanOptionalAction, default=True, help="what mAP is lost")
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True, help="the exact graph too")
    parser.add_argument("--ivf-rows", type=int, help="rows that faiss searches, its time scaled to all; default: all")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    results = []
    for size in options.sizes.split(",") if options.sizes else []:
        rows, dim = map(int, size.split("x"))
        results.append(compare(rows, dim, options))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    if options.photos is not None and options.map:
        results.append({"augmentation": losses(options)})
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
