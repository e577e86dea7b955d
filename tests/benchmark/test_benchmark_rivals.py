"""The rivals on the whole graph in a run: their numbers, rows too many for them, the adapted space, what is claimed."""

import csv
import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from benchmark_sets import FACTS, FIXED, fill, rows_of, small_run

import lattqe
from benchmarks.rivals import clusters, measured, parts
from cluster.benchmark import Bench
from lattqe.benchmark.presets import PresetOptions, preset_run
from lattqe.benchmark.results import assemble, findings
from lattqe.benchmark.spec import GRAPH_METHODS, Candidate, Pipeline, Run, Setting, graph_candidate
from lattqe.datasets.revisited import load_gnd
from lattqe.datasets.synthetic import SyntheticWorld
from lattqe.errors import LattqeError
from lattqe.evaluation import evaluate, score_ranking
from lattqe.expansion.diffusion import Diffusion, GraphRows, Propagation
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.report import render_page, to_csv, to_text
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, open_place


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return small_run(tmp_path_factory.mktemp("world"))


RIVALS = (
    graph_candidate("diffusion", "test", kq=(5,), kd=(10,), gamma=(3.0,), alpha=(0.9, 0.99)),
    graph_candidate(
        "offline-diffusion",
        "fixed",
        "ADBA + AQE + offline",
        Pipeline(Setting("aqe", 4), Setting("aqe", 4)),
        kq=(5,),
        kd=(10,),
        gamma=(3.0,),
        alpha=(0.9,),
        truncation=(50,),
    ),
    graph_candidate("propagation", "fixed", "propagation + AQE", Pipeline(qe=Setting("aqe", 4)), k=(5,), hops=(2,)),
)


@pytest.mark.usefixtures("no_figures")
def test_rivals_on_the_graph_are_rows_like_all_others(run: Run, tmp_path: Path) -> None:
    chosen = dataclasses.replace(run, datasets=run.datasets[:1], graph_methods=RIVALS, methods=FIXED[:1])
    bench = Bench(chosen, str(tmp_path))
    fill(bench)
    assert Bench(chosen, str(tmp_path)).cells_to_do() == []
    results = assemble(chosen, bench, FACTS)
    assert [row["label"] for row in results["table3"] if row["kind"] == "graph"] == [
        "diffusion",
        "ADBA + AQE + offline",
        "propagation + AQE",
    ]
    truth = load_gnd(run.datasets[0].truth).truth
    xb, xq = rows_of(bench, "oxford", True), FeatureSet.open(run.datasets[0].queries).read()
    row = next(row for row in results["table3"] if row["label"] == "diffusion")
    ranker = Diffusion(kq=5, kd=10, gamma=3.0, alpha=row["rank"]["alpha"])
    ranking = np.concatenate(list(ranker.rankings(GraphRows(xb), xq)))
    expected = score_ranking(ranking, truth)["hard"].mean_ap
    assert row["map"]["oxford+distractors"]["hard"] == pytest.approx(100 * expected, abs=1e-9)
    row = next(row for row in results["table3"] if row["label"] == "propagation + AQE")
    flowed = Propagation(k=5, hops=2).augment(GraphRows(xb))
    expected = evaluate(FlatIndex(flowed), lattqe.expand(xq, flowed, method="aqe", k=4), truth)["hard"].mean_ap
    assert row["map"]["oxford+distractors"]["hard"] == pytest.approx(100 * expected, abs=1e-6)
    for row in results["everything"]:
        assert row["tuned_mean"] >= row["mean"] - 1e-9
        assert (row["seconds_per_million_rows"] > 0) == (row["kind"] in ("dba+qe", "graph"))
    assert next(row for row in results["everything"] if row["label"] == "diffusion")["tried"] == 2
    page, text = render_page(results), to_csv(results)
    assert "Everything, tuned for each set" in page
    assert "kq 5, α" in text


