"""A graph that follows its rows on Ray: the bytes of one process and of a build from scratch, whatever is killed."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from killing import killed_midway

import cluster.growth
from cluster.growth import FIND, SEARCH, GrowthWorker, _Driver
from lattqe.augmentation.growth import Growth, grow_here, join_features, kept_rows
from lattqe.augmentation.recipe import read_reusable
from lattqe.search import knn_graph
from lattqe.search.stored import publish_graph
from lattqe.store import Edges, FeatureSet, FeatureWriter, NeighborGraph, Pending, open_place

DIM, K = 8, 6


def write(uri: Path, x: np.ndarray, first: int = 0) -> FeatureSet:
    with FeatureWriter(str(uri), x.shape[1], "float16") as writer:
        writer.append(x, [f"r{first + row}" for row in range(len(x))])
    return FeatureSet.open(str(uri))


def rows(count: int, seed: int = 0) -> np.ndarray:
    """Rows of which a quarter are copies of others: the order among equals counts."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, DIM)).astype(np.float32)
    copies = rng.permutation(count)[: count // 4]
    x[copies] = x[rng.integers(0, count, len(copies))]
    return x


def begin(growth: Growth, total: int, part_rows: int) -> Pending:
    cuts = [min(part_rows, total - start) for start in range(0, total, part_rows)]
    return Pending.begin(growth.to, "neighbors", {"k": K}, cuts, config={"job": "append"})


def drive(growth: Growth, pending: Pending, slab_rows: int, lose: str = "") -> tuple[Counter[str], Counter[int]]:
    """What `grow_graph` does, here: counts, and how many pieces of work of each kind there were."""
    driver, kinds = _Driver(growth, pending, lambda count: None, slab_rows), Counter[int]()
    items = driver.begin()
    worker = GrowthWorker(growth, 1, slab_rows)
    while items:
        item = items.pop(0)
        kinds[item[0]] += 1
        items += driver.done(item, worker.run(item))
        if lose and pending.place.exists(lose):
            pending.place.write(lose, b"damaged")
            lose = ""
    return driver.counts, kinds


@pytest.mark.parametrize(("new", "removed"), [(30, []), (0, [5, 6, 100]), (25, [0, 7, 8, 9, 199]), (300, [3])])
def test_pieces_of_work_make_the_graph_of_the_joined_rows(tmp_path, monkeypatch, new, removed):
    monkeypatch.setattr(cluster.growth, "group_rows", lambda dim, k: 23)
    x = rows(200 + new)
    old = write(tmp_path / "old", x[:200])
    before = publish_graph(old, K, str(tmp_path / "before"))
    kept = kept_rows(old, [f"r{row}" for row in removed])
    joined = join_features(old, kept, write(tmp_path / "new", x[200:], 200) if new else None, str(tmp_path / "joined"))
    growths = [
        Growth(joined.uri, before.uri, f"{tmp_path}/{name}/neighbors", kept, K - 2, f"{tmp_path}/{name}", None)
        for name in ("here", "pieces")
    ]
    pendings = [begin(growth, joined.rows, 70) for growth in growths]
    here = grow_here(growths[0], pendings[0])
    counts, kinds = drive(growths[1], pendings[1], slab_rows=64, lose="_work/lists/00000-2.bin")
    for pending in pendings:
        pending.finish()
    graphs = [NeighborGraph.open(growth.to) for growth in growths]
    assert graphs[0].digest == graphs[1].digest
    I, D = knn_graph(joined.read(), K)
    np.testing.assert_array_equal(graphs[1].read()[0], I)
    np.testing.assert_array_equal(graphs[1].read()[1], D)
    for part in range(len(pendings[0].part_rows)):
        taken = [read_reusable(open_place(growth.index), part) for growth in growths]
        np.testing.assert_array_equal(*taken)
    assert counts["searched"] == here["searched"]
    assert kinds[FIND] == (len(pendings[0].part_rows) if removed else 0)
    assert kinds[SEARCH] == -(-(new + here["searched"]) // 23) * -(-joined.rows // 64)
    # Each searched row meets all rows, and each newcomer every row that stayed; a damaged piece is made again.
    expected = (new + here["searched"]) * joined.rows + new * len(kept)
    assert expected <= counts["products"] <= expected + 23 * 64


def test_what_is_there_is_not_searched_again(tmp_path):
    x = rows(150)
    old = write(tmp_path / "old", x[:120])
    before, kept = publish_graph(old, K, str(tmp_path / "before")), kept_rows(old, ["r3"])
    joined = join_features(old, kept, write(tmp_path / "new", x[120:], 120), str(tmp_path / "joined"))
    growth = Growth(joined.uri, before.uri, f"{tmp_path}/graph", kept, K, None, None)
    pending = begin(growth, joined.rows, 50)
    first = drive(growth, pending, slab_rows=64)[1]
    pending.place.delete(next(name for name in pending.place.sizes() if name.endswith("00001.arrow")))
    again = drive(growth, Pending.attach(growth.to), slab_rows=64)[1]
    pending.place.write(cluster.growth.SEARCHED, b"damaged")
    pending.place.delete(next(name for name in pending.place.sizes() if name.endswith("00002.arrow")))
    found = drive(growth, Pending.attach(growth.to), slab_rows=64)[1]
    assert dict(found) == {FIND: 3, cluster.growth.PUBLISH: 1}
    assert (first[FIND], first[SEARCH]) == (3, 3)
    assert dict(again) == {cluster.growth.PUBLISH: 1}


@pytest.mark.ray
@pytest.mark.kill
def test_a_killed_append_on_ray_ends_in_the_bytes_of_one_process(
    tmp_path: Path, call_lattqe: Callable[..., tuple[int, str, str]]
) -> None:
    """The driver is killed with its Ray when something was found; the same command goes on.

    The index is adapted to its rows and has hops, as those of the shipped model: newcomers are adapted, edges are taken
    over, and the hops are made again.
    """
    x = rows(3000)
    write(tmp_path / "old", x[:2900])
    write(tmp_path / "new", x[2900:], 2900)
    (tmp_path / "gone.txt").write_text("r7\nr2000\n")

    def start(*words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *map(str, words), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(*words: object) -> dict[str, object]:
        code, out, shown = call_lattqe(*words, "--json")
        assert code == 0, shown
        return json.loads(out)

    method = ("--method", "alphaqe", "-k", K, "--hops", 3, "--adapt")
    run("augment", tmp_path / "old", *method, "--to", tmp_path / "index")
    append = ("append", tmp_path / "index", tmp_path / "new", "--remove", tmp_path / "gone.txt", "--to")
    here = run(*append, tmp_path / "here")
    killed = killed_midway(
        lambda to: start(*append, to, "--workers", 2),
        tmp_path,
        lambda to: (to / "neighbors" / "_work" / "searched.bin").exists(),
    )
    told = run(*append, killed, "--workers", 2)
    run("neighbors", tmp_path / "here" / "originals", "-k", K, "--to", tmp_path / "scratch")
    kinds = {"": FeatureSet, "/originals": FeatureSet, "/neighbors": NeighborGraph, "/edges": Edges}
    for name, kind in kinds.items():
        assert kind.open(f"{killed}{name}").digest == kind.open(f"{tmp_path}/here{name}").digest
    assert NeighborGraph.open(f"{killed}/neighbors").digest == NeighborGraph.open(str(tmp_path / "scratch")).digest
    assert told["rows_touched"] == here["rows_touched"]
    assert not list((killed / "neighbors").glob("_work/*"))
