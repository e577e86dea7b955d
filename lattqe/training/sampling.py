"""Where batches come from: the paper's tuples, and random worlds.

Tuples: queries, positives and a pool of negatives from the whole training set. Worlds: each batch searches a random
part of one set's classes and images, so that neighbor lists come from databases of many sizes, and the network learns
to read a list and not to recognise the training set's. `densities` has worlds of every density.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from lattqe.training.batch import Batch
from lattqe.training.config import TrainingConfig
from lattqe.training.data import TrainingData
from lattqe.training.randomness import Stream, generator


class Members:
    """Rows by class, to draw another image of a row's class in one vectorised step."""

    def __init__(self, labels: NDArray[np.int64]) -> None:
        self.order = np.argsort(labels, kind="stable")
        self.sizes = np.bincount(labels)
        self.first = np.concatenate(([0], np.cumsum(self.sizes)))[:-1]
        self.place = np.empty(len(labels), dtype=np.int64)  # of a row among the rows of its class
        self.place[self.order] = np.arange(len(labels)) - self.first[labels[self.order]]
        self.labels = labels

    def others(self, rows: NDArray[np.int64], draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """For rows (b,) and uniform draws (b, p), rows (b, p) of the same class, never the row itself."""
        label = self.labels[rows][:, None]
        pick = (draws * (self.sizes[label] - 1)).astype(np.int64)
        pick += pick >= self.place[rows][:, None]
        return self.order[self.first[label] + pick]


def draw_k(config: TrainingConfig, rng: np.random.Generator) -> int:
    """How many neighbors the lists of a batch have."""
    if config.k_draw == "log":
        return round(math.exp(rng.uniform(math.log(config.k_min), math.log(config.k_max))))
    return int(rng.integers(config.k_min, config.k_max + 1))


def dropped(shape: tuple[int, int], drop_max: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which neighbors (b, k) are dropped: Bernoulli with a probability for each query from U(0, drop_max)."""
    return rng.random(shape) < drop_max * rng.random((shape[0], 1))


class Positives:
    """Whom a query may have as a positive: another image of its class, or what the data set's own pairs say.

    Sets without pairs go by labels, whatever the others have.
    """

    def __init__(self, data: TrainingData, published: bool) -> None:
        self.members = Members(data.labels)
        pairs = data.pairs if published and data.pairs is not None else np.empty((0, 2), dtype=np.int64)
        self.positive = pairs[:, 1]
        self.count = np.bincount(pairs[:, 0], minlength=data.rows)
        self.first = np.concatenate(([0], np.cumsum(self.count)))[:-1]
        by_labels = self.members.sizes[data.labels] > 1
        for start, stop in zip(data.bounds, data.bounds[1:]):
            if self.count[start:stop].any():
                by_labels[start:stop] = False
        self.eligible = np.flatnonzero(by_labels | (self.count > 0))

    def draw(self, rows: NDArray[np.int64], draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """For queries (b,) and uniform draws (b, p) their positives (b, p)."""
        paired = self.count[rows] > 0
        drawn = np.empty(draws.shape, dtype=np.int64)
        drawn[~paired] = self.members.others(rows[~paired], draws[~paired])
        mine = rows[paired]
        drawn[paired] = self.positive[
            self.first[mine][:, None] + (draws[paired] * self.count[mine][:, None]).astype(np.int64)
        ]
        return drawn


class TupleSampler:
    """Queries drawn uniformly from all classes of two images or more; negatives come from a pool drawn now and then.

    The hardest negatives are picked by the loss, which knows the current expanded query.
    """

    def __init__(self, data: TrainingData, config: TrainingConfig) -> None:
        if data.neighbors is None:
            raise ValueError("tuples need a neighbor graph")
        self.data, self.config, self.neighbors = data, config, data.neighbors
        self.positives = Positives(data, config.pairs == "published")
        self.eligible = self.positives.eligible
        self._pool = lru_cache(maxsize=2)(self._draw_pool)  # two: the next one is drawn while this one is in use

    def _draw_pool(self, number: int) -> tuple[NDArray[np.int64], torch.Tensor, NDArray[np.int64]]:
        rng = generator(self.config.seed, Stream.POOL, number)
        rows = np.sort(rng.permutation(self.data.rows)[: self.config.pool])
        return rows, torch.from_numpy(self.data.gather(rows)), self.data.labels[rows]

    def batch(self, step: int, part: slice) -> Batch:
        """The queries `part` of this step; all draws are made for the global batch, vectors read for the part."""
        config, rng = self.config, generator(self.config.seed, Stream.SAMPLING, step)
        queries = rng.choice(self.eligible, config.batch, replace=len(self.eligible) < config.batch)
        ks = np.array([draw_k(config, rng) for _ in range(config.batch if config.k_for == "query" else 1)])
        k = min(int(ks.max()), self.neighbors.shape[1])
        near = self.neighbors[queries, : max(k, config.network.background)]
        drop = dropped(near.shape, config.drop_max, rng)
        if config.k_for == "query":  # a shorter list ends earlier; what lies behind all of them is background
            drop[:, :k] |= np.arange(k) >= ks[:, None]
        positive = self.positives.draw(queries, rng.random((config.batch, config.positives)))
        queries, near, drop, positive = queries[part], near[part], drop[part], positive[part]

        labels = self.data.labels
        valid = np.concatenate((np.ones((len(queries), 1), bool), ~drop & (near >= 0)), axis=1)
        items = self.data.gather(np.concatenate((queries[:, None], near), axis=1))
        pool_rows, pool, pool_labels = self._pool(step // config.pool_steps)
        return Batch(
            items=torch.from_numpy(items),
            valid=torch.from_numpy(valid),
            relevant=torch.from_numpy(labels[near] == labels[queries, None]),
            positives=torch.from_numpy(self.data.gather(positive)),
            candidates=pool,
            same=torch.from_numpy(pool_labels == labels[queries, None]),
            usable=torch.from_numpy(pool_rows != queries[:, None]),
            queries=config.batch,
            k=k,
            classes=torch.from_numpy(pool_labels),
        )


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
