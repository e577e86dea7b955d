"""`lattqe evaluate`: stored ranks scored by labels and by a graded truth, as the library scores the whole ranking."""

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import jobs.search
from jobs.lists import evaluate_app
from lattqe.datasets.revisited import from_gnd, load_gnd, save_gnd
from lattqe.errors import LattqeError
from lattqe.evaluation import LabelTruth, evaluate
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, FeatureWriter

ROWS, QUERIES, DIM = 90, 12, 8


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Numbered and named labels of the same rows, ranks of each, and a graded truth."""
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(1)
    labels = {"database": rng.integers(0, 5, ROWS), "queries": rng.integers(0, 5, QUERIES)}
    x = {name: rng.normal(size=(5, DIM))[of] + rng.normal(size=(len(of), DIM)) for name, of in labels.items()}
    for name, of in labels.items():
        with FeatureWriter(str(folder / name), DIM, labels=True) as writer:
            writer.append(x[name], [f"{name[0]}{i}" for i in range(len(of))], of.astype(np.int32))
    gnd = [{"easy": [i, i + 1], "hard": [i + 2], "junk": [i + 3], "bbx": [0, 0, 1, 1]} for i in range(QUERIES)]
    save_gnd(
        folder / "gnd.json",
        from_gnd({"imlist": [f"d{i}" for i in range(ROWS)], "qimlist": [f"q{i}" for i in range(QUERIES)], "gnd": gnd}),
    )
    invoke(jobs.search.app, folder / "database", folder / "queries", "-k", ROWS, "--to", folder / "ranks")
    invoke(jobs.search.app, folder / "database", folder / "database", "-k", ROWS, "--to", folder / "itself")
    return folder


def invoke(app, *words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def counted(world, truth, queries="queries"):
    index, xq = FlatIndex(FeatureSet.open(str(world / "database")).read()), FeatureSet.open(str(world / queries)).read()
    return evaluate(index, xq.astype(np.float32), truth, ks=(1, 4))


def test_labels(world, tmp_path):
    told = json.loads(invoke(evaluate_app, world / "ranks", "--at", "1,4", "--json", "--csv", tmp_path / "q.csv"))
    labels = {name: FeatureSet.open(str(world / name)).labels() for name in ("database", "queries")}
    expected = counted(world, LabelTruth(labels["database"], query_labels=labels["queries"]))["label"]
    assert told["label"] == expected.summary()
    with (tmp_path / "q.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["query"] for row in rows] == [f"q{i}" for i in range(QUERIES)]
    np.testing.assert_array_equal([float(row["ap"]) for row in rows], expected.ap)
    np.testing.assert_array_equal([float(row["p@4"]) for row in rows], expected.precision[:, 1])


def test_queries_of_the_database_are_no_answers_to_themselves(world):
    told = json.loads(invoke(evaluate_app, world / "itself", "--at", "1,4", "--json"))
    labels = FeatureSet.open(str(world / "database")).labels()
    expected = counted(world, LabelTruth(labels, query_rows=np.arange(ROWS)), "database")
    assert told["label"] == expected["label"].summary()


def test_a_graded_truth_has_three_setups(world):
    truth = world / "gnd.json"
    told = json.loads(invoke(evaluate_app, world / "ranks", "--truth", truth, "--at", "1,4", "--json"))
    expected = counted(world, load_gnd(truth).truth)
    assert list(told) == ["easy", "hard", "medium"]
    assert told == {name: scores.summary() for name, scores in expected.items()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--at", "0"], "--at is '0'"),
        (["--at", "one"], "whole numbers from 1"),
        (["--truth", "nothing.json"], "nothing.json"),
        (["--truth", "labels.npy"], "not a ground truth .* import --labels"),
        (["--csv", "/"], "cannot write '/': give the name of a CSV file, such as queries.csv"),
        (["--csv", ""], "--csv has an empty value"),
    ],
)
def test_refusals(world, words, message):
    with pytest.raises(LattqeError, match=message):
        invoke(evaluate_app, world / "ranks", *words)


def test_descriptors_are_not_replaced_by_a_table(world, tmp_path):
    vectors = tmp_path / "vectors.npy"
    np.save(vectors, np.zeros(3))
    before = vectors.read_bytes()
    with pytest.raises(LattqeError, match="give the name of a CSV file"):
        invoke(evaluate_app, world / "ranks", "--csv", vectors)
    assert vectors.read_bytes() == before


def test_precision_at_any_k(world):
    told = json.loads(invoke(evaluate_app, world / "ranks", "--at", f"1000,{10**20}", "--json"))
    assert told["label"][f"mp@{10**20}"] == told["label"]["mp@1000"]


def test_text_labels_against_numbers_are_refused(world, tmp_path):
    queries = FeatureSet.open(str(world / "queries"))
    names = [f"class {i}" for i in range(5)]
    with FeatureWriter(str(tmp_path / "named"), DIM, labels=True, label_names=names) as writer:
        writer.append(queries.read(), queries.ids(), queries.labels())
    invoke(jobs.search.app, world / "database", tmp_path / "named", "-k", 9, "--to", tmp_path / "ranks")
    with pytest.raises(LattqeError, match="are text and those of"):
        invoke(evaluate_app, tmp_path / "ranks")
