"""Distributed augmentation equals the in-memory one, for every method and number of workers, through deaths."""

from functools import cache

import numpy as np
import pytest
import ray
import torch

import lattqe
from cluster import augmentation as on_ray
from cluster.augmentation import Nodes, Reach, ShardReader, choose_reach, decide, open_shards
from lattqe.augmentation.index import AugmentWorker, build_index, piece_name
from lattqe.augmentation.recipe import Augmentation
from lattqe.errors import LattqeError
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, Pending, neighbors_table

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

ROWS, DIM, K = 700, 16, 6


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A labelled float32 feature set with duplicates, and its exact graph."""
    folder = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    x[100:120] = x[0]
    with FeatureWriter(str(folder / "features"), DIM, dtype="float32", labels=True) as writer:
        writer.append(x, [f"row-{i}" for i in range(ROWS)], rng.integers(0, 9, ROWS))
    features = FeatureSet.open(str(folder / "features"))
    x = features.read().astype(np.float64)
    scores = x @ x.T
    np.fill_diagonal(scores, -np.inf)
    I = np.argsort(-scores, axis=1, kind="stable")[:, :K].astype(np.int32)
    D = np.take_along_axis(scores, I, axis=1).astype(np.float32)
    pending = Pending.begin(
        str(folder / "graph"), "neighbors", {"k": K}, [ROWS], inputs={"features": features.as_input()}
    )
    pending.publish(0, neighbors_table(I, D))
    pending.finish()
    return features, NeighborGraph.open(str(folder / "graph"))


def begin(features, to, part_rows):
    fields = {key: features.manifest.fields[key] for key in ("dim", "dtype")}
    schema = features.table(0, 1).schema
    return Pending.begin(
        str(to), "features", fields, part_rows, schema=schema, inputs={"features": features.as_input()}
    )


def augmented(source, to, method="alphaqe", workers=2, part_rows=(300, 300, 100), shards=None, **params):
    features, graph = source
    pending = begin(features, to, part_rows)
    rows = []
    task = Augmentation(features.uri, graph.uri, str(to), method, K, params, block_rows=128)
    summary = on_ray.build_index(task, rows.append, workers=workers, shards=shards)
    pending.finish()
    return FeatureSet.open(str(to)), summary, sum(rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained network, stored."""
    torch.manual_seed(0)
    uri = str(tmp_path_factory.mktemp("model") / "model")
    LAttQE(LAttQEConfig(dim=DIM, heads=2, layers=2, max_k=K)).save(uri)
    return uri


@pytest.fixture(scope="module")
def on_workers(source, model, tmp_path_factory):
    """What a method gives on so many workers, made once for all tests: (index, summary, rows reported)."""

    @cache
    def make(method, workers):
        return augmented(source, tmp_path_factory.mktemp(method) / "index", method, workers, **params_of(method, model))

    return make


def params_of(method, model):
    return {"model": model, "dba": True} if method == "lattqe" else {}


WORKERS = {"aqe": 1, "aqewd": 1, "alphaqe": 3, "dqe": 1, "lattqe": 2}


@pytest.mark.parametrize("method", WORKERS)
def test_equals_in_memory(source, on_workers, method, model):
    index, summary, rows = on_workers(method, WORKERS[method])
    expected = lattqe.augment(source[0].read(), method, k=K, **({"model": model} if method == "lattqe" else {}))
    np.testing.assert_allclose(index.read(), expected, atol=2e-6)
    assert index.ids() == source[0].ids()
    np.testing.assert_array_equal(index.labels(), source[0].labels())
    assert rows == ROWS
    assert summary.items == 3 + 3 + 3, "blocks of 128 rows in two parts of 300, and three parts"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("method", ["alphaqe", "dqe", "lattqe"])
def test_in_this_process_the_bytes_are_the_same(source, on_workers, tmp_path, model, method, threads):
    made, _, _ = on_workers(method, WORKERS[method])
    features, graph = source
    pending = begin(features, tmp_path / "here", (300, 300, 100))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows = []
    task = Augmentation(features.uri, graph.uri, pending.uri, method, K, params_of(method, model), block_rows=128)
    build_index(task, rows.append)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert (pending.finish().digest, sum(rows)) == (made.digest, ROWS)


