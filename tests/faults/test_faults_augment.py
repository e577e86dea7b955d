"""Augmentation through real kills: whatever dies, the same command ends in the same bytes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from augment_campaign import AugmentCampaign
from campaign_world import World
from killing import end_session, session_of

from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.kill, pytest.mark.slow]

ROWS, DIM, K = 16_000, 48, 8


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Features, graph, model, and the undisturbed index, computed in this process."""
    from lattqe.augmentation.index import begin_index, build_index
    from lattqe.augmentation.recipe import Augmentation

    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    with FeatureWriter(str(folder / "features"), DIM, part_bytes=500_000) as writer:
        writer.append(rng.standard_normal((ROWS, DIM)), [f"r{i}" for i in range(ROWS)])
    features = FeatureSet.open(str(folder / "features"))
    graph = publish_graph(features, K, str(folder / "graph"))
    torch.manual_seed(0)
    LAttQE(LAttQEConfig(dim=DIM, heads=4, layers=2, max_k=K)).save(str(folder / "model"))
    task = Augmentation(
        features.uri, graph.uri, str(folder / "undisturbed"), "lattqe", K, {"model": str(folder / "model"), "dba": True}
    )
    pending = begin_index(task)
    build_index(task)
    pending.finish()
    return folder


def start(made, to):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jobs.augment",
            str(made / "features"),
            "--model",
            str(made / "model"),
            "-k",
            str(K),
            "--neighbors",
            str(made / "graph"),
            "--to",
            str(to),
            "--workers",
            "2",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, process, seconds=120):
    """Wait until something is seen while the job runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it was not seen in time"
        time.sleep(0.02)


def pieces(to):
    return list((Path(to) / "_work" / "pieces").glob("*.bin"))


def progress(to):
    """Grows as blocks and parts get done; a part replaces its pieces."""
    return len(list(Path(to).glob("part-*.arrow"))) * 100 + len(pieces(to))


def workers_of(process):
    """Process ids of the augmentation's actors within one command."""
    return [pid for pid in session_of(process) if b"ray::AugmentWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def test_kills_ctrl_c_and_two_drivers_then_the_same_bytes(made, tmp_path):
    to = tmp_path / "index"
    killed = start(made, to)
    wait_for(lambda: pieces(to), killed)
    os.kill(killed.pid, signal.SIGKILL)
    end_session(killed)
    assert not (to / "manifest.json").exists(), "nothing half-published"

    stopped, before = start(made, to), progress(to)
    wait_for(lambda: progress(to) > before, stopped)
    os.kill(stopped.pid, signal.SIGINT)
    _, shown = stopped.communicate(timeout=800)
    end_session(stopped)
    assert stopped.returncode == 130
    assert re.search(
        r"\ninterrupted: augment [\d,]+ of 16,000; finished work is kept; run the same command again "
        r"to continue\n$",
        shown,
    ), shown
    assert "Traceback" not in shown

    both = [start(made, to), start(made, to)]
    try:
        # Parts are missing, so at least one of the two starts workers.
        wait_for(lambda: workers_of(both[0]) + workers_of(both[1]), both[0])
        os.kill((workers_of(both[0]) + workers_of(both[1]))[0], signal.SIGKILL)
        shown = [process.communicate(timeout=800)[1] for process in both]
    finally:
        for process in both:
            end_session(process)
    assert [process.returncode for process in both] == [0, 0], shown
    assert files(to) == files(made / "undisturbed")
    assert not (to / "_work").exists()


@pytest.mark.long
def test_a_node_and_the_storage_killed_in_one_run(monkeypatch):
    """On two nodes that share nothing but S3; `augment_campaign.py` does this ten times at random moments."""
    for name, value in os.environ.items():
        monkeypatch.setenv(name, value)  # the campaign changes them
    with tempfile.TemporaryDirectory(prefix="lq-") as folder:
        world = World(Path(folder), nodes=2)
        try:
            campaign = AugmentCampaign(world)
            campaign.expect(requests=100)
            result = campaign.both_at_once(40, 60)
        finally:
            world.close()
    assert not result.problem, result.line()
    assert result.injected == 2, result.line()
    assert not result.tracebacks, result.tracebacks
