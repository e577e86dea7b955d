"""A stored network comes back the same, and one that does not fit says which setting or tensor."""

import dataclasses
import json
import resource

import numpy as np
import pytest
import torch
from network_variants import ABLATIONS, ablation
from test_model_network import EXTENDED, SMALL, lists, make

from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.expansion import create
from lattqe.model import LAttQE
from lattqe.model.network import VERSION
from lattqe.store import load_model, open_place, save_model
from lattqe.store.artifacts import verify_artifact
from lattqe.store.models import DEFAULT_MODEL
from lattqe.store.pending import claim, make_plan

SHAPES = {"w": {"shape": [2, 3], "dtype": "float32"}}


@pytest.mark.parametrize("config", [*(ablation(SMALL, name) for name in sorted(ABLATIONS)), EXTENDED])
def test_what_is_loaded_is_what_was_saved(tmp_path, config):
    network = make(config)
    network.save(str(tmp_path / "model"), {"mAP": 0.5}, training={"steps": 3})
    loaded = LAttQE.load(str(tmp_path / "model"))
    assert loaded.config == config
    items = lists(2, 5, 32)
    assert torch.equal(loaded(items).weights, network(items).weights)
    assert torch.equal(loaded(items, dba=True).weights, network(items, dba=True).weights)


def test_the_files_are_safetensors_and_json(tmp_path):
    make().save(str(tmp_path / "model"), {"mAP": 0.5}, training={"steps": 3})
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"model.safetensors", "config.json", "metrics.json"} <= names
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["version"] == VERSION
    assert config["network"] == SMALL.to_dict()
    assert config["training"] == {"steps": 3}


def test_a_method_takes_where_a_network_is_stored(tmp_path):
    network = make()
    uri = str(tmp_path / "model")
    network.save(uri)
    items = lists(3, 4, 32).numpy()
    arguments = (items[:, 0], items[:, 1:], np.zeros((3, 4), dtype=np.float32))
    stored, given = create("lattqe", model=uri, device="cpu"), create("lattqe", model=network, device="cpu")
    np.testing.assert_array_equal(stored.expand(*arguments).vectors, given.expand(*arguments).vectors)
    assert stored.params == {"model": uri, "dba": False, "precision": "float32"}
    assert json.dumps(given.params)


def weights(value):
    return {"w": np.full((2, 3), value, np.float32)}


@pytest.mark.parametrize("left", [["model.safetensors"], ["model.safetensors", "config.json", "metrics.json"]])
def test_what_a_killed_writer_has_stored_is_published(tmp_path, left):
    """Measured seconds differ from run to run: what is published is what is there."""
    place, plan = open_place(str(tmp_path / "model")), make_plan("model", {"tensors": SHAPES}, {"a": 1}, None, None)
    save_model(str(tmp_path / "whole"), weights(1), {"a": 1}, {"seconds": 1.5})
    assert claim(place, plan) is None
    for name in left:
        place.write(name, open_place(str(tmp_path / "whole")).read(name))
    save_model(str(tmp_path / "model"), weights(1), {"a": 1}, {"seconds": 2.5})
    tensors, _, metrics, _ = load_model(str(tmp_path / "model"))
    verify_artifact(str(tmp_path / "model"))
    np.testing.assert_array_equal(tensors["w"], weights(1)["w"])
    assert metrics == {"seconds": 1.5 if "metrics.json" in left else 2.5}


def test_two_writers_leave_one_sound_model_and_the_other_is_told(tmp_path):
    """One stores its weights between the other's claim and the other's weights."""
    uri = str(tmp_path / "model")
    place = open_place(uri)
    assert claim(place, make_plan("model", {"tensors": SHAPES}, {"a": 1}, None, None)) is None
    save_model(str(tmp_path / "whole"), weights(1), {"a": 1}, {})
    place.write("model.safetensors", open_place(str(tmp_path / "whole")).read("model.safetensors"))
    with pytest.raises(AlreadyExistsError, match="with other weights than these"):
        save_model(uri, weights(2), {"a": 1}, {})
    verify_artifact(uri)
    np.testing.assert_array_equal(load_model(uri)[0]["w"], weights(1)["w"])


