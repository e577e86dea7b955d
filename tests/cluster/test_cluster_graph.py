"""The graph on Ray is the graph in one process, byte for byte, for any cut, and through deaths of actors and nodes."""

import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from cluster.graph import Progress, build_approximate, plan_graph, run_graph
from cluster.graph_worker import CUT, GraphWorker, agree_on_cut, file_name, find_lists, read_lists, write_lists
from cluster.session import ray_session
from cluster.shards import ShardedIndex
from jobs.neighbors import approximate_neighbors
from lattqe.cost import Cut, cut_rows
from lattqe.cost.rows import cut_owned
from lattqe.errors import LattqeError
from lattqe.search import knn_graph, stored, topk
from lattqe.search.compare import Lists
from lattqe.search.rows import Pairing
from lattqe.search.stored import GraphTask, begin_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, open_place

pytestmark = pytest.mark.ray

K = 7


def write(path, x, dtype="float16"):
    with FeatureWriter(str(path), x.shape[1], dtype=dtype, part_bytes=10_000) as writer:
        writer.append(x, [f"{path.name}-{i}" for i in range(len(x))])
    return FeatureSet.open(str(path))


def crowd(rng, n, dim=24):
    """Half of the rows random, the others copies of a few of them."""
    x = rng.standard_normal((n, dim))
    x[n // 2 :] = x[rng.integers(0, 6, n - n // 2)]
    return x[rng.permutation(n)]


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    return write(tmp_path_factory.mktemp("features") / "rows", crowd(np.random.default_rng(0), 900))


@pytest.fixture(scope="module")
def undisturbed(features):
    """I, D of all rows in one process."""
    return knn_graph(features.read(), K)


def compute(task, cut, workers=2, on_products=lambda _: None):
    pending = begin_graph(task)
    cut = agree_on_cut(pending.place, cut)
    summary = run_graph(task, cut, workers, on_products)
    pending.finish()
    return NeighborGraph.open(task.to), summary


def compute_here(task, cut, on_products=lambda _: None):
    """The same with one worker in this process: an actor of its own would take longer to start than to work."""
    pending, threads = begin_graph(task), torch.get_num_threads()
    cut = agree_on_cut(pending.place, cut)
    worker, progress = GraphWorker(task, cut), Progress(task, cut, pending, 1, on_products)
    items = progress.possible()
    while items:
        item = items.pop(0)
        items += progress.done(item, worker.run(item))
    torch.set_num_threads(threads)
    pending.finish()
    return NeighborGraph.open(task.to)


def assert_same(graph, expected):
    ids, scores = graph.read()
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(scores, expected[1])
    assert [name for name in graph.place.list() if "_work" in name] == [], "nothing unfinished is left behind"


def test_any_cut_gives_the_same_bytes(local_ray, features, undisturbed, tmp_path):
    cut, counted = cut_rows(900, 0, 2, 128, exact=True), []
    graph, summary = compute(GraphTask(features.uri, str(tmp_path / "graph"), K), cut, 2, counted.append)
    assert_same(graph, undisturbed)
    assert sum(counted) == sum(cut.cost(*pair) for pair in cut.work())
    for schedule in ("pairs", "rows"):
        cut, counted = Cut((0, 1, 500, 899, 900), 4, schedule), []
        other = compute_here(GraphTask(features.uri, str(tmp_path / schedule), K), cut, counted.append)
        assert_same(other, undisturbed)
        assert sum(counted) == sum(cut.cost(*pair) for pair in cut.work())
        assert other.digest == graph.digest
    assert {"loading", "products", "selection", "scoring", "merging", "writing", "waiting"} <= set(summary.seconds)
    assert 0 < summary.balance <= 1


@pytest.mark.parametrize("kind", ["photos", "crowd"])
def test_distractors_join_a_graph_made_once(local_ray, photos_folder, tmp_path, kind):
    """Two benchmarks share the distractors' graph; rows count through: the database, then the distractors."""
    rng = np.random.default_rng(1)
    if kind == "photos":
        birds = np.load(photos_folder / "cub200_vectors.npy")[:1400, :64]
        database, others = birds[::2], birds[1::2]
    else:
        database, others = crowd(rng, 300), crowd(rng, 500)
        others[100:150] = database[:50]
    a, b = write(tmp_path / "database", database), write(tmp_path / "others", others)
    known = stored.publish_graph(b, K + 2, str(tmp_path / "known"))
    task = GraphTask(a.uri, str(tmp_path / "joint"), K, b.uri, known.uri)
    expected = knn_graph(np.concatenate([a.read(), b.read()]), K)
    assert (expected[0][a.rows :] < a.rows).any(), "some distractors found rows of the database, or this shows nothing"
    cut, counted = cut_rows(a.rows, b.rows, 2, 150), []
    graph = compute(task, cut, 2, counted.append)[0] if kind == "crowd" else compute_here(task, cut, counted.append)
    assert_same(graph, expected)
    assert sum(counted) <= a.rows * (a.rows + 1) // 2 + a.rows * b.rows + cut.blocks * a.rows, "no distractor pairs"
    owned, counted = cut_owned(a.rows, b.rows, 2, 250), []
    graph = compute_here(replace(task, to=str(tmp_path / "owned")), owned, counted.append)
    assert_same(graph, expected)
    assert sum(counted) <= a.rows * a.rows + 2 * a.rows * b.rows, "no distractor pairs"


@pytest.mark.parametrize("options", [{"engine": "faiss"}, {"kind": "int8"}, {"kind": "float32 torch"}])
def test_engines_and_kinds_of_products_give_the_same_bytes(local_ray, features, undisturbed, tmp_path, options):
    for name, cut in {"pairs": cut_rows(900, 0, 2, 300), "rows": cut_owned(900, 0, 2, 300)}.items():
        graph = compute_here(GraphTask(features.uri, str(tmp_path / name), K, **options), cut)
        assert_same(graph, undisturbed)


def mortal_worker(fatal):
    """A worker that dies between its two writes, once for each file in `fatal`."""

    class MortalWorker(GraphWorker):
        def compare(self, a, b, seen_a, seen_b):
            marks = sorted(os.listdir(fatal))
            if marks and seen_a and a != b:
                os.remove(os.path.join(fatal, marks[0]))
                place, writes = self.place, Counter()
                write_once = place.write

                def write(name, data):
                    if writes["done"]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    writes["done"] += 1
                    write_once(name, data)

                place.write = write
            super().compare(a, b, seen_a, seen_b)

    return MortalWorker


def test_actors_killed_in_the_middle(local_ray, features, undisturbed, tmp_path, monkeypatch):
    fatal = tmp_path / "fatal"
    fatal.mkdir()
    for mark in "ab":
        (fatal / mark).touch()
    monkeypatch.setattr("cluster.graph.GraphWorker", mortal_worker(str(fatal)))
    graph, summary = compute(GraphTask(features.uri, str(tmp_path / "graph"), K), cut_rows(900, 0, 2, 150))
    assert summary.blocks.actors_lost == 2
    assert not list(fatal.iterdir())
    assert_same(graph, undisturbed)


def mortal_owner(fatal, log):
    """A worker that dies in the middle of the rows that pass its block, once; all tell which blocks they begin."""

    class MortalOwner(GraphWorker):
        def own(self, block):
            self.stream_rows = 130  # several pieces for each block
            with open(log, "a") as file:
                file.write(f"{block}\n")
            super().own(block)

        def passing(self, block, products):
            for number, piece in enumerate(super().passing(block, products)):
                if number == 3 and block == 4 and os.path.exists(fatal):
                    os.remove(fatal)
                    os.kill(os.getpid(), signal.SIGKILL)
                yield piece

    return MortalOwner


class Stop(Exception):
    """The driver is stopped."""


def test_owners_write_lists_once_and_finished_blocks_are_not_made_again(
    local_ray, features, undisturbed, tmp_path, monkeypatch
):
    """An actor dies in the middle of a block, the driver after two; the next one, with another cut in mind, goes on.

    It does not read the part that is finished: a worker does.
    """
    monkeypatch.setattr("lattqe.search.stored.part_row_counts", lambda rows, row_bytes: [150] * 6)
    fatal, log = tmp_path / "fatal", tmp_path / "log"
    fatal.touch()
    monkeypatch.setattr("cluster.graph.GraphWorker", mortal_owner(str(fatal), str(log)))
    task, cut, done = GraphTask(features.uri, str(tmp_path / "graph"), K), cut_owned(900, 0, 1, 150), []

    def stop(products):
        done.append(products)
        if len(done) == 2:
            raise Stop

    with pytest.raises(Stop):
        compute(task, cut, 1, stop)
    lists = [name for name in open_place(task.to).list() if name.startswith("_work/lists/")]
    assert lists == [file_name(block, cut.complete(block)) for block in (0, 1)], "nothing but finished lists"
    assert open_place(task.to).exists("part-00000.arrow")
    monkeypatch.setattr("lattqe.store.pending.load_part", lambda place, part: pytest.fail("the driver reads a part"))
    graph, summary = compute(task, cut_rows(900, 0, 2, 300), 1)
    assert summary.blocks.actors_lost == 1
    assert_same(graph, undisturbed)
    assert Counter(log.read_text().split()) == {str(block): 1 + (block == 4) for block in range(cut.blocks)}


def test_damaged_and_lost_lists_are_made_again(local_ray, features, undisturbed, tmp_path):
    """A run stopped in the middle leaves lists; two of them are hurt before the next run."""
    task, cut = GraphTask(features.uri, str(tmp_path / "graph"), K), cut_rows(900, 0, 2, 150)
    done = []

    def stop(products):
        done.append(products)
        if len(done) == 8:
            raise Stop

    with pytest.raises(Stop):
        compute(task, cut, 2, stop)
    place = open_place(task.to)
    lists = [name for name in place.list() if name.startswith("_work/lists/")]
    assert len(lists) >= 6
    place.write(lists[0], place.read(lists[0])[:-1] + b"?")
    place.delete(lists[1])
    graph, _ = compute(task, cut_rows(900, 0, 1, 900))  # another cut than the first run's: that one is kept
    assert_same(graph, undisturbed)


def test_two_drivers_at_once_make_one_graph(local_ray, features, undisturbed, tmp_path):
    task, cut = GraphTask(features.uri, str(tmp_path / "graph"), K), cut_rows(900, 0, 2, 100)
    results = []

    def drive():
        results.append(compute(task, cut, 1)[0])

    threads = [threading.Thread(target=drive) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert_same(NeighborGraph.open(task.to), undisturbed)


def test_the_plan_refuses_what_cannot_fit(local_ray, features, tmp_path, monkeypatch):
    task = GraphTask(features.uri, str(tmp_path / "graph"), K)
    plan = plan_graph(task, 2)
    assert plan.products == pytest.approx(900 * 900 / 2, rel=0.02)
    assert plan.work.flops == 2 * plan.work.products * 24
    monkeypatch.setattr("cluster.graph.worker_budget", lambda workers, device: 1 << 20)
    with pytest.raises(LattqeError, match="2 workers have 1 MiB each, but two blocks of 512 rows"):
        plan_graph(task, 2)
    monkeypatch.undo()
    monkeypatch.setattr("cluster.graph_worker.shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(LattqeError, match="its disk has 0 MiB free"):
        plan_graph(task, 2)
    assert not open_place(task.to).list()


def test_a_damaged_cut_is_one_line(tmp_path):
    place, cut = open_place(str(tmp_path / "graph")), Cut((0, 10, 30), 1, "rows")
    assert agree_on_cut(place, cut) == cut
    assert agree_on_cut(place, Cut((0, 30), 1)) == cut, "that of the first run"
    for wrong in (b"", b'{"bounds": [0, 20, 30], "own": 1}', place.read(CUT).replace(b"10", b"20")):
        place.write(CUT, wrong)
        with pytest.raises(LattqeError, match=r"cut.json .*; delete .*/graph, which is not finished, and begin again"):
            agree_on_cut(place, cut)


def test_lists_are_named_by_what_they_have_seen(tmp_path):
    place = open_place(str(tmp_path))
    rng = np.random.default_rng(0)
    lists = Lists(rng.standard_normal((5, 3)), rng.integers(0, 9, (5, 3)).astype(np.int32))
    for seen in (0b1, 0b1010, 0b11):
        write_lists(place, 1, seen, lists)
    assert find_lists(place, 3) == [0, 0b1010, 0]
    again = read_lists(place, 1, 0b11, 5, 3)
    np.testing.assert_array_equal(again.scores, lists.scores)
    np.testing.assert_array_equal(again.ids, lists.ids)
    assert place.exists(file_name(1, 0b11))


@pytest.mark.parametrize(
    ("rows", "workers", "fit", "blocks"),
    [
        (20_000, 1, 20_000, 1),
        (20_000, 2, 20_000, 4),
        (20_000, 3, 20_000, 10),
        (20_000, 2, 2_000, 10),
        (1_000_000, 2, 1_000_000, 8),
        (1_000_000, 8, 1_000_000, 32),
        (700, 2, 700, 1),
    ],
)
def test_blocks_are_few_but_enough_for_the_workers(rows, workers, fit, blocks):
    cut = cut_rows(rows, 0, workers, fit)
    assert cut.blocks == blocks
    pairing = Pairing(cut.pairs(), first=[pair for pair in cut.pairs() if cut.siblings(*pair)])
    first = [pairing.take() for _ in range(workers)]
    assert rows < 1000 or all(first), "a worker has nothing to begin with"


@pytest.mark.parametrize(("own", "others"), [(1, 0), (2, 0), (5, 0), (6, 0), (1, 3), (4, 2)])
def test_every_pair_of_blocks_is_compared_once(own, others):
    cut = Cut(tuple(range(own + others + 1)), own)
    seen = [0] * cut.blocks
    met = Counter()
    for a, b in cut.pairs():
        for block, gain in {a: cut.gain(a, b)[0], b: cut.gain(a, b)[1]}.items():
            assert not seen[block] & gain
            seen[block] |= gain
        met.update([(a, b)] if not cut.siblings(a, b) or a == b else [(a, a), (a, b), (b, b)])
    assert seen == [cut.complete(block) for block in range(cut.blocks)]
    assert met == Counter([(a, b) for a in range(own) for b in range(a, own + others)])


def test_an_approximate_graph_is_that_of_one_process(local_ray, features, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "part_row_counts", lambda rows, size: [400, 300, rows - 700])
    manifests = []
    for name in ("here", "ray"):
        task = GraphTask(features.uri, str(tmp_path / name), K, recall=0.9)
        pending = begin_graph(task)
        made = stored.build_approximate(task) if name == "here" else build_approximate(task, workers=2)[0]
        manifests.append(pending.finish(made.measured))
    assert manifests[0].digest == manifests[1].digest
    assert manifests[0].config == manifests[1].config


def test_a_continued_approximate_graph_is_not_read_by_the_driver(local_ray, features, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "part_row_counts", lambda rows, size: [400, 300, rows - 700])
    task = GraphTask(features.uri, str(tmp_path / "graph"), K, recall=0.9)
    begin_graph(task)
    worker = stored.ClusterWorker(task)
    worker.run(0)
    worker.run(2)
    monkeypatch.setattr("lattqe.store.pending.load_part", lambda place, part: pytest.fail("the driver reads a part"))
    manifest, told = approximate_neighbors(task, None, here=False)
    assert (manifest.rows, told["workers"]) == (features.rows, 1), "one part is left for one worker"


def started_by(process):
    """The processes that a process has started."""
    return [
        int(pid) for task in Path(f"/proc/{process}/task").iterdir() for pid in (task / "children").read_text().split()
    ]


def patient(folder):
    """Workers that begin when there are two of them."""

    class PatientWorker(GraphWorker):
        def compare(self, *item):
            Path(folder, str(os.getpid())).touch()
            while len(os.listdir(folder)) < 2:
                time.sleep(0.02)
            super().compare(*item)

    return PatientWorker


def test_a_node_killed_in_the_middle(features, undisturbed, tmp_path, monkeypatch):
    """Two nodes; the second is killed, with a shard and a worker on it, when a third of the products is done.

    The graph and a search index both go on, on a node that joins. Two processors a node for two shards and two
    workers: both nodes are full, so the dying one has a worker. Last: it needs its own Ray.
    """
    (tmp_path / "up").mkdir()
    monkeypatch.setattr("cluster.graph.GraphWorker", patient(str(tmp_path / "up")))
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        doomed = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        with ray_session(cluster.address), ShardedIndex(features.uri, 2, cpus=1) as index:
            cut = cut_rows(900, 0, 2, 60)
            total, done, killed = sum(cut.cost(*pair) for pair in cut.pairs()), [], []
            xq, answers = features.read(0, 50), []
            asking = threading.Thread(target=lambda: answers.append(index.search(xq, K)[1]))

            def kill(products):
                done.append(products)
                if sum(done) > total / 3 and not killed:
                    killed.append(time.monotonic())
                    # A worker would notice a moment after its node: by then it may have finished all blocks.
                    workers = started_by(doomed.all_processes["raylet"][0].process.pid)
                    assert workers
                    for worker in workers:
                        with suppress(ProcessLookupError):
                            os.kill(worker, signal.SIGKILL)
                    cluster.remove_node(doomed, allow_graceful=False)
                    # Asked while its shard has no room anywhere: a moment later Ray might have built it again.
                    asking.start()
                    while asking.is_alive() and not index.failures:
                        time.sleep(0.02)
                    cluster.add_node(num_cpus=2)
                    asking.join()

            graph, summary = compute(GraphTask(features.uri, str(tmp_path / "graph"), K), cut, 2, kill)
            np.testing.assert_array_equal(answers, [topk(xq, features.read(), K)[1]])
            assert index.failures == 1
        assert killed
        assert summary.blocks.actors_lost >= 1, "the node died with a worker on it, before the work was done"
        assert_same(graph, undisturbed)
    finally:
        cluster.shutdown()
