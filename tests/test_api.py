"""The Python API with addresses and with arrays: the same answers, progress that ends, names that completion shows."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import jobs.search
import lattqe
from lattqe.augmentation.index import begin_index, build_index
from lattqe.augmentation.recipe import Augmentation
from lattqe.errors import LattqeError
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search import FlatIndex
from lattqe.search.products import MklProducts
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter

DIM = 16
EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "arrays_to_figure.py"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A labelled database and queries of the same classes, a graph, a model, and the index it makes."""
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(9, DIM))
    for name, rows in (("database", 150), ("queries", 30)):
        of = rng.integers(0, 9, rows)
        with FeatureWriter(str(folder / name), DIM, "float32", labels=True) as writer:
            writer.append(
                centres[of] + 0.8 * rng.normal(size=(rows, DIM)),
                [f"{name}-{i}" for i in range(rows)],
                of.astype(np.int32),
            )
    with FeatureWriter(str(folder / "bare"), DIM) as writer:
        writer.append(centres, [f"centre-{i}" for i in range(9)])
    graph = publish_graph(FeatureSet.open(str(folder / "database")), 12, str(folder / "graph"))
    torch.manual_seed(0)
    LAttQE(LAttQEConfig(dim=DIM, heads=2, layers=1, max_k=12, positional_start="small")).save(
        str(folder / "model"), {"nqe": 9, "ndba": 5, "nqe_with_dba": 3}
    )
    task = Augmentation(
        str(folder / "database"),
        graph.uri,
        str(folder / "index"),
        "lattqe",
        5,
        {"model": str(folder / "model"), "dba": True},
    )
    pending = begin_index(task)
    build_index(task)
    pending.finish()
    return folder


def test_addresses_and_arrays_give_the_same(world):
    database, queries = lattqe.load(world / "database"), lattqe.load(str(world / "queries"))
    by_address = lattqe.search(world / "queries", world / "database", 7, expand="alphaqe", nqe=4, alpha=2.0)
    by_array = lattqe.search(queries.x, database.x, 7, expand="alphaqe", nqe=4, alpha=2.0)
    np.testing.assert_array_equal(by_address.I, by_array.I)
    np.testing.assert_array_equal(by_address.D, by_array.D)
    assert (database.ids[3], database.label_names, len(database.labels)) == ("database-3", None, 150)
    for stored, computed in zip(lattqe.load(world / "graph"), lattqe.neighbors(world / "database", 12)):
        np.testing.assert_array_equal(stored, computed)
    model = lattqe.load(world / "model")
    augmented = lattqe.augment(world / "database", model=model)
    np.testing.assert_allclose(augmented, lattqe.load(world / "index").x, atol=1e-6)


def test_many_rows_are_multiplied_by_the_kind_that_is_measured_fastest(world, monkeypatch):
    expected = lattqe.neighbors(world / "database", 12)
    asked = []

    def measured(sample, k, rows, device):
        asked.append((len(sample) <= rows, k, rows))
        return "float32 torch", 1.0

    monkeypatch.setattr("lattqe.api.fastest_kind", measured)
    kinds = []
    monkeypatch.setattr(
        MklProducts, "_product", lambda *given, real=MklProducts._product: kinds.append(1) or real(*given)
    )
    found = lattqe.neighbors(world / "database", 12)
    assert (asked, bool(kinds)) == ([(True, 12, 150)], True)
    np.testing.assert_array_equal(found.I, expected.I)
    np.testing.assert_array_equal(found.D, expected.D)


def test_over_an_augmented_index_the_number_chosen_for_it_is_taken(world, tmp_path):
    xq, model = world / "queries", str(world / "model")
    for database, chosen in (("database", 9), ("index", 3)):
        np.testing.assert_array_equal(
            lattqe.expand(xq, world / database, "lattqe", model=model),
            lattqe.expand(xq, world / database, "lattqe", chosen, model=model),
        )
        result = CliRunner().invoke(
            jobs.search.app,
            [str(world / database), str(xq), "--expand", "lattqe", "--model", model, "--to", str(tmp_path / database)],
        )
        assert result.exit_code == 0, result.output
        assert f"lattqe from {chosen} neighbors" in result.output
        assert ("for augmented" in result.output) == (database == "index")
        ranks = lattqe.load(tmp_path / database)
        expected = lattqe.search(xq, world / database, 100, expand="lattqe", nqe=chosen, model=model)
        np.testing.assert_array_equal(ranks.I, expected.I)
        assert ranks.ids[2] == "queries-2"