def test_finished_pieces_are_taken_up_and_damaged_ones_computed_again(source, on_workers, tmp_path):
    whole, _, _ = on_workers("alphaqe", WORKERS["alphaqe"])
    features, graph = source
    pending = begin(features, tmp_path / "index", (300, 300, 100))
    task = Augmentation(features.uri, graph.uri, str(tmp_path / "index"), "alphaqe", K, block_rows=128)
    worker = AugmentWorker(task)
    for start, stop in ((0, 128), (128, 256), (256, 300), (300, 428)):
        worker.write_piece(start, worker.expand(start, stop))
    damaged = tmp_path / "index" / piece_name(128)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    rows = []
    summary = on_ray.build_index(task, rows.append, workers=2)
    assert pending.finish().digest == whole.digest
    assert summary.expanded == 700 - 128 - 44 - 128, "three good pieces were not computed again"


def test_vectors_from_shards_give_the_same_bytes(source, tmp_path, model):
    """Also after a shard was killed; DQE searches its negatives in the shards."""
    features, graph = source
    with open_shards(features, Reach("shards", "for the test", 2)) as index:
        reader = ShardReader(index)
        for method, params in {"alphaqe": {}, "lattqe": {"model": model, "dba": True}}.items():
            gathered, _, rows = augmented(source, tmp_path / method, method, workers=1, shards=reader, **params)
            pending = begin(features, tmp_path / f"{method}-mapped", (300, 300, 100))
            build_index(Augmentation(features.uri, graph.uri, pending.uri, method, K, params, block_rows=128))
            assert (gathered.digest, rows) == (pending.finish().digest, ROWS)
            ray.kill(index.actors[1], no_restart=False)
        x = features.read(0, 50)
        for got, expected in zip(reader.lowest(x, 9), FlatIndex(features.read()).lowest(x, 9)):
            np.testing.assert_array_equal(got, expected)


def test_shards_are_opened_where_workers_cannot_hold_the_vectors(source, tmp_path, on_workers, monkeypatch):
    """For every caller: a benchmark did not, and each of its blocks read all rows from S3 again."""
    asked = []
    monkeypatch.setattr(on_ray, "choose_reach", lambda *_: Reach("shards", "for the test", 1))
    monkeypatch.setattr(on_ray, "ShardReader", lambda index: asked.append(index.rows) or ShardReader(index))
    gathered, _, _ = augmented(source, tmp_path / "index", workers=1)
    assert asked == [ROWS]
    assert gathered.digest == on_workers("alphaqe", WORKERS["alphaqe"])[0].digest


MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "nodes", "remote", "cache", "how"),
    [
        (100, Nodes(1, 1000 * MIB, 1000 * MIB), False, None, "map"),
        (2000, Nodes(1, 1000 * MIB, 1000 * MIB), False, None, "map"),  # one node: nothing else could hold them
        (2000, Nodes(8, 1000 * MIB, 8000 * MIB), False, None, "shards"),
        (5000, Nodes(8, 1000 * MIB, 8000 * MIB), False, None, "map"),  # too many for shards too
        (100, Nodes(2, 1000 * MIB, 2000 * MIB), True, None, "map"),
        (500, Nodes(2, 1000 * MIB, 2000 * MIB), True, None, "shards"),
        (5000, Nodes(2, 1000 * MIB, 2000 * MIB), True, None, None),
        (500, Nodes(2, 1000 * MIB, 2000 * MIB, 600 * MIB), True, "cache", "map"),
        (500, Nodes(2, 1000 * MIB, 2000 * MIB, 400 * MIB), True, "cache", "shards"),
        (1500, Nodes(4, 1000 * MIB, 4000 * MIB, 9000 * MIB), True, "cache", "shards"),
        (5000, Nodes(2, 1000 * MIB, 2000 * MIB, 400 * MIB), True, "cache", None),
    ],
)
def test_reach_is_chosen_by_what_nodes_can_hold(size, nodes, remote, cache, how):
    if how is None:
        with pytest.raises(LattqeError, match="MiB"):
            decide(size * MIB, size * MIB, nodes, remote, cache)
    else:
        assert decide(size * MIB, size * MIB, nodes, remote, cache)[0] == how


def test_vectors_on_s3_are_held_where_their_whole_parts_fit():
    """Ids and labels are held with the vectors: a million rows of 128 float16 columns would be read for each block."""
    nodes = Nodes(1, 20_000 * MIB, 20_000 * MIB)
    assert decide(244 * MIB, 255 * MIB, nodes, True, None)[0] == "map"
    assert decide(244 * MIB, 269 * MIB, nodes, True, None)[0] == "shards"


def test_this_cluster_maps_and_shards_when_asked(source):
    assert choose_reach("auto", source[0], None).how == "map"
    assert choose_reach("shards", source[0], None) == Reach("shards", "as asked", 1)
