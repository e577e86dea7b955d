"""`lattqe benchmark`: the real ground truths, what it refuses, the golden check, the photographs' known numbers."""

import csv
import dataclasses
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_sets import FIXED, small_run
from rich.console import Console
from typer.testing import CliRunner

import jobs.benchmark
import jobs.console
from jobs.benchmark import app, measure_run, print_results, publish
from lattqe.benchmark.cells import OpenedDataset
from lattqe.benchmark.presets import PresetOptions, preset_run
from lattqe.benchmark.spec import Candidate, Pipeline, Run, Setting, graph_candidate
from lattqe.datasets.labelled import PHOTO_SETS
from lattqe.datasets.revisited import load_gnd
from lattqe.errors import LattqeError
from lattqe.evaluation import evaluate
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, FeatureWriter, open_place

DIM = 16
RUN = """
published = {published}
bootstrap = 100
nqe_sweep = [2]
[[dataset]]
name = "roxford5k"
database = "database"
queries = "queries"
truth = "{truth}"
[[method]]
method = "aqe"
nqe = 2
"""


def shown_on(screen: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark prints goes to this screen."""
    for module in (jobs.benchmark, jobs.console):
        monkeypatch.setattr(module, "screen", screen)


def write(folder: Path, ids: list[str], seed: int) -> None:
    with FeatureWriter(str(folder), DIM, dtype="float32") as writer:
        writer.append(np.random.default_rng(seed).standard_normal((len(ids), DIM)).astype(np.float32), ids)


def prepare(folder: Path, truth: Path, imlist: list[str], qimlist: list[str], published: bool = False) -> list[str]:
    """A run over random descriptors with these ids; the command's words."""
    write(folder / "database", imlist, 0)
    write(folder / "queries", qimlist, 1)
    (folder / "run.toml").write_text(RUN.format(truth=truth, published=str(published).lower()))
    return [str(folder / "run.toml"), "--to", str(folder / "results")]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """These runs have few rows: nothing of theirs goes to Ray, and starting it takes seconds."""
    from contextlib import nullcontext

    import cluster.session

    monkeypatch.setattr(cluster.session, "ray_session", lambda address=None: nullcontext())


@pytest.mark.usefixtures("no_figures")
def test_any_descriptors_under_the_real_ground_truth(real_gnd: Path, tmp_path: Path) -> None:
    gnd = load_gnd(real_gnd)
    words = prepare(tmp_path, real_gnd, [f"jpg/{name}.jpg" for name in gnd.imlist], list(gnd.qimlist))
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    expected = evaluate(
        FlatIndex(FeatureSet.open(str(tmp_path / "database")).read()),
        FeatureSet.open(str(tmp_path / "queries")).read(),
        gnd.truth,
    )
    found = results["table3"][0]["map"]["roxford5k"]
    assert found == {setup: pytest.approx(100 * expected[setup].mean_ap, abs=1e-9) for setup in ("medium", "hard")}
    with open(tmp_path / "results" / "results.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {(row["label"], row["setup"], row["measure"]) for row in rows} >= {
        ("AQE", "hard", "mAP"),
        ("no expansion", "medium", "mP@10"),
    }
    assert (tmp_path / "results" / "cells" / f"{rows[0]['cell']}.json").exists()
    assert "report.html" in done.stderr


HOSTILE = ("$x$ [/bold] \x1b[31m", "=1+1", "<script>$\\frac{</script>")


def test_hostile_names_are_text_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4, dtype=np.int32), 5)
    for name, prefix in (("database", "[/red]$"), ("queries", "=cmd|' /C calc'!")):
        with FeatureWriter(str(tmp_path / name), DIM, dtype="float32", labels=True) as writer:
            writer.append(
                rng.standard_normal((20, DIM)).astype(np.float32), [f"{prefix}{row}" for row in range(20)], labels
            )
    text = RUN.format(truth="labels", published="false").replace('"roxford5k"', json.dumps(HOSTILE[1]))
    text = f"title = {json.dumps(HOSTILE[0])}\n" + text + f"label = {json.dumps(HOSTILE[2])}\n"
    (tmp_path / "run.toml").write_text(text)
    screen = Console(record=True, width=200, file=io.StringIO())
    shown_on(screen, monkeypatch)
    done = CliRunner().invoke(app, [str(tmp_path / "run.toml"), "--to", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output + repr(done.exception)
    shown = screen.export_text()
    assert "$x$ [/bold]" in shown
    assert "\x1b[31m" not in shown
    page = (tmp_path / "results" / "report.html").read_text()
    figures = {path.name: path.read_text() for path in (tmp_path / "results" / "figures").iterdir()}
    assert {"nqe.svg", "gain-by-ap.svg", "gain-by-relevant.svg", "queries.svg"} <= set(figures)
    assert all(figure in page for figure in figures.values())
    assert "<script>$" not in page
    assert "&lt;script&gt;$\\frac{&lt;/script&gt;" in page
    with open(tmp_path / "results" / "results.csv", newline="") as lines:
        rows = list(csv.reader(lines))
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "@"))]
    assert "'=1+1" in {row[4] for row in rows}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("short", "roxford5k: .*4992 rows, but imlist of the ground truth 4993 .missing: [a-z_]+_00"),
        ("long", "4994 rows, but imlist of the ground truth 4993: distractors belong into"),
        ("renamed", "row 5 of the database .* is 'unknown', but imlist says '[a-z_]+_00.*': they are other images"),
        ("shuffled", "another order: sort them"),
        ("queries missing", "69 rows, but qimlist of the ground truth 70 .missing: "),
        ("queries renamed", "row 0 of the queries .* is 'unknown', but qimlist says"),
    ],
)
def test_features_that_do_not_fit_are_refused_by_name(
    revisited_folder: Path, tmp_path: Path, change: str, words: str
) -> None:
    path = revisited_folder / "gnd_roxford5k.pkl"
    gnd = load_gnd(path)
    imlist, qimlist = list(gnd.imlist), list(gnd.qimlist)
    if change == "short":
        imlist.pop(7)
    if change == "long":
        imlist.append("distractor")
    if change == "renamed":
        imlist[5] = "unknown"
    if change == "shuffled":
        imlist[:2] = imlist[1::-1]
    if change == "queries missing":
        qimlist.pop()
    if change == "queries renamed":
        qimlist[0] = "unknown"
    done = CliRunner().invoke(app, prepare(tmp_path, path, imlist, qimlist))
    assert isinstance(done.exception, LattqeError)
    with pytest.raises(LattqeError, match=words):
        raise done.exception


