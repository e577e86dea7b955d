"""From transformed tokens to weights: the cosine with the query's token, and what may be done to it."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lattqe.model.config import LAttQEConfig

# A power below 1 has an infinite slope at 0; this is where the slope stops growing.
SMALLEST_COSINE = 1e-4


@dataclass(frozen=True)
class Output:
    """What the network says of n lists of t = 1 + k items.

    weights (n, t): of the original vectors, 0 on padding; column 0 is the query's.
    auxiliary (n, k): logits of 'this neighbor is relevant', or None; for training only.
    cosine (n, t): of q̃ and d̃_i. transformed (n, t, W): the tokens q̃, d̃_1 … d̃_k.
    """

    weights: torch.Tensor
    auxiliary: torch.Tensor | None
    cosine: torch.Tensor
    transformed: torch.Tensor


class Head(nn.Module):
    """w_i = cos(q̃, d̃_i), or its learned power; for database rows softmax(w / T) with a learned temperature."""

    def __init__(self, config: LAttQEConfig) -> None:
        super().__init__()
        self.clamp = config.clamp_negative
        # Logarithms, so that whatever the optimiser does, powers and temperatures stay above zero.
        start = config.power_start
        self.log_power = nn.Parameter(torch.tensor(math.log(start))) if start is not None else None
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.temperature_start)))
        self.linear = nn.Linear(config.token_width, 1) if config.auxiliary == "linear" else None
        # Starts where a cosine of one half is undecided.
        self.scale_bias = nn.Parameter(torch.tensor([5.0, -2.5])) if config.auxiliary == "cosine" else None

    @property
    def temperature(self) -> torch.Tensor:
        """T of the softmax for database rows."""
        return self.log_temperature.exp()

    def forward(self, transformed: torch.Tensor, valid: torch.Tensor, dba: bool = False) -> Output:
        """Weights of transformed (n, t, W) with valid (n, t) bool; `dba` takes the tempered softmax."""
        unit = F.normalize(transformed, dim=-1)
        cosine = (unit @ unit[:, 0, :, None])[..., 0]
        weights = cosine
        if self.log_power is not None:
            weights = cosine.sign() * cosine.abs().clamp(min=SMALLEST_COSINE) ** self.log_power.exp()
        return Output(self.finish(weights, valid, dba), self.classify(transformed, cosine), cosine, transformed)

    def finish(self, weights: torch.Tensor, valid: torch.Tensor, dba: bool) -> torch.Tensor:
        """Weights (n, t) without padding, clamped where that is wanted; `dba`: the tempered softmax of them."""
        if self.clamp:
            weights = weights.clamp(min=0)
        if dba:
            return (weights / self.temperature).masked_fill(~valid, -torch.inf).softmax(dim=1)
        return weights.masked_fill(~valid, 0)

    def classify(self, transformed: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor | None:
        """Logits (n, k) of 'this neighbor is relevant', from the tokens or from the cosine."""
        if self.linear is not None:
            return self.linear(transformed[:, 1:])[..., 0]
        if self.scale_bias is not None:
            return self.scale_bias[0] * cosine[:, 1:] + self.scale_bias[1]
        return None
