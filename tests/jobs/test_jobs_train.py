"""`lattqe train`: what it prints and writes, what it refuses, and a driver that dies."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from killing import end_session, killed_midway
from training_sets import DIM, TINY, clusters, plan_for, write_set, write_sets
from typer.testing import CliRunner

from cluster.training import TORCHRUN, Standing
from jobs.train import app, shown_updates
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter, load_model
from lattqe.training import train

SLOW = ["steps=150", "checkpoint_every=20", "validate_every=75"]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two training sets and a validation database with queries of its classes."""
    return write_sets(tmp_path_factory.mktemp("sets"))


def arguments(sets: dict[str, str], to: Path, *settings: str) -> list[str]:
    chosen = [part for setting in (*TINY, *settings) for part in ("--set", setting)]
    return [sets["a"], sets["b"], "--val", sets["database"], "--queries", sets["queries"], "--to", str(to), *chosen]


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.train", *words],
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.ray
@pytest.mark.kill
def test_a_killed_driver_continues_to_the_same_weights(sets: dict[str, str], tmp_path: Path) -> None:
    """What a worker on Ray has begun, this process ends."""
    undisturbed = plan_for(sets, tmp_path / "undisturbed", *SLOW)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(undisturbed)
    torch.set_num_threads(threads)

    def begin(to: Path) -> subprocess.Popen[str]:
        return start(*arguments(sets, to, *SLOW), "--threads", "1", "--workers", "1", "--json")

    to = killed_midway(begin, tmp_path, lambda to: (to / "_work" / "state.json").exists())
    driver = start(*arguments(sets, to, *SLOW), "--threads", "1", "--json")
    output, errors = driver.communicate()
    assert driver.returncode == 0, errors
    result = json.loads(output)
    assert result["nqe"] in (4, 8)
    assert "Traceback" not in errors
    assert "Ray" not in errors  # none was started, and the screen is ours
    found, wanted = (load_model(str(uri))[0] for uri in (to, tmp_path / "undisturbed"))
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
    assert not (to / "_work").exists()


@pytest.mark.kill
@pytest.mark.parametrize("options", [(), pytest.param(("--workers", "1"), marks=pytest.mark.ray)], ids=["here", "ray"])
def test_a_signal_saves_a_checkpoint_and_ends_the_training(
    sets: dict[str, str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """In the middle of a training that would save nothing by itself for a long time.

    SIGTERM becomes a kind of KeyboardInterrupt; `tests/test_cli.py` has what the two signals do not share.
    """
    settings = ["steps=1000000", "checkpoint_every=1000000", "validate_every=1000000"]
    log = tmp_path / "log"
    words = [*arguments(sets, tmp_path / "model", *settings), "--threads", "1", "--log-file", str(log)]
    driver = start(*words, *options)
    while driver.poll() is None and not (log.exists() and '"event": "phase", ' in log.read_text()):
        time.sleep(0.05)
    driver.send_signal(signal.SIGTERM)
    _, shown = driver.communicate()
    end_session(driver)
    assert driver.returncode == 143, shown
    kept = json.loads((tmp_path / "model" / "_work" / "state.json").read_bytes())["step"]
    assert kept > 0
    last = shown.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"terminated: train [\d,]+ of [\d,]+; checkpoint of update {kept:,}; finished work is "
        r"kept; run the same command again to continue",
        last,
    ), shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("done", "standings", "shown"),
    [
        (0, [(0, 0, ""), (0, 9, ""), (1, 9, "loss")], [(0, 9), (1, "loss")]),
        (4, [(0, 0, ""), (4, 9, ""), (6, 9, "loss"), (9, 9, "choosing")], [(4, 9), (2, "loss"), (3, "choosing")]),
        (
            9,
            [(0, 0, ""), (9, 9, "choosing nQE"), (9, 9, "choosing nDBA")],
            [(9, 9), (0, "choosing nQE"), (0, "choosing nDBA")],
        ),
    ],
    ids=["new", "continued", "continued while choosing"],
)
def test_the_bar_opens_with_the_first_work_of_a_run(
    monkeypatch: pytest.MonkeyPatch, done: int, standings: list[tuple[int, int, str]], shown: list[tuple[object, ...]]
) -> None:
    seen: list[tuple[object, ...]] = []

    @contextmanager
    def bar(title: str, total: int, before: int) -> Iterator[SimpleNamespace]:
        seen.append((before, total))
        yield SimpleNamespace(advance=lambda *given: seen.append(given))

    monkeypatch.setattr("jobs.train.progress_bar", bar)
    with shown_updates(done) as show:
        for standing in standings:
            show(Standing(*standing))
    assert seen == shown


