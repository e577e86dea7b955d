"""Training on Ray Train: one and two workers, and workers that die."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from training_sets import DIM, plan_for, write_sets

from cluster import training
from cluster.training import Standing, train_on_cluster
from lattqe.errors import LattqeError
from lattqe.store import load_model, open_place
from lattqe.training import TrainingPlan, train

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

# Validation after each update, so that there is time to kill a worker.
SLOW = ("steps=8", "validate_every=1")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two training sets and a validation database with queries of its classes."""
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def alone(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> TrainingPlan:
    """A training in this process, undisturbed."""
    plan = plan_for(sets, tmp_path_factory.mktemp("alone") / "model", *SLOW)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(plan)
    torch.set_num_threads(threads)
    return plan


def tensors(plan: TrainingPlan) -> dict[str, np.ndarray]:
    return load_model(plan.destination)[0]


def test_two_workers_train_the_same_model_even_if_one_is_killed(
    alone: TrainingPlan, sets: dict[str, str], tmp_path: Path
) -> None:
    """Dropout and all; a worker's death costs the updates since the checkpoint, and nothing else."""
    plan = plan_for(sets, tmp_path / "model", *SLOW)
    starts: list[int] = []

    def kill_once(standing: Standing) -> None:
        if not starts and open_place(plan.destination).exists("_work/state.json"):
            os.kill(standing.pids[1], signal.SIGKILL)
            starts.append(standing.starts)
        if starts:
            starts.append(standing.starts)

    train_on_cluster(plan, workers=2, threads=1, show=kill_once)
    assert starts[0] == 1
    assert starts[-1] == 2
    wanted = tensors(alone)
    for name, found in tensors(plan).items():
        different = np.abs(found - wanted[name]) > 1e-6
        if name.endswith("qkv.bias"):
            # A bias of all keys moves no softmax: its gradient is zero but for rounding, which Adam blows up.
            different[DIM : 2 * DIM] = False
        assert not different.any(), name


def test_an_error_that_a_user_can_fix_arrives_as_such(sets: dict[str, str], tmp_path: Path) -> None:
    plan = plan_for(sets, tmp_path / "model", "learning_rate=1e30", "steps=50")
    with pytest.raises(LattqeError, match=r"at step \d+ the loss became .*last good checkpoint"):
        train_on_cluster(plan, workers=1, threads=1)


def test_workers_that_cannot_share_the_slots_are_refused_at_once(sets: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(LattqeError, match="3 workers cannot share 4 slots"):
        train_on_cluster(plan_for(sets, tmp_path / "model"), workers=3)


def test_more_threads_than_a_node_has_are_refused(sets: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(LattqeError, match=r"1 workers need 3 CPU \(the cluster has 2\)"):
        train_on_cluster(plan_for(sets, tmp_path / "model"), workers=1, threads=3, placing_seconds=0)


def test_workers_that_find_no_room_are_not_waited_for_without_end(
    sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes are large enough, but another job has all of their CPUs."""
    monkeypatch.setattr(training, "MAX_STARTS", 1)
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "0.2")
    other = ray.remote(num_cpus=2)(training.Board).remote()
    ray.get(other.read.remote())
    try:
        with pytest.raises(LattqeError, match=r"no room on the nodes in 2 attempts: wait for other jobs"):
            train_on_cluster(plan_for(sets, tmp_path / "model"), workers=1, threads=1)
    finally:
        ray.kill(other)


def test_a_board_that_dies_ends_in_one_line(
    sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(training.Board):
        def read(self) -> Standing:
            if self.standing.step:
                os._exit(1)
            return self.standing

    monkeypatch.setattr(training, "Board", Mortal)
    with pytest.raises(LattqeError, match=r"progress has died .*: the same command continues from the last checkpoint"):
        train_on_cluster(plan_for(sets, tmp_path / "model", *SLOW), workers=1, threads=1)
    left = [thread.name for thread in threading.enumerate() if thread.name == "ray-train"]
    assert not left, "a thread that still waits for Ray crashes the process when Ray is ended"
