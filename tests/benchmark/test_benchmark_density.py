"""The density grid: what is cut, what is measured, and what a user with labelled features reads from it."""

import csv
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from jobs.benchmark import app
from lattqe.benchmark.cells import OpenedDataset
from lattqe.benchmark.density import LabelledSet, cut, load_own_set, make_cells, rivals
from lattqe.errors import LattqeError
from lattqe.evaluation import evaluate
from lattqe.search import FlatIndex
from lattqe.store import FeatureWriter


def labelled(name: str, classes: int = 8, images: int = 12, seed: int = 0) -> LabelledSet:
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((classes, 16))
    labels = np.repeat(np.arange(classes, dtype=np.int32), images)
    x = centers[labels] + 0.9 * rng.standard_normal((len(labels), 16))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    asks = np.arange(len(labels)) % images < 2
    ids = [f"{name}-{row}" for row in range(len(labels))]
    return LabelledSet(
        name,
        x[~asks],
        labels[~asks],
        [each for each, ask in zip(ids, asks) if not ask],
        x[asks],
        labels[asks],
        [each for each, ask in zip(ids, asks) if ask],
    )


def store(folder: Path, one: LabelledSet) -> tuple[str, str]:
    for name, x, ids, labels in (
        (one.name, one.xb, one.ids, one.labels),
        (f"{one.name}-queries", one.xq, one.query_ids, one.query_labels),
    ):
        with FeatureWriter(str(folder / name), x.shape[1], "float32", labels=True) as writer:
            writer.append(x, ids, labels)
    return str(folder / one.name), str(folder / f"{one.name}-queries")


@pytest.mark.parametrize("relevant", [1, 3, 10, 99])
def test_every_class_keeps_so_many_images_always_the_same(relevant: int) -> None:
    one = labelled("a")
    rows = cut(one, relevant)
    np.testing.assert_array_equal(np.bincount(one.labels[rows]), np.full(8, min(relevant, 10)))
    np.testing.assert_array_equal(rows, cut(one, relevant))
    assert set(cut(one, max(relevant - 1, 1))) <= set(rows), "denser sets hold the sparser ones"
    assert len(cut(one, 0)) == len(one.labels)


def test_cells_hold_the_cut_rows_and_distractors_that_are_relevant_to_nothing(tmp_path: Path) -> None:
    sets = [labelled("a"), labelled("b", seed=1)]
    cells = make_cells(sets, str(tmp_path), relevant=(2, 0))
    kinds = [("no", 2), ("yes", 2), ("cut alike", 2), ("no", 0), ("yes", 0)]
    assert [cell.group for cell in cells] == [(16, kind, m) for kind, m in kinds] * 2
    crowded = OpenedDataset.open(cells[1].dataset)
    assert crowded.database.rows == 2 * 8 + 80
    np.testing.assert_array_equal(crowded.truth.counts, np.full(16, 2))
    alike = OpenedDataset.open(cells[2].dataset)
    assert alike.database.rows == 2 * 8 + 2 * 8
    np.testing.assert_array_equal(alike.truth.counts, np.full(16, 2))
    alone = make_cells(sets[:1], str(tmp_path / "alone"), relevant=(1,))
    assert [cell.distractors for cell in alone] == ["no"]


@pytest.mark.slow
def test_a_users_own_sets_get_an_answer(tmp_path: Path) -> None:
    first, second = labelled("first"), labelled("second", seed=1)
    words = ["density", "--to", str(tmp_path / "results"), "--relevant", "1", "--relevant", "0"]
    words += ["--only", "aqe", "--only", "lattqe"]
    for one in (first, second):
        database, queries = store(tmp_path, one)
        words += ["--features", database, "--queries", queries]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output + repr(done.exception)
    text = " ".join(done.stderr.split())
    assert "1 relevant" in text
    assert "LAttQE" in text
    assert "it harms" in text
    page = (tmp_path / "results" / "report.html").read_text()
    assert "gain in mAP (points)" in page
    figures = sorted((tmp_path / "results" / "figures").iterdir())
    assert [each.name for each in figures] == ["gain-16-cut-alike.svg", "gain-16-distractors.svg", "gain-16.svg"]
    for figure in figures:  # each is the page's own, and a whole document by itself
        assert figure.read_text() in page
        assert ElementTree.parse(figure).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    lines = list(csv.reader((tmp_path / "results" / "results.csv").read_text().splitlines()))
    found = {tuple(line[:5]): float(line[5]) for line in lines[1:]}
    kept = cut(first, 1)
    truth = OpenedDataset.open(make_cells([first], str(tmp_path / "again"), (1,))[0].dataset).truth
    expected = evaluate(FlatIndex(first.xb[kept]), first.xq, truth)["label"].mean_ap
    assert found["first", "16", "1", "no", "no expansion"] == pytest.approx(100 * expected, abs=1e-5)
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0
    assert (tmp_path / "results" / "report.html").read_text() == page