def test_files_of_another_network_are_not_published(tmp_path):
    uri = str(tmp_path / "model")
    place = open_place(uri)
    assert claim(place, make_plan("model", {"tensors": SHAPES}, {"a": 1}, None, None)) is None
    place.write("model.safetensors", b"no tensors at all")
    with pytest.raises(CorruptDataError, match="not a readable safetensors file"):
        save_model(uri, weights(2), {"a": 1}, {})
    assert not (tmp_path / "model" / "manifest.json").exists()


def parts(config=SMALL):
    tensors = {name: tensor.detach().numpy().copy() for name, tensor in make(config).state_dict().items()}
    return tensors, {"version": VERSION, "network": config.to_dict()}


def refused(tensors, config):
    with pytest.raises(LattqeError) as error:
        LAttQE.from_tensors(tensors, config, "somewhere")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("somewhere: ")
    return str(error.value)


def test_refusals_name_the_tensor():
    name = "stack.encoders.1.qkv.weight"
    tensors, config = parts()
    tensors[name] = tensors[name][:5]
    message = refused(tensors, config)
    assert name in message
    assert "(5, 32)" in message
    assert "(96, 32)" in message
    tensors, config = parts()
    tensors[name][3, 4] = np.nan
    assert name in refused(tensors, config)
    tensors, config = parts()
    del tensors[name]
    assert f"{name} is missing" in refused(tensors, config)
    tensors, config = parts()
    tensors["stack.encoders.7.qkv.weight"] = tensors[name]
    assert "stack.encoders.7.qkv.weight is not part" in refused(tensors, config)


def test_refusals_name_the_setting():
    tensors, config = parts()
    assert "version 99" in refused(tensors, {**config, "version": 99})
    assert "version None" in refused(tensors, {"network": config["network"]})
    assert "no settings of a network" in refused(tensors, {})
    assert "colour" in refused(tensors, {**config, "network": {**config["network"], "colour": 3}})
    assert "5 heads" in refused(tensors, {**config, "network": {**config["network"], "heads": 5}})
    assert "dropout" in refused(tensors, {**config, "network": {**config["network"], "dropout": "much"}})
    assert "attention" in refused(tensors, {**config, "network": {**config["network"], "attention": "yes"}})
    assert "no settings" in refused(tensors, {**config, "network": [1]})
    wider = dataclasses.replace(SMALL, dim=64).to_dict()
    assert "(13, 64)" in refused(tensors, {**config, "network": wider})


@pytest.mark.parametrize(
    "setting",
    [
        {"layers": 10**7},
        {"layers": 1000},
        {"width": 10**6},
        {"ffn": 10**9},
        {"ffn": 10**6, "width": 200_000},
        {"dim": 7},
        {"dim": 2**20, "heads": 1},
        {"max_k": 10**9},
        {"max_k": 60_000},
        {"background": 10**12, "relational": True},
        {"layers": 10**30},
        {"heads": 10**400},
    ],
)
def test_sizes_are_held_against_the_tensors_before_anything_is_built(tmp_path, setting):
    """A configuration is a few bytes: it must not decide how much memory is taken."""
    tensors, config = parts()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(tensors, {**config, "network": {**config["network"], **setting}})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)  # KiB
    save_model(str(tmp_path / "model"), tensors, {**config, "network": {**config["network"], **setting}}, {})
    with pytest.raises(CorruptDataError):
        verify_artifact(str(tmp_path / "model"))


@pytest.mark.parametrize(("name", "most"), [("max_k", 4096), ("background", 4096)])
def test_depths_that_no_tensor_shows_have_a_limit(name, most):
    """Of the shipped network, whose tensors fit any of them: k neighbors have k² relations."""
    tensors, config, *_ = load_model(DEFAULT_MODEL)
    network = LAttQE.from_tensors(tensors, {**config, "network": {**config["network"], name: most}}, "shipped")
    assert getattr(network.config, name) == most
    assert f"{name} is {most + 1}: use at most {most}" in refused(
        tensors, {**config, "network": {**config["network"], name: most + 1}}
    )


def test_a_place_without_a_model_is_refused(tmp_path):
    with pytest.raises(LattqeError):
        LAttQE.load(str(tmp_path / "nothing"))
