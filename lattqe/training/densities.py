"""Worlds of every density: classes of two images or of hundreds, with and without distractors, in many spaces.

A network that has met only large classes averages whatever it finds; where one image in ten thousand is relevant, that
destroys the result. Here each batch is a world of its own: one set or several, at one of several widths, sometimes
in a space that another descriptor would give, sometimes synthetic landmarks or clusters; its classes are whole, or
each is cut to a number of its own, or all of one set's are cut to the same number while the others stay whole as
distractors, or all of them are cut alike: in such a collection no list shows what a large class looks like.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lattqe import adaptation
from lattqe.training.config import TrainingConfig
from lattqe.training.plan import TrainingData
from lattqe.training.sampling import Batch, Members, Stream, draw_k, generator

WHOLE = 1 << 30  # a class that is not cut
FEWEST_CLASSES = 6  # a world of fewer has hardly a wrong neighbor to tell from a right one
FEWEST_ROWS = 400  # of a world, where the set has as many
TINY, TINY_ROWS = 0.15, 20  # share of worlds that may be smaller, and how small
ONE_SET = 0.45  # share of the worlds that are made of one set; the others mix two or more
# Shares of the ways in which classes are cut; what is left: a random part of the classes is cut.
ALL_WHOLE, ONE_SET_CUT, EACH_CUT = 0.45, 0.3, 0.12
MOST_CUT = 40  # images of a class in worlds where one set is cut
MOST_ALIKE = 16  # images to be found of a class in worlds where all are cut alike
WHITENED, SHIFTED = 0.15, 0.25  # shares of the worlds whose space is scaled otherwise, and whose mean is not zero
NOISY, ROUNDED, BENT, RECTIFIED = 0.04, 0.03, 0.04, 0.08  # shares of those altered in one of these ways besides
UNITS = (64, 512)  # columns, at least and at most, of worlds that are never negative
CLUSTER_WIDTHS, CLUSTER_ROWS = (16, 32, 64, 128, 256, 512), 4_000
SYNTHETIC_WIDTHS = (64, 128, 256, 512)
ADAPTED_SAMPLE = 1_000  # rows of a world that its adaptation is learned from: a sample takes a tenth of the time


class Pool(NamedTuple):
    """Rows to draw worlds from: vectors (n, D), labels (n,), the set of each row (n,) and each column's spread (D,)."""

    vectors: NDArray[np.floating]
    labels: NDArray[np.int64]
    sets: NDArray[np.int64]
    spread: NDArray[np.floating]


@dataclass(frozen=True)
class DensityWorld:
    """vectors (m, D) float32 of unit length, labels (m,) 0..classes-1, which classes (classes,) are asked for."""

    vectors: NDArray[np.float32]
    labels: NDArray[np.int64]
    asked: NDArray[np.bool_]


