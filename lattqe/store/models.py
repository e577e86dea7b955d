"""A stored model: `model.safetensors`, `config.json`, `metrics.json` and the manifest. Never a pickle."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store.manifest import Manifest, Part, checksum, parse_json, plain_json, read_manifest
from lattqe.store.parts import load_part
from lattqe.store.pending import check_inputs, claim, make_plan, publish_manifest
from lattqe.store.place import open_place

TENSORS, CONFIG, METRICS = "model.safetensors", "config.json", "metrics.json"
DEFAULT_MODEL = "lattqe://universal"
SHIPPED = {"universal": DEFAULT_MODEL}  # models that are part of the package, by the names users give them


def model_address(model: str | None) -> str:
    """Where a model is stored: None is the default, the name of a shipped model its address, all else as it is.

    A folder of such a name is `./universal`.
    """
    return DEFAULT_MODEL if model is None else SHIPPED.get(model, model)


def save_model(
    uri: str,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
    inputs: Mapping[str, Mapping[str, str]] | None = None,
) -> Manifest:
    """Store a model; a destination that holds the same model already is left as it is."""
    if not tensors:
        raise LattqeError(f"a model without tensors cannot be stored at {uri}")
    check_inputs(inputs)
    # Not `ascontiguousarray`: it would turn a scalar into a vector of one.
    arrays = {name: np.asarray(array, order="C") for name, array in sorted(tensors.items())}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise LattqeError(f"tensor {name!r} holds NaN or infinity: such a model is not stored")
    files = {
        TENSORS: safetensors.numpy.save(arrays),
        CONFIG: _pretty(config, "the model's config"),
        METRICS: _pretty(metrics, "the model's metrics"),
    }
    parts = tuple(Part(name, 0, len(data), checksum(data)) for name, data in files.items())
    plan = make_plan("model", {"tensors": _shapes(arrays)}, config, inputs, None)
    place = open_place(uri)
    manifest = Manifest("model", 0, parts, plan["fields"], plan["config"], plan["inputs"])
    finished = claim(place, plan)
    if finished is not None:
        if finished.digest == manifest.digest:
            return finished
        raise AlreadyExistsError(f"{uri} holds another model: choose another destination or delete it")
    for name, data in files.items():
        place.write(name, data)
    for part in parts:  # two trainings with one configuration make two models: what is there must still be ours
        load_part(place, part)
    return publish_manifest(place, manifest)


def load_model(uri: str) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any], Manifest]:
    """(tensors, config, metrics, manifest) of a stored model, all checksums checked."""
    place = open_place(uri)
    manifest = read_manifest(place, "model")
    by_name = {part.name: part for part in manifest.parts}
    if set(by_name) != {TENSORS, CONFIG, METRICS}:
        raise CorruptDataError(f"{uri} is not a model: its files are {sorted(by_name)}")
    files = {name: load_part(place, part).to_pybytes() for name, part in by_name.items()}
    try:
        tensors = safetensors.numpy.load(files[TENSORS])
    except (SafetensorError, ValueError, KeyError) as error:
        raise CorruptDataError(f"{uri}/{TENSORS} is not a readable safetensors file: {error}") from error
    if plain_json(_shapes(tensors), "tensors") != manifest.fields.get("tensors"):
        raise CorruptDataError(f"{uri}/{TENSORS} holds other tensors than its manifest says")
    config, metrics = (parse_json(files[name], f"{uri}/{name}") for name in (CONFIG, METRICS))
    return tensors, config, metrics, manifest


def _shapes(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in sorted(tensors.items())}


def _pretty(value: Mapping[str, Any], what: str) -> bytes:
    return json.dumps(plain_json(dict(value), what), indent=1, sort_keys=True).encode() + b"\n"
