"""A driver of a hundred million rows stays below 2 GiB: opening, planning, listing, looking up ids, joining.

The rows are forged: one part of 50,000 rows under two thousand names, so that all that is read is there and sound.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from lattqe.store import FeatureWriter, Manifest, features_table, neighbors_table
from lattqe.store.manifest import Part, checksum, schema_columns
from lattqe.store.parts import encode_part
from lattqe.store.pending import part_name

ROWS, PART_ROWS, LIMIT = 100_000_000, 50_000, 2 << 30

DRIVER = """
import json, sys, threading, time
import numpy as np

peak, done = 0, threading.Event()

def anonymous():
    with open("/proc/self/status") as status:  # mapped files are not counted: they can be dropped at any time
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10

def watch():
    global peak
    while not done.wait(0.01):
        peak = max(peak, anonymous())

threading.Thread(target=watch, daemon=True).start()
from cluster.graph import Progress
from cluster.growth import SLAB_ROWS, _Driver
from lattqe.augmentation.index import Augmentation, begin_index
from lattqe.augmentation.growth import Growth, join_features, kept_rows
from lattqe.augmentation.index import items_to_do
from lattqe.cost.rows import graph_on_ray
from lattqe.cost.work import Machines, Stored
from lattqe.search.stored import GraphTask, begin_graph, check_sets, measure_products
from lattqe.store import FeatureSet, NeighborGraph, Pending, part_row_counts, row_bytes

features, graph, new, to = sys.argv[1:]
stored = FeatureSet.open(features)
found = {"rows": stored.rows, "lists": NeighborGraph.open(graph).rows}

task = GraphTask(features, f"{to}/graph", 64)
check_sets(task)
found["kind"] = measure_products(task)[0]
pending = begin_graph(task)
for part in range(0, len(pending.part_rows), 2):
    pending.place.write(f"_work/part-{part:05d}.json", b"{}")
found["receipts"] = len(pending.unchecked())
for rate in (1e10, 1e12):
    sets, machines = [Stored.of(stored.manifest)], Machines(64, asked=64)
    cut, work = graph_on_ray(sets, stored.dim, 64, machines, budget=20 << 30, products_per_second=rate)
    progress = Progress(task, cut, pending, 64, lambda products: None)
    started, left = len(progress.possible()), progress.products_left()
    found["by " + cut.schedule] = [started, left == cut.products]

index = begin_index(Augmentation(features, graph, f"{to}/index", "aqe", 2, {}))
found["items"] = len(items_to_do(index, 4096)[0])
kept = kept_rows(stored, ["row 7", "row 49999"])
found["kept"] = len(kept)
found["joined"] = join_features(stored, kept, FeatureSet.open(new), f"{to}/joined").rows

growth = Growth(features, graph, f"{to}/grown", kept, 2, None)
pending = Pending.begin(growth.to, "neighbors", {"k": 2}, part_row_counts(len(kept), row_bytes("neighbors", {"k": 2})))
driver = _Driver(growth, pending, lambda rows: None, SLAB_ROWS)
items, kinds = driver.begin(), [0, 0, 0]
while items:
    item = items.pop()
    kinds[item[0]] += 1
    stale = 4_000_000 * item[1] + np.arange(0, 1_000_000, 10) if item[0] == 0 else None
    items += driver.done(item, {"counts": {}, "stale": stale})
found["grown"] = kinds
done.set()
print(json.dumps(found | {"peak": max(peak, anonymous())}))
"""


def forge(folder, kind, table, fields):
    """An artifact of 100 million rows whose parts are all one file."""
    folder.mkdir()
    data = encode_part(table, table.schema)
    (folder / part_name(0)).write_bytes(data)
    names = [part_name(number) for number in range(ROWS // PART_ROWS)]
    for name in names[1:]:
        os.link(folder / names[0], folder / name)
    parts = tuple(Part(name, PART_ROWS, data.size, checksum(data)) for name in names)
    fields = {**fields, "columns": schema_columns(table.schema)}
    (folder / "manifest.json").write_bytes(Manifest(kind, ROWS, parts, fields, {}, {}).to_json())
    return str(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)  # less than a minute of one core, which a busy machine may not give soon
def test_a_driver_of_a_hundred_million_rows_stays_below_two_gigabytes(tmp_path):
    vectors = np.zeros((PART_ROWS, 4), np.float16)
    vectors[np.arange(PART_ROWS), np.arange(PART_ROWS) % 4] = 1
    ids = pa.array([f"row {row}" for row in range(PART_ROWS)])
    features = forge(tmp_path / "rows", "features", features_table(ids, vectors), {"dim": 4, "dtype": "float16"})
    lists = neighbors_table(np.full((PART_ROWS, 2), -1, np.int32), np.zeros((PART_ROWS, 2), np.float32))
    graph = forge(tmp_path / "graph", "neighbors", lists, {"k": 2})
    with FeatureWriter(str(tmp_path / "new"), 4) as writer:
        writer.append(np.eye(4), [f"new {row}" for row in range(4)])
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, features, graph, str(tmp_path / "new"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["rows"] == found["lists"] == ROWS
    assert found["receipts"] > 300
    assert found["items"] > 20_000
    assert found["by pairs"] == found["by rows"] == [64, True], "every worker has something to begin with"
    assert found["kept"] == ROWS - 2
    assert found["joined"] == ROWS + 2
    finding, searching, publishing = found["grown"]
    assert finding == publishing > 20
    assert searching > 96, "2.4 million rows that are searched, by groups, in 96 slabs"
    assert found["peak"] < LIMIT
