"""Reading published network files without running anything in them.

A `.pth` file is a pickle. `lattqe.formats` reads it as data: tensors, plain containers, numbers, and the numpy arrays
that the published files carry in `meta` (a learned whitening). Everything else in the file is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lattqe.errors import LattqeError
from lattqe.extraction.resnet import STAGES, RetrievalNet
from lattqe.formats.tensors import load_torch
from lattqe.store import open_place
from lattqe.whitening import Whitening


def read_file(uri: str) -> bytes:
    """The whole file at a path or an s3:// address."""
    whole = open_place(uri).uri  # absolute, where it is a path
    folder, _, name = whole.rpartition("/")
    return open_place(folder or "/").read(name)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# torchvision's names of the children that cnnimageretrieval-pytorch numbers.
TORCHVISION_CHILDREN = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}


@dataclass(frozen=True)
class Checkpoint:
    """A network file, checked: its state has exactly the keys and shapes of its architecture."""

    architecture: str
    whitening: bool
    state: Mapping[str, Tensor]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    # Whitening to be applied after extraction: training set → 'ss' or 'ms' → {'m': (D, 1), 'P': (d, D)}.
    post_whitening: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> RetrievalNet:
        """Make the network with these weights, in evaluation mode."""
        with torch.device("meta"):
            network = RetrievalNet(self.architecture, self.whitening)
        state = {
            key: self.state[key].float() if key in self.state else torch.zeros((), dtype=torch.int64)
            for key in network.state_dict()
        }
        network.load_state_dict(state, assign=True)
        return network.eval()


def read_checkpoint(data: bytes, name: str) -> Checkpoint:
    """Read the bytes of a network file; `name` is for the messages.

    Three layouts are known by their keys: cnnimageretrieval-pytorch's networks ({'meta', 'state_dict'}), its bare
    convolutions (`0.weight`, `4.0.conv1.weight`, ...), and torchvision's classifiers (`conv1.weight`, `layer1...`,
    whose last layer is left out). The latter two get GeM with p = 3 and no whitening.
    """
    content = read_saved(data, name)
    if not isinstance(content, Mapping):
        raise LattqeError(f"{name}: holds a {type(content).__name__}, not the dict of a network file")
    if "state_dict" in content and "meta" in content:
        checkpoint = _from_retrieval_layout(content, name)
    elif "conv1.weight" in content or "0.weight" in content:
        checkpoint = _from_bare_features(content)
    else:
        keys = ", ".join(map(repr, list(content)[:5]))
        raise LattqeError(
            f"{name}: keys {keys} are of no known layout: expected 'meta' and 'state_dict' "
            "(cnnimageretrieval-pytorch) or the state dict of a torchvision ResNet"
        )
    _check_keys(checkpoint, name)
    return checkpoint


def read_saved(data: bytes, name: str) -> Any:
    """What torch.save wrote, read by a machine that knows data only: anything else in the file is refused by name."""
    try:
        return load_torch(data, name, torch.from_numpy)
    except LattqeError as error:
        reason = " ".join(str(error).removeprefix(name).split()).removeprefix("is refused: ")
        raise LattqeError(f"{name}: refused, it is not a file of plain tensors and numbers ({reason[:200]})") from error


def _from_retrieval_layout(content: Mapping[str, Any], name: str) -> Checkpoint:
    meta, state = content["meta"], content["state_dict"]
    if not isinstance(meta, Mapping) or not isinstance(state, Mapping):
        raise LattqeError(f"{name}: 'meta' and 'state_dict' must be dicts")
    for key, wanted in (("pooling", "gem"), ("regional", False), ("local_whitening", False)):
        if meta.get(key, wanted) != wanted:
            raise LattqeError(f"{name}: meta says {key} = {meta[key]!r}, and only {wanted!r} is supported")
    return Checkpoint(
        architecture=str(meta.get("architecture")),
        whitening=bool(meta.get("whitening", False)),
        state=state,
        mean=_three_numbers(meta, "mean", IMAGENET_MEAN, name),
        std=_three_numbers(meta, "std", IMAGENET_STD, name),
        post_whitening=meta.get("Lw", {}),
    )


def _three_numbers(meta: Mapping[str, Any], key: str, default: tuple[float, ...], name: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in meta.get(key, default))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != 3 or not all(np.isfinite(numbers)) or (key == "std" and min(numbers) <= 0):
        raise LattqeError(f"{name}: meta says {key} = {meta.get(key)!r}, expected one number for each of R, G, B")
    return numbers


def _from_bare_features(content: Mapping[str, Any]) -> Checkpoint:
    state = {"pool.p": torch.full((1,), 3.0)}
    for key, value in content.items():
        child, _, rest = key.partition(".")
        if child != "fc":
            state[f"features.{TORCHVISION_CHILDREN.get(child, child)}.{rest}"] = value
    blocks = tuple(
        len({key.split(".")[2] for key in state if key.startswith(f"features.{stage}.")}) for stage in range(4, 8)
    )
    architecture = next((name for name, stages in STAGES.items() if stages == blocks), f"with stages {blocks}")
    return Checkpoint(architecture, whitening=False, state=state)


def _check_keys(checkpoint: Checkpoint, name: str) -> None:
    """Refuse missing, unexpected and misshapen entries by name."""
    with torch.device("meta"):
        expected = RetrievalNet(checkpoint.architecture, checkpoint.whitening).state_dict()
    counters = {key for key in expected if key.endswith("num_batches_tracked")}  # files before torch 0.4.1 lack them
    state = checkpoint.state
    found = [("is missing", key) for key in expected if key not in state and key not in counters]
    found += [("is unexpected", key) for key in state if key not in expected]
    found += [
        (f"has shape {_shape(state[key])}, expected {tuple(expected[key].shape)}", key)
        for key in expected
        if key in state and key not in counters and _shape(state[key]) != expected[key].shape
    ]
    found += [
        ("holds NaN or infinity", key)
        for key in expected
        if isinstance(state.get(key), Tensor) and not torch.isfinite(state[key]).all()
    ]
    if found:
        shown = "; ".join(f"{key!r} {trouble}" for trouble, key in found[:5])
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise LattqeError(
            f"{name}: not a {checkpoint.architecture} with GeM"
            f"{' and whitening' if checkpoint.whitening else ''}: {shown}{more}"
        )


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) and value.is_floating_point() else None


def published_whitening(uri: str, training_set: str | None, scales: str) -> tuple[Whitening, str]:
    """Read `meta['Lw'][training_set][scales]` ('ss' or 'ms') of a network file; → the whitening, the file's digest."""
    data = read_file(uri)
    found = read_checkpoint(data, uri).post_whitening
    if not isinstance(found, dict) or not found:
        raise LattqeError(f"{uri} carries no whitening (no 'Lw' in its meta): learn one with `lattqe whiten learn`")
    if training_set is None and len(found) == 1:
        training_set = next(iter(found))
    try:
        entry = found[training_set][scales]
        mean, projection = np.asarray(entry["m"], dtype=np.float64), np.asarray(entry["P"], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        raise LattqeError(
            f"{uri} carries no readable whitening {training_set!r} for {scales!r}: choose with "
            f"--training-set (it has {', '.join(map(repr, found))}) and --single-scale"
        ) from None
    config = {"method": "published", "training_set": training_set, "scales": scales}
    return Whitening(mean.reshape(-1), projection, config), xxhash.xxh3_128_hexdigest(data)
