"""One stage of training on one worker: learning rate, forward, loss, backward, update, running average.

The learning rate is a function of the step alone, so that a resumed run needs no memory of it.
"""

import copy
import dataclasses
import math
from functools import partial
from typing import Any

import torch
from torch import nn

from lattqe.errors import LattqeError
from lattqe.expansion.base import aggregate
from lattqe.model import LAttQE
from lattqe.training.checkpoint import Team, Tensors, optimizer_tensors, restore_optimizer
from lattqe.training.config import LOSSES, TrainingConfig
from lattqe.training.losses import in_augmented_world, through_hops, total_loss
from lattqe.training.sampling import Batch, SlotMasks, use_slot_dropout

COSINE_FLOOR = 0.02  # of the full rate, where the cosine ends


TEMPERATURE_FLOOR = 0.05  # of the temperature's rate, where its straight line ends


def temperature_rate(config: TrainingConfig, step: int) -> float:
    """The rate of the second stage's update number `step`, counted from the beginning of the first."""
    done = (step - config.steps) / config.temperature_steps
    return config.temperature_rate * max(TEMPERATURE_FLOOR, 1 - done)


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The rate of update number `step`, from 0."""
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.schedule == "cosine":
        fall = COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * step / config.steps)) / 2
    else:
        fall = config.decay ** (step // config.epoch_steps)
    return config.learning_rate * rise * fall


class NotFiniteError(LattqeError):
    """The loss or its gradient became NaN or infinite; the weights are still those of the step before."""


class Stage:
    """A network, the parameters that are trained, and their optimiser.

    dba False: the whole network but its temperature. True: the temperature alone, all else frozen and dropout off.
    """

    def __init__(self, network: LAttQE, config: TrainingConfig, team: Team, dba: bool = False) -> None:
        self.network, self.team, self.dba = network.to(team.device), team, dba
        self.config = dataclasses.replace(config, auxiliary=0.0) if dba else config
        # Copied before it is wrapped: the average is never trained, drops nothing and never communicates.
        self.average = copy.deepcopy(self.network).requires_grad_(False) if config.ema and not dba else None
        self.masks = SlotMasks(config.seed, team.slots(config.slots), team.device)
        use_slot_dropout(network, self.masks)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(_trained(name, self.config, dba))
        self.names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in network.named_parameters() if parameter.requires_grad
        }
        self.optimizer = _optimizer(self.names, self.config)
        self.rate = partial(temperature_rate if dba else learning_rate, config)
        # One number is not worth a wrapper, and which parameters a gated network uses depends on the batch.
        self.averages = dba or network.config.gated
        self.wrapped = network if self.averages else team.wrap(network)
        self.unread: list[torch.Tensor] = []  # losses of batches, on the device

    @property
    def kept(self) -> LAttQE:
        """The weights that are validated and kept."""
        return self.network if self.average is None else self.average

    def update(self, step: int, batch: Batch) -> torch.Tensor:
        """One batch, and the update after the last of `accumulate`; returns the loss and its parts of all of these,
        (accumulate, 1 + parts), on the CPU: the one time in an update that the device is waited for. Before: (0, …).
        """
        self.network.train(not self.dba)
        self.masks.begin(step)
        loss, parts = self._loss(batch)
        # Gradients are averaged over the workers; the loss is a share of a sum.
        (loss * (self.team.size / self.config.accumulate)).backward()
        self.unread.append(torch.stack([loss.detach(), *parts.values()]))
        if (step + 1) % self.config.accumulate:
            return torch.empty(0, 1 + len(parts))
        if self.averages:
            for parameter in self.names:
                if parameter.grad is not None:
                    parameter.grad = self.team.total(parameter.grad) / self.team.size
        norm = nn.utils.clip_grad_norm_(list(self.names), self.config.clip or float("inf"))
        values, (norm,) = self._read(norm[None])
        if not torch.isfinite(values.sum() + norm):
            loss = values[:, 0].mean()
            raise NotFiniteError(f"at step {step} the loss became {loss.item():g}, its gradient {norm.item():g}")
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step) * group.get("times", 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._follow(step // self.config.accumulate)
        return values

    def rest(self) -> torch.Tensor:
        """What `update` has not returned yet, (batches, 1 + parts): a stage may end before the last of `accumulate`."""
        if not self.unread:
            return torch.empty(0, len(self.loss_names()))
        return self._read(self.unread[0][:0])[0]

    def _read(self, more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is unread, added up over the workers, and `more` (n,), in one copy from the device."""
        values = self.team.total(torch.stack(self.unread))
        self.unread = []
        told = torch.cat([values.flatten(), more]).cpu()
        return told[: values.numel()].view(values.shape), told[values.numel() :]

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this worker's share of the loss, and of its parts."""
        if self.dba and self.config.temperature_on == "worlds":
            expanded, augmented = in_augmented_world(self.network, batch, self.config.temperature_k)
            return total_loss(expanded, None, augmented, self.config)
        if batch.hops:
            expanded, logits, augmented, rows_loss = through_hops(self.network, batch)
            loss, parts = total_loss(expanded, logits, augmented, self.config)
            if "auxiliary" in parts:  # every worker has all rows
                loss = loss + self.config.auxiliary * rows_loss / self.team.size
            return loss, parts
        output = self.wrapped(batch.items, batch.valid, dba=self.dba, k=batch.k)
        expanded = aggregate(output.weights, self.network.terms(output, batch.items))
        return total_loss(expanded, output.auxiliary, batch, self.config)

    def loss_names(self) -> list[str]:
        """What `update` returns, by name."""
        return ["loss", *(name for name in LOSSES if getattr(self.config, name))]

    @torch.no_grad()
    def _follow(self, step: int) -> None:
        """Move the running average; in the first steps it forgets faster, so that the start does not linger."""
        if self.average is None:
            return
        decay = min(self.config.ema, (step + 1) / (step + 10))
        for ours, theirs in zip(self.average.parameters(), self.network.parameters()):
            ours.lerp_(theirs, 1 - decay)

    def tensors(self) -> Tensors:
        """All that must be saved to continue exactly here."""
        saved = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        if self.average is not None:
            saved |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        return saved | optimizer_tensors(self.optimizer, self.names)

    def restore(self, tensors: Tensors) -> None:
        """Put back what `tensors` gave."""
        self.network.load_state_dict(_under(tensors, "network."))
        if self.average is not None:
            self.average.load_state_dict(_under(tensors, "average."))
        restore_optimizer(self.optimizer, self.names, tensors)


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _trained(name: str, config: TrainingConfig, dba: bool) -> bool:
    """Whether a parameter is trained; one without gradient would stall the workers' exchange."""
    temperature = name == "head.log_temperature"
    if dba:
        return temperature
    unused = not config.auxiliary and name.startswith(("head.linear.", "head.scale_bias", "head.relevance."))
    return not temperature and not unused


def _optimizer(names: dict[torch.Tensor, str], config: TrainingConfig) -> torch.optim.Optimizer:
    """Adam with decay on everything as in the paper, or AdamW with decay on matrices only."""
    if config.optimizer == "adam":
        return torch.optim.Adam(list(names), lr=config.learning_rate, weight_decay=config.weight_decay)
    factors = [parameter for parameter, name in names.items() if name.endswith(".relation")]
    others = [parameter for parameter, name in names.items() if not name.endswith(".relation")]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in others if parameter.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in others if parameter.ndim <= 1], "weight_decay": 0.0},
        {"params": factors, "weight_decay": 0.0, "times": config.relation_rate},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate)
