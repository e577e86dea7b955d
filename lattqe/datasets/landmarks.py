"""The equations of the synthetic landmark world: what a landmark is, what a photograph shows, how it is described.

A landmark is a row of parts. A photograph stands somewhere along the row and sees the parts near it; two photographs
are alike as far as they see the same parts, so that the ends of a long row share nothing but are joined by photographs
in between. Parts partly follow styles that other landmarks follow too (look-alikes). Every photograph also shows
clutter that has nothing to do with the landmark, and noise. docs/synthetic.md has the formulas and what they lead to.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
