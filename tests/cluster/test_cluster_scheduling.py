"""Where graph workers run: on nodes of any shape, on declared GPUs, on nodes that join late; never a silent wait.

Nodes only declare what they own: sixteen CPUs or a GPU cost nothing here, and LATTQE_DEVICE=cpu keeps workers that
were given a GPU on the CPU.
"""

import os
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from hop_world import begun, expected, make_world, no_bar, published
from ray.cluster_utils import Cluster
from training_sets import plan_for, write_sets

from cluster import augmentation as cluster_augmentation
from cluster.augmentation import build_index, hop_workers, run_hops
from cluster.blocks import BlockPolicy
from cluster.graph import agree_on_cut, plan_graph, run_graph
from cluster.graph_worker import GraphWorker, measure_worker, places, threads_for
from cluster.session import ray_session
from cluster.training import train_on_cluster
from lattqe.augmentation.bands import HopWorker
from lattqe.augmentation.index import AugmentWorker, begin_index
from lattqe.augmentation.recipe import Augmentation, AugmentSummary
from lattqe.cost import cut_rows
from lattqe.device import pick_device
from lattqe.errors import LattqeError
from lattqe.search import knn_graph
from lattqe.search.lanes import kinds_for
from lattqe.search.stored import GraphTask, begin_graph, publish_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, load_model

pytestmark = pytest.mark.ray

K, ROWS = 5, 600


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    path = tmp_path_factory.mktemp("features") / "rows"
    with FeatureWriter(str(path), 16) as writer:
        writer.append(np.random.default_rng(0).standard_normal((ROWS, 16)), [str(row) for row in range(ROWS)])
    return FeatureSet.open(str(path))


def witness(folder, wait_for_nodes):
    """A worker that notes its node, and whether it was given a GPU, and waits until enough nodes have a worker."""

    class Witness(GraphWorker):
        def __init__(self, task, cut):
            super().__init__(task, cut)
            self.note = f"{ray.get_runtime_context().get_node_id()} {len(ray.get_gpu_ids())} {self.device.type}"
            (folder / f"up {self.note}").touch()

        def compare(self, *item):
            deadline = time.monotonic() + 600
            while len(list(folder.glob("up *"))) < wait_for_nodes and time.monotonic() < deadline:
                time.sleep(0.05)
            (folder / f"worked {self.note}").touch()
            super().compare(*item)

    return Witness


def notes(folder, word):
    return [path.name.split()[1:] for path in folder.glob(f"{word} *")]


def compute(task, plan, cut, **options):
    pending = begin_graph(task)
    cut = agree_on_cut(pending.place, cut)
    run_graph(
        replace(task, threads=plan.threads, kind=plan.kind),
        cut,
        plan.workers,
        lambda _: None,
        resources=plan.resources,
        **options,
    )
    pending.finish()
    return NeighborGraph.open(task.to).read()


@contextmanager
def started():
    """A head that owns no CPUs."""
    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def cluster():
    with started() as made:
        yield made


def test_workers_fit_the_nodes(cluster, features, tmp_path):
    """Four workers for three nodes of 8 CPUs: a share of all would be 6, which only three workers could get."""
    for _ in range(3):
        cluster.add_node(num_cpus=8)
    cluster.wait_for_nodes()
    with ray_session(cluster.address):
        assert threads_for(1) == 8, "one worker for 24 CPUs gets those of one node"
        assert threads_for(4) == 4
        assert places(4) == 6
        assert places(9) == 0
        plan = plan_graph(GraphTask(features.uri, str(tmp_path / "graph"), K), 2)
        assert plan.resources == {"num_cpus": 8}
        assert plan.kind in kinds_for(torch.device("cpu"))
        task = GraphTask(features.uri, str(tmp_path / "graph"), K)
        while ray.available_resources().get("CPU") != 24:  # the measured worker's come back a moment after it has ended
            time.sleep(0.1)
        with pytest.raises(LattqeError, match=r"with 9 cpus could not be placed on any node within 1 s \(free: 24"):
            measure_worker(task, {"num_cpus": 9}, timeout=1)