def test_evaluate_takes_arrays_results_and_stored_ranks(world, tmp_path):
    assert (
        CliRunner()
        .invoke(
            jobs.search.app,
            [str(world / "database"), str(world / "queries"), "-k", "150", "--to", str(tmp_path / "ranks")],
        )
        .exit_code
        == 0
    )
    labels = {name: lattqe.load(world / name).labels for name in ("database", "queries")}
    found = lattqe.search(world / "queries", world / "database", 150)
    known = {"labels": labels["database"], "query_labels": labels["queries"], "ks": (1, 3)}
    sets = {name: world / name for name in labels}
    loaded = {name: lattqe.load(world / name) for name in labels}
    results = [
        lattqe.evaluate(tmp_path / "ranks", ks=(1, 3)),
        lattqe.evaluate(found, **known),
        lattqe.evaluate(found.I, **known),
        lattqe.evaluate(lattqe.load(tmp_path / "ranks"), **known),
        lattqe.evaluate(tmp_path / "ranks", **known),
        lattqe.evaluate(found, labels=sets["database"], query_labels=str(sets["queries"])),
        lattqe.evaluate(found, labels=loaded["database"], query_labels=loaded["queries"]),
        lattqe.evaluate(found, labels=loaded["database"], query_labels=labels["queries"].tolist()),
    ]
    for scores in results:
        np.testing.assert_array_equal(scores["label"].ap, results[0]["label"].ap)
    assert repr(results[0]["label"]).startswith("Scores(label: mAP ")
    with pytest.raises(LattqeError, match="it is not known what is relevant"):
        lattqe.evaluate(found)
    text = {name: [f"class {number}" for number in labels[name]] for name in labels}
    for named in (text, {name: np.array(text[name], dtype=object) for name in text}):
        scores = lattqe.evaluate(found, labels=named["database"], query_labels=named["queries"])
        np.testing.assert_array_equal(scores["label"].ap, results[0]["label"].ap)
    for wrong, message in (
        (lambda: lattqe.evaluate(found.D, **known), r"ranks are float32 of shape \(30, 150\): give row numbers"),
        (lambda: lattqe.evaluate(found, **known | {"labels": labels["database"][:-1]}), "row 149 was found, but there"),
        (lambda: lattqe.evaluate(found, **known | {"labels": text["database"]}), "both text labels or both numbers"),
        (
            lambda: lattqe.evaluate(found, labels="no address", query_labels=labels["queries"]),
            "no finished artifact at",
        ),
        (lambda: lattqe.evaluate(found, labels=world / "database", query_labels="nor this"), "no finished artifact at"),
        (
            lambda: lattqe.evaluate(found, labels=3, query_labels=labels["queries"]),
            r"of the rows have shape \(\): give",
        ),
        (lambda: lattqe.evaluate(found, labels=[[1], [1, 2]], query_labels=[1]), "labels of the rows are not a list"),
        (
            lambda: lattqe.evaluate(found, **known | {"query_labels": np.ones(30)}),
            "of the queries are float64: give whole",
        ),
        (lambda: lattqe.evaluate(found, labels=labels["database"]), "labels given without query_labels: give these"),
        (lambda: lattqe.evaluate(found, query_labels=labels["queries"]), "query_labels given with no labels"),
        (lambda: lattqe.evaluate(found, "gnd.json", labels=labels["database"]), "labels given with a truth"),
        (lambda: lattqe.evaluate(tmp_path / "ranks", query_rows=np.arange(30)), "query_rows given with no labels"),
        (
            lambda: lattqe.evaluate(tmp_path / "ranks", labels=labels["database"][:-1], query_labels=labels["queries"]),
            "database has 150 rows, but there are 149 labels",
        ),
        (lambda: lattqe.evaluate(found, labels=lattqe.load(world / "bare"), query_labels=[1]), "bare has no labels"),
    ):
        with pytest.raises(LattqeError, match=message):
            wrong()