@pytest.mark.usefixtures("no_figures")
def test_every_method_is_measured_where_none_is_named(tmp_path: Path) -> None:
    database, queries = store(tmp_path, labelled("own"))
    words = ["density", "--features", database, "--queries", queries, "--relevant", "1"]
    done = CliRunner().invoke(app, [*words, "--to", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output + repr(done.exception)
    lines = list(csv.reader((tmp_path / "results" / "results.csv").read_text().splitlines()))
    plain, graph = rivals()
    assert {each.label for each in graph} >= {
        "offline diffusion",
        "ADBAwD + AQEwD + offline diffusion",
        "diffusion, adapted",
        "ADBAwD + AQEwD + diffusion, adapted",
        "propagation + AQEwD, adapted",
    }
    assert {line[4] for line in lines[1:]} >= {"no expansion", "LAttQE", *(each.label for each in (*plain, *graph))}


def test_a_collection_of_too_many_rows_is_measured_without_what_cannot_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.benchmark.MOST_ROWS", 20)
    database, queries = store(tmp_path, labelled("own"))
    words = ["density", "--features", database, "--queries", queries, "--relevant", "1", "--relevant", "0"]
    words += ["--only", "diffusion", "--only", "lattqe", "--to", str(tmp_path / "results")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output + repr(done.exception)
    told = "not measured: more than 100,000 rows"
    lines = list(csv.reader((tmp_path / "results" / "results.csv").read_text().splitlines()))
    found = {(line[2], line[4]): line[5] for line in lines[1:]}
    assert found["all", "diffusion"] == found["all", "diffusion, adapted"] == told
    assert float(found["1", "diffusion"]) > 0
    assert float(found["all", "LAttQE"]) > 0
    page = (tmp_path / "results" / "report.html").read_text()
    learned = sum(label.startswith("LAtt") for relevant, label in found if relevant == "all")
    assert page.count(told) == 4 + learned, "four rows of diffusion, and the interval of each learned row over the best"


@pytest.mark.usefixtures("no_figures")
def test_the_model_alone_is_compared_with_no_expansion(tmp_path: Path) -> None:
    database, queries = store(tmp_path, labelled("own"))
    words = ["density", "--features", database, "--queries", queries, "--relevant", "1", "--only", "lattqe"]
    done = CliRunner().invoke(app, [*words, "--to", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output + repr(done.exception)
    lines = list(csv.reader((tmp_path / "results" / "results.csv").read_text().splitlines()))
    assert {line[4] for line in lines[1:]} >= {"no expansion", "LAttQE"}


def test_without_queries_one_image_of_each_class_asks(tmp_path: Path) -> None:
    database, queries = store(tmp_path, labelled("own"))
    own = load_own_set(database, None)
    assert len(own.xq) == len(set(own.query_labels)) == 8
    assert not set(own.query_ids) & set(own.ids)
    assert len(load_own_set(database, queries).xb) == 80
    with FeatureWriter(str(tmp_path / "lonely"), 16, "float32", labels=True) as writer:
        writer.append(own.xb[:8], own.ids[:8], np.arange(8, dtype=np.int32))
    with pytest.raises(LattqeError, match="no two images have the same label"):
        load_own_set(str(tmp_path / "lonely"), None)
    with FeatureWriter(str(tmp_path / "plain"), 16, "float32") as writer:
        writer.append(own.xb[:8], own.ids[:8])
    with pytest.raises(LattqeError, match="has no labels"):
        load_own_set(str(tmp_path / "plain"), None)


def test_a_single_class_is_cut_to_a_single_row(tmp_path: Path) -> None:
    database, queries = store(tmp_path, labelled("own", classes=1))
    words = ["density", "--features", database, "--queries", queries, "--relevant", "1", "--only", "aqewd"]
    done = CliRunner().invoke(app, [*words, "--only", "lattqe", "--to", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output + repr(done.exception)
    lines = list(csv.reader((tmp_path / "results" / "results.csv").read_text().splitlines()))
    assert {float(line[5]) for line in lines[1:]} == {100.0}


def test_queries_that_find_nothing_are_refused(tmp_path: Path) -> None:
    own = labelled("own")
    database, _ = store(tmp_path, own)
    with pytest.raises(LattqeError, match="leave --queries out"):
        load_own_set(database, database)
    with FeatureWriter(str(tmp_path / "strange"), 16, "float32", labels=True) as writer:
        writer.append(own.xq, own.query_ids, own.query_labels + 100)
    with pytest.raises(LattqeError, match=r"no image of .*: give queries of the same classes"):
        load_own_set(database, str(tmp_path / "strange"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["density", "--queries", "q"], "--queries need --features"),
        (["density", "--features", "f", "--columns", "64"], "used whole: leave --data and --columns out"),
        (["density", "--features", "f", "--features", "g", "--queries", "q"], "1 --queries for 2 --features"),
        (["synthetic", "--features", "f"], "takes no --features, which belongs to density"),
        (["synthetic", "--columns", "64"], "takes no --columns, which belongs to photos, density"),
        (["run.toml", "--relevant", "1"], "are for presets"),
    ],
)
def test_options_that_do_not_belong_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [*words, "--to", str(tmp_path)])
    assert isinstance(done.exception, LattqeError)
    assert message in str(done.exception)
