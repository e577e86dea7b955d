"""AQE: the item and its k nearest neighbors, averaged (Chum et al. 2007)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lattqe.expansion.base import Lists, Method


@dataclass
class AverageExpansion(Method):
    """w_i = 1."""

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
