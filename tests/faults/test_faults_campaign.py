"""A short, seeded part of the fault campaign, and proof that it sees what it looks for."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from campaign import run_campaign
from campaign_faults import Fault, Faults, Target
from campaign_pipeline import fingerprint
from campaign_report import Round, Struck, markdown, read_log, summary
from campaign_world import PROJECT
from warm_driver import WarmDriver

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store import FeatureSet, FeatureWriter


@pytest.mark.s3
@pytest.mark.kill
@pytest.mark.slow
def test_faults_lose_nothing_and_change_nothing():
    """`make faults` strikes the whole pipeline on several nodes; here it is the import, which needs no Ray."""
    rounds = run_campaign([21], rounds=2, seconds=300, faults=4, nodes=0, verbs="import")
    assert [each.problem for each in rounds] == ["", ""], summary(rounds)
    assert sum(each.injected for each in rounds) >= 2, summary(rounds)
    assert [each.tracebacks for each in rounds] == [[], []], summary(rounds)


@pytest.mark.kill
def test_commands_of_a_warm_driver_end_with_their_code_and_die_alone(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((300, 16)))
    driver = WarmDriver([], {**os.environ, "PYTHONPATH": str(PROJECT)})
    try:
        good = driver.start(["import", str(tmp_path / "x.npy"), "--to", str(tmp_path / "set")], tmp_path / "log")
        assert good.wait() == 0, (tmp_path / "log").read_text()
        assert len(FeatureSet.open(str(tmp_path / "set")).manifest.parts) > 1, "parts are small here"
        bad = driver.start(["import", str(tmp_path / "absent.npy"), "--to", str(tmp_path / "other")], tmp_path / "log")
        assert bad.wait() == 2
        assert (tmp_path / "log").read_text().startswith("error: ")
        os.mkfifo(tmp_path / "pipe")  # without a reader, so that opening it as a log waits for ever
        doomed = driver.start(["--version"], tmp_path / "pipe")
        os.kill(doomed.pid, signal.SIGKILL)
        assert doomed.wait() == -signal.SIGKILL
        assert driver.start(["--version"], tmp_path / "log").wait() == 0
        assert (tmp_path / "log").read_text().startswith("lattqe ")
    finally:
        driver.close()


def test_a_flipped_byte_or_a_trace_of_the_work_is_no_good_end(tmp_path):
    with FeatureWriter(str(tmp_path / "set"), 4) as writer:
        writer.append(np.eye(4), list("abcd"))
    assert fingerprint(str(tmp_path / "set")) == fingerprint(str(tmp_path / "set"))
    (tmp_path / "set" / "_work").mkdir()
    (tmp_path / "set" / "_work" / "plan.json").write_text("{}")
    with pytest.raises(RuntimeError, match="left behind"):
        fingerprint(str(tmp_path / "set"))
    (tmp_path / "set" / "_work" / "plan.json").unlink()
    part = tmp_path / "set" / "part-00000.arrow"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(CorruptDataError):
        fingerprint(str(tmp_path / "set"))


def test_the_table_counts_what_struck_and_what_came_too_late():
    rounds = [
        Round(1, "import", 1, [Struck("disk full", 3, True, ""), Struck("clock jumps", 9, False, "")], [2, 0]),
        Round(2, "search", 1, [Struck("disk full", 3, True, "")], [0], problem="LOST: the bytes differ"),
    ]
    lines = [line.split() for line in summary(rounds).splitlines()]
    assert ["disk", "full", "2", "1", "1", "0"] in lines
    assert ["clock", "jumps", "0", "0", "0", "1"] in lines
    assert "1 were run again, 1 times" in summary(rounds)
    assert "| disk full | 1 | 1 | 2 | 1 | 1 | 0 |" in markdown(rounds)
    assert "| clock jumps | 0 | 0 | 0 | 0 | 0 | 1 |" in markdown(rounds)


@pytest.mark.parametrize("kind", ["input part deleted", "input part replaced"])
def test_a_part_that_is_taken_away_between_two_commands_is_noticed_and_comes_back(tmp_path, kind):
    with FeatureWriter(str(tmp_path / "set"), 4) as writer:
        writer.append(np.eye(4), list("abcd"))
    sound = fingerprint(str(tmp_path / "set"))
    target = Target([], [], "", [str(tmp_path / "set")])
    world = SimpleNamespace(proxy=SimpleNamespace(happened=Counter()))
    faults = Faults([Fault(world, kind, 0, random.Random(1), target)])
    faults.begin()
    assert faults.faults[0].injected
    with pytest.raises(LattqeError):
        FeatureSet.open(str(tmp_path / "set")).read()
    faults.end()
    assert fingerprint(str(tmp_path / "set")) == sound


def test_a_log_says_where_a_seed_goes_on(tmp_path):
    rounds = [
        Round(1, "import", 1, [Struck("disk full", 3, True, "")], [0]),
        Round(2, "import", 2, left={"temporary": 1}),
    ]
    lines = [json.dumps({"seed": seed} | asdict(each)) for seed, each in zip((7, 8), rounds)]
    (tmp_path / "log").write_text("\n".join(lines))
    assert read_log(str(tmp_path / "log")) == rounds
    assert read_log(str(tmp_path / "log"), 8) == rounds[1:]
    assert "Left behind a minute after a command: temporary: 1." in markdown(rounds)


def test_a_clock_follows_its_file(tmp_path):
    code = (
        "import clock, pathlib, time; before = time.time(); clock.follow(pathlib.Path('clock'));"
        "import botocore.auth; assert time.time() - before > 3000;"
        "assert botocore.auth.get_current_datetime().timestamp() - before > 3000"
    )
    (tmp_path / "clock").write_text("3600")
    path = str(PROJECT / "tests" / "faults")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True)
