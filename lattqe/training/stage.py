"""One stage of training on one worker: forward, losses, backward, update, running average.

A loss has one value for each expanded query; others are of what database rows need.
"""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lattqe.errors import LattqeError
from lattqe.expansion.base import aggregate
from lattqe.model import LAttQE
from lattqe.model.gated import WholeList
from lattqe.training.checkpoint import Team, Tensors, optimizer_tensors, restore_optimizer
from lattqe.training.config import LOSSES, RANKING_LOSSES, TrainingConfig, learning_rate, temperature_rate
from lattqe.training.sampling import Batch, SlotMasks, use_slot_dropout

RankingLoss = Callable[[torch.Tensor, Batch, TrainingConfig], torch.Tensor]
BLOCK = 128  # rows expanded at once


def contrastive(expanded: torch.Tensor, batch: Batch, config: TrainingConfig) -> torch.Tensor:
    """The paper's: z² for a positive, max(0, m - z)² for each of its hardest negatives, z = ‖q̂ - d‖.

    expanded (b, D); averaged over the positives (b, p, D); negatives are the candidates of other classes that the
    current expanded query finds nearest. Returns (b,).
    """
    negative = ~batch.same & batch.usable
    with torch.no_grad():
        scores = (expanded @ batch.candidates.T).masked_fill(~negative, -torch.inf)
        best, rows = hardest(
            scores, min(config.negatives, scores.shape[1]), batch.classes if config.distinct_negatives else None
        )
    pulled = (expanded[:, None] - batch.positives).square().sum(-1).mean(1)
    # The clamp keeps the gradient of the root finite where a negative coincides with the query.
    distance = (expanded[:, None] - batch.candidates[rows]).square().sum(-1).clamp(min=1e-12).sqrt()
    pushed = F.relu(config.margin - distance).square().masked_fill(best == -torch.inf, 0).sum(1)
    return pulled + pushed