def refusal(words: list[str]) -> str:
    """The error of a command that must not start."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    return str(result.exception)


def test_a_set_without_labels_is_refused(sets: dict[str, str], tmp_path: Path) -> None:
    with FeatureWriter(str(tmp_path / "bare"), DIM) as writer:
        writer.append(clusters(9, 2, 3)[0], [f"bare-{row}" for row in range(6)])
    assert "has no labels" in refusal(arguments({**sets, "a": str(tmp_path / "bare")}, tmp_path / "model"))


def test_a_set_given_twice_is_refused(sets: dict[str, str], tmp_path: Path) -> None:
    """Whatever it is called the second time."""
    shutil.copytree(sets["a"], tmp_path / "again")
    words = arguments(sets, tmp_path / "model")
    told = refusal([*words[:2], str(tmp_path / "again"), *words[2:]])
    assert "again holds the same rows as" in told
    assert "give each training set once" in told


def test_sets_of_different_widths_are_refused(sets: dict[str, str], tmp_path: Path) -> None:
    with FeatureWriter(str(tmp_path / "wide"), 32, labels=True) as writer:
        writer.append(np.eye(32, dtype=np.float32), [f"wide-{row}" for row in range(32)], np.arange(32) // 2)
    assert "32 columns" in refusal(arguments({**sets, "b": str(tmp_path / "wide")}, tmp_path / "model"))


def test_images_in_training_and_validation_are_refused(sets: dict[str, str], tmp_path: Path) -> None:
    message = refusal(arguments({**sets, "database": sets["a"]}, tmp_path / "model"))
    assert "96 images of" in message
    assert "are also in" in message


def test_classes_in_training_and_validation_are_refused_where_labels_are_shared(
    sets: dict[str, str], tmp_path: Path
) -> None:
    overlapping = {**sets, "database": write_set(tmp_path, "overlapping", 5, 5, 10, 7)}
    assert "1 classes of" in refusal(arguments(overlapping, tmp_path / "model", "shared_labels=true"))


def test_classes_of_the_same_name_are_refused(sets: dict[str, str], tmp_path: Path) -> None:
    for name, classes in (("named", ["cat", "dog"]), ("held-out", ["dog", "emu"])):
        with FeatureWriter(str(tmp_path / name), DIM, labels=True, config={"label_names": classes}) as writer:
            x, labels = clusters(8, 2, 20)
            writer.append(x, [f"{name}-{row}" for row in range(len(x))], labels)
    named = {**sets, "a": str(tmp_path / "named"), "database": str(tmp_path / "held-out")}
    assert "'dog'" in refusal(arguments(named, tmp_path / "model"))


def test_classes_of_one_image_only_are_refused(sets: dict[str, str], tmp_path: Path) -> None:
    single = {**sets, "a": write_set(tmp_path, "single", 5, 30, 1), "b": write_set(tmp_path, "lonely", 6, 30, 1)}
    assert "all 60 classes have one image only" in refusal(arguments(single, tmp_path / "model"))


def write_graph(folder: Path, features: str, k: int) -> str:
    """The graph of a set, in a folder of the set's name."""
    to = f"{folder}/graph-of-{Path(features).name}"
    publish_graph(FeatureSet.open(features), k, to)
    return to


def refused_at_once(call_lattqe: Callable[..., tuple[int, str, str]], words: list[str]) -> str:
    """The one line of a command that ends before it starts Ray, which a test without the mark may not."""
    code, _, shown = call_lattqe("train", *words)
    assert code == 2, shown
    assert len(shown.strip().splitlines()) == 1, shown
    return shown


def test_graphs_that_do_not_fit_are_refused_before_ray_starts(
    sets: dict[str, str], tmp_path: Path, call_lattqe: Callable[..., tuple[int, str, str]]
) -> None:
    short = [write_graph(tmp_path, sets[name], 5) for name in ("a", "b")]
    words = arguments(sets, tmp_path / "model")
    shown = refused_at_once(call_lattqe, [*words, "--neighbors", short[0], "--neighbors", short[1]])
    assert f"{short[0]} has 5 neighbors for each row of {sets['a']}, training needs 8" in shown
    assert f"lattqe neighbors {sets['a']} -k 8 --to GRAPH" in shown
    shown = refused_at_once(call_lattqe, [*words, "--neighbors", short[1], "--neighbors", short[0]])
    assert f"{short[1]} has 60 rows and {sets['a']} has 96" in shown
    other = write_graph(tmp_path, write_set(tmp_path, "other", 9, 8, 12), 8)
    shown = refused_at_once(call_lattqe, [*words, "--neighbors", other, "--neighbors", short[1]])
    assert f"{other} was made from other features than {sets['a']} holds now" in shown


