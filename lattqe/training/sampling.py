"""Where batches come from: the paper's tuples, and random worlds; made ahead of the step that uses them, by one thread.

A batch is one update's material: queries with their neighbors, and what the losses compare the expanded queries with.
Tuples: queries, positives and a pool of negatives from the whole training set. Worlds: each batch searches a random
part of one set's classes and images, so that neighbor lists come from databases of many sizes, and the network learns
to read a list and not to recognise the training set's. `densities` has worlds of every density.

Randomness is a pure function of (seed, stream, step): a worker that resumes or joins draws the same numbers.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.weak import WeakTensorKeyDictionary

from lattqe.training.config import TrainingConfig
from lattqe.training.plan import TrainingData

AHEAD = 2
FEWEST_CLASSES = 4  # a world of fewer has hardly a wrong neighbor to tell from a right one
FEWEST_IMAGES = 3  # of a query's class in its world: itself, one to find near and one to find far


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
        self.tokens: list[int] = []

    def begin(self, step: int, valid: torch.Tensor | None = None) -> None:
        """Set the generators to where they stand at the beginning of a step; valid (b, t): what its lists hold."""
        if valid is not None and valid.device.type == "cpu":
            self.tokens = [int(part.sum()) for part in valid.chunk(len(self.generators))]
        for slot, source in zip(self.slots, self.generators):
            source.manual_seed(torch_seed(self.seed, Stream.DROPOUT, step, slot))

    def draw(self, like: torch.Tensor, keep: float) -> torch.Tensor:
        """A mask like (n, ...) of zeros and 1 / keep: n is a whole number of slots, or (m, W) their valid tokens."""
        mask = torch.empty_like(like)
        parts = mask.split(self.tokens) if self.tokens and like.dim() == 2 else mask.chunk(len(self.generators))
        for part, source in zip(parts, self.generators):
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


@dataclass(frozen=True)
class Batch:
    """The part of the global batch that one worker holds: b queries.

    items (b, 1 + k, D) float32: the query, then its neighbors by rank; valid (b, 1 + k) bool: not dropped, not padding;
    relevant (b, k) bool: the neighbor is of the query's class; positives (b, p, D): images of the query's class;
    candidates (m, D): the pool or world the query searches; same (b, m) bool: of the query's class;
    usable (b, m) bool: False for the query itself; queries: size of the global batch, what losses are divided by;
    k: how many of the neighbors are weighed one by one (a background may make the list longer);
    positive_rows (b, p): where the positives stand among the candidates, if they do;
    classes (m,): the candidates' classes, where negatives are to be of distinct ones.
    hops: above 0, the candidates are augmented by so many hops over the graph of their row_k nearest before the
    queries, which are not among their rows, search them; labels (m,) are the candidates'; hopping (r,): which of the
    candidates are augmented, the others stay what they are.
    """

    items: torch.Tensor
    valid: torch.Tensor
    relevant: torch.Tensor
    positives: torch.Tensor
    candidates: torch.Tensor
    same: torch.Tensor
    usable: torch.Tensor
    queries: int
    k: int
    positive_rows: torch.Tensor | None = None
    classes: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    hops: int = 0
    row_k: int = 0
    hopping: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same on a device. A pool that many batches share goes there once, and stays until it is drawn again."""
        if device.type == "cpu":
            return self
        there = _POOLS.get(self.candidates)
        if there is None or there.device.type != device.type:
            _POOLS[self.candidates] = there = self.candidates.to(device, non_blocking=True)
        return self._each(lambda tensor: tensor.to(device, non_blocking=True), there)

    def pinned(self) -> "Batch":
        """The same in memory that a GPU copies from while the process goes on; a pool that batches share only once."""
        pool = _PINNED.get(self.candidates)
        if pool is None:
            _PINNED[self.candidates] = pool = self.candidates.pin_memory()
        return self._each(torch.Tensor.pin_memory, pool)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor], candidates: torch.Tensor) -> "Batch":
        changed: dict[str, Any] = {
            name: change(value)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor) and name != "candidates"
        }
        return dataclasses.replace(self, candidates=candidates, **changed)


# Candidates on a device, and in pinned memory, for as long as the sampler or a batch has them here.
_POOLS, _PINNED = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()


class Sampler(Protocol):
    """Makes batches; a batch is a pure function of (seed, step), a part of it of the queries asked for."""

    def batch(self, step: int, part: slice) -> Batch:
        """The queries `part` of the global batch of this step."""
        ...


@contextmanager
def prefetched(sampler: Sampler, steps: range, part: slice, device: torch.device) -> Iterator[Iterator[Batch]]:
    """An iterator over the batches of `steps`, ready to be sent to the device; what it yields depends on (seed, step)
    alone, not on the thread.
    """

    def make(step: int) -> Batch:
        batch = sampler.batch(step, part)
        return batch.pinned() if device.type == "cuda" else batch

    with ThreadPoolExecutor(1, thread_name_prefix="sampler") as thread:

        def batches() -> Iterator[Batch]:
            waiting: list[Future[Batch]] = [thread.submit(make, step) for step in steps[:AHEAD]]
            for step in steps:
                ready = waiting.pop(0).result()
                if step + AHEAD < steps.stop:
                    waiting.append(thread.submit(make, step + AHEAD))
                yield ready

        try:
            yield batches()
        finally:
            thread.shutdown(cancel_futures=True)


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
