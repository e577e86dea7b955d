"""The whole pipeline on a million rows: what `python -m benchmarks.million --whole` runs.

The four test databases of the photographs (12,621 rows) and as many distractors as are missing (`distractors.py` says
how they are drawn), 128 columns in float16, on a real S3 server that keeps its data in FOLDER/s3; every stage is the
command that a user types. The real queries search the augmented rows. Run again, the same command goes on: finished
stages are not run again, unfinished ones are continued by their own command. `--kills 3` kills the running command and
its Ray at random moments (drawn by the seed as shares of the processor time that a stage is expected to take at least)
and continues it. Results: FOLDER/measured.json, table.md, distractors.svg and report.html.

`augment` adapts the space and computes the exact graph of the adapted rows. The rivals of the benchmark need a graph of
the rows as they are, exact or (`--approximate RECALL`, a seventh of the time) approximate, which the report then says.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import lattqe
from benchmarks import distractors
from benchmarks.measured import Runner, Stage, table
from lattqe.augmentation.recipe import MOST_HOPPED_AGAIN
from lattqe.datasets.labelled import PHOTO_SETS, load_photos, photos_in
from lattqe.expansion import create
from lattqe.store import FeatureSet, NeighborGraph, open_place

COLUMNS = 128
RESULTS = 1000  # of a query: more than the images of a class
BASE = "s3://test-bucket/million"
MODEL = Path(lattqe.__file__).parent / "models" / "universal"
CHECKED = (("the graph", "features", "graph"), ("the graph of adapted rows", "index/adapted", "index/neighbors"))

# One setting each, for classes of fifty and more images. DQE augments no rows: the negatives of each are its lowest
# rows, a second comparison of all with all.
RIVALS = """
[[method]]
method = "aqe"
nqe = 6
ndba = 8
nqe_with_dba = 4

[[method]]
method = "aqewd"
nqe = 8
ndba = 12
nqe_with_dba = 12

[[method]]
method = "alphaqe"
nqe = 10
alpha = 3
ndba = 24
nqe_with_dba = 16

[[method]]
method = "dqe"
nqe = 4
"""

RUN = f"""title = "The photographs with and without distractors"
bootstrap = 1000
nqe_sweep = [8]
graphs = ["{BASE}/graph", "{BASE}/index/neighbors"]

[[dataset]]
name = "photographs"
database = "{BASE}/database"
queries = "{BASE}/queries"

[[distractors]]
name = "drawn"
features = "{BASE}/distractors"

{RIVALS}
[[method]]
method = "lattqe"
model = "{MODEL}"
"""


def write_inputs(folder: Path, data: Path, rows: int) -> dict[str, Any]:
    """The files that are imported, and the comparison of real rows with distractors; nothing where they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = folder / "compared.json"
    if compared.exists():  # written last
        return json.loads(compared.read_text())
    sets = [load_photos(name, "test", data, columns=COLUMNS) for name in PHOTO_SETS]
    xb, labels = np.concatenate([each.xb for each in sets]), np.concatenate([each.labels for each in sets])
    if rows <= len(xb):
        sys.exit(f"error: --rows {rows:,}: the photographs alone are {len(xb):,}, give more")
    np.save(folder / "database.npy", xb)
    np.save(folder / "database-labels.npy", labels)
    np.save(folder / "queries.npy", np.concatenate([each.xq for each in sets]))
    np.save(folder / "queries-labels.npy", np.concatenate([each.query_labels for each in sets]))
    count = rows - len(xb)
    drawn = np.lib.format.open_memmap(folder / "distractors.npy", "w+", np.float16, (count, COLUMNS))
    classes, done = np.empty(count, np.int32), 0
    for block, numbers in distractors.draw(distractors.donors(data, COLUMNS), count):
        drawn[done : done + len(block)], classes[done : done + len(block)] = block, numbers
        done += len(block)
    drawn.flush()
    np.save(folder / "features-labels.npy", np.concatenate((labels, np.full(count, -1, np.int32))))
    names = {
        "database": [i for each in sets for i in each.ids],
        "queries": [i for each in sets for i in each.query_ids],
    }
    names["distractors"] = [f"distractor_{row:07d}" for row in range(count)]
    names["features"] = names["database"] + names["distractors"]
    for name, ids in names.items():
        (folder / f"{name}-ids.txt").write_text("".join(f"{each}\n" for each in ids))
    found = distractors.compare((xb, labels), (drawn[: len(xb)].astype(np.float32), classes[: len(xb)]))
    distractors.figure(found, folder.parent / "distractors.svg")
    found = distractors.without_drawn(found)
    compared.write_text(json.dumps(found, indent=1))
    return found