def test_sets_that_need_a_stored_graph_are_refused_before_ray_starts(
    sets: dict[str, str],
    tmp_path: Path,
    call_lattqe: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lattqe.training.plan.LARGEST_GRAPH", 80)
    shown = refused_at_once(call_lattqe, arguments(sets, tmp_path / "model"))
    assert f"{sets['a']} has 96 rows: make its graph once with `lattqe neighbors {sets['a']} -k 8" in shown


def write_named(folder: Path, name: str) -> str:
    """Rows like those of the validation queries, their labels being text."""
    x, labels = clusters(3, 5, 2)
    with FeatureWriter(f"{folder}/{name}", DIM, labels=True, label_names=list("pqrst")) as writer:
        writer.append(x, [f"{name}-{row}" for row in range(len(x))], labels)
    return f"{folder}/{name}"


def test_labels_that_cannot_be_compared_are_refused_before_ray_starts(
    sets: dict[str, str], tmp_path: Path, call_lattqe: Callable[..., tuple[int, str, str]]
) -> None:
    named = write_named(tmp_path, "named")
    shown = refused_at_once(call_lattqe, arguments({**sets, "queries": named}, tmp_path / "model"))
    assert f"the labels of {named} are text and those of {sets['database']} are numbers" in shown
    words = arguments({**sets, "b": named}, tmp_path / "model", "shared_labels=true")
    assert f"the labels of {named} are text and those of {sets['a']} are numbers" in refused_at_once(call_lattqe, words)


@pytest.mark.parametrize("setting", ["choose_qe", "choose_dba"])
def test_a_database_too_small_to_choose_on_is_refused_before_ray_starts(
    sets: dict[str, str], tmp_path: Path, call_lattqe: Callable[..., tuple[int, str, str]], setting: str
) -> None:
    small = write_set(tmp_path, "small", 4, 2, 3, 300)  # 6 rows, each with 5 neighbors
    words = arguments({**sets, "database": small}, tmp_path / "model", "choose_qe=4", f"{setting}=6,8")
    shown = refused_at_once(call_lattqe, words)
    assert f"{small} has 6 rows, too few to choose on" in shown
    assert f"--set {setting}" in shown


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stepz=3", "there is no setting 'stepz'"),
        ("steps", "write key=value"),
        ("steps=many", "'many' is not a valid int"),
        ("sampler=magic", "use one of tuples, worlds"),
        ("network.heads=3", "3 heads do not divide"),
        ("batch=9", "does not fall into 4 slots"),
        ("k_max=99", "has ranks for 16"),
        ("contrastive=0", "no ranking loss"),
        ("learning_rate=0", "use a number above 0"),
        ("drop_max=1.5", "use a share from 0"),
        ("validate_k=0", "give whole numbers from 1"),
    ],
)
def test_bad_settings_are_refused_by_name(sets: dict[str, str], tmp_path: Path, setting: str, message: str) -> None:
    assert message in refusal(arguments(sets, tmp_path / "model", setting))


@pytest.mark.parametrize("option", ["--workers", "--threads"])
def test_fewer_than_no_workers_or_threads_are_refused(sets: dict[str, str], tmp_path: Path, option: str) -> None:
    ended = CliRunner().invoke(app, [*arguments(sets, tmp_path / "model"), option, "-3", "--plan"])
    assert ended.exit_code == 2
    assert option in ended.output


def test_torchrun_is_refused(sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train's local mode would join its group, in which every process trains the same and writes to one place."""
    for name in TORCHRUN:
        monkeypatch.setenv(name, "1")
    assert "give --workers N, without torchrun" in refusal(arguments(sets, tmp_path / "model"))
    assert not (tmp_path / "model" / "manifest.json").exists()


def test_unequal_numbers_of_databases_and_queries_are_refused(sets: dict[str, str], tmp_path: Path) -> None:
    words = [*arguments(sets, tmp_path / "model"), "--val", sets["database"]]
    assert "1 --queries for 2 --val" in refusal(words)


def test_a_finished_model_is_named_as_it_is(sets: dict[str, str], tmp_path: Path) -> None:
    to = tmp_path / "x[/bold]"
    train(plan_for(sets, to))
    done = CliRunner().invoke(app, arguments(sets, to))
    assert done.exit_code == 0, repr(done.exception)
    assert "x[/bold] already holds this model" in done.output