@pytest.mark.slow
def test_columns_of_too_many_rows_are_not_measured_and_the_report_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.benchmark.MOST_ROWS", 500)
    one = dataclasses.replace(run, datasets=run.datasets[:1], methods=FIXED[:1])
    ranked = dataclasses.replace(one, graph_methods=(RIVALS[0], RIVALS[2]))
    bench = Bench(ranked, str(tmp_path))
    fill(bench)
    results = json.loads(json.dumps(assemble(ranked, bench, FACTS), allow_nan=False))
    rows = {row["label"]: row for row in results["table3"]}
    for label in ("diffusion", "propagation + AQE"):
        assert set(rows[label]["map"]["oxford"]) == {"medium", "hard"}
        assert rows[label]["map"]["oxford+distractors"] == {}
        assert rows[label]["mean"] is None, "a mean of some columns is not to be compared with means of all"
    assert rows["AQE"]["mean"] is not None
    assert next(row for row in results["everything"] if row["label"] == "diffusion")["mean"] is not None
    compared = next(row for row in results["differences"] if row["after"] == "diffusion")
    means = [np.mean(list(rows[label]["map"]["oxford"].values())) for label in ("no expansion", "diffusion")]
    assert compared["difference"] == pytest.approx(means[1] - means[0])
    assert [row["column"] for row in results["cost"] if row["label"] == "diffusion"] == ["oxford"]
    told = "not measured: more than 100,000 rows"
    assert render_page(results).count(told) == 4, "two rows, two setups"
    lines = [line for line in csv.reader(to_csv(results).splitlines()) if line[7] == told]
    assert {(line[1], line[4], line[5]) for line in lines} == {
        (label, "oxford+distractors", setup)
        for label in ("diffusion", "propagation + AQE")
        for setup in ("medium", "hard")
    }
    (table,) = (rows for title, rows in to_text(results) if "graph" in title)
    assert [row[0] for row in table if told in " ".join(row)] == ["oxford+distractors M", "oxford+distractors H"]
    assert next(row for row in table if row[0] == "mean")[2:] == ["– ", "– "]
    # Not a single column: the row stays, with its first setting.
    monkeypatch.setattr("cluster.benchmark.MOST_ROWS", 100)
    bench = Bench(ranked, str(tmp_path / "none"))
    fill(bench)
    results = assemble(ranked, bench, FACTS)
    assert next(row for row in results["everything"] if row["label"] == "diffusion")["map"] == {"oxford": None}
    assert "diffusion" not in {row["after"] for row in results["differences"]}
    assert render_page(results).count(told) == 8 + 4, "two columns; and twice in the tables of everything"


ADAPTED = (
    graph_candidate("diffusion", "fixed", "alone", adapt=True, kq=(5,), kd=(10,), gamma=(3.0,), alpha=(0.9,)),
    graph_candidate(
        "diffusion",
        "fixed",
        "after",
        Pipeline(Setting("aqe", 4, (("adapt", True),)), Setting("aqe", 3)),
        kq=(5,),
        kd=(10,),
        gamma=(3.0,),
        alpha=(0.9,),
    ),
    graph_candidate("propagation", "fixed", "flow", Pipeline(qe=Setting("aqe", 4)), adapt=True, k=(5,), hops=(2,)),
)


def test_rivals_in_the_adapted_space(run: Run, tmp_path: Path) -> None:
    """Rows and queries go through the map that an index of these rows would have; nothing else changes."""
    plain = graph_candidate("diffusion", "fixed", kq=(5,), kd=(10,), gamma=(3.0,), alpha=(0.9,))
    chosen = dataclasses.replace(run, datasets=run.datasets[:1], methods=FIXED[:1], graph_methods=(plain, *ADAPTED))
    bench = Bench(chosen, str(tmp_path))
    fill(bench)
    results = assemble(chosen, bench, FACTS)
    found = {row["label"]: row["map"]["oxford+distractors"]["hard"] for row in results["table3"]}
    xb, xq = rows_of(bench, "oxford", True), bench.inputs["oxford"].queries.read()
    dtype, truth = bench.inputs["oxford"].database.dtype, bench.inputs["oxford"].truth
    space = lattqe.adapt(xb)
    queries, rows = space.apply(xq), space.apply(xb).astype(dtype).astype(np.float32)

    def diffused(xq: np.ndarray, xb: np.ndarray) -> float:
        ranker = Diffusion(kq=5, kd=10, gamma=3.0, alpha=0.9)
        ranking = np.concatenate(list(ranker.rankings(GraphRows(xb), xq)))
        return 100 * score_ranking(ranking, truth)["hard"].mean_ap

    assert found["diffusion"] == pytest.approx(diffused(xq, xb), abs=1e-9)
    assert found["alone"] == pytest.approx(diffused(queries, rows), abs=1e-6)
    assert found["alone"] != found["diffusion"]
    index = lattqe.augment(rows, "aqe", 4).astype(dtype).astype(np.float32)
    assert found["after"] == pytest.approx(diffused(lattqe.expand(queries, index, "aqe", 3), index), abs=1e-6)
    flowed = Propagation(k=5, hops=2).augment(GraphRows(rows))
    expected = evaluate(FlatIndex(flowed), lattqe.expand(queries, flowed, "aqe", 4), truth)["hard"].mean_ap
    assert found["flow"] == pytest.approx(100 * expected, abs=1e-6)
    assert "space adapted" in to_csv(results)
    assert open_place(f"{bench.folder}/indexes").list() == [], "spaces go when their cells are measured"


PRESET_RIVALS = [
    "diffusion",
    "ADBAwD + AQEwD + diffusion",
    "offline diffusion",
    "ADBAwD + AQEwD + offline diffusion",
    "propagation",
    "propagation + AQEwD",
]


