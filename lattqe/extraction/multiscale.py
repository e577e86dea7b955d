"""One image at several scales, aggregated into one unit vector."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lattqe.errors import LattqeError

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


def describe(encode: Callable[[Tensor], Tensor], images: Tensor, scales: Sequence[float] = (1.0,),
             power: float = 1.0) -> Tensor:
    """Encode (n, 3, h, w) images at every scale; → (n, D) unit vectors.

    The scales' vectors v are aggregated as (mean of v^power)^(1/power). With power 1 that is the plain mean; the
    published code takes GeM's p for networks without whitening, whose vectors are never negative.
    """
    powers = torch.stack([encode(rescale(images, scale)).float().pow(power) for scale in scales])
    return functional.normalize(powers.mean(dim=0).pow(1.0 / power), dim=1)
