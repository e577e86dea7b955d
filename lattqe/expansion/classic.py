"""The classic methods, whose weights are a formula of rank or similarity: AQE, AQEwD and αQE."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lattqe.errors import LattqeError
from lattqe.expansion.base import Lists, Method, parameter


@dataclass
class AverageExpansion(Method):
    """AQE: the item and its k nearest neighbors, averaged (Chum et al. 2007): w_i = 1."""

    name: ClassVar[str] = "aqe"
    default_k: ClassVar[int] = 2
    default_k_dba: ClassVar[int] = 4
    label: ClassVar[str] = "AQE"
    dba_label: ClassVar[str] = "ADBA"
    tries_k: ClassVar[tuple[int, ...]] = (1, 2, 4, 6, 8, 12, 16)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((2, 4, 8), (2, 4, 8))

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k) ones."""
        return torch.ones_like(lists.items[:, : 1 + lists.k, 0])


@dataclass
class DecayExpansion(Method):
    """AQEwD: weights that decay with rank (Gordo et al. 2017): w_i = (k - i) / k, so the last neighbor has 0.

    k counts the valid neighbors of the row, and i counts among them: a row with fewer candidates than asked for
    gets the weights it would get with that smaller k.
    """

    name: ClassVar[str] = "aqewd"
    default_k: ClassVar[int] = 4
    default_k_dba: ClassVar[int] = 4
    label: ClassVar[str] = "AQEwD"
    dba_label: ClassVar[str] = "ADBAwD"
    tries_k: ClassVar[tuple[int, ...]] = (2, 4, 6, 8, 10, 12, 16, 24)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((4, 8, 12), (4, 6, 8, 12))

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k), from 1 down to 0."""
        valid = lists.valid[:, 1 : 1 + lists.k].float()
        k = valid.sum(dim=1, keepdim=True).clamp(min=1)
        rank = torch.cat([torch.zeros_like(k), valid.cumsum(dim=1)], dim=1)
        return (k - rank) / k


@dataclass
class AlphaExpansion(Method):
    """αQE: a power of the similarity (Radenović et al. 2018): w_i = max(sim(q, d_i), 0)^α, the item itself with 1.

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
