"""The workers of one training, seen from one of them: alone, or joined by torch.distributed."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lattqe.errors import LattqeError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Team:
    """Rank and number of workers, and the two things they do together: add up numbers, and gradients."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @classmethod
    def joined(cls, device: torch.device) -> "Team":
        """The team of the process group that was set up (by Ray Train, torchrun, ...); alone if there is none."""
        if not dist.is_initialized():
            return cls(device=device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def leads(self) -> bool:
        """Whether this worker writes the files."""
        return self.rank == 0

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the workers, the same on each."""
        if self.size == 1:
            return values
        shared = values.detach().clone().to(self.device)
        dist.all_reduce(shared)
        return shared.to(values.device)

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network with gradients averaged over the workers."""
        if self.size == 1:
            return network
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(network, device_ids=devices, gradient_as_bucket_view=True)

    def share(self, count: int, unit: int = 1) -> slice:
        """Return this worker's part of `count` things that come in whole units."""
        units = -(-count // unit)
        start, stop = (units * rank // self.size * unit for rank in (self.rank, self.rank + 1))
        return slice(min(start, count), min(stop, count))

    def slots(self, slots: int) -> range:
        """Return this worker's slots of the global batch."""
        if slots % self.size:
            raise LattqeError(
                f"{self.size} workers cannot share {slots} slots evenly: "
                f"use a divisor, or --set slots={self.size * max(1, slots // self.size)}"
            )
        each = slots // self.size
        return range(self.rank * each, (self.rank + 1) * each)
