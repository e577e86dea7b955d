"""Backbones that other packages define (timm, torchvision, open_clip), with weights from a file: nothing is downloaded.

The package's own configuration says how an image is brought to the network: side, share of the central square, filter,
mean and deviation. Pooling is the CLS token of transformers and GeM of convolutional networks, unless asked otherwise.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lattqe.errors import LattqeError
from lattqe.extraction.resnet import IMAGENET_MEAN, IMAGENET_STD, GeM, read_file, read_saved

POOLS = ("auto", "cls", "gem", "mean")
EXTRA = "pip install 'lattqe[backbones]', with the torchvision that matches your torch"
GEM_POWER = 3.0


@dataclass(frozen=True)
class Backbone:
    """A network of another package and the preparation it was made with."""

    network: Callable[[Tensor], Tensor]  # (n, 3, h, w) normalised float32 → (n, D)
    pool: str
    side: int  # of the square input
    share: float  # of the short side that the central square takes
    filter: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


def open_backbone(model: str, weights: str | None, pool: str, device: torch.device) -> tuple[Backbone, bytes]:
    """Open `package:name` with the weights of a file; also the file's bytes, for their digest."""
    package, _, name = model.partition(":")
    if package not in PACKAGES or not name or not set(name) <= set(_NAME):
        raise LattqeError(f"--model {model!r} is not known: write timm:NAME, torchvision:NAME or open_clip:NAME")
    if pool not in POOLS:
        raise LattqeError(f"--pool {pool!r} is not known: use one of {', '.join(POOLS)}")
    if weights is None:
        raise LattqeError(
            f"--model {model} needs --weights FILE, its state dict as .safetensors or .pth: nothing is downloaded here"
        )
    data = read_file(weights)
    with _offline():
        backbone, network = PACKAGES[package](_package(package), name, pool)
    load_weights(network, read_state(data, weights), model, weights)
    network.eval().to(device)
    return backbone, data


_NAME = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."


@contextmanager
def _offline() -> Iterator[None]:
    """Packages that would look for files on a hub find that there is none."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a torchvision of another torch raises RuntimeError
        raise LattqeError(f"--model {name}:… cannot be used here ({_line(error)}): {EXTRA}") from error


def read_state(data: bytes, name: str) -> dict[str, Tensor]:
    """Tensors by name of a .safetensors or .pth file, read without running anything in it."""
    if name.endswith(".safetensors"):
        from safetensors.torch import load

        try:
            return load(data)
        except Exception as error:
            raise LattqeError(f"{name}: not a readable safetensors file ({_line(error)})") from None
    content = read_saved(data, name)
    for key in ("state_dict", "model", "teacher"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise LattqeError(f"{name}: holds no state dict: save one with torch.save(network.state_dict(), FILE)")
    return {str(key).removeprefix("module."): value for key, value in content.items() if isinstance(value, Tensor)}


def load_weights(network: nn.Module, state: Mapping[str, Tensor], model: str, weights: str) -> None:
    """Load all of a network's tensors; what the file has beyond them (a classifier) is left out."""
    expected = network.state_dict()
    missing = [key for key in expected if key not in state and not key.endswith(("num_batches_tracked", ".gem.p"))]
    wrong = [key for key in expected if key in state and state[key].shape != expected[key].shape]
    if missing or wrong:
        what = (
            f"lacks {missing[0]!r}"
            if missing
            else (
                f"has {wrong[0]!r} of shape {tuple(state[wrong[0]].shape)}, expected {tuple(expected[wrong[0]].shape)}"
            )
        )
        raise LattqeError(
            f"{weights} are not the weights of {model}: it {what}, and {len(missing) + len(wrong) - 1} more do not fit"
        )
    network.load_state_dict({**expected, **{key: state[key] for key in expected if key in state}})
    if not all(torch.isfinite(value).all() for value in network.state_dict().values() if value.is_floating_point()):
        raise LattqeError(f"{weights} hold NaN or infinity: they are damaged")


