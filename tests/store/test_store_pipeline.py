"""The whole store in one go, on disk and on a real S3 server: features, a graph, a model, each opened again."""

import numpy as np
import pytest

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store import (
    FeatureSet,
    FeatureWriter,
    NeighborGraph,
    Pending,
    Ranks,
    load_model,
    neighbors_table,
    open_artifact,
    part_row_counts,
    ranks_table,
    save_model,
)
from lattqe.store.artifacts import verify_artifact


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def base(request: pytest.FixtureRequest, tmp_path) -> str:
    return str(tmp_path / "things") if request.param == "disk" else request.getfixturevalue("s3_uri")


def make_features(uri: str, rows: int = 300, dim: int = 16, **options) -> np.ndarray:
    """Write random rows in uneven appends and small parts; the vectors as they should come out, float64."""
    x = np.random.default_rng(0).standard_normal((rows, dim)).astype(np.float32)
    with FeatureWriter(uri, dim, part_bytes=4000, labels=True, config={"source": "random"}, **options) as writer:
        for start in range(0, rows, 77):
            numbers = np.arange(start, min(rows, start + 77))
            writer.append(x[numbers], [f"image-{i}" for i in numbers], labels=numbers % 10)
    return x / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)


def test_features_come_back(base):
    x = make_features(f"{base}/features")
    features = FeatureSet.open(f"{base}/features")
    assert (features.rows, features.dim, features.dtype, features.has_labels) == (300, 16, "float16", True)
    assert len(features.manifest.parts) > 2
    whole = features.read()
    np.testing.assert_array_equal(whole, x.astype(np.float16))
    np.testing.assert_array_equal(features.read(50, 250), whole[50:250])
    rows = np.random.default_rng(1).integers(0, 300, 40)
    np.testing.assert_array_equal(features.gather(rows), whole[rows])
    np.testing.assert_array_equal(np.concatenate([block for _, block in features.blocks(33)]), whole)
    assert features.ids(98, 101) == ["image-98", "image-99", "image-100"]
    np.testing.assert_array_equal(features.labels(), np.arange(300) % 10)
    assert features.table(10, 20).column("id").to_pylist() == features.ids(10, 20)
    assert features.place.list() == ["manifest.json", *(part.name for part in features.manifest.parts)]
    verify_artifact(features.uri)


def test_graph_is_made_in_parts_and_joined(base):
    make_features(f"{base}/features")
    features = FeatureSet.open(f"{base}/features")
    I = (np.arange(300)[:, None] + [[1, 2, 3]]) % 300
    D = np.tile(np.float32([0.9, 0.8, 0.7]), (300, 1))
    plan = {
        "kind": "neighbors",
        "fields": {"k": 3},
        "part_rows": part_row_counts(300, 24, 2000),
        "config": {"k": 3},
        "inputs": {"features": features.as_input()},
    }
    pending = Pending.begin(f"{base}/graph", **plan)
    starts = np.cumsum([0, *pending.part_rows])
    assert pending.missing() == list(range(len(pending.part_rows)))
    for number in pending.missing():
        rows = slice(starts[number], starts[number + 1])
        Pending.attach(f"{base}/graph").publish(number, neighbors_table(I[rows], D[rows]))
    manifest = pending.finish()
    graph = NeighborGraph.open(f"{base}/graph")
    np.testing.assert_array_equal(graph.read()[0], I)
    np.testing.assert_array_equal(graph.gather(np.array([7, 290, 7]))[1], D[[7, 290, 7]])
    assert graph.manifest.inputs["features"]["digest"] == features.digest
    assert Pending.begin(f"{base}/graph", **plan).finished == manifest
    with pytest.raises(AlreadyExistsError, match=r"config\.k: 3 there, 4 here"):
        Pending.begin(f"{base}/graph", **{**plan, "config": {"k": 4}})
    with pytest.raises(LattqeError, match=r"is a neighbor graph .* but a feature set"):
        FeatureSet.open(f"{base}/graph")
    verify_artifact(f"{base}/graph")


def test_ranks_and_model(base):
    pending = Pending.begin(f"{base}/ranks", "ranks", {"k": 2}, [2])
    pending.publish(0, ranks_table(["q0", "q1"], np.array([[5, 1], [3, -1]]), np.float32([[0.5, 0.4], [0.9, 0]])))
    pending.finish()
    ranks = open_artifact(f"{base}/ranks")
    assert isinstance(ranks, Ranks)
    assert ranks.ids() == ["q0", "q1"]
    verify_artifact(f"{base}/ranks")

    tensors = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    manifest = save_model(f"{base}/model", tensors, {"heads": 8}, {"map": 0.5})
    loaded, config, metrics, again = load_model(f"{base}/model")
    np.testing.assert_array_equal(loaded["weight"], tensors["weight"])
    assert (config, metrics, again) == ({"heads": 8}, {"map": 0.5}, manifest)
    assert manifest.fields["tensors"] == {"weight": {"shape": [2, 3], "dtype": "float32"}}
    assert save_model(f"{base}/model", tensors, {"heads": 8}, {"map": 0.5}) == manifest
    with pytest.raises(AlreadyExistsError):
        save_model(f"{base}/model", tensors, {"heads": 8}, {"map": 0.6})
    verify_artifact(f"{base}/model")
