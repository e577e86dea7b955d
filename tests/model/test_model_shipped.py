"""The model that is part of the package: found by its name, whole, small, and never written to."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import lattqe
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.expansion import create
from lattqe.model import LAttQE
from lattqe.store import load_model, open_place
from lattqe.store.artifacts import verify_artifact
from lattqe.store.models import DEFAULT_MODEL, model_address

FOLDER = Path(lattqe.__file__).parent / "models" / "universal"


def test_names_and_addresses():
    assert model_address(None) == model_address("universal") == DEFAULT_MODEL == open_place(DEFAULT_MODEL).uri
    assert model_address("./universal") == "./universal"
    with pytest.raises(LattqeError, match="no model of that name is part of lattqe: use lattqe://universal"):
        open_place("lattqe://other")


def test_info_and_verify_know_it_by_its_name(call_lattqe):
    code, told, _ = call_lattqe("info", "universal", "--json")
    assert (code, json.loads(told)["uri"], json.loads(told)["kind"]) == (0, DEFAULT_MODEL, "model")
    assert call_lattqe("verify", "universal")[0] == 0


def test_it_is_sound_small_and_takes_any_width():
    assert verify_artifact(DEFAULT_MODEL).kind == "model"
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 1 << 20
    network = LAttQE.load(DEFAULT_MODEL)
    assert network.config.any_width
    metrics = load_model(DEFAULT_MODEL)[2]
    assert {"nqe", "ndba", "nqe_with_dba", "hops", "alpha"} <= set(metrics)
    method = create("lattqe")
    assert method.params["model"] == DEFAULT_MODEL
    assert method.suggested_k(dba=False) == metrics["nqe"]
    for dim in (3, 64, 1000):
        method.check_width(dim)


@pytest.mark.parametrize("dim", [16, 700])
def test_it_gives_unit_vectors_whatever_it_is_given(dim):
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((40, dim)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for xb in (x, x[:1], np.repeat(x[:1], 30, axis=0)):
        for result in (lattqe.expand(x[:5], xb, method="lattqe"), lattqe.augment(xb)):
            assert np.allclose(np.linalg.norm(result, axis=1), 1, atol=1e-4)
    assert np.allclose(lattqe.augment(x[:1]), x[:1], atol=1e-6)
    assert np.allclose(lattqe.expand(x[:5], x[:1]), x[:5], atol=1e-6)


@pytest.mark.parametrize("dim", [64, 128])
def test_one_relevant_image_is_not_lost_where_vectors_are_not_centred(dim):
    """What destroyed sparse collections once: descriptors that all share a mean look alike, and none of them is."""
    rng = np.random.default_rng(0)
    classes = 1200
    centres = rng.standard_normal((classes, dim))
    mean = np.sqrt(2 * dim) * np.eye(1, dim)  # as long as the vectors themselves
    xb, xq = (centres + rng.standard_normal((classes, dim)) + mean for _ in range(2))
    xb, xq = ((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32) for x in (xb, xq[:150]))
    labels = np.arange(classes)

    def mean_ap(queries):
        found = lattqe.search(queries, xb, k=100)
        return lattqe.evaluate(found, labels=labels, query_labels=labels[:150])["label"].mean_ap

    assert mean_ap(lattqe.expand(xq, xb)) > mean_ap(xq) - 0.02


def test_damage_is_named(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "copy")
    tensors = tmp_path / "copy" / "model.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-5] ^= 1
    tensors.write_bytes(bytes(data))
    with pytest.raises(CorruptDataError, match=r"model\.safetensors"):
        LAttQE.load(str(tmp_path / "copy"))


def test_it_is_never_written_to():
    with pytest.raises(LattqeError, match="part of the package and cannot be written"):
        open_place(DEFAULT_MODEL).write("note.txt", b"text")
