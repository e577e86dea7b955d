"""A run through cells, choices and tables: right numbers, nothing measured twice, nothing kept secret."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from benchmark_sets import FIXED, small_run

import lattqe
from cluster.benchmarking import Bench
from lattqe.benchmark.cells import Cell
from lattqe.benchmark.choosing import choose_rows, mean_map
from lattqe.benchmark.results import assemble
from lattqe.benchmark.small import SmallIndex
from lattqe.benchmark.spec import Dataset, Method, Run, Setting
from lattqe.datasets.revisited import load_gnd
from lattqe.evaluation import evaluate
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, open_place

FACTS = {"inputs": {}, "run": {}, "warnings": [], "published": {}}


def fill(bench: Bench) -> int:
    """Complete a run; how many cells were measured."""
    measured = 0
    while cells := bench.cells_to_do():
        done: list[Cell] = []
        bench.fill(cells, done.append)
        assert len(set(done)) == len(done) == len(cells)
        measured += len(done)
    return measured


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return small_run(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def bench(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(run, str(tmp_path_factory.mktemp("run")))
    assert fill(bench) > 20
    return bench


def rows_of(bench: Bench, dataset: str, distractors: bool) -> np.ndarray:
    sets = [bench.inputs[dataset].database]
    if distractors:
        sets.append(bench.distractors[dataset, "distractors"])
    return np.concatenate([each.read() for each in sets])


@pytest.mark.parametrize(("dba", "qe"), [
    (None, None), (None, Setting("aqe", 4)), (Setting("aqe", 4), Setting("aqe", 4)),
    (Setting("dqe", 2, (("C", 0.1), ("negatives", 5))), Setting("dqe", 2, (("C", 0.1), ("negatives", 5))))])
@pytest.mark.parametrize("distractors", [False, True])
def test_a_cell_is_what_the_library_gives_for_arrays(bench: Bench, dba: Setting | None, qe: Setting | None,
                                                     distractors: bool) -> None:
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
    means = {setting: mean_map(bench.lookup, tested, None, setting) for setting in run.methods[2].qe_settings()}
    assert rows["αQE"].qe == max(means, key=lambda setting: means[setting])
    assert rows["αDBA + αQE"].dba is not None
    assert rows["αDBA + αQE"].dba.params == rows["αQE"].qe.params  # type: ignore[union-attr]


def test_validation_chooses_where_it_was_asked_to(run: Run, tmp_path: Path) -> None:
    """Validation on one data set decides for the other, whatever would have been best there."""
    grid = (Method("aqe", "AQE", "validation", (1, 4, 64)),)
    oxford, paris = run.datasets
    for judge, other in ((oxford, paris), (paris, oxford)):
        judging = dataclasses.replace(judge, role="validation")
        chosen = dataclasses.replace(run, datasets=(judging, other), methods=grid, distractors=(), nqe_sweep=(1,))
        bench = Bench(chosen, str(tmp_path / judge.name))
        fill(bench)
        row = choose_rows(chosen, bench.lookup)[1]
        assert row.choose == "validation"
        means = {setting: mean_map(bench.lookup, [judging], None, setting) for setting in grid[0].qe_settings()}
        assert row.qe == max(means, key=lambda setting: means[setting])


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
