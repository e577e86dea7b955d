"""How many extraction workers a cluster gets, and what each is given."""

from dataclasses import replace

import pytest

from cluster import extraction
from cluster.extraction import WorkerPlan, plan_workers
from lattqe.errors import LattqeError


@pytest.fixture
def cluster(monkeypatch):
    """Pretend to be connected to nodes with these CPUs and GPUs."""

    def pretend(*nodes, dead=()):
        rows = [{"Alive": True, "Resources": {"CPU": float(cpus), "GPU": float(gpus)}} for cpus, gpus in nodes]
        rows += [{"Alive": False, "Resources": {"CPU": float(cpus)}} for cpus in dead]
        monkeypatch.setattr(extraction.ray, "nodes", lambda: rows)
        monkeypatch.setattr(extraction.ray, "cluster_resources", lambda: {"GPU": float(sum(gpus for _, gpus in nodes))})

    return pretend


@pytest.mark.parametrize(
    ("nodes", "wanted", "expected"),
    [
        ([(2, 0)], None, WorkerPlan(2, 1, 0)),  # a laptop: one thread each
        ([(64, 0)], None, WorkerPlan(8, 8, 0)),  # a large machine: eight networks, not sixty-four
        ([(64, 0), (16, 0)], None, WorkerPlan(40, 2, 0)),  # a worker fits on the smaller node
        ([(8, 0)], 2, WorkerPlan(2, 4, 0)),
        ([(8, 0), (8, 0)], 1, WorkerPlan(1, 8, 0)),  # no more than one node has
        ([(2, 0)], 5, WorkerPlan(5, 1, 0)),  # refused later, by name, for there are not five CPUs
        ([(16, 4), (16, 4)], None, WorkerPlan(8, 4, 1)),
        ([(16, 4)], 2, WorkerPlan(2, 4, 1)),
        ([(2, 1)], None, WorkerPlan(1, 2, 1)),
        ([(0, 0), (4, 0)], None, WorkerPlan(4, 1, 0)),  # a head that takes no work
    ],
)
def test_plan(cluster, nodes, wanted, expected):
    cluster(*nodes, dead=[32])
    assert plan_workers(wanted) == replace(expected, grows=wanted is None)
    assert expected.device == ("cuda" if expected.gpus else "cpu")


def test_one_setting_says_what_auto_means(cluster, monkeypatch):
    cluster((8, 2))
    monkeypatch.setenv("LATTQE_DEVICE", "cpu")
    assert plan_workers(None) == WorkerPlan(8, 1, 0, grows=True), "GPUs that nodes declare stay alone"
    assert plan_workers(None, "cuda") == WorkerPlan(2, 4, 1, grows=True), "a device that is asked for by name is meant"
    monkeypatch.setenv("LATTQE_DEVICE", "cuda:0")
    assert plan_workers(None) == WorkerPlan(2, 4, 1, grows=True)
    cluster((8, 0))
    with pytest.raises(LattqeError, match="has no GPU"):
        plan_workers(None)


def test_device_decides(cluster):
    cluster((8, 2))
    assert plan_workers(None, "cpu") == WorkerPlan(8, 1, 0, grows=True)
    assert plan_workers(None, "cuda") == WorkerPlan(2, 4, 1, grows=True)
    cluster((8, 0))
    for wanted, device, message in ((None, "cuda", "has no GPU"), (0, "cpu", "--workers 0"), (None, "tpu", "'tpu'")):
        with pytest.raises(LattqeError, match=message):
            plan_workers(wanted, device)