class TestDeclaredGpus:
    """On two nodes with a GPU and two CPUs, and one with four CPUs; workers stay on the CPU, as told."""

    @pytest.fixture(scope="class")
    def address(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LATTQE_DEVICE", "cpu")  # which nodes inherit
            with started() as cluster:
                for _ in range(2):
                    cluster.add_node(num_cpus=2, num_gpus=1)
                cluster.add_node(num_cpus=4)
                cluster.wait_for_nodes()
                yield cluster.address

    def test_graph_workers_take_them(self, address, features, tmp_path, monkeypatch):
        folder = tmp_path / "notes"
        folder.mkdir()
        monkeypatch.setattr("cluster.graph.GraphWorker", witness(folder, 2))
        with ray_session(address):
            task = GraphTask(features.uri, str(tmp_path / "graph"), K)
            plan = plan_graph(task)
            assert plan.workers == 2
            assert plan.resources == {"num_cpus": 2, "num_gpus": 1}, "no more CPUs than a node with a GPU has"
            found = compute(task, plan, cut_rows(ROWS, 0, 2, 100))
        assert len({node for node, *_ in notes(folder, "worked")}) == 2
        assert {(gpus, device) for _, gpus, device in notes(folder, "worked")} == {("1", "cpu")}
        np.testing.assert_array_equal(found[0], knn_graph(features.read(), K)[0])

    def test_hops_planned_for_gpus_take_them(self, address, tmp_path, monkeypatch):
        """On torch's CPU device, which sums as a GPU does."""
        world, folder = make_world(tmp_path), tmp_path / "notes"
        folder.mkdir()

        class Witness(HopWorker):
            def __init__(self, task):
                super().__init__(task)
                (folder / f"up {os.getpid()} {len(ray.get_gpu_ids())} {self.sums.device}").touch()

        monkeypatch.setattr("cluster.augmentation.HopWorker", Witness)
        with ray_session(address):
            assert (hop_workers(), hop_workers("cuda")) == (8, 2)
            task = begun(world, device="cuda")
            run_hops(task, no_bar, AugmentSummary())
        assert {tuple(note[1:]) for note in notes(folder, "up")} == {("1", "cpu")}
        np.testing.assert_allclose(published(task).read(), expected(world), rtol=0, atol=1e-5)

    def test_training_takes_none(self, address, tmp_path):
        """It would ask for NCCL and for one of them: here for more CPUs than any node with a GPU has."""
        plan = plan_for(write_sets(tmp_path), tmp_path / "model", "steps=2", "temperature_steps=0")
        with ray_session(address):
            train_on_cluster(plan, workers=1, threads=4, placing_seconds=0)
        assert load_model(plan.destination)[2]["device"] == "cpu"


def test_a_node_that_joins_late_gets_work(cluster, features, tmp_path, monkeypatch):
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setattr("cluster.graph.GraphWorker", witness(folder, 2))
    with ray_session(cluster.address):
        task = GraphTask(features.uri, str(tmp_path / "graph"), K)
        plan = plan_graph(task)
        assert plan.workers == 1
        assert plan.grows
        assert not plan_graph(task, 1).grows, "so many workers as were asked for"
        cluster.add_node(num_cpus=1)  # the first worker waits until there is another one
        found = compute(
            task, plan, cut_rows(ROWS, 0, 4, 100), grows=True, policy=BlockPolicy(window=1, room_seconds=0.0)
        )
    assert len({node for node, *_ in notes(folder, "worked")}) == 2
    np.testing.assert_array_equal(found[0], knn_graph(features.read(), K)[0])


def test_a_node_that_joins_late_gets_rows_to_augment(cluster, features, tmp_path, monkeypatch):
    """Of nine processors, two more are taken: there are three blocks."""
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    folder, graph = tmp_path / "notes", publish_graph(features, K, str(tmp_path / "graph"))
    folder.mkdir()

    class Witness(AugmentWorker):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.note = f"{ray.get_runtime_context().get_node_id()} {os.getpid()}"
            (folder / f"up {self.note}").touch()

        def run(self, item):
            deadline = time.monotonic() + 600
            while len(list(folder.glob("up *"))) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            (folder / f"worked {self.note}").touch()
            return super().run(item)

    joined, places_now = [], cluster_augmentation._places

    def places_once_one_is_up():
        if notes(folder, "up") and not joined:
            joined.append(cluster.add_node(num_cpus=8))
        return places_now()

    monkeypatch.setattr(cluster_augmentation, "_places", places_once_one_is_up)
    monkeypatch.setattr(cluster_augmentation, "worker_class", lambda task: Witness)
    with ray_session(cluster.address):
        task = Augmentation(features.uri, graph.uri, str(tmp_path / "index"), "aqe", 2, {}, block_rows=ROWS // 3)
        pending = begin_index(task)
        build_index(task, policy=BlockPolicy(window=1, room_seconds=0.0))
        pending.finish()
    assert len(notes(folder, "up")) == 3
    assert len({node for node, _ in notes(folder, "worked")}) == 2


def test_one_setting_says_what_auto_means(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device().type == "cuda"
    monkeypatch.setitem(os.environ, "LATTQE_DEVICE", "cpu")
    assert pick_device().type == "cpu"
    assert pick_device("cuda").type == "cuda", "a device that is asked for by name is meant"
    monkeypatch.setitem(os.environ, "LATTQE_DEVICE", "toaster")
    with pytest.raises(LattqeError, match="unknown device 'toaster'"):
        pick_device()