@pytest.mark.usefixtures("no_figures")
def test_features_that_are_not_the_papers_are_warned_of_before_all_else(revisited_folder: Path, tmp_path: Path) -> None:
    path = revisited_folder / "gnd_roxford5k.pkl"
    gnd = load_gnd(path)
    done = CliRunner().invoke(app, prepare(tmp_path, path, list(gnd.imlist), list(gnd.qimlist), published=True))
    assert done.exit_code == 0, done.output
    text = " ".join(done.stderr.split())
    warning = text.index("warning: roxford5k medium: mAP")
    assert "67.30 expected of the paper's features" in text
    assert warning < text.index("query expansion"), "the table came before the warning"
    page = (tmp_path / "results" / "report.html").read_text()
    assert "67.30 expected" in page
    assert "<small>72.3</small>" in page, "the paper's AQE on Oxford Medium stands beside ours"


def test_presets_and_files_do_not_mix(tmp_path: Path) -> None:
    for words in (
        ["run.toml", "--model", "m"],
        ["revisited"],
        ["synthetic", "--data", "."],
        ["synthetic", "--columns", "9"],
    ):
        done = CliRunner().invoke(app, [*words, "--to", str(tmp_path)])
        assert isinstance(done.exception, LattqeError), words


def test_a_plan_of_a_preset_leaves_nothing(tmp_path: Path, call_lattqe: Callable[..., tuple[int, str, str]]) -> None:
    with FeatureWriter(str(tmp_path / "mine"), DIM, labels=True) as writer:
        x = np.random.default_rng(0).standard_normal((40, DIM)).astype(np.float32)
        writer.append(x, [f"image-{row}" for row in range(40)], np.arange(40) // 8)
    words = ("density", "--features", tmp_path / "mine", "--relevant", "0", "--only", "aqe")
    code, _, err = call_lattqe("benchmark", *words, "--to", tmp_path / "results", "--plan")
    assert code == 0, err
    assert "plan: cells" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["figures/mine.svg", "results.csv", "results.json"])
