"""Any stored artifact: models, opening one without knowing its kind, and checking every invariant, part by part.

A model is `model.safetensors`, `config.json`, `metrics.json` and the manifest. Never a pickle.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.numpy
from safetensors import SafetensorError

from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store.features import NORM_TOLERANCE, FeatureSet, IdRegister, bad_ids, norms
from lattqe.store.lists import Edges, NeighborGraph, Ranks, impossible_lists
from lattqe.store.manifest import Manifest, Part, checksum, parse_json, plain_json, read_manifest
from lattqe.store.parts import StoredRows, load_part
from lattqe.store.pending import check_inputs, claim, make_plan, publish_manifest
from lattqe.store.place import Place, open_place
from lattqe.store.tables import column_matrix

TENSORS, CONFIG, METRICS = "model.safetensors", "config.json", "metrics.json"
DEFAULT_MODEL = "lattqe://universal"
SHIPPED = {"universal": DEFAULT_MODEL}  # models that are part of the package, by the names users give them
# Rows looked at in one go.
BLOCK = 16_384


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


Report = Callable[[int], None]


@dataclass(frozen=True)
class StoredFiles:
    """A finished artifact that is not cut by rows, such as a model: a place and a manifest."""

    place: Place
    manifest: Manifest


Artifact = FeatureSet | NeighborGraph | Edges | Ranks | StoredFiles


def open_artifact(uri: str, cache: str | None = None) -> Artifact:
    """A FeatureSet, NeighborGraph, Edges or Ranks, or the StoredFiles of any other kind."""
    place = open_place(uri)
    manifest = read_manifest(place)
    for kind in (FeatureSet, NeighborGraph, Edges, Ranks):
        if manifest.kind == kind.kind:
            return kind(place, manifest, cache)
    return StoredFiles(place, manifest)


def check_input_kind(uri: str, kind: str) -> Manifest:
    """The manifest of an artifact that must be of `kind`; LattqeError names both kinds where it is not."""
    return read_manifest(open_place(uri), kind)


def verify_artifact(uri: str, report: Report = lambda rows: None) -> Manifest:
    """Check a stored artifact of any kind; `report` hears how many more bytes are done."""
    artifact = open_artifact(uri)
    if isinstance(artifact, FeatureSet):
        verify_features(artifact, report)
    elif isinstance(artifact, NeighborGraph):
        verify_lists(artifact, report)
    elif isinstance(artifact, Edges):
        verify_edges(artifact, report)
    else:
        for part in artifact.manifest.parts:
            load_part(artifact.place, part)
            report(part.bytes)
        if artifact.manifest.kind == "model":
            tensors, *_ = load_model(uri)
            for name, tensor in tensors.items():
                if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
                    raise CorruptDataError(f"{uri}: tensor {name!r} holds NaN or infinity")
    return artifact.manifest


def verify_features(features: FeatureSet, report: Report = lambda rows: None) -> None:
    """Unit norms, finite, ids unique and not empty."""
    register, tolerance = IdRegister(), NORM_TOLERANCE[features.dtype]
    for where, first, batch in _batches(features, report):
        for start in range(0, batch.num_rows, BLOCK):
            lengths = norms(column_matrix(batch.column("vector").slice(start, BLOCK)))
            # Written so that NaN, for which every comparison is false, counts as wrong.
            wrong = np.flatnonzero(~(np.abs(lengths - 1) <= tolerance))
            if len(wrong):
                raise CorruptDataError(
                    f"{where}: the vector of row {first + start + wrong[0]} has norm {lengths[wrong[0]]:.6g}, not 1"
                )
        _check_ids(batch.column("id"), where, first)
        register.add(batch.column("id"))
        if features.has_labels and features.label_names is not None:
            labels = batch.column("label").to_numpy()
            wrong = np.flatnonzero((labels < 0) | (labels >= len(features.label_names)))
            if len(wrong):
                raise CorruptDataError(
                    f"{where}: row {first + wrong[0]} has label {labels[wrong[0]]}, and there are "
                    f"{len(features.label_names)} label names"
                )
    repeated = register.duplicates(limit=1)
    if repeated:
        row = repeated[0][1]
        number = int(np.searchsorted(features.parts.starts, row, side="right")) - 1
        raise CorruptDataError(
            f"{features.uri}/{features.manifest.parts[number].name}: the id of row {row}, "
            f"{features.ids(row, row + 1)[0]!r}, is that of row {repeated[0][0]} too"
        )


def verify_lists(lists: NeighborGraph, report: Report = lambda rows: None) -> None:
    """Rows in range, padding at the end, scores finite and sorted, no row twice, in a graph no row beside itself."""
    limit = lists.database_rows
    for where, first, batch in _batches(lists, report):
        if isinstance(lists, Ranks):
            _check_ids(batch.column("id"), where, first)
        for start in range(0, batch.num_rows, BLOCK):
            I = column_matrix(batch.column("neighbors").slice(start, BLOCK))
            D = column_matrix(batch.column("scores").slice(start, BLOCK))
            own = None if isinstance(lists, Ranks) else first + start
            for what, wrong in _list_faults(I, D, limit, own):
                rows = np.flatnonzero(wrong)
                if len(rows):
                    raise CorruptDataError(f"{where}: row {first + start + rows[0]} {what}")


def verify_edges(edges: Edges, report: Report = lambda rows: None) -> None:
    """Rows in range, none beside itself, weights finite and 0 in padding."""
    for where, first, batch in _batches(edges, report):
        neighbors, weights = column_matrix(batch.column("neighbors")), column_matrix(batch.column("weights"))
        wrong = np.flatnonzero(((neighbors == -1) & (weights[:, 1:] != 0)).any(axis=1))
        if len(wrong):
            raise CorruptDataError(f"{where}: row {first + wrong[0]} has a weight other than 0 in its padding")


def _list_faults(I: np.ndarray, D: np.ndarray, limit: int | None, own: int | None) -> Iterator[tuple[str, np.ndarray]]:
    """(what is wrong, which rows (n,) bool) for lists I, D (n, k); `own` is the row number of the first list."""
    yield from impossible_lists(I, D, limit, own)
    padding = I == -1
    yield "has a neighbor after its padding", (padding[:, :-1] & ~padding[:, 1:]).any(axis=1)
    yield "has a score other than 0 in its padding", (padding & (D != 0)).any(axis=1)
    yield "has scores that are not sorted", ((D[:, 1:] > D[:, :-1]) & ~padding[:, 1:]).any(axis=1)
    ordered = np.sort(I, axis=1)
    yield "names a neighbor twice", ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)).any(axis=1)


def _batches(artifact: StoredRows, report: Report) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """(address of the part, its first row, its rows), with the Arrow structure checked in full."""
    slices = artifact.parts.slices(0, artifact.rows, keep=False)
    for part, (first, batch) in zip(artifact.manifest.parts, slices):
        where = f"{artifact.uri}/{part.name}"
        try:
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise CorruptDataError(f"{where} is not sound: {error}") from error
        yield where, first, batch
        report(part.bytes)


def _check_ids(ids: pa.Array, where: str, first: int) -> None:
    wrong = np.flatnonzero(bad_ids(ids))
    if len(wrong):
        raise CorruptDataError(f"{where}: the id of row {first + wrong[0]} is empty or holds a line break")
