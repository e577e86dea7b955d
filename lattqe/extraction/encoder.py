"""What turns pixels into vectors: a published ResNet-GeM, a torch.export or TorchScript file, a backbone of another
package, or a Python function.

One image is encoded at several scales and aggregated into one unit vector.
"""

import importlib
import importlib.util
import inspect
import io
import math
import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from lattqe.device import exact_convolutions
from lattqe.errors import LattqeError
from lattqe.extraction.resnet import IMAGENET_MEAN, IMAGENET_STD, fold_batch_norm, read_checkpoint, read_file

# Published for the revisited benchmarks: the image as it is, shrunk and enlarged by √2.
PUBLISHED_SCALES = (1.0, 1 / math.sqrt(2), math.sqrt(2))


def parse_scales(text: str) -> tuple[float, ...]:
    """'1,0.7071,1.4142' → (1.0, 1/√2, √2): the published scales are taken exactly, others as they are written."""
    try:
        scales = tuple(float(part) for part in text.split(","))
    except ValueError:
        scales = ()
    if not scales or not all(0 < scale <= 8 for scale in scales):
        raise LattqeError(f"scales {text!r} are not numbers between 0 and 8: give for example 1,0.7071,1.4142")
    exact = {round(scale, 4): scale for scale in PUBLISHED_SCALES}
    return tuple(exact.get(scale, scale) for scale in scales)


def rescale(images: Tensor, scale: float) -> Tensor:
    """Resize (n, 3, h, w) bilinearly to ⌊h·scale⌋ × ⌊w·scale⌋, at least one pixel each way.

    The ratio of the sizes is the step, as in the torch releases (before 1.6) that the published networks came with.
    """
    if scale == 1:
        return images
    height, width = (max(1, math.floor(side * scale)) for side in images.shape[2:])
    return functional.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)


def describe(
    encode: Callable[[Tensor], Tensor], images: Tensor, scales: Sequence[float] = (1.0,), power: float = 1.0
) -> Tensor:
    """Encode (n, 3, h, w) images at every scale; → (n, D) unit vectors.

    The scales' vectors v are aggregated as (mean of v^power)^(1/power). With power 1 that is the plain mean; the
    published code takes GeM's p for networks without whitening, whose vectors are never negative.
    """
    powers = torch.stack([encode(rescale(images, scale)).float().pow(power) for scale in scales])
    return functional.normalize(powers.mean(dim=0).pow(1.0 / power), dim=1)


EXPORT_HELP = "it must take (n, 3, h, w) float32 and give (n, D)"


@dataclass(frozen=True)
class EncoderSpec:
    """Where an encoder comes from; plain values, so that every worker can open it for itself."""

    checkpoint: str | None = None  # a file on disk or S3: .pth (published layouts), torch.export, TorchScript
    hook: str | None = None  # module:function; the function takes a torch.device and returns the encoder
    hook_folder: str | None = None  # where the module was found: workers on this machine look there too
    mean: tuple[float, ...] | None = None  # of the input's R, G, B in 0..1; by default what the encoder says
    std: tuple[float, ...] | None = None
    model: str | None = None  # package:name of a backbone of timm, torchvision or open_clip
    weights: str | None = None  # its state dict: a file on disk or S3
    pool: str = "auto"  # of the backbone: cls, gem or mean

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.checkpoint, self.hook, self.model)) != 1:
            raise LattqeError(
                "give one of --checkpoint FILE, --model package:name with --weights FILE, or --encoder module:function"
            )
        if self.model is None and (self.weights is not None or self.pool != "auto"):
            raise LattqeError("--weights and --pool need --model")

    @property
    def source(self) -> str:
        """What the manifest says that it was."""
        return self.checkpoint or self.hook or f"{self.model} {self.weights}"


@dataclass(frozen=True)
class ImageEncoder:
    """An encoder on its device: uint8 pixels in, unit vectors out."""

    network: Callable[[Tensor], Tensor]  # (n, 3, h, w) normalised float32 → (n, D)
    device: torch.device
    kind: str
    digest: str  # of the file or of the hook's source
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    scale_power: float = 1.0  # exponent of the mean over scales
    post_whitening: Any = None  # carried by some published files, applied by `lattqe whiten`
    side: int | None = None  # of the square that a backbone was made for, the share of the short side it takes, and
    share: float = 1.0  # the filter that scales it: what its package says
    filter: str = "lanczos"

    def describe(self, pixels: Tensor, scales: Sequence[float] = (1.0,)) -> Tensor:
        """Encode (n, h, w, 3) uint8 pixels → (n, D) float32 on the encoder's device, without waiting for it.

        Pixels in pinned memory travel to a GPU while it works on the images before them.
        """
        images = pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float().div(255)
        mean, std = self._mean_and_std
        with torch.inference_mode(), exact_convolutions():
            return describe(self.network, (images - mean) / std, scales, self.scale_power)

    @cached_property
    def _mean_and_std(self) -> tuple[Tensor, Tensor]:
        """On the device once: a copy for each image would wait for all images before it."""
        mean, std = (torch.tensor(values, device=self.device).view(1, 3, 1, 1) for values in (self.mean, self.std))
        return mean, std

    def output_dim(self, side: int) -> int:
        """Encode one grey image of side × side pixels to learn D, and whether the encoder works at all."""
        try:
            vectors = self.describe(torch.full((1, side, side, 3), 127, dtype=torch.uint8))
        except Exception as error:  # foreign code
            reason = " ".join(str(error).split())[:300]
            raise LattqeError(
                f"the encoder fails on a {side}×{side} image ({reason}): {EXPORT_HELP}; "
                "for one of fixed input size give --center-crop"
            ) from error
        if vectors.ndim != 2 or vectors.shape[0] != 1:
            raise LattqeError(f"the encoder gives shape {tuple(vectors.shape)} for one image: {EXPORT_HELP}")
        return int(vectors.shape[1])


