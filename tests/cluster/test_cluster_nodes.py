"""The pipeline over several Ray nodes that share nothing but S3; one is cut off in the middle and comes back.

Nodes are separate `ray start` processes, in network namespaces with their own addresses where the machine permits it.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ray_nodes import RayNode, make_network
from s3_proxy import FaultyProxy
from s3_server import S3Server

from lattqe.augmentation.index import begin_index, build_index
from lattqe.augmentation.recipe import Augmentation
from lattqe.search import FlatIndex
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, Pending, open_place, ranks_table, read_manifest

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.kill, pytest.mark.long]

ROWS, DIM, K, PARTS_BEFORE, PARTS_HELD = 3000, 32, 8, 3, 12
CACHE = "~/cache"  # each node has a HOME of its own

# Runs verbs one after the other in one session: `python -c DRIVER address "verb word ..." ...`
DRIVER = """
import importlib, sys
from cluster.session import ray_session
with ray_session(sys.argv[1]):
    for line in sys.argv[2:]:
        verb, *words = line.split()
        importlib.import_module(f"jobs.{verb}").app(words, standalone_mode=False)
"""


class Cluster:
    """A head without CPUs, two workers with one CPU each, and an S3 server outside, behind a proxy we can hold up."""

    def __init__(self, folder: Path) -> None:
        self.network = make_network(3)
        self.held = threading.Event()  # set: parts from PARTS_HELD on are not let through to the storage
        self.server = S3Server(folder / "s3", self.network.outside)
        self.proxy = FaultyProxy(self.server.endpoint, self._hold, self.network.outside)
        patience = {"LATTQE_S3_ANSWER_SECONDS": "300", "LATTQE_S3_RETRY_SECONDS": "300"}  # what we hold up is not lost
        environment = self.server.environment | patience | {"AWS_ENDPOINT_URL": self.proxy.endpoint}
        self.nodes = [RayNode(self.network, number, folder, environment, port=26400) for number in range(3)]
        self.jobs: subprocess.Popen[str] | None = None

    def _hold(self, method: str, path: str) -> None:
        name = path.rpartition("/")[2]
        while method == "PUT" and "/index/part-" in path and name >= f"part-{PARTS_HELD:05d}" and self.held.is_set():
            time.sleep(0.02)

    def start(self) -> None:
        self.server.start()
        self.nodes[0].begin()
        self.nodes[0].wait_started()
        for node in self.nodes[1:]:
            node.begin()
        for node in self.nodes[1:]:
            node.wait_started()

    def stop(self) -> None:
        self.held.clear()
        if self.jobs is not None:
            self.jobs.kill()
            self.jobs.wait()
        for node in reversed(self.nodes):
            node.kill()
        self.proxy.close()
        self.server.kill()
        self.network.close()

    def run(self, *lines: str) -> subprocess.Popen[str]:
        """Jobs whose driver is on the head node."""
        head = self.nodes[0]
        command = [
            *self.network.within(0),
            sys.executable,
            "-c",
            DRIVER,
            head.head_address,
            *(f"{line} --cache {CACHE} --workers 2 --json" for line in lines),
        ]
        self.jobs = subprocess.Popen(
            command, env=head.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        return self.jobs

    def cached(self, number: int) -> set[str]:
        """What a node keeps of the rows it has read."""
        return {path.name for path in (self.nodes[number].home / "cache").glob("*/part-*.arrow")}


@pytest.fixture
def cluster(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="lq-") as folder:  # a short path: Ray has sockets in it
        made = Cluster(Path(folder))
        for name, value in made.server.environment.items():  # this process goes past the proxy
            monkeypatch.setenv(name, value)
        try:
            made.start()
            yield made
        finally:
            made.stop()


def results_of(jobs: subprocess.Popen[str]) -> list[dict]:
    """What the jobs print for scripts: one JSON document each, and nothing else."""
    shown, told = jobs.communicate(timeout=800)
    assert jobs.returncode == 0, told
    documents = []
    while shown.strip():
        document, end = json.JSONDecoder().raw_decode(shown.lstrip())
        documents.append(document)
        shown = shown.lstrip()[end:]
    return documents


def write_features(uri: str, rows: int, seed: int) -> FeatureSet:
    with FeatureWriter(uri, DIM, part_bytes=8_000) as writer:
        writer.append(np.random.default_rng(seed).standard_normal((rows, DIM)), [f"{seed}-{i}" for i in range(rows)])
    return FeatureSet.open(uri)


def undisturbed(features: FeatureSet, queries: FeatureSet, to: str) -> None:
    """Graph, index and ranks, computed in this process alone."""
    graph = publish_graph(features, K, f"{to}/graph")
    task = Augmentation(features.uri, graph.uri, f"{to}/index", "alphaqe", K, {"alpha": 3.0})
    index = begin_index(task)
    build_index(task)
    index.finish()
    scores, ids = FlatIndex(FeatureSet.open(f"{to}/index").read()).search(queries.read(), K)
    ranks = Pending.begin(f"{to}/ranks", "ranks", {"k": K}, [queries.rows])
    ranks.publish(0, ranks_table(queries.ids(), ids, scores))
    ranks.finish()


def parts(uri: str) -> list[bytes]:
    place = open_place(uri)
    return [place.read(part.name) for part in read_manifest(place).parts]


def wait_until(condition, job: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 800
    while not condition():
        assert job.poll() is None, (what, job.communicate())
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_node_cut_off_in_the_middle_comes_back_and_nothing_differs(cluster, capsys):
    with capsys.disabled():
        print(f"\nthree Ray nodes: {cluster.network.name}")
    base = cluster.server.fresh_uri()
    features, queries = write_features(f"{base}/features", ROWS, 0), write_features(f"{base}/queries", 200, 1)
    index = open_place(f"{base}/index")
    cluster.held.set()
    jobs = cluster.run(
        f"neighbors {features.uri} -k {K} --block-rows 500 --to {base}/graph",
        f"augment {features.uri} --neighbors {base}/graph --method alphaqe --alpha 3 -k {K} --to {index.uri}",
        f"search {index.uri} {queries.uri} -k {K} --to {base}/ranks",
    )
    undisturbed(features, queries, f"{base}/undisturbed")
    wait_until(lambda: sum("_work/part-" in name for name in index.list()) >= PARTS_BEFORE, jobs, "the first parts")
    victim, graph = cluster.nodes[2], NeighborGraph.open(f"{base}/graph")
    wait_until(lambda: (victim.home / "cache" / graph.digest).exists(), jobs, "the victim augments rows")
    victim.cut_off()
    wait_until(victim.counted_as_dead, jobs, "Ray gives the node up")
    victim.reconnect()
    (victim.home / "cache").rename(victim.home / "cache-before")
    victim.begin()
    wait_until(lambda: cluster.cached(2), jobs, "the node that came back works again")
    cluster.held.clear()
    _, augmented, searched = results_of(jobs)
    assert augmented["workers_lost"] >= 1
    assert augmented["retries"] >= 1, "what the node was at was asked for again"
    assert searched["shards"] == 2

    for name in ("graph", "index", "ranks"):
        assert parts(f"{base}/{name}") == parts(f"{base}/undisturbed/{name}"), name
        assert (
            read_manifest(open_place(f"{base}/{name}")).digest
            == read_manifest(open_place(f"{base}/undisturbed/{name}")).digest
        ), name
    assert not [name for name in index.list() if name.startswith("_work/")]
