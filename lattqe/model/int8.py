"""Linear layers with 8-bit weights for CPUs: half the time of float32, for a rounding that the weights hardly feel."""

import torch
from torch import nn

from lattqe.errors import LattqeError

# Activations use 7 bits: CPUs without VNNI add pairs of products in 16 bits, and 2 × 127 × 127 is what fits there.
LEVELS = 63
ZERO = 64


class Int8Linear:
    """y = x Wᵀ + b with W in int8 (a scale for each output) and x in 7 bits (a scale for each row, found on the fly).

    A scale for each row, where torch's dynamic quantisation has one for the tensor: a row's result must not depend on
    the rows that happen to be computed with it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        if not hasattr(torch.ops.onednn, "qlinear_pointwise") or not torch.backends.mkldnn.is_available():
            raise LattqeError("precision int8 needs a torch built with oneDNN: use float32")
        weight = linear.weight.detach().float().cpu()
        scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        quantised = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(quantised, None)
        self.scale = scale
        self.zeros = torch.zeros(len(scale), dtype=torch.long)
        self.bias = None if linear.bias is None else linear.bias.detach().float().cpu()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (m, in) float32 to (m, out) float32."""
        size = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
        size /= LEVELS
        # Truncation of what is positive, half a step up, is rounding.
        rounded = torch.div(x, size).add_(ZERO + 0.5).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, ZERO, self.weight, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y.mul_(size) if self.bias is None else torch.addcmul(self.bias, y, size)
