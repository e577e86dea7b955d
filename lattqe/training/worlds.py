"""Random worlds: each batch searches a random part of one set's classes and images.

Neighbor lists then come from databases of many sizes and densities, so that the network learns to read a list and
not to recognise the training set's.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lattqe.training.batch import Batch
from lattqe.training.config import TrainingConfig
from lattqe.training.data import TrainingData
from lattqe.training.randomness import Stream, generator
from lattqe.training.tuples import Members, draw_k, dropped

FEWEST_CLASSES = 4  # a world of fewer has hardly a wrong neighbor to tell from a right one
FEWEST_IMAGES = 3  # of a query's class in its world: itself, one to find near and one to find far


@dataclass(frozen=True)
class World:
    """Some rows of one set (m,), ascending, their labels (m,), and the share of draws that falls on each (m,)."""

    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    chance: NDArray[np.float64]


class WorldSampler:
    """One set for each batch, in turn; queries are drawn with equal chance for each class of the world."""

    def __init__(self, data: TrainingData, config: TrainingConfig) -> None:
        self.data, self.config = data, config

    def world(self, step: int, rng: np.random.Generator) -> World:
        """The world of a step."""
        config, sets = self.config, len(self.data.bounds) - 1
        start, stop = self.data.bounds[step % sets], self.data.bounds[step % sets + 1]
        labels = self.data.labels[start:stop]
        classes = np.unique(labels)
        share = config.world_classes + (1 - config.world_classes) * rng.random()
        kept = classes[rng.random(len(classes)) < share]
        if len(kept) < FEWEST_CLASSES:
            kept = rng.permutation(classes)[:FEWEST_CLASSES]
        share = config.world_images + (1 - config.world_images) * rng.random()
        rows = np.flatnonzero(np.isin(labels, kept) & (rng.random(len(labels)) < share))
        if len(rows) > config.world_rows:
            rows = np.sort(rng.permutation(rows)[: config.world_rows])
        inverse, counts = np.unique(labels[rows], return_inverse=True, return_counts=True)[1:]
        chance = np.where(counts >= FEWEST_IMAGES, 1 / counts, 0)[inverse]
        if not chance.any():  # a set of very small classes: its whole is the world
            rows = np.arange(len(labels))
            inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)[1:]
            chance = np.where(counts >= 2, 1 / counts, 0)[inverse]
        return World(rows + start, labels[rows], chance / chance.sum())

    def batch(self, step: int, part: slice) -> Batch:
        """The queries `part` of this step; every worker draws and searches for all, so that all agree on near ties."""
        config, rng = self.config, generator(self.config.seed, Stream.SAMPLING, step)
        world = self.world(step, rng)
        few = np.count_nonzero(world.chance) < config.batch
        queries = rng.choice(len(world.rows), config.batch, replace=bool(few), p=world.chance)
        k, depth = (min(wanted, len(world.rows) - 1) for wanted in (draw_k(config, rng), config.network.background))
        depth = max(k, depth)
        draws = rng.random((config.batch, config.positives))
        positive = Members(np.unique(world.labels, return_inverse=True)[1]).others(queries, draws)
        drop = dropped((config.batch, depth), config.drop_max, rng)

        vectors = torch.from_numpy(self.data.gather(world.rows))
        scores = vectors[queries] @ vectors.T
        scores[torch.arange(config.batch), queries] = -2  # below every cosine
        near = scores.topk(depth).indices.numpy()[part]
        queries, positive, drop = queries[part], positive[part], drop[part]
        own = world.labels[queries, None]
        return Batch(
            items=vectors[np.concatenate((queries[:, None], near), axis=1)],
            valid=torch.from_numpy(np.concatenate((np.ones((len(queries), 1), bool), ~drop), axis=1)),
            relevant=torch.from_numpy(world.labels[near] == own),
            positives=vectors[positive],
            candidates=vectors,
            same=torch.from_numpy(world.labels == own),
            usable=torch.from_numpy(np.arange(len(world.rows)) != queries[:, None]),
            queries=config.batch,
            k=k,
            positive_rows=torch.from_numpy(positive),
        )
