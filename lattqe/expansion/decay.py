"""AQEwD: average expansion with weights that decay with rank (Gordo et al. 2017)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lattqe.expansion.base import Lists, Method


@dataclass
class DecayExpansion(Method):
    """w_i = (k - i) / k, as in the paper: the item itself has 1 and the last neighbor 0.

    k counts the valid neighbors of the row, and i counts among them: a row with fewer candidates than asked for
    gets the weights it would get with that smaller k.
    """

    name: ClassVar[str] = "aqewd"
    default_k: ClassVar[int] = 4
    default_k_dba: ClassVar[int] = 4
    label: ClassVar[str] = "AQEwD"
    dba_label: ClassVar[str] = "ADBAwD"
    tries_k: ClassVar[tuple[int, ...]] = (2, 4, 6, 8, 10, 12, 16, 24)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((4, 8, 12), (4, 8, 12))

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k), from 1 down to 0."""
        valid = lists.valid[:, 1 : 1 + lists.k].float()
        k = valid.sum(dim=1, keepdim=True).clamp(min=1)
        rank = torch.cat([torch.zeros_like(k), valid.cumsum(dim=1)], dim=1)
        return (k - rank) / k
