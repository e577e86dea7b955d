"""αQE: neighbors weighted by a power of their similarity (Radenović et al. 2018)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lattqe.errors import LattqeError
from lattqe.expansion.base import Lists, Method, parameter


@dataclass
class AlphaExpansion(Method):
    """w_i = max(sim(q, d_i), 0)^α, the item itself with 1.

    Similarities below zero count as zero: a power of a negative number would be complex, or flip its sign with α.
    """

    name: ClassVar[str] = "alphaqe"
    default_k: ClassVar[int] = 72
    default_k_dba: ClassVar[int] = 36
    label: ClassVar[str] = "αQE"
    dba_label: ClassVar[str] = "αDBA"
    tries_k: ClassVar[tuple[int, ...]] = (8, 10, 16, 24, 36, 48, 72)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((10, 24, 36), (4, 10, 24))
    # 3 is the value of the paper's comparison; 0 is AQE over all k
    alpha: float = parameter(3.0, "Power of the similarity", symbol="α", tries=(1.0, 2.0, 3.0, 4.0))

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise LattqeError(f"alphaqe: alpha is {self.alpha}: use a finite number that is not negative, such as 3")

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k), none negative."""
        own = torch.ones_like(lists.items[:, :1, 0])
        return torch.cat([own, lists.scores.clamp(min=0) ** self.alpha], dim=1)
