"""`lattqe train`: what it prints and writes, what it refuses, and a driver that dies."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import end_session, killed_midway
from training_sets import DIM, TINY, clusters, plan_for, write_set, write_sets
from typer.testing import CliRunner

from jobs.train import app
from lattqe.errors import LattqeError
from lattqe.store import FeatureWriter, load_model
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
    undisturbed = plan_for(sets, tmp_path / "undisturbed", *SLOW)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(undisturbed)
    torch.set_num_threads(threads)

    def begin(to: Path) -> subprocess.Popen[str]:
        return start(*arguments(sets, to, *SLOW), "--threads", "1", "--json")

    to = killed_midway(begin, tmp_path, lambda to: (to / "_work" / "state.json").exists())
    driver = begin(to)
    output, errors = driver.communicate()
    assert driver.returncode == 0, errors
    result = json.loads(output)
    assert result["nqe"] in (4, 8)
    assert "Traceback" not in errors
    assert "Ray Train" not in errors  # the screen is ours
    found, wanted = (load_model(str(uri))[0] for uri in (to, tmp_path / "undisturbed"))
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
    assert not (to / "_work").exists()


@pytest.mark.ray
@pytest.mark.kill
def test_a_signal_saves_a_checkpoint_and_ends_the_training(sets: dict[str, str], tmp_path: Path) -> None:
    """In the middle of a training that would save nothing by itself for a long time.

    SIGTERM becomes a kind of KeyboardInterrupt; `tests/test_cli.py` has what the two signals do not share.
    """
    settings = ["steps=1000000", "checkpoint_every=1000000", "validate_every=1000000"]
    log = tmp_path / "log"
    driver = start(*arguments(sets, tmp_path / "model", *settings), "--threads", "1", "--log-file", str(log))
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


def refusal(words: list[str]) -> str:
    """The error of a command that must not start."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    return str(result.exception)


def test_a_set_without_labels_is_refused(sets: dict[str, str], tmp_path: Path) -> None:
    with FeatureWriter(str(tmp_path / "bare"), DIM) as writer:
        writer.append(clusters(9, 2, 3)[0], [f"bare-{row}" for row in range(6)])
    assert "has no labels" in refusal(arguments({**sets, "a": str(tmp_path / "bare")}, tmp_path / "model"))


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
    plan = plan_for(single, tmp_path / "model")
    with pytest.raises(LattqeError, match="all 60 classes have one image only"):
        train(plan)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stepz=3", "there is no setting 'stepz'"),
        ("steps", "write key=value"),
        ("steps=many", "'many' is not a int"),
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


def test_unequal_numbers_of_databases_and_queries_are_refused(sets: dict[str, str], tmp_path: Path) -> None:
    words = [*arguments(sets, tmp_path / "model"), "--val", sets["database"]]
    assert "1 --queries for 2 --val" in refusal(words)
