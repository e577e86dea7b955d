"""Augmentation through real kills: whatever dies, the same command ends in the same bytes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

ROWS, DIM, K = 16_000, 48, 8


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Features, graph, model, and the undisturbed index, computed in this process."""
    from cluster.augmentation import Augmentation, begin_index, run_augmentation_here
    from lattqe.store import open_place, read_manifest

    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    with FeatureWriter(str(folder / "features"), DIM, part_bytes=500_000) as writer:
        writer.append(rng.standard_normal((ROWS, DIM)), [f"r{i}" for i in range(ROWS)])
    features = FeatureSet.open(str(folder / "features"))
    graph = publish_graph(features, K, str(folder / "graph"))
    torch.manual_seed(0)
    LAttQE(LAttQEConfig(dim=DIM, heads=4, layers=2, max_k=K)).save(str(folder / "model"))
    digest = read_manifest(open_place(str(folder / "model")), "model").digest
    task = Augmentation(features.uri, graph.uri, str(folder / "undisturbed"), "lattqe", K,
                        {"model": str(folder / "model"), "dba": True}, share=True)
    pending = begin_index(task, {"features": features.as_input(), "neighbors": graph.as_input(),
                                 "model": {"uri": str(folder / "model"), "digest": digest, "kind": "model"}})
    run_augmentation_here(task)
    pending.finish()
    return folder


def start(made, to):
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.augment", str(made / "features"), "--model", str(made / "model"), "-k", str(K),
         "--neighbors", str(made / "graph"), "--to", str(to), "--workers", "2"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(condition, process, seconds=120):
    """Wait until something is seen while the job runs; whether it was seen in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(0.02)
    return False


def pieces(to):
    return list((Path(to) / "_work" / "pieces").glob("*.bin"))


def workers_of(session):
    """Process ids of the augmentation's actors within one process session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_bytes()
            if b"ray::AugmentWorker" in title and os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def end(process):
    """End what is left of a killed driver's session (its Ray): by its own group and session ids."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == process.pid:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
    process.wait()


def test_driver_and_workers_killed_then_the_same_bytes(made, tmp_path):
    to = tmp_path / "index"
    killed = start(made, to)
    assert wait_for(lambda: len(pieces(to)) >= 1, killed), "the driver must die in the middle"
    os.kill(killed.pid, signal.SIGKILL)
    end(killed)
    assert not (to / "manifest.json").exists(), "nothing half-published"

    again = start(made, to)
    try:
        assert wait_for(lambda: workers_of(again.pid), again), "a worker must die in the middle"
        os.kill(workers_of(again.pid)[0], signal.SIGKILL)
        _, shown = again.communicate(timeout=200)
    finally:
        end(again)
    assert again.returncode == 0, shown
    assert files(to) == files(made / "undisturbed")
    assert not (to / "_work").exists()


def test_two_drivers_on_one_destination_give_one_result(made, tmp_path):
    to = tmp_path / "index"
    both = [start(made, to), start(made, to)]
    try:
        shown = [process.communicate(timeout=200)[1] for process in both]
    finally:
        for process in both:
            end(process)
    assert [process.returncode for process in both] == [0, 0], shown
    assert files(to) == files(made / "undisturbed")