def _timm(timm: ModuleType, name: str, pool: str) -> tuple[Backbone, nn.Module]:
    """A network of timm; transformers take other sizes than their own where timm lets them."""
    try:
        try:
            network = timm.create_model(name, pretrained=False, num_classes=0, dynamic_img_size=True)
        except TypeError:
            network = timm.create_model(name, pretrained=False, num_classes=0)
    except Exception as error:
        raise _unknown(f"timm:{name}", error) from error
    config = importlib.import_module("timm.data").resolve_model_data_config(network)
    prefix = int(getattr(network, "num_prefix_tokens", 0))
    pool = pool if pool != "auto" else "cls" if prefix else "gem"
    if pool == "cls" and not prefix:
        raise LattqeError(f"timm:{name} has no CLS token: use --pool gem or mean")
    gem = GeM(GEM_POWER)

    def encode(images: Tensor) -> Tensor:
        found = network.forward_features(images)
        if found.ndim == 3:
            if pool == "cls":
                return found[:, 0]
            found = found[:, prefix:].transpose(1, 2).unsqueeze(3)
        elif found.shape[1] != network.num_features:  # some networks keep channels last
            found = found.permute(0, 3, 1, 2)
        return gem.to(found.device)(found) if pool == "gem" else found.mean(dim=(2, 3))

    return Backbone(
        encode,
        pool,
        int(config["input_size"][1]),
        float(config["crop_pct"]),
        _filter(config["interpolation"]),
        tuple(config["mean"]),
        tuple(config["std"]),
    ), network


class _Pooled(nn.Module):
    """GeM or the mean in the place of torchvision's average pooling, with its output's shape (n, D, 1, 1)."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.gem = GeM(GEM_POWER) if pool == "gem" else None

    def forward(self, x: Tensor) -> Tensor:
        """(n, D, h, w) → (n, D, 1, 1)."""
        return (x.mean(dim=(2, 3)) if self.gem is None else self.gem(x))[:, :, None, None]


def _torchvision(torchvision: ModuleType, name: str, pool: str) -> tuple[Backbone, nn.Module]:
    """A classifier of torchvision without its last layers, pooled again."""
    try:
        network = torchvision.models.get_model(name, weights=None)
        prepare = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    except Exception as error:
        raise _unknown(f"torchvision:{name}", error) from error
    transformer = hasattr(network, "class_token")
    pool = pool if pool != "auto" else "cls" if transformer else "gem"
    if transformer != (pool == "cls") or not (transformer or hasattr(network, "avgpool")):
        remedy = "use --pool cls" if transformer else "use --pool gem or mean, or the same network of timm"
        raise LattqeError(f"torchvision:{name} cannot be pooled by {pool!r}: {remedy}")
    for last in ("heads", "fc", "classifier", "head"):
        if hasattr(network, last):
            setattr(network, last, nn.Identity())
    if not transformer:
        network.avgpool = _Pooled(pool)
    side = int(prepare.crop_size[0])
    return Backbone(
        lambda images: network(images).flatten(1),
        pool,
        side,
        side / float(prepare.resize_size[0]),
        _filter(prepare.interpolation.value),
        tuple(prepare.mean),
        tuple(prepare.std),
    ), network


def _open_clip(open_clip: ModuleType, name: str, pool: str) -> tuple[Backbone, nn.Module]:
    """The image side of a CLIP network, with the projection that its text side is compared with."""
    if pool != "auto":
        raise LattqeError(f"open_clip:{name} has its own pooling: leave --pool out")
    if name not in open_clip.list_models():
        raise LattqeError(f"open_clip:{name} is not known: see open_clip.list_models()")
    try:
        whole = open_clip.create_model(name, pretrained=None)
    except Exception as error:
        raise _unknown(f"open_clip:{name}", error) from error
    config: Mapping[str, Any] = getattr(whole.visual, "preprocess_cfg", {})
    size = config.get("size", whole.visual.image_size)
    side = int(size if isinstance(size, int) else size[0])
    network = nn.ModuleDict({"visual": whole.visual})
    return Backbone(
        whole.visual,
        "its own",
        side,
        1.0,
        _filter(config.get("interpolation", "bicubic")),
        tuple(config.get("mean", IMAGENET_MEAN)),
        tuple(config.get("std", IMAGENET_STD)),
    ), network


PACKAGES: dict[str, Callable[[ModuleType, str, str], tuple[Backbone, nn.Module]]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "open_clip": _open_clip,
}


def _filter(name: str) -> str:
    return name if name in ("bicubic", "bilinear", "lanczos") else "bicubic"


def _unknown(model: str, error: Exception) -> LattqeError:
    return LattqeError(f"{model} cannot be made: {_line(error)}")


def _line(error: Exception) -> str:
    """What a library says, without torch's advice to load files unrestricted."""
    return " ".join(str(error).partition("Please use")[0].split())[:160] or type(error).__name__
