"""Indexes and graphs built in this process: killed at any block and begun again, they end in the same bytes."""

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from lattqe.augmentation.index import AugmentWorker, begin_index, build_index
from lattqe.augmentation.recipe import Augmentation
from lattqe.search import stored
from lattqe.search.index import StoredIndex
from lattqe.search.stored import GraphTask, begin_graph, build_graph, publish_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph

ROWS, DIM, K, BLOCK = 900, 12, 5, 64

KILLED = """
import os, signal, sys
import torch
from lattqe.augmentation.index import Augmentation, AugmentWorker, build_index
torch.set_num_threads(int(sys.argv[4]))
real, calls = AugmentWorker.write_piece, []
def write_piece(self, start, vectors):
    real(self, start, vectors)
    calls.append(start)
    if len(calls) == int(sys.argv[5]):
        os.kill(os.getpid(), signal.SIGKILL)
AugmentWorker.write_piece = write_piece
build_index(Augmentation(*sys.argv[1:4], "alphaqe", 5, {"alpha": 2.0}, block_rows=64))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Rows in parts of which some have several blocks, and their graph."""
    folder = tmp_path_factory.mktemp("source")
    with FeatureWriter(str(folder / "features"), DIM, part_bytes=8_000) as writer:
        writer.append(np.random.default_rng(0).standard_normal((ROWS, DIM)), [f"r{row}" for row in range(ROWS)])
    features = FeatureSet.open(str(folder / "features"))
    assert len(features.manifest.parts) > 2
    assert max(part.rows for part in features.manifest.parts) > 2 * BLOCK
    return features, publish_graph(features, K, str(folder / "graph"))


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def task_of(source, to):
    return Augmentation(source[0].uri, source[1].uri, str(to), "alphaqe", K, {"alpha": 2.0}, block_rows=BLOCK)


def whole(source, to):
    task = task_of(source, to)
    pending = begin_index(task)
    build_index(task)
    return pending.finish().digest


@pytest.mark.kill
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_killed_at_any_block_and_begun_again(source, tmp_path, threads, at):
    expected = whole(source, tmp_path / "undisturbed")
    task = task_of(source, tmp_path / "index")
    pending = begin_index(task)
    done = subprocess.run([sys.executable, "-c", KILLED, task.features, task.graph, task.to, str(threads), str(at)])
    assert done.returncode == -signal.SIGKILL
    torch.set_num_threads(threads)
    summary = build_index(task)
    assert pending.finish().digest == expected
    assert summary.expanded <= ROWS - at * BLOCK + BLOCK, "finished blocks were not computed again"


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupt_stops_the_threads_and_keeps_what_is_done(source, tmp_path, threads, monkeypatch):
    expected = whole(source, tmp_path / "undisturbed")
    task = task_of(source, tmp_path / "index")
    pending = begin_index(task)
    torch.set_num_threads(threads)
    told = []

    def interrupt(rows):
        told.append(rows)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(task, interrupt)
    assert torch.get_num_threads() == threads
    computed = []
    real = AugmentWorker.expand_rows
    monkeypatch.setattr(AugmentWorker, "expand_rows", lambda self, rows: computed.append(len(rows)) or real(self, rows))
    build_index(task)
    assert pending.finish().digest == expected
    assert sum(computed) < ROWS


def test_a_graph_whose_parts_are_partly_there_is_finished(source, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "part_row_counts", lambda rows, size: [400, 400, rows - 800])
    expected = publish_graph(source[0], K, str(tmp_path / "undisturbed")).digest
    task = GraphTask(source[0].uri, str(tmp_path / "graph"), K)
    pending = begin_graph(task)
    publish = type(pending).publish

    def stopping(self, part, table):
        publish(self, part, table)
        if part == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(pending), "publish", stopping)
        with pytest.raises(KeyboardInterrupt):
            build_graph(task)
    assert pending.missing() == [2]
    build_graph(task)
    assert pending.finish().digest == expected
    assert NeighborGraph.open(task.to).digest == expected


def test_rows_that_lie_on_the_device_serve_every_thread(tmp_path, monkeypatch):
    """Of neighbors nothing is read, whichever thread computes a block; the bytes are those of rows that are sent."""
    x = np.random.default_rng(1).standard_normal((120, DIM))
    with FeatureWriter(str(tmp_path / "features"), DIM) as writer:
        writer.append(x, [f"r{row}" for row in range(len(x))])
    features = FeatureSet.open(str(tmp_path / "features"))
    graph = publish_graph(features, len(x) - 1, str(tmp_path / "graph"))
    asked, gather = [], StoredIndex.gather
    monkeypatch.setattr(StoredIndex, "gather", lambda self, rows: asked.append(len(rows)) or gather(self, rows))
    torch.set_num_threads(3)

    def digest(name):
        params = {"dba": True, "device": "cpu"}
        task = Augmentation(features.uri, graph.uri, str(tmp_path / name), "lattqe", 8, params, block_rows=20)
        pending = begin_index(task)
        build_index(task)
        return pending.finish().digest

    sent = digest("sent")
    assert sum(asked) > 2 * len(x)
    asked.clear()
    monkeypatch.setattr("lattqe.search.index.room_on", lambda device: 1 << 30)
    assert digest("resident") == sent
    assert asked == [20] * 6, "each block's own rows"