class DensitySampler:
    """A batch is a world and some queries of it: a pure function of (seed, step)."""

    def __init__(self, data: TrainingData, config: TrainingConfig) -> None:
        self.data, self.config = data, config
        self.widths = [width for width in config.widths if width < data.dim] + [data.dim]

    @cached_property
    def spreads(self) -> list[NDArray[np.floating]]:
        """Standard deviation (D,) of each column of each set."""
        return [
            self.data.vectors[start:stop].astype(np.float32).std(axis=0)
            for start, stop in zip(self.data.bounds, self.data.bounds[1:])
        ]

    @cached_property
    def synthetic(self) -> list[Pool]:
        """Landmarks that nothing but a seed is needed for."""
        from lattqe.datasets.synthetic import SyntheticWorld

        pools = []
        for number, width in enumerate(SYNTHETIC_WIDTHS):
            split = SyntheticWorld(seed=1 + number, dim=width).split("train")
            vectors = split.vectors()
            pools.append(
                Pool(vectors, split.labels().astype(np.int64), np.zeros(len(vectors), np.int64), vectors.std(axis=0))
            )
        return pools

    def pool(self, rng: np.random.Generator, clusters: float, joined: bool) -> Pool:
        """The rows of one set or of several, or a synthetic world; clusters: how often nothing but those; joined: of
        all sets, as classes of a few images make few rows.
        """
        kind = rng.random()
        if kind < self.config.synthetic:
            return self.synthetic[rng.integers(len(self.synthetic))]
        if kind < self.config.synthetic + clusters:
            return _clusters(rng)
        sets = len(self.data.bounds) - 1
        several = 1 if sets == 1 or rng.random() < ONE_SET else int(rng.integers(2, sets + 1))
        several = sets if joined else several
        chosen = rng.permutation(sets)[:several]
        width = int(rng.choice(self.widths))
        ranges = [np.arange(self.data.bounds[s], self.data.bounds[s + 1]) for s in chosen]
        rows = np.concatenate(ranges)
        return Pool(
            self.data.vectors[rows, :width],
            self.data.labels[rows],
            np.repeat(np.arange(several), [len(r) for r in ranges]),
            np.mean([self.spreads[s][:width] for s in chosen], axis=0),
        )

    def world(self, rng: np.random.Generator, most: int, ordinary: bool) -> DensityWorld:
        """Some rows of a pool, at most `most` of them; ordinary: in a space that is not altered, and no clusters."""
        alike = self.config.alike > 0 and bool(rng.random() < self.config.alike)
        pool = self.pool(rng, 0.0 if ordinary else self.config.clusters, joined=alike)
        order = rng.permutation(len(pool.labels))
        _, first, inverse, sizes = np.unique(
            pool.labels[order], return_index=True, return_inverse=True, return_counts=True
        )
        limit, asked = _cut_alike(rng, len(sizes)) if alike else _limits(rng, sizes, pool.sets[order][first])
        by_class = np.argsort(inverse, kind="stable")
        place = np.empty(len(order), dtype=np.int64)  # of a row among the rows of its class, in random order
        place[by_class] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        kept = np.flatnonzero(place < limit[inverse])
        kept = _shrunk(rng, kept, inverse, np.minimum(sizes, limit), limit, most)
        present, labels = np.unique(inverse[kept], return_inverse=True)
        often = 0.0 if ordinary else self.config.altered
        vectors = _altered(rng, pool.vectors[order[kept]].astype(np.float32), pool.spread, often)
        return DensityWorld(_adapted(rng, vectors, self.config.adapted), labels, asked[present])

    def batch(self, step: int, part: slice) -> Batch:
        """The queries `part` of this step; every worker draws and searches for all, so that all agree on near ties."""
        config, rng = self.config, generator(self.config.seed, Stream.SAMPLING, step)
        hops = bool(config.hop_every) and step % config.hop_every == 0
        # A network that meets every kind of space from the start learns restraint, and never quite what it restrains.
        ordinary = step < config.ordinary * config.steps
        while True:
            world = self.world(rng, config.hop_world_rows if hops else config.world_rows, ordinary)
            if (np.bincount(world.labels)[world.asked] >= 2).any():
                break
        queries = _queries(rng, world, config.batch)
        return self._through_hops(rng, world, queries, part) if hops else self._search(rng, world, queries, part)

    def _search(self, rng: np.random.Generator, world: DensityWorld, queries: NDArray[np.int64], part: slice) -> Batch:
        """Queries that search the world they are part of, leaving themselves out."""
        config, rows = self.config, len(world.labels)
        k, depth = (min(wanted, rows - 1) for wanted in (draw_k(config, rng), config.network.background))
        depth = max(k, depth)
        positive = Members(world.labels).others(queries, rng.random((config.batch, config.positives)))
        vectors = torch.from_numpy(world.vectors)
        scores = vectors[queries] @ vectors.T
        scores[torch.arange(len(queries)), queries] = -2  # below every cosine
        near = scores.topk(depth).indices.numpy()[part]
        queries, positive = queries[part], positive[part]
        own = world.labels[queries, None]
        return Batch(
            items=vectors[np.concatenate((queries[:, None], near), axis=1)],
            valid=torch.ones(len(queries), 1 + depth, dtype=torch.bool),
            relevant=torch.from_numpy(world.labels[near] == own),
            positives=vectors[positive],
            candidates=vectors,
            same=torch.from_numpy(world.labels == own),
            usable=torch.from_numpy(np.arange(rows) != queries[:, None]),
            queries=config.batch,
            k=k,
            positive_rows=torch.from_numpy(positive),
        )

    def _through_hops(
        self, rng: np.random.Generator, world: DensityWorld, queries: NDArray[np.int64], part: slice
    ) -> Batch:
        """Queries that are taken out of the world, which is augmented before they search it."""
        config = self.config
        members = Members(world.labels)
        outside = np.zeros(len(world.labels), dtype=bool)
        outside[_one_of_each(world.labels, queries)] = True
        number = np.cumsum(~outside) - 1
        # One query of each class is taken out, more could leave it empty; of a class asked for twice it counts twice.
        queries = _outside_of_class(world.labels, outside, queries)
        positive = number[members.others(queries, rng.random((config.batch, config.positives)))]
        labels, vectors = world.labels[~outside], torch.from_numpy(world.vectors[~outside])
        hopping = _around(vectors, torch.from_numpy(world.vectors[queries]), positive, config.hop_rows)
        asked = torch.from_numpy(world.vectors[queries[part]])
        own, positive = world.labels[queries[part], None], positive[part]
        same = torch.from_numpy(labels == own)
        return Batch(
            items=asked[:, None],
            valid=torch.ones(len(asked), 1, dtype=torch.bool),
            relevant=torch.zeros(len(asked), 0, dtype=torch.bool),
            positives=vectors[positive],
            candidates=vectors,
            same=same,
            usable=torch.ones_like(same),
            queries=config.batch,
            k=min(draw_k(config, rng), len(vectors) - 1),
            positive_rows=torch.from_numpy(positive),
            labels=torch.from_numpy(labels),
            hops=int(rng.integers(max(config.hops - 1, 1), config.hops + 2)),  # 0 would be a batch of queries alone
            row_k=min(int(rng.integers(max(config.hop_k // 2, 1), config.hop_k + 1)), len(vectors) - 1),
            hopping=hopping,
        )


def _clusters(rng: np.random.Generator) -> Pool:
    """Classes that are nothing but clusters, some of them in groups: where plain averaging is at its best.

    How far a class stands out from chance is drawn, and how fast its columns fall off, so that there are few dimensions
    in some and all of them in others.
    """
    width, classes = int(rng.choice(CLUSTER_WIDTHS)), int(np.exp(rng.uniform(np.log(20), np.log(250))))
    sizes = np.exp(rng.normal(0, rng.uniform(0, 0.8), classes))
    sizes = np.maximum(2, sizes / sizes.sum() * CLUSTER_ROWS).astype(np.int64)
    labels = np.repeat(np.arange(classes), sizes)
    ranks = np.arange(1, width + 1)
    between, within = ((ranks ** -rng.uniform(0, 0.8)).astype(np.float32) for _ in range(2))
    groups, shared = rng.integers(0, max(1, classes // 6), classes), rng.uniform(0, 0.7) * (rng.random() < 0.5)

    def draw(count: int, spectrum: NDArray[np.float32]) -> NDArray[np.float32]:
        return rng.standard_normal((count, width), dtype=np.float32) * (spectrum / np.linalg.norm(spectrum))

    centres = np.sqrt(shared) * draw(groups.max() + 1, between)[groups] + np.sqrt(1 - shared) * draw(classes, between)
    # Cosines within a class are 1 / (1 + noise²) on average, those of chance 0 ± 1 / √dimensions.
    dimensions = float((within**2).sum() ** 2 / (within**4).sum())
    stands_out = np.exp(rng.uniform(np.log(1.5), np.log(10)))
    noise = np.sqrt(max(0.15, np.sqrt(dimensions) / stands_out - 1))
    vectors = scaled_rows(centres[labels] + noise * draw(len(labels), within))
    return Pool(vectors, labels, np.zeros(len(labels), np.int64), vectors.std(axis=0))


def _around(vectors: torch.Tensor, queries: torch.Tensor, positive: NDArray[np.int64], most: int) -> torch.Tensor:
    """Rows (r,) of vectors (m, D) in order: the positives (b, p) and what is nearest to the queries (b, D).

    At most so many, all of a small world: what lies far from every query decides nothing, but lists are those of the
    whole world.
    """
    if len(vectors) <= most:
        return torch.arange(len(vectors))
    best = torch.full((len(vectors),), len(vectors))  # rank in the list that has it first
    ranks = torch.arange(min(most, len(vectors))).expand(len(queries), -1)
    near = (queries @ vectors.T).topk(ranks.shape[1]).indices
    best.scatter_reduce_(0, near.flatten(), ranks.flatten(), "amin")
    best[torch.from_numpy(positive.ravel())] = -1
    return best.argsort(stable=True)[:most].sort().values


def _limits(
    rng: np.random.Generator, sizes: NDArray[np.int64], sets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """How many images of each class (classes,) the world has, and which classes (classes,) are asked for."""
    count = len(sizes)
    present = rng.random(count) < rng.uniform(0.3, 1)
    if present.sum() < FEWEST_CLASSES:
        present[:] = True
    limit, asked, way = np.full(count, WHOLE), np.ones(count, dtype=bool), rng.random()
    if ALL_WHOLE <= way < ALL_WHOLE + ONE_SET_CUT:
        asked = sets == 0
        m = 1 + np.exp(max(0.0, rng.uniform(-0.7, np.log(MOST_CUT))))  # a third of these: one image to be found
        cut = np.full(count, m) if rng.random() < 0.7 else np.maximum(2, m * np.exp(rng.normal(0, 0.5, count)))
        limit = np.where(asked, cut, limit).astype(np.int64)
        present |= rng.random(count) < 0.5
    elif ALL_WHOLE + ONE_SET_CUT <= way < ALL_WHOLE + ONE_SET_CUT + EACH_CUT:
        limit = np.exp(rng.uniform(np.log(2), np.log(257), count)).astype(np.int64)
    elif way >= ALL_WHOLE + ONE_SET_CUT + EACH_CUT:
        some = rng.random(count) < rng.uniform(0.3, 0.9)
        draws = rng.uniform(np.log(2), np.log(18), count)
        limit = np.where(some, np.exp(draws if rng.random() < 0.5 else draws[0]).astype(np.int64), limit)
    return np.where(present, limit, 0), asked


def _cut_alike(rng: np.random.Generator, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """As `_limits`: every class has about the same few images, a query's and at least one to be found."""
    m = 1 + np.exp(max(0.0, rng.uniform(-1, np.log(MOST_ALIKE))))  # a quarter of these: one image to be found
    limit = np.full(count, m) if rng.random() < 0.6 else np.maximum(2, m * np.exp(rng.normal(0, 0.5, count)))
    return limit.astype(np.int64), np.ones(count, dtype=bool)


def _shrunk(
    rng: np.random.Generator,
    kept: NDArray[np.int64],
    inverse: NDArray[np.int64],
    sizes: NDArray[np.int64],
    limit: NDArray[np.int64],
    most: int,
) -> NDArray[np.int64]:
    """Rows (m,) reduced to a random number: classes go, or rows of classes that are not cut, so that cuts stay."""
    fewest = TINY_ROWS if rng.random() < TINY else FEWEST_ROWS
    target = int(np.exp(rng.uniform(np.log(min(fewest, most)), np.log(most))))
    if len(kept) > target and rng.random() < 0.6:
        order = rng.permutation(len(sizes))
        order = order[sizes[order] > 0]  # of classes that the world does not have nothing would be left
        fits = max(FEWEST_CLASSES, int((np.cumsum(sizes[order]) <= target).sum()))
        stays = np.zeros(len(sizes), dtype=bool)
        stays[order[:fits]] = True
        kept = kept[stays[inverse[kept]]]
    surplus = len(kept) - target
    if surplus > 0:
        whole = np.flatnonzero(limit[inverse[kept]] == WHOLE)
        goes = rng.permutation(whole)[:surplus] if len(whole) > surplus else rng.permutation(len(kept))[:surplus]
        kept = np.delete(kept, goes)
    return kept


def _altered(
    rng: np.random.Generator, x: NDArray[np.float32], spread: NDArray[np.floating], often: float = 1.0
) -> NDArray[np.float32]:
    """Vectors (m, D) as another descriptor would give them; `often` times as often as usual, else as they are.

    Whitened more or less; noisy, rounded to few bits, bent by a power, or never negative, as a rectified layer's are;
    with a mean that was not taken away.
    """
    spread = np.maximum(spread, 1e-4).astype(np.float32)
    if rng.random() < often * WHITENED:
        x = x * spread ** rng.uniform(-0.5, 1.2)
    x, width = scaled_rows(x), x.shape[1]
    way = rng.random() / max(often, 1e-9)
    if way < NOISY:
        x = scaled_rows(x + rng.standard_normal(x.shape, dtype=np.float32) * rng.uniform(0.1, 0.8) / np.sqrt(width))
    elif way < (edge := NOISY + ROUNDED):
        step = np.abs(x).max() / rng.choice([2, 4, 8])
        x = scaled_rows(np.round(x / step) * step + 1e-6)  # a row that rounds to zero is a row that all others resemble
    elif way < (edge := edge + BENT):
        x = scaled_rows(np.sign(x) * np.abs(x) ** rng.uniform(0.3, 2))
    elif way < edge + RECTIFIED:
        units = int(np.clip(width * rng.integers(1, 4), *UNITS))
        mixed = x @ (rng.standard_normal((width, units), dtype=np.float32) / np.sqrt(width))
        x = scaled_rows(np.maximum(mixed - rng.uniform(-0.5, 1) / np.sqrt(width), 0) + 1e-6)
    if rng.random() < often * SHIFTED:
        mean = rng.standard_normal((1, x.shape[1]), dtype=np.float32)
        x = scaled_rows(x + np.exp(rng.uniform(np.log(0.2), np.log(3))) * scaled_rows(mean))
    return x


def _adapted(rng: np.random.Generator, x: NDArray[np.float32], often: float) -> NDArray[np.float32]:
    """Unit vectors (m, D) adapted to themselves in that share of the worlds, as those of an augmented index are."""
    if rng.random() >= often or len(x) < adaptation.FEWEST:
        return x
    rows = np.sort(rng.permutation(len(x))[:ADAPTED_SAMPLE])
    vectors = torch.from_numpy(x)
    scores = vectors[rows] @ vectors.T
    scores[torch.arange(len(rows)), rows] = -2  # below every cosine
    near = scores.topk(adaptation.NEAR).indices.numpy()
    return adaptation.learn(x[rows], x[near], len(x)).apply(x)


def scaled_rows(x: NDArray[np.floating]) -> NDArray[np.float32]:
    """Rows (n, D) scaled to length 1; a row of zeros stays one."""
    return (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def _queries(rng: np.random.Generator, world: DensityWorld, count: int) -> NDArray[np.int64]:
    """Rows (count,) of asked classes of two images or more, classes in turn so that small ones are asked as often."""
    sizes = np.bincount(world.labels)
    able = np.flatnonzero(world.asked & (sizes >= 2))
    turns = np.concatenate([rng.permutation(able) for _ in range(-(-count // len(able)))])[:count]
    order = rng.permutation(len(world.labels))
    by_class = order[np.argsort(world.labels[order], kind="stable")]
    first = np.cumsum(sizes) - sizes
    again = np.zeros(len(sizes), dtype=np.int64)
    rows = []
    for label in turns:
        rows.append(by_class[first[label] + again[label] % sizes[label]])
        again[label] += 1
    return np.array(rows)


def _one_of_each(labels: NDArray[np.int64], queries: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first query of each class: taking out more could leave a class empty."""
    return queries[np.unique(labels[queries], return_index=True)[1]]


def _outside_of_class(
    labels: NDArray[np.int64], outside: NDArray[np.bool_], queries: NDArray[np.int64]
) -> NDArray[np.int64]:
    """For each query (b,), the row of its class that was taken out."""
    taken = np.full(labels.max() + 1, -1)
    taken[labels[outside]] = np.flatnonzero(outside)
    return taken[labels[queries]]