def stages(folder: Path, options: argparse.Namespace) -> list[Stage]:
    """The commands in their order. What they are expected to take at least decides where kills fall."""
    rows, real = options.rows, len(np.load(folder / "input" / "database.npy", mmap_mode="r"))
    asked = len(np.load(folder / "input" / "queries.npy", mmap_mode="r"))
    depth = create("lattqe", dba=True).depth(create("lattqe", dba=True).suggested_k(dba=True))
    products = rows * rows * COLUMNS / 60e9  # seconds of a core: 60 GFLOP/s are hardly reached
    workers = ["--workers", str(options.workers)] if options.workers else []

    def imported(name: str, count: int, files: list[str], labelled: bool = True) -> Stage:
        words = ["import", *(f"{folder}/input/{file}.npy" for file in files), "--to", f"{BASE}/{name}"]
        words += ["--ids", f"{folder}/input/{name}-ids.txt"]
        return Stage(f"import {name}", words + ["--labels", f"{folder}/input/{name}-labels.npy"] * labelled, count)

    def search(name: str, database: str, expand: list[str]) -> Stage:
        words = ["search", f"{BASE}/{database}", f"{BASE}/queries", "-k", str(min(RESULTS, rows)), *expand, *workers]
        return Stage(f"search {name}", [*words, "--to", f"{BASE}/{name}"], asked)

    graph = ["neighbors", f"{BASE}/features", "-k", str(depth), "--to", f"{BASE}/graph", *workers]
    graph += ["--block-rows", str(options.block_rows)] if options.block_rows else []
    graph += ["--approximate", "--recall", str(options.approximate)] if options.approximate else []
    graph_seconds = 8 + products / (10 if options.approximate else 1)
    augment = ["augment", f"{BASE}/features", "--to", f"{BASE}/index", *workers]
    benchmark = ["benchmark", f"{folder}/run.toml", "--to", f"{BASE}/benchmark", *workers]
    verify = ["verify", f"{BASE}/index", "--recompute", str(options.check)]
    return [
        imported("database", real, ["database"]),
        imported("queries", asked, ["queries"]),
        imported("distractors", rows - real, ["distractors"], labelled=False),
        imported("features", rows, ["database", "distractors"]),
        Stage("augment", augment, rows, cpu_seconds=12 + products + rows / 2000),
        search("plain", "features", []),
        search("expanded", "index", ["--expand", "lattqe"]),
        Stage("evaluate plain", ["evaluate", f"{BASE}/plain"], asked),
        Stage("evaluate expanded", ["evaluate", f"{BASE}/expanded"], asked),
        Stage("verify index", verify, options.check, json=False),
        Stage("neighbors", graph, rows, cpu_seconds=graph_seconds),
        Stage("benchmark", benchmark, rows, cpu_seconds=15 + rows / 1000),
    ]


def drawn_kills(count: int, seed: int) -> list[tuple[str, float]]:
    """Stages, and shares of their time, at which the running command is killed."""
    rng = np.random.default_rng([seed, 7])
    return [
        (str(rng.choice(("neighbors", "augment", "benchmark"))), float(rng.uniform(0.1, 0.9))) for _ in range(count)
    ]


def run_whole(options: argparse.Namespace, check: Any) -> None:
    """Run the stages that are not finished, check graph and index, write the table; exit code 1: a row is wrong."""
    folder = Path(options.to).absolute()
    with photos_in(options.data) as photos:
        compared = write_inputs(folder / "input", photos, options.rows)
    (folder / "run.toml").write_text(RUN)
    settings = {"rows": options.rows, "workers": options.workers, "kills": options.kills, "seed": options.seed}
    settings |= {"check": options.check} | ({"block_rows": options.block_rows} if options.block_rows else {})
    settings |= {"approximate": options.approximate} if options.approximate else {}
    with Runner(folder, settings, drawn_kills(options.kills, options.seed)) as runner:
        for stage in stages(folder, options):
            runner.run(stage)
        found = runner.found
        for name, rows_of, graph_of in CHECKED:
            if name not in found.setdefault("checked", {}):
                features, graph = FeatureSet.open(f"{BASE}/{rows_of}"), NeighborGraph.open(f"{BASE}/{graph_of}")
                sample = min(options.check, features.rows)
                right, recall = check(features, graph, sample)
                found["checked"][name] = {"rows": sample, "right": right, "recall": recall}
                runner.save()
        (folder / "report.html").write_bytes(open_place(f"{BASE}/benchmark").read("report.html"))
        found["load"] = [round(value, 1) for value in os.getloadavg()]
        found["distractors"] = compared
        runner.save()
    (folder / "table.md").write_text(text := summary(found))
    print(text)
    plain, index = (found["checked"][name] for name, _, _ in CHECKED)
    plain_is_wrong = plain["recall"] < options.approximate if options.approximate else plain["right"] < plain["rows"]
    sys.exit(plain_is_wrong or index["right"] < index["rows"])


def summary(found: dict[str, Any]) -> str:
    """The table, and what was found, as markdown."""
    scores = {
        name: found["stages"][f"evaluate {name}"]["attempts"][-1]["summary"]["label"] for name in ("plain", "expanded")
    }
    kills = [each["done"] for each in found["kills"]]
    hopped = "" if found["settings"]["rows"] <= MOST_HOPPED_AGAIN else " (in the edges; hops were not computed again)"
    lines = [
        *(
            f"{each['rows']:,} random rows of {name} against brute force: {each['right']:,} right, "
            f"{each['recall']:.4f} of their neighbors found"
            for name, each in found["checked"].items()
        ),
        f"the index: `lattqe verify --recompute {found['settings']['check']}` found no fault{hopped}",
        "kills: " + (", ".join("not due before the end" if each is None else
        f"{each['stage']} after {each['after_cpu_seconds']} s of processor time" for each in kills) or "none"),
        f"mAP: {json.dumps(scores)}",
        f"distractors: {json.dumps(found['distractors'])}",
    ]  # fmt: skip
    return table(found) + "\n" + "".join(f"- {line}\n" for line in lines)