def test_presets_have_the_rivals_with_one_setting_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(SyntheticWorld, seed=3, dim=32, scale=0.05, distractors=50)
    monkeypatch.setattr("lattqe.benchmark.presets.SyntheticWorld", small)
    for name, data in (("revisited", str(tmp_path)), ("synthetic", None)):
        made = preset_run(name, PresetOptions(str(tmp_path / name), data=data))
        rivals = [each for each in made.graph_methods if each.method in GRAPH_METHODS]
        assert [each.label for each in rivals] == PRESET_RIVALS
        assert {(each.choose, len(each.pipelines)) for each in rivals} == {("fixed", 1)}
    measured = Run("small", made.datasets[:1], FIXED[:1], nqe_sweep=(4,), bootstrap=50, graph_methods=tuple(rivals))
    bench = Bench(measured, str(tmp_path / "run"))
    fill(bench)
    shown = assemble(measured, bench, FACTS)["table3"]
    assert [row["label"] for row in shown if row["mean"] is not None][-6:] == PRESET_RIVALS


def row_of(kind: str, method: str, *values: float | None) -> dict[str, object]:
    """A row of Table 3 with one number for each column; None: not measured."""
    columns = {f"c{place}": {} if value is None else {"label": value} for place, value in enumerate(values)}
    mean = None if None in values else float(np.mean(values))  # type: ignore[arg-type]
    return {"kind": kind, "method": method, "label": f"{kind} {method}", "map": columns, "mean": mean}


def test_the_claims_look_at_every_row_of_the_model() -> None:
    """Hops are rows of the model too; a rival that was not measured everywhere is compared where it was."""
    table = [
        row_of("none", "none", 40.0, 20.0),
        row_of("qe", "aqe", 42.0, 22.0),
        row_of("qe", "lattqe", 45.0, 25.0),
        row_of("dba+qe", "aqe", 50.0, 30.0),
        row_of("dba+qe", "lattqe", 48.0, 28.0),
    ]
    best, graph = "LAttDBA + LAttQE is the best of all", "LAttDBA + LAttQE is better than diffusion and propagation"

    def told(*more: dict[str, object]) -> dict[str, tuple[bool, str]]:
        return {each["claim"]: (each["holds"], each["detail"]) for each in findings([*table, *more])}

    assert told()[best] == (False, "dba+qe lattqe 38.0, dba+qe aqe 40.0")
    hops = row_of("graph", "lattqe", 52.0, 32.0)
    assert told(hops)[best] == (True, "graph lattqe 42.0, dba+qe aqe 40.0")
    rival = row_of("graph", "diffusion", 54.0, 33.0)
    assert told(hops, rival)[best] == told(hops, rival)[graph] == (False, "graph lattqe 42.0, graph diffusion 43.5")
    partly = row_of("graph", "diffusion", 51.0, None)
    where = "graph lattqe 52.0, graph diffusion 51.0, on the columns that it was measured on"
    assert told(hops, partly)[graph] == (True, where)
    assert graph not in told(hops, row_of("graph", "diffusion", None, None)), "nothing to compare"


def test_what_cannot_run_is_refused_before_anything_is_measured(run: Run, tmp_path: Path, monkeypatch) -> None:
    import cluster.benchmark

    monkeypatch.setattr(cluster.benchmark, "MOST_ROWS", 100)
    with pytest.raises(
        LattqeError, match="diffusion works in one process, up to 100 rows, and every test set has more"
    ):
        Bench(dataclasses.replace(run, methods=(), graph_methods=RIVALS), str(tmp_path))
    chosen = (dataclasses.replace(RIVALS[0], choose="validation"),)
    judged = (*run.datasets, dataclasses.replace(run.datasets[0], name="judge", role="validation"))
    with pytest.raises(LattqeError, match=r"diffusion works .* every validation set has more: leave it out"):
        Bench(dataclasses.replace(run, datasets=judged, graph_methods=chosen), str(tmp_path))
    LAttQE(LAttQEConfig(dim=16, heads=2, layers=1, max_k=8)).save(str(tmp_path / "model"))
    learned = Candidate("lattqe", "LAttQE", "fixed", (4,), params={"model": (str(tmp_path / "model"),)})
    with pytest.raises(LattqeError, match=r"model .* does not fit the data set oxford.*"):
        Bench(dataclasses.replace(run, methods=(learned,)), str(tmp_path))


def test_the_benchmark_of_the_rivals_measures_every_part() -> None:
    x, xq = clusters(200, 5, 16, seed=0)
    np.testing.assert_allclose(np.linalg.norm(np.concatenate([x, xq]), axis=1), 1, atol=1e-5)
    found = json.loads(json.dumps([measured(part, work) for part, work in parts(x, xq)]))
    assert [each["part"] for each in found] == [
        "graph, 20 neighbors",
        "propagation of all rows, 8 hops",
        "diffusion: affinities",
        "diffusion of 5 queries",
        "graph, 1,000 neighbors",
        "offline diffusion: flows of all rows",
        "offline diffusion of 5 queries",
    ]
    assert all(each["cpu_seconds"] >= 0 and each["peak_bytes"] > 0 for each in found)
