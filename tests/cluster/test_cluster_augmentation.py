"""Distributed augmentation equals the in-memory one, for every method and number of workers, through deaths."""

import numpy as np
import pytest

from cluster.augmentation import Augmentation, run_augmentation
from cluster.session import ray_session
from lattqe.expansion import create
from lattqe.expansion.rows import expand_rows
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, Pending, neighbors_table

pytestmark = pytest.mark.ray

ROWS, DIM, K = 700, 16, 6


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with ray_session(cpus=2):
        yield


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
    I = np.argsort(-scores, axis=1, kind="stable")[:, :K].astype(np.int32)  # noqa: E741
    D = np.take_along_axis(scores, I, axis=1).astype(np.float32)
    pending = Pending.begin(str(folder / "graph"), "neighbors", {"k": K}, [ROWS],
                            inputs={"features": features.as_input()})
    pending.publish(0, neighbors_table(I, D))
    pending.finish()
    return features, NeighborGraph.open(str(folder / "graph"))


def begin(features, to, part_rows):
    fields = {key: features.manifest.fields[key] for key in ("dim", "dtype")}
    schema = features.table(0, 1).schema
    return Pending.begin(str(to), "features", fields, part_rows, schema=schema,
                         inputs={"features": features.as_input()})


def augmented(source, to, method="alphaqe", workers=2, part_rows=(300, 300, 100), **params):
    features, graph = source
    pending = begin(features, to, part_rows)
    rows = []
    task = Augmentation(features.uri, graph.uri, str(to), method, K, params, block_rows=128)
    summary = run_augmentation(task, workers, rows.append)
    pending.finish()
    return FeatureSet.open(str(to)), summary, sum(rows)


def in_memory(source, method, **params):
    features, graph = source
    made = create(method, **params)
    x, (I, D) = features.read(), graph.read()  # noqa: E741
    negatives = None
    if made.negatives:
        scores = x.astype(np.float64) @ x.astype(np.float64).T
        negatives = np.argsort(scores, axis=1, kind="stable")[:, :made.negatives]
    return expand_rows(made, x, I, D, features.gather, negatives)


@pytest.mark.parametrize(("method", "workers"), [("aqe", 1), ("aqewd", 2), ("alphaqe", 3)])
def test_equals_in_memory(source, tmp_path, method, workers):
    index, summary, rows = augmented(source, tmp_path / "index", method, workers)
    np.testing.assert_allclose(index.read(), in_memory(source, method), atol=1e-6)
    assert index.ids() == source[0].ids()
    np.testing.assert_array_equal(index.labels(), source[0].labels())
    assert rows == ROWS
    assert summary.blocks.blocks == 3 + 3 + 3, "blocks of 128 rows in two parts of 300, and three parts"
