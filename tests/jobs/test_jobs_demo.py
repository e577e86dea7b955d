"""`lattqe demo` in miniature: the whole pipeline in one command, quiet, honest, and continued after a kill."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SETTINGS = (
    "steps=6",
    "temperature_steps=1",
    "validate_every=6",
    "checkpoint_every=3",
    "network.layers=1",
    "choose_qe=8",
    "choose_dba=8",
)
MINIATURE = ["--scale", "0.05", *(word for setting in SETTINGS for word in ("--set", setting))]


def start(folder: Path) -> subprocess.Popen[str]:
    # Ray puts its workers behind everybody else, which on a busy machine makes minutes of seconds.
    environment = {**os.environ, "RAY_worker_niceness": "0", "COLUMNS": "100"}
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.demo", "--to", "demo", *MINIATURE],
        cwd=folder,
        text=True,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def kill_when(driver: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Wait until something is there, then kill the process; it must not have ended before."""
    try:
        while not ready():
            assert driver.poll() is None, driver.communicate()[1]
            time.sleep(0.05)
    finally:
        driver.kill()
        driver.communicate()


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(900)  # under a minute by itself; a busy machine is not a failure
def test_killed_in_its_benchmark_it_goes_on_to_the_report(tmp_path: Path) -> None:
    cells = tmp_path / "demo" / "benchmark" / "cells"
    kill_when(start(tmp_path), lambda: len(list(cells.glob("*.json"))) > 5)
    trained = (tmp_path / "demo" / "model" / "manifest.json").stat().st_mtime_ns
    kept = {path.name: path.stat().st_mtime_ns for path in cells.glob("*.json")}

    second = start(tmp_path)
    try:
        out, screen = second.communicate(timeout=800)
    finally:
        second.kill()
    assert second.returncode == 0, screen
    assert out == "", "results for people go to stderr"
    assert (tmp_path / "demo" / "model" / "manifest.json").stat().st_mtime_ns == trained
    assert {name: (cells / name).stat().st_mtime_ns for name in kept} == kept

    results = json.loads((tmp_path / "demo" / "benchmark" / "results.json").read_bytes())
    labels = [row["label"] for row in results["table3"]]
    assert labels[1:6] == ["AQE", "AQEwD", "DQE", "αQE", "LAttQE"]
    assert labels[6:] == ["ADBA + AQE", "ADBAwD + AQEwD", "DDBA + DQE", "αDBA + αQE", "LAttDBA + LAttQE"]
    assert {row["choose"] for row in results["table3"][1:]} <= {"validation", "model"}, "nothing was tuned on test"
    assert [row["label"] for row in results["table3"] if row["choose"] == "model"] == [labels[5], labels[10]]
    for heading in ("1/5", "2/5", "3/5", "4/5", "5/5", "LAttDBA+LAttQE", "What to try next", "lattqe benchmark"):
        assert heading in screen
    assert (tmp_path / "demo" / "benchmark" / "report.html").exists()
    assert "demo/benchmark/report.html" in screen
    # It says of each of the paper's orderings whether it appears, and adds a word where one does not.
    answers = re.findall(r"^(yes|no) ", screen, flags=re.MULTILINE)
    assert len(answers) == len(results["findings"]) == 4
    assert ("no" in answers) == ("Not all of the paper's ordering appears" in screen)
    assert not re.search(r"raylet|INFO|WARNING|\(pid=", screen), "Ray talks on the screen"
