"""What database rows need, trained in the situation where it is used.

A whole world is augmented, queries are expanded on it and search it; the loss is that of the ranking they get. In one
step for the temperature of the softmax: trained on queries alone, as in the paper, T would be what suits rows that have
relevant neighbors, and most rows of a database are like that only in a training set. Through hops over the world's
whole graph for a gated network: its edges, self-loops and α are learned for what they are used for.
"""

import dataclasses

import torch
import torch.nn.functional as F

from lattqe.expansion.base import aggregate
from lattqe.model import LAttQE
from lattqe.model.gated import WholeList
from lattqe.training.sampling import Batch

BLOCK = 128  # rows expanded at once


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
    own = (~batch.usable).nonzero()[:, 1]
    with torch.no_grad():
        found = _nearest(world[own], augmented, own, network.depth(k))
    expanded = _expand(network, world[own], augmented, found, k, dba=False)
    return expanded, dataclasses.replace(batch, candidates=augmented, positives=augmented[batch.positive_rows])


def through_hops(network: LAttQE, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None, Batch, torch.Tensor]:
    """Expand a batch's queries, which are no rows of its world, on the world after `batch.hops` hops over its graph.

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
    weights = network(items.detach(), dba=dba, k=k).weights
    if dba:  # nothing beyond the weighed neighbors has a weight
        weights, items = weights[:, : 1 + k], items[:, : 1 + k]
    return aggregate(weights, items)