def test_labels_of_loaded_sets_are_compared_by_name(world, tmp_path):
    """Each set numbers its own names; numbers that are given with stored ranks take the place of their labels."""
    names = {"database": [f"class {number}" for number in range(9)], "queries": [f"class {8 - n}" for n in range(9)]}
    for name in names:
        stored = lattqe.load(world / name)
        numbers = stored.labels if name == "database" else 8 - stored.labels
        with FeatureWriter(str(tmp_path / name), DIM, "float32", labels=True, label_names=names[name]) as writer:
            writer.append(stored.x, stored.ids, numbers)
    found = lattqe.search(tmp_path / "queries", tmp_path / "database", 150)
    expected = lattqe.evaluate(found, labels=world / "database", query_labels=world / "queries")["label"].ap
    loaded = {name: lattqe.load(tmp_path / name) for name in names}
    texts = [names["queries"][number] for number in loaded["queries"].labels]
    for labels, asked in (
        (tmp_path / "database", tmp_path / "queries"),
        (loaded["database"], loaded["queries"]),
        (loaded["database"], tmp_path / "queries"),
        (loaded["database"], texts),
    ):
        np.testing.assert_array_equal(lattqe.evaluate(found, labels=labels, query_labels=asked)["label"].ap, expected)
    with pytest.raises(LattqeError, match=r"labels of .*database are text and those of the queries are numbers"):
        lattqe.evaluate(found, labels=loaded["database"], query_labels=loaded["queries"].labels)
    ranks = tmp_path / "ranks"
    words = [str(tmp_path / "database"), str(tmp_path / "queries"), "-k", "150", "--to", str(ranks)]
    assert CliRunner().invoke(jobs.search.app, words).exit_code == 0
    np.testing.assert_array_equal(lattqe.evaluate(ranks)["label"].ap, expected)
    other = lattqe.evaluate(ranks, labels=np.arange(150) % 3, query_labels=np.arange(30) % 3)["label"]
    assert other.positives.tolist() == [50] * 30


def test_queries_that_are_rows_need_not_be_named_where_they_are_stored(world, tmp_path):
    rows = np.arange(0, 150, 5)
    stored = lattqe.load(world / "database")
    with FeatureWriter(str(tmp_path / "asked"), DIM, "float32", labels=True) as writer:
        writer.append(stored.x[rows], [stored.ids[row] for row in rows], stored.labels[rows])
    by_address = lattqe.search(tmp_path / "asked", world / "database", 150, "aqe", 3)
    by_array = lattqe.search(stored.x[rows], stored.x, 150, "aqe", 3, query_rows=rows)
    np.testing.assert_array_equal(by_address.I, by_array.I)
    assert (by_address.I != lattqe.search(stored.x[rows], stored.x, 150, "aqe", 3).I).any()
    expected = lattqe.evaluate(by_array, labels=stored.labels, query_rows=rows)["label"].ap
    asked = lattqe.load(tmp_path / "asked")
    for known in (
        {"labels": world / "database", "query_labels": tmp_path / "asked"},
        {"labels": stored, "query_labels": asked},
        {"labels": stored.labels, "query_labels": asked.labels, "query_rows": rows},
    ):
        np.testing.assert_array_equal(lattqe.evaluate(by_address, **known)["label"].ap, expected)
    for wrong in (rows[:-1], rows + 10, rows.astype(float), np.full(30, -2)):
        with pytest.raises(
            LattqeError, match="query_rows: give for each of the 30 queries the number of its row, below"
        ):
            lattqe.expand(stored.x[rows], stored.x, "aqe", query_rows=wrong)
    with pytest.raises(LattqeError, match="query_rows given without expand"):
        lattqe.search(stored.x[rows], stored.x, query_rows=rows)


def test_progress_counts_to_its_total(world):
    for call in (
        lambda told: lattqe.neighbors(world / "database", 5, progress=told),
        lambda told: lattqe.expand(world / "queries", world / "database", progress=told),
        lambda told: lattqe.search(world / "queries", world / "database", 5, progress=told),
        lambda told: lattqe.search(world / "queries", world / "database", 5, "aqe", progress=told),
        lambda told: lattqe.search(np.eye(DIM), np.eye(DIM)[:0], 5, "aqe", progress=told),
        lambda told: lattqe.adapt(world / "database", progress=told),
        lambda told: lattqe.adapt(np.eye(DIM), progress=told),
        lambda told: lattqe.augment(world / "database", "aqe", progress=told),
        lambda told: lattqe.augment(np.eye(DIM)[:1], "aqe", progress=told),
        lambda told: lattqe.augment(world / "database", "aqe", hops=3, progress=told),
    ):
        calls = []
        call(lambda done, total, calls=calls: calls.append((done, total)))
        assert calls
        assert len({total for _, total in calls}) == 1
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert calls[-1][0] == calls[-1][1]