def open_encoder(spec: EncoderSpec, device: torch.device) -> ImageEncoder:
    """Open the encoder on `device`. A .pth file runs no code; the two other kinds are code, for you to trust."""
    if spec.hook is not None:
        encoder = _open_hook(spec.hook, spec.hook_folder, device)
    elif spec.model is not None:
        encoder = _open_model(spec, device)
    else:
        encoder = _open_file(str(spec.checkpoint), device)
    return replace(encoder, mean=spec.mean or encoder.mean, std=spec.std or encoder.std)


def _open_file(uri: str, device: torch.device) -> ImageEncoder:
    data = read_file(uri)
    digest = xxhash.xxh3_128_hexdigest(data)
    kind = file_kind(data)
    if kind == "checkpoint":
        return _open_checkpoint(data, uri, device, digest)
    try:
        if kind == "torchscript":
            network = torch.jit.load(io.BytesIO(data), map_location=device).eval()
        else:
            network = torch.export.load(io.BytesIO(data)).module().to(device)
    except Exception as error:  # foreign files
        raise LattqeError(f"{uri}: cannot be opened as {kind} ({' '.join(str(error).split())[:300]})") from error
    return ImageEncoder(_one_tensor(network), device, kind, digest)


def file_kind(data: bytes) -> str:
    """Tell 'torchscript', 'torch.export' and 'checkpoint' apart by what is in the file."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return "checkpoint"
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    if any(name.split("/", 1)[-1].startswith("code/") for name in names):
        return "torchscript"
    if any(name.rsplit("/", 1)[-1] in ("archive_format", "serialized_exported_program.json") for name in names):
        return "torch.export"
    return "checkpoint"


def _open_checkpoint(data: bytes, uri: str, device: torch.device, digest: str) -> ImageEncoder:
    checkpoint = read_checkpoint(data, uri)
    network = checkpoint.build()
    power = 1.0 if checkpoint.whitening else float(network.pool.p.detach())
    fast = fold_batch_norm(network).to(device)
    fast.features.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it
    kind = f"{checkpoint.architecture} + GeM{' + whitening' if checkpoint.whitening else ''}"
    return ImageEncoder(fast, device, kind, digest, checkpoint.mean, checkpoint.std, power, checkpoint.post_whitening)


def _open_model(spec: EncoderSpec, device: torch.device) -> ImageEncoder:
    from lattqe.extraction.backbones import open_backbone

    opened, data = open_backbone(str(spec.model), spec.weights, spec.pool, device)
    return ImageEncoder(
        _one_tensor(opened.network),
        device,
        f"{spec.model}, pooling {opened.pool}",
        xxhash.xxh3_128_hexdigest(data),
        opened.mean,
        opened.std,
        side=opened.side,
        share=opened.share,
        filter=opened.filter,
    )


def find_hook_folder(hook: str) -> str | None:
    """The folder that holds the hook's module or package: the one it is started in counts too."""
    _look_in(os.getcwd())  # console scripts do not see it by themselves
    try:
        found = importlib.util.find_spec(hook.partition(":")[0].partition(".")[0])
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        return None
    path = Path(found.origin)
    return str(path.parent.parent if path.name == "__init__.py" else path.parent)


def _look_in(folder: str | None) -> None:
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def _open_hook(name: str, folder: str | None, device: torch.device) -> ImageEncoder:
    module_name, _, function_name = name.partition(":")
    _look_in(folder)
    try:
        module = importlib.import_module(module_name)
        network = getattr(module, function_name)(device)
    except Exception as error:  # foreign code
        raise LattqeError(
            f"--encoder {name}: {type(error).__name__}: {error}; expected module:function, "
            "where function(device) returns the encoder"
        ) from error
    if not callable(network):
        raise LattqeError(f"--encoder {name}: gave a {type(network).__name__}, which cannot be called: {EXPORT_HELP}")
    source = inspect.getsource(module).encode()
    return ImageEncoder(
        _one_tensor(network),
        device,
        "Python function",
        xxhash.xxh3_128_hexdigest(source),
        tuple(getattr(network, "mean", IMAGENET_MEAN)),
        tuple(getattr(network, "std", IMAGENET_STD)),
    )


def _one_tensor(network: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Unpack the encoders that return a list, a tuple or a dict of one tensor."""

    def call(images: Tensor) -> Tensor:
        out = network(images)
        if isinstance(out, dict):
            out = list(out.values())
        if isinstance(out, list | tuple) and len(out) == 1:
            out = out[0]
        if not isinstance(out, Tensor):
            raise LattqeError(f"the encoder gives a {type(out).__name__}: {EXPORT_HELP}")
        return out.flatten(1)

    return call