def test_results_of_others_are_neither_overwritten_nor_removed(
    tmp_path: Path, name: str, call_lattqe: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "paper" / "figures").mkdir(parents=True)
    (tmp_path / "paper" / name).write_text("[1]")
    code, _, err = call_lattqe("benchmark", "synthetic", "--to", tmp_path / "paper")
    assert (code, err.count("\n")) == (2, 1)
    assert err.endswith(f"paper holds {name}, which no benchmark made: choose another destination\n")
    assert [path for path in (tmp_path / "paper").rglob("*") if path.is_file()] == [tmp_path / "paper" / name]


# The table in the data's README: no QE, AQE 4, AQEwD 8, alphaQE 3 with k = 10 and 72. One set of each width will do
# here: `tests/datasets/test_datasets_photos.py` has all four of both.
KNOWN = {128: {"caltech101": (75.3, 81.4, 81.4, 80.9, 78.6)}, 512: {"grocery81": (49.8, 55.1, 55.4, 55.0, 50.5)}}


def photos_run(folder: Path, photos_folder: Path, columns: int, *names: str, **changes: Any) -> Run:
    """The preset with some of its sets, without distractors."""
    run = preset_run("photos", PresetOptions(str(folder), str(photos_folder), columns=(columns,)))
    kept = tuple(dataset for dataset in run.datasets if dataset.name in names)
    return dataclasses.replace(run, datasets=kept, distractors=(), bootstrap=10, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [128, 512])
def test_the_photos_preset_gives_the_known_numbers(photos_folder: Path, tmp_path: Path, columns: int) -> None:
    alpha = {"alpha": (3.0,)}
    methods = (
        Candidate("aqe", "AQE", "fixed", (4,)),
        Candidate("aqewd", "AQEwD", "fixed", (8,)),
        Candidate("alphaqe", "αQE 10", "fixed", (10,), params=alpha),
        Candidate("alphaqe", "αQE 72", "fixed", (72,), params=alpha),
    )
    run = photos_run(
        tmp_path, photos_folder, columns, *KNOWN[columns], methods=methods, graph_methods=(), nqe_sweep=(4,)
    )
    results = measure_run(run, str(tmp_path))
    found = {name: tuple(round(row["map"][name]["label"], 1) for row in results["table3"]) for name in KNOWN[columns]}
    assert found == KNOWN[columns]


@pytest.mark.slow
def test_rivals_on_the_graph_give_the_known_numbers(photos_folder: Path, tmp_path: Path) -> None:
    """Those of one set, from a run over all four whose means other code has measured too: 46.2, 53.6 and 53.0."""
    before = Pipeline(Setting("aqewd", 12), Setting("aqewd", 8))
    rivals = (
        graph_candidate("diffusion", "fixed", kq=(5,), kd=(20,), gamma=(3.0,), alpha=(0.99,)),
        graph_candidate("diffusion", "fixed", "after", before, kq=(20,), kd=(20,), gamma=(6.0,), alpha=(0.9,)),
        graph_candidate("propagation", "fixed", "", Pipeline(qe=Setting("aqewd", 12)), k=(10,), hops=(8,)),
    )
    run = photos_run(tmp_path, photos_folder, 128, "grocery81", methods=(), graph_methods=rivals, nqe_sweep=())
    results = measure_run(run, str(tmp_path))
    assert [round(row["mean"], 1) for row in results["table3"]] == [44.9, 56.6, 65.9, 63.7]


