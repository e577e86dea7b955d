"""Queries that are rows of the database are known by id and vector, whatever became of the rows; not by ids alone."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

import jobs.augment
import jobs.search
import lattqe
from cluster.shards import Shard, cut_ranges
from jobs.lists import evaluate_app
from lattqe.benchmark.cells import OpenedDataset, measure
from lattqe.benchmark.spec import Dataset, Pipeline, Setting
from lattqe.duplicates import own_rows
from lattqe.errors import LattqeError
from lattqe.evaluation import LabelTruth, evaluate
from lattqe.evaluation.analysis import JudgedRanks
from lattqe.expansion import METHODS
from lattqe.report.gallery import neighbor_weights
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, FeatureWriter, Ranks
from lattqe.training.validation import load_set

ROWS, QUERIES, DIM = 120, 15, 16


def draw(rows, seed):
    """Vectors around 8 centres, and which."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 8, rows).astype(np.int32)
    x = np.random.default_rng(0).normal(size=(8, DIM))[labels] + 0.7 * rng.normal(size=(rows, DIM))
    return x / np.linalg.norm(x, axis=1, keepdims=True), labels


def write(uri, x, labels, ids, dtype="float32"):
    with FeatureWriter(str(uri), DIM, dtype, labels=True) as writer:
        writer.append(x, [f"x-{number}" for number in ids], labels)
    return FeatureSet.open(str(uri))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A database, and queries with ids of its rows: all of them rows, none, and every other one."""
    folder = tmp_path_factory.mktemp("world")
    x, labels = draw(ROWS, 1)
    foreign, foreign_labels = draw(QUERIES, 2)
    own = np.arange(0, ROWS, ROWS // QUERIES)
    write(folder / "database", x, labels, range(ROWS))
    write(folder / "itself", x[own], labels[own], own)
    write(folder / "half", x[own], labels[own], own, "float16")
    write(folder / "colliding", foreign, foreign_labels, range(QUERIES))
    some = np.arange(QUERIES) % 2 == 0
    write(folder / "mixed", np.where(some[:, None], x[own], foreign), np.where(some, labels[own], foreign_labels), own)
    for name, more in (("index", ["--method", "aqe", "-k", "3"]), ("adapted", ["-k", "3", "--hops", "2"])):
        call(jobs.augment.app, folder / "database", "--to", folder / name, *more)
    return folder


def expected_rows(name):
    """What each query of a set is."""
    own = np.arange(0, ROWS, ROWS // QUERIES)
    return {"colliding": None, "mixed": np.where(np.arange(QUERIES) % 2 == 0, own, -1)}.get(name, own)


def call(app, *words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def opened(world, name):
    return FeatureSet.open(str(world / name))


@pytest.mark.parametrize("database", ["database", "index", "adapted"])
@pytest.mark.parametrize("queries", ["itself", "half", "colliding", "mixed"])
def test_a_query_is_the_row_with_its_id_and_its_vector(world, database, queries):
    np.testing.assert_equal(own_rows(opened(world, database), opened(world, queries)), expected_rows(queries))


@pytest.mark.parametrize("name", ["database", "index", "adapted"])
def test_rows_of_a_set_are_themselves(world, tmp_path, name):
    """All of them, or some, as they are stored: augmented ones too."""
    stored = opened(world, name)
    np.testing.assert_array_equal(own_rows(stored, stored), np.arange(ROWS))
    some = write(tmp_path / "some", stored.read(5, 30), stored.labels(5, 30), range(5, 30))
    np.testing.assert_array_equal(own_rows(stored, some), np.arange(5, 30))


@pytest.mark.parametrize("method", METHODS)
def test_a_query_that_is_the_only_row_stays_what_it_is(tmp_path, method):
    only = write(tmp_path / "only", *draw(1, 1), [0])
    found = lattqe.expand(tmp_path / "only", tmp_path / "only", method)
    np.testing.assert_allclose(found, only.read(), atol=1e-6)
    measured = {}
    one = Pipeline(qe=Setting(method, 3))
    measure(
        FlatIndex(only.read()),
        only.read(),
        LabelTruth(np.zeros(1), query_rows=np.zeros(1, int)),
        [one],
        measured.__setitem__,
        np.zeros(1, int),
    )
    assert measured[one].scores[0].positives.tolist() == [0]


def test_where_the_rows_before_augmentation_are_gone_shared_ids_are_refused(world, tmp_path):
    for name in ("database", "itself", "index"):
        shutil.copytree(world / name, tmp_path / name)
    call(jobs.augment.app, tmp_path / "database", "--to", tmp_path / "made", "--method", "aqe", "-k", 3)
    foreign, labels = draw(QUERIES, 2)
    others = write(tmp_path / "others", foreign, labels, range(1000, 1000 + QUERIES))
    shutil.rmtree(tmp_path / "database")
    assert own_rows(opened(tmp_path, "made"), others) is None
    with pytest.raises(LattqeError, match=r"15 queries of .*itself have ids of rows in .*made, .* with other ids"):
        own_rows(opened(tmp_path, "made"), opened(tmp_path, "itself"))


def slow_ap(world, queries, database="database"):
    """AP of each query against the rows without it, one at a time."""
    xb, asked = lattqe.load(world / database).x, lattqe.load(world / queries)
    labels, own = lattqe.load(world / "database").labels, expected_rows(queries)
    found = []
    for number in range(QUERIES):
        rest = np.arange(ROWS)
        if own is not None and own[number] >= 0:
            rest = np.delete(rest, own[number])
        truth = LabelTruth(labels[rest], query_labels=asked.labels[[number]])
        found.append(evaluate(FlatIndex(xb[rest]), asked.x[[number]].astype(np.float32), truth)["label"].ap[0])
    return np.array(found)


@pytest.mark.parametrize("queries", ["itself", "colliding", "mixed"])
def test_evaluate_benchmark_and_validation_score_the_same(world, tmp_path, queries):
    expected = slow_ap(world, queries)
    call(jobs.search.app, world / "database", world / queries, "-k", ROWS, "--to", tmp_path / "ranks")
    told = call(evaluate_app, tmp_path / "ranks", "--json")
    inside = 0 if expected_rows(queries) is None else int((expected_rows(queries) >= 0).sum())
    assert (f"{inside} of the queries are rows of the database" in told) == bool(inside)
    assert json.loads(told[told.index("{") :])["label"]["map"] == pytest.approx(expected.mean())
    np.testing.assert_allclose(JudgedRanks.open(str(tmp_path / "ranks")).scores["label"].ap, expected)
    inputs = OpenedDataset.open(Dataset("one", str(world / "database"), str(world / queries)))
    xq = inputs.queries.read()
    np.testing.assert_allclose(evaluate(FlatIndex(inputs.database.read()), xq, inputs.truth)["label"].ap, expected)
    one = load_set(str(world / "database"), str(world / queries))
    assert one.mean_ap(one.xq, one.index) == pytest.approx(100 * expected.mean())


@pytest.mark.parametrize("queries", ["itself", "colliding", "mixed"])
def test_ranks_over_an_augmented_index_are_scored_likewise(world, tmp_path, queries):
    call(jobs.search.app, world / "index", world / queries, "-k", ROWS, "--to", tmp_path / "ranks")
    found = JudgedRanks.open(str(tmp_path / "ranks")).scores["label"].ap
    np.testing.assert_allclose(found, slow_ap(world, queries, "index"))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("database", ["database", "adapted"])
def test_the_gallery_shows_the_weights_that_the_search_gave(world, tmp_path, database, plain):
    """From queries adapted as the rows were, without their own rows, whether plain ranks spare the search or not."""
    for name, more in (("plain", ()), ("expanded", ("--expand", "aqewd", "--nqe", 4))):
        call(jobs.search.app, world / database, world / "mixed", "-k", 9, "--to", tmp_path / name, *more)
    ranks = JudgedRanks.open(str(tmp_path / "expanded"))
    weights, _ = neighbor_weights(ranks, JudgedRanks.open(str(tmp_path / "plain")) if plain else None, range(QUERIES))
    lists = Ranks.open(str(tmp_path / "plain")).read()[0]
    for query, own in enumerate(expected_rows("mixed")):
        nearest = [row for row in lists[query].tolist() if row != own][:4]
        assert weights[query] == {row: pytest.approx(1 - rank / 4) for rank, row in enumerate(nearest, 1)}


def test_shards_look_up_ids_of_the_database_alone(world):
    """Distractors may have the same ids; their rows are no rows of queries."""
    stored, again = opened(world, "database"), opened(world, "itself")
    spans = [(stored.uri, stored.rows), (again.uri, again.rows)]
    ids = [*stored.ids(100, 115), "unknown", *stored.ids(3, 5)]
    found = []
    for start, stop in ((0, 50), (50, 110), (110, ROWS + QUERIES)):
        pieces = cut_ranges(spans, start, stop, ids=True)
        found.append(Shard(pieces, start, torch.get_num_threads(), None).find_ids(pa.array(ids)))
        inside = (stored.find_ids(ids) >= start) & (stored.find_ids(ids) < stop)
        np.testing.assert_array_equal(found[-1], np.where(inside, stored.find_ids(ids), -1))
    np.testing.assert_array_equal(np.max(found, axis=0), stored.find_ids(ids))
