"""Several scales against a loop over pixels and scales."""

import math

import numpy as np
import pytest
import torch

from lattqe.errors import LattqeError
from lattqe.extraction.encoder import describe, parse_scales, rescale


def slow_bilinear(image, height, width):
    """Half-pixel centres, edges repeated: one output pixel at a time."""
    channels, old_height, old_width = image.shape
    out = np.zeros((channels, height, width))
    for i in range(height):
        for j in range(width):
            y = min(max((i + 0.5) * old_height / height - 0.5, 0), old_height - 1)
            x = min(max((j + 0.5) * old_width / width - 0.5, 0), old_width - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, old_height - 1), min(left + 1, old_width - 1)
            fy, fx = y - top, x - left
            out[:, i, j] = (1 - fy) * ((1 - fx) * image[:, top, left] + fx * image[:, top, right]) + fy * (
                (1 - fx) * image[:, bottom, left] + fx * image[:, bottom, right]
            )
    return out


@pytest.mark.parametrize("scale", [1 / math.sqrt(2), math.sqrt(2), 0.5, 1.3])
def test_rescale_against_the_loop(scale):
    image = torch.randn(1, 3, 11, 17, generator=torch.Generator().manual_seed(0))
    out = rescale(image, scale)
    height, width = math.floor(11 * scale), math.floor(17 * scale)
    assert out.shape == (1, 3, height, width)
    np.testing.assert_allclose(out[0].numpy(), slow_bilinear(image[0].numpy(), height, width), atol=1e-5)


def test_one_pixel_stays_one():
    assert rescale(torch.ones(1, 3, 1, 1), 0.5).shape == (1, 3, 1, 1)


@pytest.mark.parametrize("power", [1.0, 2.92])
def test_aggregate_against_the_loop(power):
    """(mean over scales of v^power)^(1/power), then L2."""

    def encode(images):
        return torch.stack(
            [images.abs().mean(dim=(1, 2, 3)), images.abs().amax(dim=(1, 2, 3)), images.square().mean(dim=(1, 2, 3))],
            dim=1,
        )

    images = torch.randn(2, 3, 20, 14, generator=torch.Generator().manual_seed(0))
    scales = (1.0, 1 / math.sqrt(2), math.sqrt(2))
    out = describe(encode, images, scales, power).numpy()
    for row in range(2):
        at_scales = [encode(rescale(images[row : row + 1], scale))[0].tolist() for scale in scales]
        mean = [(sum(vector[i] ** power for vector in at_scales) / 3) ** (1 / power) for i in range(3)]
        np.testing.assert_allclose(out[row], np.array(mean) / math.hypot(*mean), rtol=1e-5)


def test_plain_mean_keeps_signs():
    out = describe(lambda images: torch.tensor([[3.0, -4.0]]), torch.zeros(1, 3, 8, 8), (1.0, 0.5))
    np.testing.assert_allclose(out.numpy(), [[0.6, -0.8]], rtol=1e-6)


def test_scales_are_parsed():
    assert parse_scales("1,0.7071,1.4142") == (1.0, 1 / math.sqrt(2), math.sqrt(2))
    assert parse_scales("0.5") == (0.5,)
    for wrong in ("", "1,", "1;2", "0", "-1", "nan", "100"):
        with pytest.raises(LattqeError, match="scales"):
            parse_scales(wrong)
