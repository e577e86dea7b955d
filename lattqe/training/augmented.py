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
from lattqe.training.batch import Batch

BLOCK = 128  # rows expanded at once


def in_augmented_world(network: LAttQE, batch: Batch, k: int) -> tuple[torch.Tensor, Batch]:
    """Expand a batch's queries on its augmented world: (b, D), and the batch with that world as candidates.

    Gradients reach the temperature through the augmented rows that queries are made of and compared with.
    """
    if batch.positive_rows is None:
        raise ValueError("the positives of the batch are not among its candidates")
    world = batch.candidates
    near = _nearest(world, world, torch.arange(len(world), device=world.device), network.depth(k))
    augmented = torch.cat([_expand(network, world[rows], world, near[rows], k, dba=True)
                           for rows in torch.arange(len(world), device=world.device).split(BLOCK)])
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
    world = batch.candidates
    if batch.positive_rows is None or batch.labels is None:
        raise ValueError("the positives of the batch are not among its candidates")
    count = len(world)
    near = _nearest(world, world, torch.arange(count, device=world.device), network.depth(batch.row_k))
    weights, losses = [], []
    for rows in torch.arange(count, device=world.device).split(BLOCK):
        found = network(torch.cat([world[rows, None], world[near[rows]]], dim=1), dba=True, k=batch.row_k)
        weights.append(found.weights[:, : 1 + batch.row_k])
        if found.auxiliary is not None:
            relevant = batch.labels[near[rows, : batch.row_k]] == batch.labels[rows, None]
            losses.append(F.binary_cross_entropy_with_logits(found.auxiliary, relevant.float(), reduction="sum"))
    hopped = hop(torch.cat(weights), near[:, : batch.row_k], world, network.alpha, batch.hops)
    with torch.no_grad():
        scores = batch.items[:, 0] @ hopped.T
        found_rows = scores.topk(min(network.depth(batch.k), count)).indices
    items = torch.cat([batch.items[:, :1], hopped[found_rows]], dim=1)
    output = network(items.detach(), k=batch.k)
    relevant = torch.gather(batch.same, 1, found_rows)
    augmented = dataclasses.replace(batch, candidates=hopped, positives=hopped[batch.positive_rows], relevant=relevant,
                                    valid=torch.ones(items.shape[:2], dtype=torch.bool, device=items.device))
    rows_loss = torch.stack(losses).sum() / (count * batch.row_k) if losses else world.new_zeros(())
    return aggregate(output.weights, items), output.auxiliary, augmented, rows_loss


def hop(weights: torch.Tensor, near: torch.Tensor, x: torch.Tensor, alpha: torch.Tensor, hops: int) -> torch.Tensor:
    """H ← α S H + (1 - α) x, so many times from H = x, rows normalised: (n, D).

    weights (n, 1 + k): of each row itself and of the edges to its neighbors near (n, k); S = (W + Wᵀ) / 2 with the self-
    loops, rows adding up to 1. As a dense matrix, for worlds of some thousand rows; `lattqe.augmentation` has it sparse.
    """
    count = len(x)
    matrix = weights.new_zeros(count, count).scatter(1, near, weights[:, 1:].clamp(min=0))
    matrix = (matrix + matrix.T) / 2 + torch.diag(weights[:, 0])
    matrix = matrix / matrix.sum(1, keepdim=True).clamp(min=1e-12)
    result = x
    for _ in range(hops):
        result = alpha * (matrix @ result) + (1 - alpha) * x
    return F.normalize(result, dim=-1)


def _nearest(x: torch.Tensor, world: torch.Tensor, own: torch.Tensor, k: int) -> torch.Tensor:
    """The k nearest rows (n, k) of x (n, D) in the world (m, D), the own row (n,) excepted."""
    scores = x @ world.T
    scores[torch.arange(len(x), device=x.device), own] = -2  # below every cosine
    return scores.topk(min(k, len(world) - 1)).indices


def _expand(
    network: LAttQE, x: torch.Tensor, world: torch.Tensor, near: torch.Tensor, k: int, dba: bool
) -> torch.Tensor:
    """Rows or queries x (n, D), expanded from the rows near (n, depth) of the world."""
    items = torch.cat([x[:, None], world[near]], dim=1)
    weights = network(items.detach(), dba=dba, k=k).weights
    if dba:  # nothing beyond the weighed neighbors has a weight
        weights, items = weights[:, : 1 + k], items[:, : 1 + k]
    return aggregate(weights, items)
