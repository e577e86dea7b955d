"""LAttQE: weights predicted by the attention network from the whole list (section 3.3 of the paper)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from lattqe.device import pick_device
from lattqe.errors import LattqeError
from lattqe.expansion.base import Lists, Method
from lattqe.model.network import LAttQE


@dataclass
class AttentionExpansion(Method):
    """w_i = cos(q̃, d̃_i) in the transformed space; for database rows (dba) softmax(cos / T)."""

    name: ClassVar[str] = "lattqe"
    default_k: ClassVar[int] = 64
    model: str | LAttQE | None = None  # where a trained network is stored, or the network itself
    dba: bool = False  # the tempered softmax, for rows of the database
    network: LAttQE = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.model is None:
            raise LattqeError("lattqe needs model: the folder or s3:// address of a trained network, or a LAttQE")
        network = self.model if isinstance(self.model, LAttQE) else LAttQE.load(self.model)
        self.network = network.to(pick_device(self.device)).eval()

    @property
    def params(self) -> dict[str, Any]:
        """What decides the result, ready for JSON; a network that was never stored has no name."""
        return {**super().params, "model": self.model if isinstance(self.model, str) else None}

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k), from -1 to 1; with dba positive and adding up to 1."""
        t = 1 + lists.k
        return self.network(lists.items[:, :t], lists.valid[:, :t], dba=self.dba).weights
