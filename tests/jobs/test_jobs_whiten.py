"""`lattqe whiten`: learn, apply, and the whitening that published networks carry."""

import io
import json
from functools import partial

import numpy as np
import pytest
import torch

from lattqe.extraction.resnet import Checkpoint
from lattqe.store import FeatureSet, FeatureWriter
from lattqe.whitening import Whitening


@pytest.fixture
def run(call_lattqe):
    """Call `lattqe whiten` in this process: (exit code, stdout, stderr)."""
    return partial(call_lattqe, "whiten")


@pytest.fixture
def features(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 10).astype(np.int32)
    x = rng.normal(size=(20, 16))[labels] + 0.5 * rng.normal(size=(200, 16)) * np.arange(1, 17)
    with FeatureWriter(str(tmp_path / "features"), 16, "float32", labels=True) as writer:
        writer.append(x, [f"row {n}" for n in range(200)], labels)
        writer.close()
    return FeatureSet.open(str(tmp_path / "features"))


@pytest.mark.parametrize("method", ["pca", "half", "full", "learned"])
def test_learn_and_apply(features, tmp_path, run, method):
    code, out, err = run(
        "learn", features.uri, "--method", method, "--dim", "6", "--to", tmp_path / "whitening", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert (told["method"], told["dim"], told["input_dim"], told["rows"]) == (method, 6, 16, 200)
    code, out, err = run(
        "apply", features.uri, "--whitening", tmp_path / "whitening", "--to", tmp_path / "out", "--json"
    )
    assert code == 0, err
    whitened = FeatureSet.open(str(tmp_path / "out"))
    whitened.verify()
    assert (whitened.rows, whitened.dim, json.loads(out)["dim"]) == (200, 6, 6)
    model, _ = Whitening.load(str(tmp_path / "whitening"))
    np.testing.assert_allclose(whitened.read(), model.apply(features.read()), atol=1e-6)
    np.testing.assert_array_equal(whitened.labels(), features.labels())


def test_on_s3(features, s3_uri, run):
    code, out, err = run("learn", features.uri, "--to", f"{s3_uri}/whitening")
    assert (code, out) == (0, ""), "JSON was not asked for"
    assert "half" in err
    assert run("apply", features.uri, "--whitening", f"{s3_uri}/whitening", "--to", f"{s3_uri}/out")[0] == 0
    FeatureSet.open(f"{s3_uri}/out").verify()


def test_whitening_of_a_published_network(tmp_path, run, monkeypatch):
    """Only `meta['Lw']` is looked at here: the check of the network's keys has its own tests."""
    rng = np.random.default_rng(0)
    carried = {
        "retrieval-SfM-120k": {
            scales: {"m": rng.normal(size=(16, 1)), "P": rng.normal(size=(12, 16))} for scales in ("ss", "ms")
        }
    }
    file = io.BytesIO()
    torch.save({"meta": {"architecture": "resnet50", "Lw": carried}, "state_dict": {}}, file)
    (tmp_path / "net.pth").write_bytes(file.getvalue())
    monkeypatch.setattr("lattqe.extraction.resnet._check_keys", lambda *_: None)
    code, out, err = run("from-checkpoint", tmp_path / "net.pth", "--to", tmp_path / "whitening", "--json")
    assert code == 0, err
    assert (json.loads(out)["training_set"], json.loads(out)["scales"]) == ("retrieval-SfM-120k", "ms")
    whitening, manifest = Whitening.load(str(tmp_path / "whitening"))
    x = rng.normal(size=(5, 16))
    entry = carried["retrieval-SfM-120k"]["ms"]
    expected = entry["P"] @ (x.T - entry["m"])
    np.testing.assert_allclose(whitening.apply(x), (expected / np.linalg.norm(expected, axis=0)).T, atol=1e-6)
    assert manifest.inputs["checkpoint"]["digest"]
    assert run("from-checkpoint", tmp_path / "net.pth", "--single-scale", "--to", tmp_path / "single")[0] == 0
    code, _, err = run("from-checkpoint", tmp_path / "net.pth", "--training-set", "nothing", "--to", tmp_path / "none")
    assert code == 2
    assert "it has 'retrieval-SfM-120k'" in err


def test_network_without_a_whitening(tmp_path, run, monkeypatch):
    (tmp_path / "net.pth").write_bytes(b"")
    monkeypatch.setattr("lattqe.extraction.resnet.read_checkpoint", lambda *_: Checkpoint("resnet50", True, {}))
    code, _, err = run("from-checkpoint", tmp_path / "net.pth", "--to", tmp_path / "none")
    assert code == 2
    assert "contains no whitening" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learn", "FEATURES", "--to", "OUT", "--method", "zca"], "method 'zca' is not known"),
        (["learn", "FEATURES", "--to", "OUT", "--dim", "17"], "dim 17 is not between"),
        (["learn", "NOWHERE", "--to", "OUT"], "NOWHERE"),
        (["apply", "FEATURES", "--whitening", "FEATURES", "--to", "OUT"], "feature set"),
        (["apply", "FEATURES", "--whitening", "NOWHERE", "--to", "OUT"], "NOWHERE"),
    ],
)
def test_mistakes_are_one_line(features, tmp_path, run, arguments, message):
    paths = {"FEATURES": features.uri, "OUT": tmp_path / "OUT", "NOWHERE": tmp_path / "NOWHERE"}
    code, out, err = run(*(paths.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "OUT").exists()