def hardest(scores: torch.Tensor, count: int, classes: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest of scores (b, m) and where they stand, both (b, count); of classes (m,) the best of each.

    Where there are fewer classes than asked for the rest is -inf.
    """
    if classes is None:
        return scores.topk(count)
    best, rows, left = [], [], scores.clone()
    for _ in range(count):
        score, row = left.max(dim=1)
        best.append(score)
        rows.append(row)
        left = left.masked_fill(classes == classes[row][:, None], -torch.inf)
    return torch.stack(best, dim=1), torch.stack(rows, dim=1)


def pull(expanded: torch.Tensor, batch: Batch, config: TrainingConfig) -> torch.Tensor:
    """1 - cosine, averaged over all candidates of the query's class. expanded (b, D); returns (b,)."""
    positive = batch.same & batch.usable
    total = ((1 - expanded @ batch.candidates.T) * positive).sum(1)
    return total / positive.sum(1).clamp(min=1)


def listwise(expanded: torch.Tensor, batch: Batch, config: TrainingConfig) -> torch.Tensor:
    """Cross entropy of softmax(cosine / temperature) over the candidates, averaged over the positives among them."""
    positive = batch.same & batch.usable
    logits = (expanded @ batch.candidates.T / config.listwise_temperature).masked_fill(~batch.usable, -torch.inf)
    total = torch.where(positive, logits.log_softmax(1), 0).sum(1)
    return -total / positive.sum(1).clamp(min=1)


def smooth_ap(expanded: torch.Tensor, batch: Batch, config: TrainingConfig) -> torch.Tensor:
    """1 - smooth average precision (Brown et al. 2020) over the drawn positives (b, p, D).

    A positive's rank is a sum of sigmoids over all candidates; itself among them counts one half, hence the other half.
    """
    scores = expanded @ batch.candidates.T
    temperature: float | torch.Tensor = config.smooth_ap_temperature
    if config.smooth_ap_spread:  # spaces differ in how far apart similarities are
        temperature = (config.smooth_ap_spread * scores.detach().std(1, keepdim=True)).clamp(min=0.004)
    scores = scores / temperature
    own = (expanded[:, None] * batch.positives).sum(-1) / temperature
    above = torch.sigmoid(scores[:, None] - own[..., None])  # (b, p, m): passes over it are what this loss costs
    counted = torch.stack([batch.usable, batch.usable & batch.same], dim=2).to(above.dtype)
    rank, rank_among_positives = (above @ counted + 0.5).unbind(2)
    return 1 - (rank_among_positives / rank).mean(1)


# A new loss is a function above, and the field of TrainingConfig with its weight.
RANKING: dict[str, RankingLoss] = {name: globals()[name] for name in RANKING_LOSSES}


def auxiliary(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Binary cross entropy of 'this neighbor is relevant', logits (b, k), averaged over a query's valid neighbors.

    The batch's lists may be longer than k, for a background.
    """
    k = logits.shape[1]
    valid = batch.valid[:, 1 : 1 + k]
    loss = F.binary_cross_entropy_with_logits(logits, batch.relevant[:, :k].float(), reduction="none")
    return (loss * valid).sum(1) / valid.sum(1).clamp(min=1)


def total_loss(
    expanded: torch.Tensor, logits: torch.Tensor | None, batch: Batch, config: TrainingConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One worker's share of the loss (a sum over its queries divided by the global batch) and of each part of it."""
    parts = {
        name: loss(expanded, batch, config).sum() / batch.queries
        for name, loss in RANKING.items()
        if getattr(config, name)
    }
    if config.auxiliary and logits is not None:
        parts["auxiliary"] = auxiliary(logits, batch).sum() / batch.queries
    total = torch.stack([getattr(config, name) * value for name, value in parts.items()]).sum()
    return total, {name: value.detach() for name, value in parts.items()}


def in_augmented_world(network: LAttQE, batch: Batch, k: int) -> tuple[torch.Tensor, Batch]:
    """Expand a batch's queries on its augmented world: (b, D), and the batch with that world as candidates.

    Gradients reach the temperature through the augmented rows that queries are made of and compared with.
    """
    if batch.positive_rows is None:
        raise ValueError("the positives of the batch are not among its candidates")
    world = batch.candidates
    near = _nearest(world, world, torch.arange(len(world), device=world.device), network.depth(k))
    augmented = torch.cat(
        [
            _expand(network, world[rows], world, near[rows], k, dba=True)
            for rows in torch.arange(len(world), device=world.device).split(BLOCK)
        ]
    )
    own = (~batch.usable).byte().argmax(dim=1)  # the one row that a query may not use; `nonzero` would wait for a GPU
    with torch.no_grad():
        found = _nearest(world[own], augmented, own, network.depth(k))
    expanded = _expand(network, world[own], augmented, found, k, dba=False)
    return expanded, dataclasses.replace(batch, candidates=augmented, positives=augmented[batch.positive_rows])


def through_hops(network: LAttQE, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None, Batch, torch.Tensor]:
    """Expand a batch's queries, which are not rows of its world, on the world after `batch.hops` hops over its graph.

    Returns the expanded queries (b, D), the logits (b, k) of their neighbors' relevance, the batch with that world as
    candidates, and the loss of the rows' own logits.
    """
    world, own = batch.candidates, batch.hopping
    if batch.positive_rows is None or batch.labels is None or own is None:
        raise ValueError("the positives of the batch are not among its candidates")
    scores, near = _ranked(world[own], world, network.depth(batch.row_k), own)
    weights, losses = [], []
    for rows in torch.arange(len(own), device=world.device).split(BLOCK):
        items = torch.cat([world[own[rows], None], world[near[rows, : batch.row_k]]], dim=1)
        found = network.weigh(items, _all(items), _whole(world, scores[rows], near[rows]), dba=True)[0]
        weights.append(found.weights)
        if found.auxiliary is not None:
            relevant = batch.labels[near[rows, : batch.row_k]] == batch.labels[own[rows], None]
            losses.append(F.binary_cross_entropy_with_logits(found.auxiliary, relevant.float(), reduction="sum"))
    hopped = hop(torch.cat(weights), near[:, : batch.row_k], world, network.alpha, batch.hops, own)
    with torch.no_grad():
        scores, near = _ranked(batch.items[:, 0], hopped, network.depth(batch.k))
    items = torch.cat([batch.items[:, :1], hopped[near[:, : batch.k]]], dim=1)
    whole = _whole(hopped, scores, near)
    # The network reads what is there; gradients reach the edges through the vectors that are summed and compared.
    output, beta = network.weigh(items.detach(), _all(items), WholeList(*(each.detach() for each in whole)))
    expanded = torch.bmm(output.weights[:, None], items)[:, 0] - beta[:, None] * whole.background
    augmented = dataclasses.replace(
        batch,
        candidates=hopped,
        positives=hopped[batch.positive_rows],
        valid=_all(items),
        relevant=torch.gather(batch.same, 1, near[:, : batch.k]),
    )
    rows_loss = torch.stack(losses).sum() / (len(own) * batch.row_k) if losses else world.new_zeros(())
    return F.normalize(expanded, dim=-1), output.auxiliary, augmented, rows_loss


def _all(items: torch.Tensor) -> torch.Tensor:
    return torch.ones(items.shape[:2], dtype=torch.bool, device=items.device)


def _whole(world: torch.Tensor, scores: torch.Tensor, near: torch.Tensor) -> WholeList:
    """What lists near (n, depth) with scores (n, depth) are beyond the neighbors that are weighed."""
    return WholeList(F.embedding_bag(near, world, mode="mean"), scores, torch.ones_like(scores, dtype=torch.bool))


def hop(
    weights: torch.Tensor,
    near: torch.Tensor,
    x: torch.Tensor,
    alpha: torch.Tensor,
    hops: int,
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    """H ← α S H + (1 - α) x, so many times from H = x, rows normalised: (n, D).

    weights (r, 1 + k): of each row itself and of the edges to its neighbors near (r, k); S = (W + Wᵀ) / 2 with the
    self-loops, rows adding up to 1. own (r,): the rows that these are, where they are not all; the others stay what
    they are, and an edge to one counts as if it led both ways. A dense matrix, for worlds of few rows;
    `lattqe.augmentation` has it sparse.
    """
    own = torch.arange(len(x), device=x.device) if own is None else own
    matrix = weights.new_zeros(len(own), len(x)).scatter(1, near, weights[:, 1:].clamp(min=0))
    inside = matrix[:, own]
    outside = matrix.index_fill(1, own, 0)
    inside = (inside + inside.T) / 2 + torch.diag(weights[:, 0])
    total = (inside.sum(1, keepdim=True) + outside.sum(1, keepdim=True)).clamp(min=1e-12)
    inside, original = inside / total, x[own]
    constant = alpha * ((outside / total) @ x) + (1 - alpha) * original
    result = original
    for _ in range(hops):
        result = alpha * (inside @ result) + constant
    return x.index_copy(0, own, F.normalize(result, dim=-1))


def _nearest(x: torch.Tensor, world: torch.Tensor, own: torch.Tensor, k: int) -> torch.Tensor:
    """The k nearest rows (n, k) of x (n, D) in the world (m, D), the own row (n,) excepted."""
    return _ranked(x, world, k, own)[1]


def _ranked(
    x: torch.Tensor, world: torch.Tensor, k: int, own: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and rows (n, k) of the k nearest of x (n, D) in the world (m, D), the own row (n,) excepted."""
    scores = x @ world.T
    if own is not None:
        scores[torch.arange(len(x), device=x.device), own] = -2  # below every cosine
    found = scores.topk(min(k, len(world) - (own is not None)))
    return found.values, found.indices


def _expand(
    network: LAttQE, x: torch.Tensor, world: torch.Tensor, near: torch.Tensor, k: int, dba: bool
) -> torch.Tensor:
    """Rows or queries x (n, D), expanded from the rows near (n, depth) of the world."""
    items = torch.cat([x[:, None], world[near]], dim=1)
    found = network(items.detach(), dba=dba, k=k)
    weights, items = found.weights, network.terms(found, items)
    if dba:  # nothing beyond the weighed neighbors has a weight
        weights, items = weights[:, : 1 + k], items[:, : 1 + k]
    return aggregate(weights, items)


class NotFiniteError(LattqeError):
    """The loss or its gradient became NaN or infinite; the weights are still those of the step before."""


class TrainingStage:
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
        self.masks.begin(step, None if self.network.config.relational else batch.valid)
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
