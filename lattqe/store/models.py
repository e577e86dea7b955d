"""Models: `model.safetensors`, `config.json`, `metrics.json` and the manifest, never a pickle; and those that ship."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.numpy

from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store.manifest import Manifest, Part, checksum, parse_json, plain_json, read_manifest
from lattqe.store.parts import load_part
from lattqe.store.pending import check_inputs, claim, keep_first, make_plan, publish_manifest
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
    plan = make_plan("model", {"tensors": _shapes(arrays)}, config, inputs, None)
    place = open_place(uri)
    manifest = Manifest("model", 0, _parts(files), plan["fields"], plan["config"], plan["inputs"])
    finished = claim(place, plan)
    if finished is not None:
        if finished.digest == manifest.digest:
            return finished
        raise AlreadyExistsError(f"{uri} holds another model: choose another destination or delete it")
    stored = {name: keep_first(place, name, data).to_pybytes() for name, data in files.items()}
    if stored != files:  # by an earlier run or another driver, which may have published them
        _parsed(uri, stored, plan["fields"])
        manifest = replace(manifest, parts=_parts(stored))
    manifest = publish_manifest(place, manifest)
    if stored[TENSORS] != files[TENSORS]:
        raise AlreadyExistsError(f"{uri} was published by another writer meanwhile, with other weights than these")
    return manifest


def load_model(uri: str) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any], Manifest]:
    """(tensors, config, metrics, manifest) of a stored model, all checksums checked."""
    place = open_place(uri)
    manifest = read_manifest(place, "model")
    by_name = {part.name: part for part in manifest.parts}
    if set(by_name) != {TENSORS, CONFIG, METRICS}:
        raise CorruptDataError(f"{uri} is not a model: its files are {sorted(by_name)}")
    files = {name: load_part(place, part).to_pybytes() for name, part in by_name.items()}
    return *_parsed(uri, files, manifest.fields), manifest


def _parsed(
    uri: str, files: Mapping[str, bytes], fields: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """(tensors, config, metrics) of a model's files; CorruptDataError if they do not fit each other or `fields`."""
    try:
        tensors = safetensors.numpy.load(files[TENSORS])
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CorruptDataError(f"{uri}/{TENSORS} is not a readable safetensors file: {error}") from error
    if plain_json(_shapes(tensors), "tensors") != fields.get("tensors"):
        raise CorruptDataError(f"{uri}/{TENSORS} holds other tensors than its manifest says")
    config, metrics = (parse_json(files[name], f"{uri}/{name}") for name in (CONFIG, METRICS))
    return tensors, config, metrics


def _parts(files: Mapping[str, bytes]) -> tuple[Part, ...]:
    return tuple(Part(name, 0, len(data), checksum(data)) for name, data in files.items())


def _shapes(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in sorted(tensors.items())}


def _pretty(value: Mapping[str, Any], what: str) -> bytes:
    return json.dumps(plain_json(dict(value), what), indent=1, sort_keys=True).encode() + b"\n"
