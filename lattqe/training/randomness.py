"""Randomness as a pure function of (seed, stream, step): a worker that resumes or joins draws the same numbers."""

from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """Uses of randomness that must not share numbers."""

    SAMPLING = 1
    POOL = 2
    DROPOUT = 3
    START = 4


def generator(seed: int, stream: Stream, step: int) -> np.random.Generator:
    """A counter-based generator for one use in one step."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (int(stream) << 48) | step], dtype=np.uint64)))


def torch_seed(seed: int, stream: Stream, step: int, slot: int = 0) -> int:
    """A seed for torch's generators."""
    return int(generator(seed, stream, step).integers(2**62, size=slot + 1)[slot])


class SlotMasks:
    """Dropout masks by slot: the global batch is cut into equal slots, each with its own generator.

    A worker holds some of the slots, so that each query meets the same mask however many workers there are.
    """

    def __init__(self, seed: int, slots: range, device: torch.device) -> None:
        self.seed, self.slots = seed, slots
        self.generators = [torch.Generator(device=device) for _ in slots]

    def begin(self, step: int) -> None:
        """Set the generators to where they stand at the beginning of a step."""
        for slot, source in zip(self.slots, self.generators):
            source.manual_seed(torch_seed(self.seed, Stream.DROPOUT, step, slot))

    def draw(self, like: torch.Tensor, keep: float) -> torch.Tensor:
        """A mask like (n, ...) of zeros and 1 / keep; n is a whole number of slots."""
        mask = torch.empty_like(like)
        for part, source in zip(mask.chunk(len(self.generators)), self.generators):
            part.bernoulli_(keep, generator=source)
        return mask.div_(keep)


class SlotDropout(torch.nn.Module):
    """nn.Dropout with masks from `SlotMasks`."""

    def __init__(self, p: float, masks: SlotMasks) -> None:
        super().__init__()
        self.p, self.masks = p, masks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop a share p of x (n, ...) while training."""
        if not self.training or self.p == 0:
            return x
        return x * self.masks.draw(x.detach(), 1 - self.p)


def use_slot_dropout(network: torch.nn.Module, masks: SlotMasks) -> None:
    """Put slot dropout in the place of every nn.Dropout; parameters and their names stay as they are."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, SlotDropout(child.p, masks))
