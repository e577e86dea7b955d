"""ResNet-50/101/152 with GeM pooling and an optional whitening layer: φ of the paper, in torch alone; and its files.

The modules are numbered and named as the children of torchvision's ResNet without its pooling and classifier, which is
how cnnimageretrieval-pytorch saves its networks: `features.0.weight` is the first convolution, `features.4` to
`features.7` are the four stages, `pool.p` is GeM's exponent, `whiten.weight` and `whiten.bias` the whitening layer.
A bottleneck strides in its 3×3 convolution (the variant called v1.5), as torchvision's does.

Published network files are read without running anything in them. A `.pth` file is a pickle. `lattqe.formats` reads it
as data: tensors, plain containers, numbers, and the numpy arrays that the published files carry in `meta` (a learned
whitening). Everything else in the file is refused by name.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lattqe.errors import LattqeError
from lattqe.formats.tensors import load_torch
from lattqe.store import open_place
from lattqe.whitening import Whitening

# Bottlenecks in each of the four stages.
STAGES = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}
EXPANSION = 4  # a bottleneck's output channels over its width
FEATURE_DIM = 512 * EXPANSION
EPS = 1e-6  # of GeM's clamp and of the L2 norms, as in the published code
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# torchvision's names of the children that cnnimageretrieval-pytorch numbers.
TORCHVISION_CHILDREN = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}


def l2_normalise(x: Tensor) -> Tensor:
    """Divide each row of x (n, D) by its L2 norm plus 1e-6, as the published networks do."""
    return x / (x.norm(dim=1, keepdim=True) + EPS)


class Bottleneck(nn.Module):
    """1×1 → 3×3 (strided) → 1×1 convolutions, each with batch norm, around a residual connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) → (n, 4·width, ⌈h/stride⌉, ⌈w/stride⌉)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + shortcut)


def resnet_features(architecture: str) -> nn.Sequential:
    """Make the convolutional part: (n, 3, h, w) → (n, 2048, ~h/32, ~w/32), non-negative."""
    if architecture not in STAGES:
        raise LattqeError(f"architecture {architecture!r} is not known: use one of {', '.join(STAGES)}")
    modules: list[nn.Module] = [
        nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    ]
    channels = 64
    for stage, blocks in enumerate(STAGES[architecture]):
        width = 64 * 2**stage
        first = Bottleneck(channels, width, stride=1 if stage == 0 else 2)
        channels = width * EXPANSION
        modules.append(nn.Sequential(first, *(Bottleneck(channels, width, stride=1) for _ in range(blocks - 1))))
    return nn.Sequential(*modules)


class GeM(nn.Module):
    """Generalised mean over positions: (mean of max(x, 1e-6)^p)^(1/p); p = 1 is the average, p → ∞ the maximum."""

    def __init__(self, p: float = 3.0) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.full((1,), p))

    def forward(self, x: Tensor) -> Tensor:
        """(n, D, h, w) → (n, D)."""
        return x.clamp(min=EPS).pow(self.p).mean(dim=(2, 3)).pow(1.0 / self.p)


class RetrievalNet(nn.Module):
    """Images to global descriptors: convolutions, GeM, L2, and where the checkpoint has it a linear layer and L2."""

    def __init__(self, architecture: str = "resnet101", whitening: bool = True) -> None:
        super().__init__()
        self.features = resnet_features(architecture)
        self.pool = GeM()
        self.whiten = nn.Linear(FEATURE_DIM, FEATURE_DIM) if whitening else None

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, h, w) normalised images → (n, 2048) unit vectors."""
        out = l2_normalise(self.pool(self.features(x)))
        return out if self.whiten is None else l2_normalise(self.whiten(out))


def fold_batch_norm(network: RetrievalNet) -> RetrievalNet:
    """Copy a network in evaluation mode into one that computes the same, up to rounding, without batch norms."""
    folded = copy.deepcopy(network).eval()
    _fold(folded.features, "0", "1")
    for module in folded.modules():
        if isinstance(module, Bottleneck):
            for number in "123":
                _fold(module, f"conv{number}", f"bn{number}")
            if module.downsample is not None:
                _fold(module.downsample, "0", "1")
    return folded


def _fold(parent: nn.Module, convolution: str, norm: str) -> None:
    conv, bn = parent.get_submodule(convolution), parent.get_submodule(norm)
    if not isinstance(conv, nn.Conv2d) or not isinstance(bn, nn.BatchNorm2d):
        raise TypeError(f"{convolution} and {norm} are not a convolution and its batch norm")
    setattr(parent, convolution, fuse_conv_bn_eval(conv, bn))
    setattr(parent, norm, nn.Identity())


def read_file(uri: str) -> bytes:
    """The whole file at a path or an s3:// address."""
    whole = open_place(uri).uri  # absolute, where it is a path
    folder, _, name = whole.rpartition("/")
    return open_place(folder or "/").read(name)


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
        raise LattqeError(f"{uri} contains no whitening (no 'Lw' in its meta): learn one with `lattqe whiten learn`")
    if training_set is None and len(found) == 1:
        training_set = next(iter(found))
    try:
        entry = found[training_set][scales]
        mean, projection = np.asarray(entry["m"], dtype=np.float64), np.asarray(entry["P"], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        raise LattqeError(
            f"{uri} contains no readable whitening {training_set!r} for {scales!r}: choose with "
            f"--training-set (it has {', '.join(map(repr, found))}) and --single-scale"
        ) from None
    config = {"method": "published", "training_set": training_set, "scales": scales}
    return Whitening(mean.reshape(-1), projection, config), xxhash.xxh3_128_hexdigest(data)
