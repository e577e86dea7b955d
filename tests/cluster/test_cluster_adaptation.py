"""An adapted index and an adapted cell of a benchmark on Ray: the bytes and numbers of one process."""

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmark_sets import small_run

import jobs.augment
import lattqe
from cluster.benchmark import Bench
from lattqe.benchmark.cells import Cell
from lattqe.benchmark.spec import Setting
from lattqe.evaluation import evaluate
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, FeatureWriter, open_place, read_manifest
from lattqe.whitening import whiten_features

ALPHA = (("alpha", 2.0),)


def write(uri, rows=700, dim=24):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(35, dim))[np.arange(rows) % 35] + rng.normal(size=(rows, dim))
    with FeatureWriter(str(uri), dim, part_bytes=1 << 13) as writer:
        writer.append(x, [f"row-{row}" for row in range(rows)])


@pytest.mark.ray
def test_augment_on_ray_adapts_to_the_same_bytes(tmp_path, local_ray, capsys):
    write(tmp_path / "features")
    digests, told = [], {}
    for name, more in (("here", []), ("ray", ["--workers", "2"])):
        words = [
            f"{tmp_path}/features",
            "--method",
            "alphaqe",
            "-k",
            "6",
            "--adapt",
            "--to",
            f"{tmp_path}/{name}",
            "--json",
            *more,
        ]
        capsys.readouterr()
        jobs.augment.app(words, standalone_mode=False)
        told[name] = json.loads(capsys.readouterr().out)
        made = [f"{tmp_path}/{name}{below}" for below in ("", "/adaptation", "/adapted", "/neighbors")]
        digests.append([read_manifest(open_place(uri)).digest for uri in made])
    assert digests[0] == digests[1]
    assert "adaptation" in FeatureSet.open(f"{tmp_path}/ray").manifest.inputs
    assert told["here"]["graph"]["products_made"] > 0
    assert told["ray"]["graph"]["worker_seconds"]["waiting"] >= 0
    for stage in ("adaptation", "graph"):
        assert told["ray"][stage]["seconds"] > 0
        assert min(told["ray"][stage][f"{which}_worker_bytes"] for which in ("predicted", "peak")) > 0


@pytest.mark.ray
def test_a_cell_of_an_adapted_collection_is_the_python_api(tmp_path, local_ray):
    run = small_run(tmp_path / "world")
    cell = Cell("oxford", None, Setting("alphaqe", 4, (("adapt", True), *ALPHA)), Setting("alphaqe", 4, ALPHA))
    here = Bench(run, str(tmp_path / "here"))
    spread = Bench(run, str(tmp_path / "spread"), workers=1, shards=2)
    for bench in (here, spread):
        bench.fill([cell], lambda cell: None)
    assert not here.indexes.memory
    assert set(spread.indexes.memory) == {"adaptation", "graph", "augmentation", "search"}
    for found in spread.indexes.memory.values():
        assert min(found["predicted_worker_bytes"], found["peak_worker_bytes"]) > 100 << 20
    found = [bench.lookup(cell).scores for bench in (here, spread)]
    assert [one.to_dict() for one in found[0]] == [one.to_dict() for one in found[1]]
    opened = here.inputs["oxford"]
    xb, xq = opened.database.read(), opened.queries.read()
    space = lattqe.adapt(xb)
    # The cell's rows are stored, before and after they are augmented, in the database's own type.
    index = lattqe.augment(space.apply(xb, opened.database.dtype), "alphaqe", 4, alpha=2.0).astype(xb.dtype)
    queries = lattqe.expand(space.apply(xq), index, "alphaqe", 4, alpha=2.0)
    expected = evaluate(FlatIndex(index), queries, opened.truth)
    for ours, theirs in zip(found[0], expected.values(), strict=True):
        np.testing.assert_allclose(ours.ap, theirs.ap, atol=1e-6)
    plain = Cell("oxford", None, Setting("alphaqe", 4, ALPHA), Setting("alphaqe", 4, ALPHA))
    here.fill([plain], lambda cell: None)
    assert [one.to_dict() for one in here.lookup(plain).scores] != [one.to_dict() for one in found[0]]


def test_queries_are_brought_into_the_space_of_adapted_rows_once(tmp_path):
    run = small_run(tmp_path / "world")
    opened, uri = Bench(run, str(tmp_path / "plain")).inputs["oxford"], f"{tmp_path}/space"
    lattqe.adapt(opened.database.read()).save(uri)
    whiten_features(opened.database, uri, f"{tmp_path}/database")
    whiten_features(opened.queries, uri, f"{tmp_path}/queries")
    (oxford,) = (each for each in run.datasets if each.name == "oxford")
    cells = [Cell("oxford", None, dba, None) for dba in (None, Setting("alphaqe", 4, ALPHA))]
    found = []
    for queries in (oxford.queries, f"{tmp_path}/queries"):
        adapted = replace(oxford, database=f"{tmp_path}/database", queries=queries)
        bench = Bench(replace(run, datasets=(adapted,), distractors=()), f"{tmp_path}/{len(found)}")
        bench.fill(cells, lambda cell: None)
        found.append([one.ap for cell in cells for one in bench.lookup(cell).scores])
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    expected = evaluate(
        FlatIndex(FeatureSet.open(f"{tmp_path}/database").read()),
        FeatureSet.open(f"{tmp_path}/queries").read(),
        opened.truth,
    )
    for ours, theirs in zip(found[0], expected.values()):
        np.testing.assert_allclose(ours, theirs.ap, atol=1e-6)
