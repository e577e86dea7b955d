"""Adapting a space to a collection: directions in which near neighbors differ count less, learned without labels.

Descriptors are whitened, if at all, for the images they were trained on. In another collection near neighbors, most of
which show the same object, differ along other directions: their differences d have a second moment S, and cosines after
S^-1/2 separate images better than before. What varies between birds is not what varies between cars, so there are a
few such maps, one around each centre of the collection, and a vector goes through a blend of them:

    y = L2( Σ_c π_c(x) M_c x ),   π(x) = softmax( SHARPNESS · cos(x, centre_c) ),   M_c = (S_c + RIDGE · mean) ^ -1/2

S_c is drawn towards that of all differences, and that towards the identity, as long as there are few of them. Fewer
than a hundred rows have too few near neighbors to learn from, and stay as they are. Queries go through the same map as
the rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.expansion.base import blocks
from lattqe.expansion.rows import nearest
from lattqe.search import Index
from lattqe.store import Manifest, load_model, save_model
from lattqe.store.features import normalised

KIND = "adaptation"
NEAR = 5  # neighbors of a row whose differences count: the first are the most likely to be relevant
FEWEST = 100  # rows that are adapted at all
CENTRES, ROWS_PER_CENTRE = 8, 300  # at most, and at least; of wide spaces fewer, and more rows: see `centre_count`
MAP_NUMBERS = 1 << 24  # of all maps together: 64 MiB, and as much to decompose as is done in a minute
SHARPNESS = 10.0
RIDGE = 0.3  # of the mean variance, added to all: no direction counts without limit
# Differences, for each column, that the identity counts as beside all of them, and all of them beside a centre's.
PRIOR, CENTRE_PRIOR = 8, 4
SAMPLE = 20_000  # rows whose neighbors are looked at, at most; fewer in wide spaces, where each costs more
SAMPLE_WORK, SMALLEST_SAMPLE = 10**12, 8_000
ROUNDS = 10  # of k-means
NO_DIFFERENCE = 1e-14  # mean square of a difference below which it is that of rounding to float32: rows are equal
ADAPTING_STAGES = 3  # sampled rows are searched for, their differences added up, and made into maps
SEARCHED_BYTES = 64 << 20  # of sampled vectors that are searched at once
LEARNED_BYTES = 64 << 20  # of differences that are multiplied at once


@dataclass(frozen=True)
class Adaptation:
    """Centres (c, D) float32 of unit length and a symmetric map (c, D, D) float32 for each."""

    centres: np.ndarray
    maps: np.ndarray
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c, dim = self.centres.shape if self.centres.ndim == 2 else (0, 0)
        if not c * dim or self.maps.shape != (c, dim, dim):
            raise LattqeError(f"centres of shape {self.centres.shape} do not fit maps of shape {self.maps.shape}")

    @property
    def input_dim(self) -> int:
        """D, of the vectors it takes."""
        return int(self.centres.shape[1])

    @property
    def dim(self) -> int:
        """D, of the vectors it gives."""
        return self.input_dim

    def apply(self, x: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """Unit vectors (n, D) of the collection's kind → adapted unit vectors (n, D) in `dtype`."""
        x = np.asarray(x)
        if x.ndim != 2 or x.shape[1] != self.input_dim:
            raise LattqeError(f"vectors of shape {x.shape} do not fit an adaptation to {self.input_dim} columns")
        x = x.astype(np.float32)
        total = np.zeros_like(x)
        with np.errstate(invalid="ignore", over="ignore"):  # rows that are not finite are refused below
            shares = _shares(x, self.centres)
            for centre, matrix in enumerate(self.maps):
                total += shares[:, centre, None] * (x @ matrix)
        out, good = normalised(total, dtype)
        if not good.all():
            raise LattqeError(f"row {int(np.flatnonzero(~good)[0])} of {len(x)} has no direction after adaptation")
        return out

    def save(self, uri: str, inputs: Mapping[str, Mapping[str, str]] | None = None) -> Manifest:
        """Store as a model artifact."""
        return save_model(uri, {"centres": self.centres, "maps": self.maps}, {"kind": KIND, **self.config}, {}, inputs)

    @classmethod
    def load(cls, uri: str) -> tuple["Adaptation", Manifest]:
        """Open a stored adaptation."""
        tensors, config, _, manifest = load_model(uri)
        return cls.of_model(uri, tensors, config), manifest

    @classmethod
    def of_model(cls, uri: str, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> "Adaptation":
        """What a stored model holds; anything but a sound adaptation is refused."""
        if config.get("kind") != KIND or set(tensors) != {"centres", "maps"}:
            raise LattqeError(f"{uri} is a model, but not an adaptation: `lattqe augment` makes those")
        for name, tensor in tensors.items():
            if tensor.dtype != np.float32:
                raise CorruptDataError(f"{uri}: tensor {name!r} holds {tensor.dtype}, not float32")
            if not np.isfinite(tensor).all():
                raise CorruptDataError(f"{uri}: tensor {name!r} holds NaN or infinity")
        space = cls(tensors["centres"], tensors["maps"], config)
        if config.get("centres") != len(space.centres):
            raise CorruptDataError(
                f"{uri}: its config says {config.get('centres')} centres, it has {len(space.centres)}"
            )
        return space


def centre_count(rows: int, dim: int) -> int:
    """How many maps that many rows and columns get: each is learned from twice as many rows as it has columns."""
    return max(1, min(CENTRES, MAP_NUMBERS // dim**2, rows // max(ROWS_PER_CENTRE, 2 * dim)))


def sample_rows(rows: int, dim: int) -> np.ndarray:
    """Numbers (s,) of the rows that are looked at, in order: all of a small collection, else some at random."""
    count = max(SMALLEST_SAMPLE, min(SAMPLE, SAMPLE_WORK // (2 * NEAR * CENTRES * dim * dim)))
    if rows <= count:
        return np.arange(rows)
    return np.sort(np.random.default_rng(0).choice(rows, count, replace=False))


def adapt_to(index: Index, on_rows: Callable[[int], None] = lambda rows: None) -> Adaptation:
    """The adaptation to the rows of an index, in this process or in shards: from the nearest rows of a sample.

    on_rows(n): called after each n sampled rows, in each of the ADAPTING_STAGES.
    """
    if index.rows < FEWEST:
        return _unchanged(index.dim, index.rows)
    rows = sample_rows(index.rows, index.dim)
    x = index.gather(rows)
    near = []
    for some in blocks(len(rows), index.dim * 4, SEARCHED_BYTES):
        near.append(nearest(index, x[some], NEAR, rows[some])[1])
        on_rows(len(near[-1]))
    neighbors = index.gather(np.concatenate(near).ravel()).reshape(len(x), NEAR, -1)
    with threadpool_limits(1):  # the last bits depend on how many threads add up
        return learn(x, neighbors, index.rows, on_rows)


def learn(x: np.ndarray, near: np.ndarray, rows: int, on_rows: Callable[[int], None] = lambda rows: None) -> Adaptation:
    """From unit vectors x (s, D) and their nearest other rows near (s, t, D), of a collection of that many rows.

    on_rows(n): called after each n of the s rows, when differences are added up and when maps are made of them.
    """
    x, near = x.astype(np.float32, copy=False), near.astype(np.float32, copy=False)
    dim = x.shape[1]
    centres = _centres(x, centre_count(rows, dim))
    shares = _shares(x, centres)
    scatters = np.zeros((len(centres), dim, dim))
    for some in blocks(len(x), near.shape[1] * dim * 4, LEARNED_BYTES):
        differences = (x[some, None] - near[some]).reshape(-1, dim)
        for centre, scatter in enumerate(scatters):
            scatter += (differences * np.repeat(shares[some, centre], near.shape[1])[:, None]).T @ differences
        on_rows(len(x[some]))
    counts = near.shape[1] * shares.sum(axis=0, dtype=np.float64)
    whole, count = scatters.sum(axis=0), counts.sum()
    plain = np.eye(dim) * np.trace(whole) / max(dim * count, 1)
    if not np.trace(plain) > NO_DIFFERENCE:
        return _unchanged(dim, rows)
    whole = (whole + PRIOR * dim * plain) / (count + PRIOR * dim)
    maps = np.empty((len(centres), dim, dim), dtype=np.float32)
    for centre, (scatter, some) in enumerate(zip(scatters, counts)):
        matrix = _inverse_root((scatter + CENTRE_PRIOR * dim * whole) / (some + CENTRE_PRIOR * dim))
        lengths = (np.square(x @ matrix.astype(np.float32)).sum(axis=1) * shares[:, centre]).sum()
        # Rows of this centre keep their length on average, so that no map outweighs the others in a blend.
        maps[centre] = matrix / np.sqrt(lengths / shares[:, centre].sum())
        on_rows(len(x) * (centre + 1) // len(maps) - len(x) * centre // len(maps))
    return Adaptation(centres, maps, _config(rows, len(x), len(centres)))


def _unchanged(dim: int, rows: int) -> Adaptation:
    """What leaves vectors as they are."""
    return Adaptation(np.eye(1, dim, dtype=np.float32), np.eye(dim, dtype=np.float32)[None], _config(rows, 0, 1))


def _config(rows: int, sampled: int, centres: int) -> dict[str, Any]:
    return {"rows": rows, "sampled": sampled, "centres": centres}


def _shares(x: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """How much of each centre's map a vector x (n, D) goes through: (n, c) float32, adding up to 1."""
    logits = SHARPNESS * (x @ centres.T)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def _centres(x: np.ndarray, count: int) -> np.ndarray:
    """Spherical k-means of unit vectors x (n, D): centres (count or 1, D) float32; always the same ones."""
    if count < 2:
        return _unit(x.mean(axis=0, keepdims=True))
    centres = x[np.random.default_rng(0).choice(len(x), count, replace=False)]
    for _ in range(ROUNDS):
        nearest = (x @ centres.T).argmax(axis=1)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, x)
        centres = np.where(np.bincount(nearest, minlength=count)[:, None] > 0, _unit(sums), centres)
    return centres


def _unit(x: np.ndarray) -> np.ndarray:
    """Rows (n, D) L2-normalised; what has no direction points along the first column."""
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    first = np.eye(1, x.shape[1], dtype=np.float32)
    return np.where(lengths > 1e-12, x / np.maximum(lengths, 1e-12), first).astype(np.float32)


def _inverse_root(matrix: np.ndarray) -> np.ndarray:
    """(matrix + RIDGE · its mean variance) ^ -1/2, symmetric, of a second moment (D, D)."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    values = np.maximum(values, 0) + RIDGE * np.trace(matrix) / len(matrix)
    return (vectors * values**-0.5) @ vectors.T
