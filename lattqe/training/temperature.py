"""The temperature of the softmax for database rows, trained in the situation where it is used.

A whole world is augmented, queries are expanded on it and search it; the loss is that of the ranking they get. Trained
on queries alone, as in the paper, T would be what suits rows that have relevant neighbors: most rows of a database
are like that only in a training set.
"""

import dataclasses

import torch

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