@pytest.mark.slow
def test_the_table_fits_a_screen_of_100_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = (*FIXED, Candidate("aqewd", "AQEwD", "fixed", (8,), (4,), (4,)))
    results = measure_run(small_run(tmp_path, methods), str(tmp_path))
    screen = Console(width=100, record=True, file=open(tmp_path / "screen", "w"))  # noqa: SIM115
    shown_on(screen, monkeypatch)
    print_results(results)
    text = screen.export_text()
    assert "…" not in text
    lines = [line.rstrip() for line in text.splitlines()]
    heading = next(line for line in lines if "ADBA+AQE" in line)
    assert heading.split()[-5:] == ["none", "ADBA+AQE", "DDBA+DQE", "αDBA+αQE", "ADBAwD+AQEwD"]
    assert any(line.split() == ["chosen", "fixed", "fixed", "on", "test", "fixed"] for line in lines)
    assert any(line.split()[:2] == ["oxford+distractors", "H"] for line in lines)


@pytest.mark.parametrize("below", ["", "photos/"])
def test_presets_take_photographs_on_s3(s3_uri: str, tmp_path: Path, below: str) -> None:
    """As on disk: in the folder itself, or in `photos` below it."""
    rng = np.random.default_rng(0)
    arrays = {
        "labels": np.arange(40, dtype=np.int32) % 4,
        "split": np.full(40, 2, np.int8),
        "isquery": np.arange(40) < 8,
    }
    (tmp_path / "data" / below).mkdir(parents=True)
    for name in PHOTO_SETS:
        for part, array in {"vectors": rng.normal(size=(40, 8)).astype(np.float16), **arrays}.items():
            path = tmp_path / "data" / below / f"{name}_{part}.npy"
            np.save(path, array)
            open_place(f"{s3_uri}/data").write(f"{below}{path.name}", path.read_bytes())
    for preset in ("photos", "density"):
        found = []
        for where, data in (("disk", str(tmp_path / "data")), ("s3", f"{s3_uri}/data")):
            run = preset_run(preset, PresetOptions(str(tmp_path / preset / where), data, columns=(4,)))
            sets = [OpenedDataset.open(dataset) for dataset in run.datasets]
            found.append([(each.database.digest, each.queries.digest) for each in sets])
        assert found[0] == found[1]
        assert len(found[0]) >= len(PHOTO_SETS)
    with pytest.raises(LattqeError, match=r"nothing.*cub200_vectors\.npy"):
        preset_run("photos", PresetOptions(str(tmp_path / "none"), f"{s3_uri}/nothing"))


def test_presets_take_data_and_folders_on_s3(s3_uri: str, tmp_path: Path) -> None:
    """The published ground truth and the features of `revisited`, and all that `synthetic` makes, may live on S3."""
    gnd = {
        "imlist": [f"image-{row}" for row in range(6)],
        "qimlist": ["a", "b"],
        "gnd": [{"easy": [0], "hard": [1], "junk": [2]}, {"easy": [3], "hard": [4], "junk": []}],
    }
    for name in ("roxford5k", "rparis6k"):
        for part, ids in ((name, gnd["imlist"]), (f"{name}-queries", gnd["qimlist"])):
            with FeatureWriter(f"{s3_uri}/data/{part}", DIM, dtype="float32") as writer:
                writer.append(np.random.default_rng(0).standard_normal((len(ids), DIM)).astype(np.float32), ids)
        open_place(f"{s3_uri}/data").write(f"gnd_{name}.pkl", pickle.dumps(gnd))
    run = preset_run("revisited", PresetOptions(str(tmp_path), f"{s3_uri}/data"))
    assert run.distractors == ()
    assert [OpenedDataset.open(dataset).truth.database_rows for dataset in run.datasets] == [6, 6]
    results = measure_run(small_run(f"{s3_uri}/world", FIXED[:1]), f"{s3_uri}/world")
    publish(results, f"{s3_uri}/world")
    here = measure_run(small_run(tmp_path / "world", FIXED[:1]), str(tmp_path / "world"))
    assert [row["map"] for row in results["table3"]] == [row["map"] for row in here["table3"]]
    assert open_place(f"{s3_uri}/world").exists("report.html")