def test_progress_is_told_of_every_stage(world):
    """Of an augmentation: its graph, its rows and each hop; of a search: each block of queries."""
    calls = []
    lattqe.augment(world / "database", "aqe", hops=3, progress=lambda done, total: calls.append((done, total)))
    assert {(150, 750), (300, 750), (450, 750), (600, 750), (750, 750)} <= set(calls)
    rng, calls = np.random.default_rng(0), []
    x = rng.normal(size=(9000, 4))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    found = lattqe.search(x, x[:50], 3, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(4096, 9000), (8192, 9000), (9000, 9000)]
    np.testing.assert_array_equal(found.I, FlatIndex(x[:50].astype(np.float32)).search(x.astype(np.float32), 3)[1])


def test_refusals(world):
    with pytest.raises(LattqeError, match="nqe given without expand"):
        lattqe.search(world / "queries", world / "database", nqe=3)
    x = np.eye(8, dtype=np.float32)
    with pytest.raises(LattqeError, match=r"the model .*model does not fit the vectors: .* made for 16"):
        lattqe.expand(x, x, "lattqe", model=str(world / "model"))


@pytest.mark.parametrize("kind", [np.ndarray.tolist, torch.from_numpy, np.asfortranarray])
def test_lists_and_tensors_are_arrays_too(world, kind):
    xq, xb = lattqe.load(world / "queries").x, lattqe.load(world / "database").x
    for call in (
        lambda q, b: lattqe.search(q, b, k=9, expand="alphaqe", nqe=4).I,
        lambda q, b: lattqe.expand(q, b, "aqewd"),
        lambda q, b: lattqe.augment(b, "aqewd", hops=np.int64(2)),
    ):
        np.testing.assert_array_equal(call(kind(xq), kind(xb)), call(xq, xb))


def test_nothing_is_found_in_an_empty_database():
    x = np.eye(8, dtype=np.float32)
    for expand in (None, "aqewd"):
        found = lattqe.search(x, x[:0], k=3, expand=expand)
        assert (found.I == -1).all()
        assert found.D.shape == (8, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: lattqe.search(x, x, k=2.5), "k must be a whole number, got 2.5"),
        (lambda x: lattqe.neighbors(x, k="3"), "k must be a whole number, got '3'"),
        (lambda x: lattqe.search(x, x, k=True), "k must be a whole number, got True"),
        (lambda x: lattqe.search(x, x, k=10**12), "far more than the 8 rows"),
        (lambda x: lattqe.neighbors(x, k=10**12), "far more than the 8 rows"),
        (lambda x: lattqe.expand(x, x, "aqe", k=1.5), "k is 1.5: use a whole number"),
        (lambda x: lattqe.augment(x, "aqe", k="3"), "k is '3': use a whole number"),
        (lambda x: lattqe.expand(x, x, "alphaqe", alpha="3"), "alpha is '3': use a finite number"),
        (lambda x: lattqe.expand(x, x, "dqe", C=None), "C is None: use a number between"),
        (lambda x: lattqe.expand(x, x, "dqe", C=1e300), r"C is 1e\+300: use a number between"),
        (lambda x: lattqe.augment(x, "aqe", hops=2, hop_alpha="1"), "neighbors is '1': use a number between"),
        (lambda x: lattqe.search(x.astype(complex), x), "xq holds complex128: real numbers"),
        (lambda x: lattqe.search(x, x.astype(str)), "xb holds <U32: real numbers"),
        (lambda x: lattqe.search([[1.0, 0.0], [1.0]], x), "xq is not a matrix"),
    ],
)
def test_what_is_no_number_or_matrix_is_refused(call, message):
    with pytest.raises(LattqeError, match=message):
        call(np.eye(8, dtype=np.float32))


def test_completion_shows_the_functions():
    assert {"LattqeError", "augment", "evaluate", "expand", "load", "neighbors", "search"} <= set(dir(lattqe))
    assert callable(lattqe.search)


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path / "figure.png")])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    plain, expanded, both = (float(word) for word in shown.replace(",", "").split() if word[0].isdecimal())
    assert plain < expanded < both
    assert (tmp_path / "figure.png").stat().st_size > 10_000
