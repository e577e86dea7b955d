"""Losses of expanded queries, one value for each query; gradients flow through the expanded query alone."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lattqe.training.config import RANKING_LOSSES, TrainingConfig
from lattqe.training.sampling import Batch

RankingLoss = Callable[[torch.Tensor, Batch, TrainingConfig], torch.Tensor]


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
