"""A synthetic world of landmarks: labelled training, validation and test splits and any number of distractors.

    world = SyntheticWorld(seed=0)
    oxford = world.split("oxford")             # few relevant images for each query; "paris": many
    oxford.vectors(0, 1000), oxford.query_vectors, oxford.truth

Row r of a split is a function of (seed, split, r) alone: any range can be made anywhere, in any order, in memory that
depends on the range (and on the number of labelled landmarks), so a million rows stream through in blocks.

A landmark is a row of parts. A photograph stands somewhere along the row and sees the parts near it; two photographs
are alike as far as they see the same parts, so that the ends of a long row share nothing but are joined by photographs
in between. Parts partly follow styles that other landmarks follow too (look-alikes). Every photograph also shows
clutter that has nothing to do with the landmark, and noise. docs/synthetic.md has the formulas and what they lead to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lattqe.datasets.revisited import RevisitedSet
from lattqe.errors import LattqeError
from lattqe.evaluation.truth import GradedTruth, Judgements, LabelTruth

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class LandmarkConfig:
    """The constants of the world. docs/synthetic.md says how they were chosen, and by looking at what."""

    parts: tuple[int, int] = (3, 7)  # shortest and longest row of parts; far ends of 3 still overlap, of 7 do not
    identity: float = 0.1  # share of a landmark's look that is the same from everywhere: stone, colour
    styles: int = 64  # looks that parts of different landmarks may share: arches, domes, towers
    style_shape: tuple[float, float] = (1.0, 2.0)  # Beta: most parts are mostly their own, some mostly style
    clutters: int = 96  # kinds of sky, trees, crowds, night
    clutter_zipf: float = 0.5  # some of them are much more frequent
    clutter: float = 0.7  # median strength beside a landmark of strength 1
    clutter_spread: float = 0.5  # log-normal: some photographs show mostly clutter
    crop: float = 0.5  # queries are cropped to the landmark: half the clutter
    noise: float = 0.6  # median norm of the photometric noise
    noise_spread: float = 0.25
    zoom: float = 0.7  # width of the field of view, in parts
    zoom_spread: float = 0.25
    wander: float = 0.5  # how far photographers stand from a popular viewpoint, in parts
    easy: float = 0.65  # visibility from which a relevant photograph is easy
    hard: float = 0.08  # and hard; below it is junk: another side of the landmark, or hardly anything of it


@dataclass(frozen=True)
class Landmarks:
    """Some landmarks. identity: (n, D); parts: (n, P, D); count: (n,) parts of each; popularity: (n, P), sums to 1."""

    identity: FloatArray
    parts: FloatArray
    count: NDArray[np.int64]
    popularity: NDArray[np.float64]


@dataclass(frozen=True)
class Views:
    """What photographs show, not how it looks: seen (n, P) unit weights over parts; clutter (n,) its strength."""

    seen: FloatArray
    clutter: FloatArray


def unit(x: NDArray[np.floating]) -> FloatArray:
    """Scale the last axis to length 1."""
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


class LandmarkModel:
    """Draws landmarks, views and descriptors. Its own directions (styles, clutter) depend on the seed alone."""

    def __init__(self, seed: int, dim: int, config: LandmarkConfig) -> None:
        self.dim, self.config = dim, config
        # Descriptors of real networks have a decaying spectrum; it makes unrelated images more alike than chance.
        self._spectrum = (1 / (1 + np.arange(dim) / (dim / 2))).astype(np.float32)
        rng = np.random.default_rng([seed])
        self._styles = self._directions(rng, config.styles)
        self._clutters = self._directions(rng, config.clutters)
        frequency = (1 + np.arange(config.clutters)) ** -config.clutter_zipf
        self._clutter_cumulated = np.cumsum(frequency / frequency.sum())

    def _directions(self, rng: np.random.Generator, *shape: int) -> FloatArray:
        return unit(rng.standard_normal((*shape, self.dim), dtype=np.float32) * self._spectrum)

    def landmarks(self, rng: np.random.Generator, count: int, longest: int | None = None) -> Landmarks:
        """Draw landmarks with rows of at most `longest` parts."""
        shortest, longest = self.config.parts[0], longest or self.config.parts[1]
        own = self._directions(rng, count, longest)
        style = self._styles[rng.integers(self.config.styles, size=(count, longest))]
        share = rng.beta(*self.config.style_shape, size=(count, longest, 1))
        parts = rng.integers(shortest, longest + 1, size=count)
        popularity = rng.standard_gamma(1.0, size=(count, longest)) + 0.15
        popularity[np.arange(longest) >= parts[:, None]] = 0
        return Landmarks(
            identity=self._directions(rng, count),
            parts=unit(np.sqrt(share) * style + np.sqrt(1 - share) * own),
            count=parts,
            popularity=popularity / popularity.sum(axis=1, keepdims=True),
        )

    def views(
        self, rng: np.random.Generator, landmarks: Landmarks, which: NDArray[np.int64], crop: float = 1.0
    ) -> Views:
        """Draw one photograph of each of the landmarks `which` (n,)."""
        config, n = self.config, len(which)
        viewpoint = (rng.random((n, 1)) > np.cumsum(landmarks.popularity[which], axis=1)[:, :-1]).sum(axis=1)
        wander, zoom, clutter = rng.standard_normal((3, n))
        last = landmarks.count[which] - 1
        place = np.clip(viewpoint + config.wander * wander, 0, last)
        width = config.zoom * np.exp(config.zoom_spread * zoom)
        part = np.arange(landmarks.parts.shape[1])
        seen = np.exp(-0.5 * ((place[:, None] - part) / width[:, None]) ** 2)
        seen[part > last[:, None]] = 0
        strength = crop * config.clutter * np.exp(config.clutter_spread * clutter)
        return Views(unit(seen), strength.astype(np.float32))

    def describe(
        self, rng: np.random.Generator, landmarks: Landmarks, which: NDArray[np.int64], views: Views
    ) -> FloatArray:
        """(n, D) unit descriptors of the views (n,) of the landmarks `which` (n,)."""
        config, n = self.config, len(which)
        seen = unit((views.seen[:, None, :] @ landmarks.parts[which])[:, 0])
        content = np.sqrt(config.identity) * landmarks.identity[which] + np.sqrt(1 - config.identity) * seen
        kinds = np.searchsorted(self._clutter_cumulated, rng.random((n, 2)))
        kinds = np.minimum(kinds, config.clutters - 1)  # the last cumulated sum may be a hair below 1
        mixture = unit((rng.random((n, 2, 1)) * self._clutters[kinds]).sum(axis=1))
        strength = config.noise * np.exp(config.noise_spread * rng.standard_normal((n, 1)))
        noise = rng.standard_normal((n, self.dim), dtype=np.float32) * self._spectrum
        noise /= np.linalg.norm(self._spectrum)
        return unit(content + views.clutter[:, None] * mixture + strength * noise)

    def visibility(self, query: Views, other: Views) -> FloatArray:
        """(n,) how much of what one query view (1,) sees is visible in others (n,): common parts, times their clarity.

        A property of the scene, not of the descriptors: ground truth is made of it.
        """
        return (other.seen @ query.seen[0]) / np.sqrt(1 + other.clutter**2)


_BLOCK = 1024  # rows drawn together: the unit of random access
_SCENES = _BLOCK // 2  # unlabelled scenes of a block: two photographs of each on average
_SCENE_PARTS = 4
_LANDMARKS, _ORDER, _QUERIES, _VIEWS, _PIXELS, _SCENERY = range(6)  # independent random streams of a split
_LABELS_APART = 10_000_000  # labels of different splits never collide


@dataclass(frozen=True)
class SplitPlan:
    """How a split is populated: landmarks with Pareto-distributed numbers of photographs, and unlabelled background."""

    landmarks: int
    shape: float  # of the Pareto distribution: smaller is heavier
    fewest: int
    most: int
    background: int
    queries_per_landmark: int


PLANS = {
    "train": SplitPlan(landmarks=360, shape=0.7, fewest=3, most=400, background=0, queries_per_landmark=0),
    "val": SplitPlan(landmarks=40, shape=0.5, fewest=6, most=300, background=800, queries_per_landmark=5),
    "oxford": SplitPlan(landmarks=35, shape=1.0, fewest=12, most=200, background=2400, queries_per_landmark=2),
    "paris": SplitPlan(landmarks=14, shape=2.0, fewest=130, most=450, background=1200, queries_per_landmark=5),
}
SPLITS = (*PLANS, "distractors")


class SyntheticWorld:
    """All splits share one model of styles and clutter; their landmarks are disjoint.

    scale multiplies the numbers of landmarks and of background images of every split (sizes of landmarks stay).
    """

    def __init__(
        self,
        seed: int = 0,
        dim: int = 128,
        *,
        scale: float = 1.0,
        distractors: int = 20_000,
        config: LandmarkConfig | None = None,
    ) -> None:
        if seed < 0 or dim < 2 or scale <= 0 or distractors < 0:
            raise LattqeError(
                "a synthetic world needs seed >= 0, dim >= 2, scale > 0 and distractors >= 0,"
                f" got seed={seed}, dim={dim}, scale={scale}, distractors={distractors}"
            )
        self.seed, self.dim, self.scale, self.distractors = seed, dim, scale, distractors
        self.model = LandmarkModel(seed, dim, config or LandmarkConfig())

    def split(self, name: str) -> "SyntheticSplit":
        """One of 'train', 'val', 'oxford', 'paris', 'distractors'."""
        if name not in SPLITS:
            raise LattqeError(f"unknown split {name!r} of the synthetic world: choose one of {', '.join(SPLITS)}")
        if name == "distractors":
            return SyntheticSplit(self, name, SplitPlan(0, 1.0, 1, 1, self.distractors, 0))
        plan = PLANS[name]
        landmarks = max(1, round(plan.landmarks * self.scale))
        background = round(plan.background * self.scale)
        return SyntheticSplit(
            self, name, SplitPlan(landmarks, plan.shape, plan.fewest, plan.most, background, plan.queries_per_landmark)
        )


def landmark_sizes(plan: SplitPlan) -> NDArray[np.int64]:
    """(landmarks,) photographs of each: quantiles of a truncated Pareto distribution, so they depend on no seed."""
    level = (np.arange(plan.landmarks) + 0.5) / max(plan.landmarks, 1)
    kept = 1 - level * (1 - (plan.fewest / plan.most) ** plan.shape)
    return np.floor(plan.fewest * kept ** (-1 / plan.shape)).astype(np.int64)


class SyntheticSplit:
    """The rows, queries and ground truth of one split. `queries` is 0 for 'train' and 'distractors'."""

    def __init__(self, world: SyntheticWorld, name: str, plan: SplitPlan) -> None:
        self.world, self.name, self.plan, self.dim = world, name, plan, world.dim
        self._model = world.model
        self._stream = SPLITS.index(name)
        sizes = landmark_sizes(plan)
        self.rows = int(sizes.sum()) + plan.background
        self.queries = plan.landmarks * plan.queries_per_landmark
        # Photographs of one landmark are scattered over the rows; background has landmark -1.
        in_order = np.concatenate([np.repeat(np.arange(plan.landmarks), sizes), np.full(plan.background, -1)])
        self._landmark_of_row = self._rng(_ORDER).permutation(in_order.astype(np.int32))

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.world.seed, 1 + self._stream, *stream])

    @cached_property
    def _landmarks(self) -> Landmarks:
        return self._model.landmarks(self._rng(_LANDMARKS), self.plan.landmarks)

    def vectors(self, start: int = 0, stop: int | None = None) -> FloatArray:
        """(n, D) float32 unit descriptors of rows start..stop-1."""
        start, stop = self._range(start, stop)
        pieces = [
            self._block_vectors(block)[max(start - block * _BLOCK, 0) : stop - block * _BLOCK]
            for block in range(start // _BLOCK, -(-stop // _BLOCK))
        ]
        return np.concatenate([np.empty((0, self.dim), np.float32), *pieces])

    def labels(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """(n,) landmark of rows start..stop-1, -1 for background and distractors."""
        start, stop = self._range(start, stop)
        return self._label(self._landmark_of_row[start:stop])

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Names of rows start..stop-1."""
        return [f"{self.name}_{row:07d}" for row in range(*self._range(start, stop))]

    def blocks(self, size: int = 8 * _BLOCK) -> Iterator[tuple[FloatArray, list[str], NDArray[np.int32]]]:
        """All rows in order, as (vectors, ids, labels) of `size` rows at a time."""
        for start in range(0, self.rows, size):
            stop = min(start + size, self.rows)
            yield self.vectors(start, stop), self.ids(start, stop), self.labels(start, stop)

    @cached_property
    def query_vectors(self) -> FloatArray:
        """(nq, D) float32 unit descriptors of the queries: cropped photographs that are not in the database."""
        rng = self._rng(_QUERIES, _PIXELS)
        return self._model.describe(rng, self._landmarks, self._query_landmarks, self._query_views)

    @property
    def query_labels(self) -> NDArray[np.int32]:
        """(nq,) landmark of each query."""
        return self._label(self._query_landmarks.astype(np.int32))

    @property
    def query_ids(self) -> list[str]:
        """Names of the queries."""
        return [f"{self.name}_query_{query:05d}" for query in range(self.queries)]

    @property
    def label_truth(self) -> LabelTruth:
        """Relevant is every photograph of the query's landmark."""
        return LabelTruth(self.labels(), query_labels=self.query_labels)

    @cached_property
    def truth(self) -> GradedTruth:
        """Easy, hard and junk by what the database photograph shows of what the query shows."""
        views, config = self._all_views(), self._model.config
        grades: list[list[NDArray[np.int64]]] = [[], [], []]
        for query, landmark in enumerate(self._query_landmarks):
            rows = np.flatnonzero(self._landmark_of_row == landmark)
            mine = Views(self._query_views.seen[query : query + 1], self._query_views.clutter[query : query + 1])
            visible = self._model.visibility(mine, Views(views.seen[rows], views.clutter[rows]))
            level = (visible < config.easy).astype(int) + (visible < config.hard)
            for grade in range(3):
                grades[grade].append(rows[level == grade])
        return GradedTruth(Judgements.from_lists(*grades), self.rows)

    def revisited(self) -> RevisitedSet:
        """The ground truth with names, as a revisited ground-truth file has it (`save_gnd` writes one)."""
        truth = self.truth
        gnd = tuple(
            {name: mine.rows[mine.grades == grade].tolist() for grade, name in enumerate(("easy", "hard", "junk"))}
            for mine in (truth.judgements(query, query + 1) for query in range(self.queries))
        )
        return RevisitedSet(tuple(self.ids()), tuple(self.query_ids), gnd, (None,) * self.queries, truth)

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise LattqeError(f"rows {start}..{stop} are not within the {self.rows} rows of split {self.name!r}")
        return start, stop

    def _label(self, landmark: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(landmark < 0, -1, landmark + self._stream * _LABELS_APART).astype(np.int32)

    @property
    def _query_landmarks(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(self.plan.landmarks), self.plan.queries_per_landmark)

    @cached_property
    def _query_views(self) -> Views:
        crop = self._model.config.crop
        return self._model.views(self._rng(_QUERIES, _VIEWS), self._landmarks, self._query_landmarks, crop)

    def _all_views(self) -> Views:
        """The views of all rows; those of background rows are of no landmark and mean nothing."""
        blocks = [self._block_views(block) for block in range(-(-self.rows // _BLOCK))]
        return Views(
            np.concatenate([views.seen for views in blocks]), np.concatenate([views.clutter for views in blocks])
        )

    def _block_landmarks(self, block: int) -> NDArray[np.int64]:
        """(_BLOCK,) landmark of each row of the block; the last block is filled up with background."""
        landmark = self._landmark_of_row[block * _BLOCK : (block + 1) * _BLOCK].astype(np.int64)
        return np.concatenate([landmark, np.full(_BLOCK - len(landmark), -1)])

    def _block_views(self, block: int) -> Views:
        which = np.maximum(self._block_landmarks(block), 0)
        return self._model.views(self._rng(_VIEWS, block), self._landmarks, which)

    def _block_vectors(self, block: int) -> FloatArray:
        """(_BLOCK, D): photographs of landmarks, and of the block's own scenes where a row is background."""
        landmark = self._block_landmarks(block)
        background = landmark < 0
        vectors = np.empty((_BLOCK, self.dim), np.float32)
        if not background.all():
            which = np.maximum(landmark, 0)
            vectors = self._model.describe(self._rng(_PIXELS, block), self._landmarks, which, self._block_views(block))
        if background.any():
            rng = self._rng(_SCENERY, block)
            scenes = self._model.landmarks(rng, _SCENES, _SCENE_PARTS)
            which = rng.integers(_SCENES, size=_BLOCK)
            scenery = self._model.describe(rng, scenes, which, self._model.views(rng, scenes, which))
            vectors = np.where(background[:, None], scenery, vectors)
        return vectors
