"""What earlier versions of lattqe stored is still read, and means the same; tests/data/v0_1_0 keeps one of each."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import lattqe
from lattqe.model import LAttQE
from lattqe.search import knn_graph
from lattqe.store import FeatureSet, NeighborGraph, Ranks, comparable_labels, load_model, open_artifact
from lattqe.store.artifacts import verify_artifact
from lattqe.store.export import export_ranks

OLD = Path(__file__).parent.parent / "data" / "v0_1_0"
CLASSES = ["ant", "bee", "cat", "dog", "emu", "fox"]


@pytest.mark.parametrize("name", ["features", "queries", "graph", "index", "ranks", "model"])
def test_every_kind_opens_and_is_sound(name):
    artifact = open_artifact(str(OLD / name))
    assert artifact.manifest.code_version == "0.1.0"
    assert verify_artifact(str(OLD / name)) == artifact.manifest


def test_features_with_text_labels():
    features, queries = FeatureSet.open(str(OLD / "features")), FeatureSet.open(str(OLD / "queries"))
    assert (features.rows, features.dim, features.dtype) == (120, 16, "float16")
    assert features.ids(0, 2) == ["x-0", "x-1"]
    assert features.label_names == CLASSES
    assert queries.label_names == ["bee", "dog", "emu", "fox"]
    labels, asked = comparable_labels(features, queries)
    assert [CLASSES[label] for label in labels] == [CLASSES[row % 6] for row in range(120)]
    assert [CLASSES[label] for label in asked] == ["bee", "dog", "emu", "fox", "bee"]


def test_a_graph_is_the_one_that_would_be_made_today():
    graph = NeighborGraph.open(str(OLD / "graph"))
    I, D = knn_graph(FeatureSet.open(str(OLD / "features")).read(), 10)
    np.testing.assert_array_equal(graph.read()[0], I)
    np.testing.assert_array_equal(graph.read()[1], D)


def test_an_augmented_index_is_the_one_that_would_be_made_today():
    features, index = FeatureSet.open(str(OLD / "features")), FeatureSet.open(str(OLD / "index"))
    assert index.ids() == features.ids()
    assert index.manifest.inputs["features"]["digest"] == features.digest
    expected = lattqe.augment(features.read().astype(np.float32), method="alphaqe", k=5, alpha=3)
    np.testing.assert_allclose(index.read().astype(np.float32), expected, atol=1e-3)


def test_ranks_are_read_and_exported(tmp_path):
    ranks = Ranks.open(str(OLD / "ranks"))
    I, D = ranks.read()
    assert ranks.ids() == [f"q-{row}" for row in range(5)]
    assert I.shape == D.shape == (5, 10)
    export_ranks(ranks, str(tmp_path / "x.csv"), [str(OLD / "index")])  # it is no longer where the ranks say it was
    with open(tmp_path / "x.csv", newline="") as file:
        lines = list(csv.reader(file))
    assert lines[1][:3] == ["q-0", "1", f"x-{I[0, 0]}"]
    assert len(lines) == 51


def test_a_relational_model_answers_as_it_did():
    network, expected = LAttQE.load(str(OLD / "model")), json.loads((OLD / "weights.json").read_text())
    assert load_model(str(OLD / "model"))[2] == {"nqe": 8, "ndba": 8}
    items = np.random.default_rng(3).standard_normal((2, 21, 16))
    items /= np.linalg.norm(items, axis=2, keepdims=True)
    for role, dba in (("queries", False), ("rows", True)):
        with torch.no_grad():
            weights = network(torch.tensor(items, dtype=torch.float32), dba=dba).weights
        np.testing.assert_allclose(weights.numpy(), expected[role], atol=1e-5)
