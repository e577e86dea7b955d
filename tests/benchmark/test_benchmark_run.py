"""A run through cells, choices and tables: right numbers, nothing measured twice, nothing kept secret."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from benchmark_sets import FACTS, FIXED, fill, rows_of, small_run

import lattqe
from cluster.benchmark import Bench
from jobs.benchmark import approximate_warnings
from lattqe.augmentation.recipe import adapted_rows
from lattqe.benchmark.cells import Cell, OpenedDataset
from lattqe.benchmark.choosing import choose_rows, mean_map
from lattqe.benchmark.results import assemble
from lattqe.benchmark.spec import Candidate, Dataset, GraphCandidate, Pipeline, Run, Setting, graph_candidate
from lattqe.datasets.revisited import load_gnd
from lattqe.errors import LattqeError
from lattqe.evaluation import LabelTruth, evaluate
from lattqe.report import render_page
from lattqe.search import FlatIndex
from lattqe.search.index import SmallIndex
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, open_place
from lattqe.store.manifest import Manifest, canonical_json, checksum, seal_json
from lattqe.store.writer import stack_features
from lattqe.whitening import whiten_features


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return small_run(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def bench(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(run, str(tmp_path_factory.mktemp("run")))
    assert fill(bench) > 20
    return bench


@pytest.mark.parametrize(
    ("dba", "qe"),
    [
        (None, None),
        (None, Setting("aqe", 4)),
        (Setting("aqe", 4), Setting("aqe", 4)),
        (Setting("dqe", 2, (("C", 0.1), ("negatives", 5))), Setting("dqe", 2, (("C", 0.1), ("negatives", 5)))),
    ],
)
@pytest.mark.parametrize("distractors", [False, True])
def test_a_cell_is_what_the_library_gives_for_arrays(
    bench: Bench, dba: Setting | None, qe: Setting | None, distractors: bool
) -> None:
    xb, xq = rows_of(bench, "oxford", distractors), bench.inputs["oxford"].queries.read()
    if dba is not None:
        xb = lattqe.augment(xb, dba.method, dba.k, **dict(dba.params))
    if qe is not None:
        xq = lattqe.expand(xq, xb, qe.method, qe.k, **dict(qe.params))
    expected = evaluate(FlatIndex(xb), xq, bench.inputs["oxford"].truth)
    found = bench.lookup(Cell("oxford", "distractors" if distractors else None, dba, qe)).scores
    assert [one.setup for one in found] == ["easy", "medium", "hard"]
    for one in found:
        np.testing.assert_allclose(one.ap, expected[one.setup].ap, atol=1e-6)


def test_the_best_of_a_grid_is_shown_and_how_it_was_found(bench: Bench, run: Run) -> None:
    rows = {row.label: row for row in choose_rows(run, bench.lookup)}
    assert rows["AQE"].choose == "fixed"
    assert rows["αQE"].choose == rows["αDBA + αQE"].choose == "test"
    tested = run.datasets_of("test")
    means = {setting: mean_map(bench.lookup, tested, Pipeline(qe=setting)) for setting in run.methods[2].qe_settings()}
    assert rows["αQE"].pipeline.qe == max(means, key=lambda setting: means[setting])
    assert rows["αDBA + αQE"].pipeline.dba is not None
    assert rows["αDBA + αQE"].pipeline.dba.params == rows["αQE"].pipeline.qe.params  # type: ignore[union-attr]


def test_validation_chooses_where_it_was_asked_to(run: Run, tmp_path: Path) -> None:
    """Validation on one data set decides for the other, whatever would have been best there."""
    grid = (Candidate("aqe", "AQE", "validation", (1, 4, 64)),)
    oxford, paris = run.datasets
    for judge, other in ((oxford, paris), (paris, oxford)):
        judging = dataclasses.replace(judge, role="validation")
        chosen = dataclasses.replace(run, datasets=(judging, other), methods=grid, distractors=(), nqe_sweep=(1,))
        bench = Bench(chosen, str(tmp_path / judge.name))
        fill(bench)
        row = choose_rows(chosen, bench.lookup)[1]
        assert row.choose == "validation"
        means = {setting: mean_map(bench.lookup, [judging], Pipeline(qe=setting)) for setting in grid[0].qe_settings()}
        assert row.pipeline.qe == max(means, key=lambda setting: means[setting])


def test_a_complete_run_measures_nothing_and_a_lost_or_damaged_cell_alone(bench: Bench, run: Run) -> None:
    again = Bench(run, bench.folder)
    assert again.cells_to_do() == []
    cells = [Cell("oxford", None, None, Setting("aqe", 4)), Cell("paris", "distractors", None, None)]
    place = open_place(f"{bench.folder}/cells")
    place.delete(f"{again.key(cells[0])}.json")
    place.write(f"{again.key(cells[1])}.json", b'{"scores": [')
    again = Bench(run, bench.folder)
    assert again.cells_to_do() == cells
    assert fill(again) == 2
    for cell in cells:
        assert _numbers(again, cell) == _numbers(bench, cell)


def forge(content: dict, **values: list) -> None:
    """Change the first scores and make the checksum fit."""
    content.pop("checksum")
    content["scores"][0].update(values)
    content["checksum"] = checksum(canonical_json(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["scores"][0].update(ap=[1.0] * len(content["scores"][0]["ap"])),
        lambda content: content.update(scores=[]),
        lambda content: content.pop("checksum"),
        lambda content: forge(content, ap=[2.0]),
        lambda content: forge(content, positives=[10**30]),
        lambda content: forge(content, ap=[], precision=[]),
    ],
)
def test_an_edited_cell_is_measured_again(bench: Bench, run: Run, change) -> None:
    cell = Cell("oxford", None, None, Setting("aqe", 4))
    path = Path(bench.folder) / "cells" / f"{bench.key(cell)}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    again = Bench(run, bench.folder)
    assert again.cells_to_do() == [cell]
    fill(again)
    assert _numbers(again, cell) == _numbers(bench, cell)


def test_hops_of_a_method_are_a_row_and_have_no_limit_of_rows(run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("cluster.benchmark.MOST_ROWS", 500)
    pipeline = Pipeline(Setting("alphaqe", 5, (("hops", 3),)), Setting("aqe", 4))
    chosen = dataclasses.replace(
        run, methods=FIXED[:1], graph_methods=(GraphCandidate("alphaqe", "three hops", "fixed", (pipeline,)),)
    )
    bench = Bench(chosen, str(tmp_path))
    fill(bench)
    row = next(row for row in assemble(chosen, bench, FACTS)["table3"] if row["label"] == "three hops")
    xb, xq = rows_of(bench, "oxford", True), FeatureSet.open(run.datasets[0].queries).read()
    flowed = lattqe.augment(xb, "alphaqe", 5, hops=3).astype(bench.inputs["oxford"].database.dtype)
    truth = load_gnd(run.datasets[0].truth).truth
    expected = evaluate(FlatIndex(flowed), lattqe.expand(xq, flowed, method="aqe", k=4), truth)["hard"].mean_ap
    assert row["map"]["oxford+distractors"]["hard"] == pytest.approx(100 * expected, abs=1e-6)


@pytest.mark.usefixtures("no_figures")
def test_an_adaptation_counts_for_the_row_that_uses_it(run: Run, tmp_path: Path) -> None:
    rows, asked = Setting("aqe", 4, (("adapt", True),)), Setting("aqe", 4)
    adapted = GraphCandidate("aqe", "adapted", "fixed", (Pipeline(rows, asked),))
    chosen = dataclasses.replace(run, methods=FIXED[:1], graph_methods=(adapted,))
    bench = Bench(chosen, str(tmp_path))
    fill(bench)
    for dataset in chosen.datasets_of("test"):  # seconds that no machine has, so that each part of the sum shows
        key = bench._index_key(Cell(dataset.name, None, rows, asked))
        spent = bench.indexes.seconds(key)
        assert spent is not None
        assert set(spent) == {"adapt", "graph", "augment"}
        assert min(spent.values()) > 0
        made_up = {"adapt": 3000, "augment": 500, "graph": 70000}
        for wrong in (b'{"graph": 1', b'{"graph": 1}', seal_json({"seconds": made_up, "key": "another"})):
            bench.indexes.costs.write(f"{key}.json", wrong)
            assert bench.indexes.seconds(key) is None
        bench.indexes.costs.write(f"{key}.json", seal_json({"seconds": made_up, "key": key}))
    results = assemble(chosen, bench, FACTS)
    row = next(row for row in results["everything"] if row["label"] == "adapted")
    sizes = [bench.sizes(dataset.name)[0] for dataset in chosen.datasets_of("test")]
    assert row["seconds_per_million_rows"] == pytest.approx(1e6 * 3500 * len(sizes) / sum(sizes), rel=0.01)
    page = render_page(results)
    assert "needs a graph of its own" in page
    assert "3000.00" in page


def test_queries_that_are_rows_never_find_themselves(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 8)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    labels, ids = rng.integers(0, 6, 60).astype(np.int32), [f"image-{row}" for row in range(60)]

    def store(name: str, rows: np.ndarray, vectors: np.ndarray) -> str:
        with FeatureWriter(str(tmp_path / name), 8, "float32", labels=True) as writer:
            writer.append(vectors[rows], [ids[row] for row in rows], labels[rows])
        return str(tmp_path / name)

    database, asked = store("database", np.arange(60), x), np.arange(0, 60, 3)
    dataset = Dataset("rows", database, store("queries", asked, x))
    candidate = Candidate("aqe", "AQE", "fixed", (3,))
    diffusing = graph_candidate("diffusion", "fixed", kq=(2,), kd=(5,), gamma=(1.0,), alpha=(0.9,))
    run = Run("rows", (dataset,), (candidate,), nqe_sweep=(3,), bootstrap=10, graph_methods=(diffusing,))
    bench = Bench(run, str(tmp_path / "run"))
    fill(bench)
    found = [100 * bench.lookup(row.cell(dataset)).scores[0].mean_ap for row in choose_rows(run, bench.lookup)]
    expected = []
    for number, row in enumerate(asked):  # one query at a time, against a database without it
        rest = np.delete(np.arange(60), row)
        truth = LabelTruth(labels[rest], query_labels=labels[[row]])
        expanded = lattqe.expand(x[[row]], x[rest], method="aqe", k=3)
        expected.append([evaluate(FlatIndex(x[rest]), each, truth)["label"].mean_ap for each in (x[[row]], expanded)])
        assert bench.inputs["rows"].exclude[number] == row
    np.testing.assert_allclose(found[:2], 100 * np.mean(expected, axis=0), atol=1e-6)
    changed = Dataset("rows", database, store("others", asked, np.roll(x, 1, axis=0)))
    assert OpenedDataset.open(changed).exclude is None, "the same ids of other vectors are other images"
    mixed = x.copy()
    mixed[3] = mixed[4]
    partly = Dataset("rows", database, store("mixed", np.array([0, 3]), mixed))
    assert OpenedDataset.open(partly).exclude.tolist() == [0, -1]
    bench = Bench(dataclasses.replace(run, datasets=(partly,), graph_methods=()), str(tmp_path / "partly"))
    fill(bench)
    found = [bench.lookup(row.cell(partly)).scores[0].ap for row in choose_rows(bench.run, bench.lookup)]
    truth = LabelTruth(labels, query_labels=labels[[3]])
    asked = mixed[[3]]
    outside = [
        evaluate(FlatIndex(x), each, truth)["label"].mean_ap
        for each in (asked, lattqe.expand(asked, x, method="aqe", k=3))
    ]
    np.testing.assert_allclose([ap[0] for ap in found], np.array(expected)[0], atol=1e-6)
    np.testing.assert_allclose([ap[1] for ap in found], outside, atol=1e-6)


def _numbers(bench: Bench, cell: Cell) -> list[dict[str, object]]:
    return [one.to_dict() for one in bench.lookup(cell).scores]


def test_other_content_under_the_same_address_is_another_cell(run: Run, bench: Bench, tmp_path: Path) -> None:
    gnd = json.loads(Path(run.datasets[0].truth).read_text())
    gnd["gnd"][0]["easy"], gnd["gnd"][0]["junk"] = gnd["gnd"][0]["junk"], gnd["gnd"][0]["easy"]
    (tmp_path / "gnd.json").write_text(json.dumps(gnd))
    other = Dataset("oxford", run.datasets[0].database, run.datasets[0].queries, str(tmp_path / "gnd.json"))
    changed = Bench(dataclasses.replace(run, datasets=(other, run.datasets[1])), bench.folder)
    assert {cell.dataset for cell in changed.cells_to_do()} == {"oxford"}


def test_augmentations_go_when_they_are_measured_and_graphs_stay(bench: Bench) -> None:
    assert open_place(f"{bench.folder}/indexes").list() == []
    assert any(name.endswith("manifest.json") for name in open_place(f"{bench.folder}/graphs").list())


def test_results_hold_all_that_the_report_shows(bench: Bench, run: Run) -> None:
    results = assemble(run, bench, FACTS)
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    labels = ["no expansion", "AQE", "DQE", "αQE", "ADBA + AQE", "DDBA + DQE", "αDBA + αQE"]
    assert [row["label"] for row in results["table3"]] == labels
    plain = results["table3"][0]
    assert list(plain["map"]) == ["oxford", "oxford+distractors", "paris", "paris+distractors"]
    assert all(set(setups) == {"medium", "hard"} for setups in plain["map"].values())
    assert plain["mean"] == pytest.approx(np.mean([list(setups.values()) for setups in plain["map"].values()]))
    truth = load_gnd(run.datasets[0].truth).truth
    direct = evaluate(FlatIndex(rows_of(bench, "oxford", True)), FeatureSet.open(run.datasets[0].queries).read(), truth)
    assert plain["map"]["oxford+distractors"]["hard"] == pytest.approx(100 * direct["hard"].mean_ap, abs=1e-9)
    precision = plain["precision"]["oxford+distractors"]["hard"]
    assert precision["5"] == pytest.approx(100 * direct["hard"].mean_precision[1])
    assert [series["nqe"] for series in results["figure3"]["series"]] == [[1, 4, 16]] * 3
    assert {row["after"] for row in results["differences"]} == set(labels[1:])
    difference = next(row for row in results["differences"] if row["after"] == "AQE")
    assert difference["difference"] == pytest.approx(results["table3"][1]["mean"] - plain["mean"])
    assert all(row["index_seconds"] for row in results["cost"] if "DBA" in row["label"])
    assert results["weights"]["k"] == 16
    assert [profile["label"] for profile in results["weights"]["profiles"]] == ["AQE", "DQE", "αQE"]
    assert len(results["per_query"][0]["ids"]) == len(results["per_query"][0]["before"])


def test_rankings_of_small_sets_are_the_counts_to_the_last_one() -> None:
    """Duplicates and exact ties included: positions decide every number."""
    rng = np.random.default_rng(0)
    xb = rng.integers(-2, 3, size=(300, 6)).astype(np.float32)
    xb[np.linalg.norm(xb, axis=1) == 0] = 1
    xb /= np.linalg.norm(xb, axis=1, keepdims=True)
    xb[200:] = xb[rng.integers(0, 200, 100)]
    xq = xb[rng.integers(0, 300, 40)]
    rows = rng.integers(-1, 300, size=(40, 30))
    flat, small = FlatIndex(xb), SmallIndex(xb)
    scores = flat.score(xq, rows)
    np.testing.assert_array_equal(small.count_above(xq, scores, rows), flat.count_above(xq, scores, rows))


def test_methods_without_dba_need_no_graph(run: Run, tmp_path: Path) -> None:
    plain = tuple(dataclasses.replace(method, ndba=(), nqe_with_dba=()) for method in FIXED)
    bench = Bench(dataclasses.replace(run, methods=plain, distractors=()), str(tmp_path))
    fill(bench)
    assert not (tmp_path / "graphs").exists()
    assert [row.kind for row in choose_rows(bench.run, bench.lookup)] == ["none", "qe", "qe", "qe"]


def test_finished_graphs_are_used_and_others_refused(run: Run, bench: Bench, tmp_path: Path) -> None:
    dba = Setting("aqe", 4)
    cells = [Cell("oxford", each, dba, dba) for each in (None, "distractors")]
    database, more = bench.inputs["oxford"].database, bench.distractors["oxford", "distractors"]
    k = max(NeighborGraph.open(str(path)).k for path in Path(bench.folder, "graphs").iterdir())

    def write(name: str, x: np.ndarray) -> FeatureSet:
        with FeatureWriter(str(tmp_path / name), x.shape[1], database.dtype, normalise=False) as writer:
            writer.append(x, [f"other{row}" for row in range(len(x))])
        return FeatureSet.open(str(tmp_path / name))

    # The same rows, joined by a user under other names; and one bit of one row is another.
    joined = np.concatenate([database.read(), more.read()])
    graphs = [publish_graph(database, k, f"{tmp_path}/alone").uri]
    graphs.append(publish_graph(write("joined", joined), k, f"{tmp_path}/both").uri)
    again = Bench(dataclasses.replace(run, graphs=tuple(graphs)), f"{tmp_path}/again")
    again.fill(cells, lambda cell: None)
    assert not (tmp_path / "again" / "graphs").exists()
    for cell in cells:
        found = [[one.to_dict() for one in each.lookup(cell).scores] for each in (again, bench)]
        assert found[0] == found[1]
    joined[-1, -1] = np.nextafter(joined[-1, -1], joined.dtype.type(0))
    for graph, words in (
        (publish_graph(write("changed", joined), k, f"{tmp_path}/wrong"), "the graph of no data set of this run"),
        (publish_graph(more, k - 1, f"{tmp_path}/short"), f"has {k - 1} neighbors per row, this run needs {k}"),
    ):
        with pytest.raises(LattqeError, match=words):
            Bench(dataclasses.replace(run, graphs=(graph.uri,)), f"{tmp_path}/refused")


def test_finished_graphs_of_adapted_rows_and_approximate_ones(
    run: Run, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dba = Setting("aqe", 4, (("adapt", True),))
    cell, plain = Cell("oxford", "distractors", dba, None), Cell("oxford", "distractors", Setting("aqe", 4), None)
    sets = [bench.inputs["oxford"].database, bench.distractors["oxford", "distractors"]]
    own = Bench(run, f"{tmp_path}/own")
    own.fill([cell], lambda cell: None)
    # An index of the same rows, as `lattqe augment` makes it, has the graph that the run needs.
    adapted = adapted_rows(stack_features(sets, f"{tmp_path}/joined"), f"{tmp_path}/index", lambda rows: None)
    graph = publish_graph(adapted, own._graph_k(), f"{tmp_path}/index/neighbors")
    known = Bench(dataclasses.replace(run, graphs=(graph.uri,)), f"{tmp_path}/known")
    known.fill([cell], lambda cell: None)
    assert not (tmp_path / "known" / "graphs").exists()
    assert known.key(cell) == own.key(cell)
    assert [one.to_dict() for one in known.lookup(cell).scores] == [one.to_dict() for one in own.lookup(cell).scores]
    assert known.known_graph("oxford", "distractors", plain.dba) is None, "it is of rows in another space"
    # Rows that went through the map of another collection are no rows of this run.
    whiten_features(sets[0], f"{tmp_path}/index/adaptation", f"{tmp_path}/strange")
    strange = publish_graph(FeatureSet.open(f"{tmp_path}/strange"), own._graph_k(), f"{tmp_path}/strange-graph")
    with pytest.raises(LattqeError, match="the graph of no data set of this run"):
        Bench(dataclasses.replace(run, graphs=(strange.uri,)), f"{tmp_path}/refused")

    monkeypatch.setattr(
        Manifest, "approximation", property(lambda each: "recall@9 0.95" if each.kind == "neighbors" else None)
    )
    both = publish_graph(stack_features(sets, f"{tmp_path}/joined"), own._graph_k(), f"{tmp_path}/both")
    told = Bench(dataclasses.replace(run, graphs=(both.uri,)), f"{tmp_path}/told")
    assert told.key(plain) != own.key(plain), "cells of exact graphs are not taken for these"
    assert told.key(cell) == own.key(cell), "these rows have another graph"
    assert approximate_warnings(told) == [f"rows are augmented from {both.uri}, an approximate graph: recall@9 0.95"]
    theirs = publish_graph(sets[1], own._graph_k(), f"{tmp_path}/theirs")
    with pytest.raises(LattqeError, match="approximate graph of distractors alone"):
        Bench(dataclasses.replace(run, graphs=(theirs.uri,)), f"{tmp_path}/refused")


@pytest.mark.slow
def test_the_papers_own_settings(tmp_path: Path) -> None:
    """Parameters settled again for augmented databases, further powers in figure 3, the paper's numbers in figure 4."""
    alpha = Candidate("alphaqe", "αQE", "test", (4, 16), (4, 8), (4, 6), {"alpha": (1.0, 3.0)}, own_dba=True)
    decay = Candidate("aqewd", "AQEwD", "test", (2, 8))
    more = tuple((f"αQE, α = {power:g}", Setting("alphaqe", 1, (("alpha", power),))) for power in (1.0, 2.0, 3.0))
    regimes = (Setting("alphaqe", 24, (("alpha", 2.0),)), Setting("aqewd", 4))
    chosen = dataclasses.replace(
        small_run(tmp_path / "world", (alpha, decay)),
        distractors=(),
        published=True,
        more_sweeps=more,
        regime_settings=regimes,
    )
    bench = Bench(chosen, str(tmp_path / "run"))
    fill(bench)
    rows = choose_rows(chosen, bench.lookup)
    tested = chosen.datasets_of("test")
    tried = [
        Pipeline(Setting("alphaqe", m, (("alpha", power),)), Setting("alphaqe", k, (("alpha", power),)))
        for power in (1.0, 3.0)
        for m in (4, 8)
        for k in (4, 6)
    ]
    augmented = next(row for row in rows if row.kind == "dba+qe")
    assert mean_map(bench.lookup, tested, augmented.pipeline) == max(
        mean_map(bench.lookup, tested, each) for each in tried
    )
    results = assemble(chosen, bench, FACTS)
    own = dict(next(row for row in rows if row.method == "alphaqe").pipeline.qe.params)["alpha"]
    assert [series["label"] for series in results["figure3"]["series"]] == [
        "αQE",
        "AQEwD",
        *(f"αQE, α = {power:g}" for power in (1.0, 2.0, 3.0) if power != own),
    ]
    bars = results["figure4"]["by_positives"]["medium"]
    assert bars["published"]["alphaqe"] == [3.28, 13.4, 9.08]
    before = [bench.lookup(Cell(dataset.name, None, None, None)).scores for dataset in tested]
    after = [bench.lookup(Cell(dataset.name, None, None, regimes[0])).scores for dataset in tested]
    medium = [[next(one for one in scores if one.setup == "medium") for scores in side] for side in (before, after)]
    plain, expanded, positives = (
        np.concatenate(each)
        for each in (
            [one.ap[one.evaluated] for one in medium[0]],
            [one.ap[one.evaluated] for one in medium[1]],
            [one.positives[one.evaluated] for one in medium[0]],
        )
    )
    few = positives <= np.percentile(positives, 33, method="higher")
    expected = 100 * np.mean((expanded[few] - plain[few]) / plain[few])
    assert bars["series"][0]["relative"][0] == pytest.approx(expected)
    page = render_page({**results, "published": {"table3": [], "table2": []}})
    assert "the paper" in page
    assert "250 queries/s on a Tesla M40" in page
