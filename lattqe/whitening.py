"""Whitening of descriptors: learned from the moments of a feature set, stored as a model, applied to feature sets.

Rotation by PCA, half or full whitening, or the supervised whitening learned from labels. Adaptations
(`lattqe.adaptation`) are applied in the same way.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from threadpoolctl import threadpool_limits

from lattqe import adaptation
from lattqe.adaptation import Adaptation
from lattqe.device import peak_bytes
from lattqe.errors import LattqeError
from lattqe.store import (
    FeatureSet,
    Manifest,
    Pending,
    features_schema,
    load_model,
    part_row_counts,
    row_bytes,
    save_model,
)
from lattqe.store.features import normalised
from lattqe.store.parts import matrix_column
from lattqe.store.place import traffic

KIND = "whitening"


@dataclass(frozen=True)
class Whitening:
    """y = L2(projection (x - mean)); mean (D,), projection (d, D)."""

    mean: np.ndarray
    projection: np.ndarray
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.projection.ndim != 2 or self.mean.shape != (self.projection.shape[1],):
            raise LattqeError(f"a mean of shape {self.mean.shape} does not fit a projection of {self.projection.shape}")

    @property
    def input_dim(self) -> int:
        """D, of the vectors it takes."""
        return int(self.projection.shape[1])

    @property
    def dim(self) -> int:
        """d, of the vectors it gives."""
        return int(self.projection.shape[0])

    def apply(self, x: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """Whiten rows (n, D) → unit vectors (n, d) in `dtype`."""
        if x.ndim != 2 or x.shape[1] != self.input_dim:
            raise LattqeError(f"vectors of shape {x.shape} do not fit a whitening of {self.input_dim}-D")
        mean, projection = self.mean.astype(np.float32), self.projection.astype(np.float32)
        out, good = normalised((x.astype(np.float32) - mean) @ projection.T, dtype)
        if not good.all():
            raise LattqeError(
                f"row {int(np.flatnonzero(~good)[0])} of {len(x)} has no direction after whitening: it "
                "equals the mean, or is not finite"
            )
        return out

    def save(self, uri: str, inputs: Mapping[str, Mapping[str, str]] | None = None) -> Manifest:
        """Store as a model artifact, in float32."""
        tensors = {"mean": self.mean.astype(np.float32), "projection": self.projection.astype(np.float32)}
        return save_model(uri, tensors, {"kind": KIND, **self.config}, {}, inputs)

    @classmethod
    def load(cls, uri: str) -> tuple["Whitening", Manifest]:
        """Open a stored whitening."""
        tensors, config, _, manifest = load_model(uri)
        return cls.of_model(uri, tensors, config), manifest

    @classmethod
    def of_model(cls, uri: str, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> "Whitening":
        """What a stored model holds; anything but a whitening is refused."""
        if config.get("kind") != KIND or set(tensors) != {"mean", "projection"}:
            raise LattqeError(f"{uri} is a model, but not a whitening: make one with `lattqe whiten learn`")
        return cls(tensors["mean"], tensors["projection"], config)


@dataclass(frozen=True)
class Moments:
    """Count, mean (D,) and covariance (D, D) (divided by the count, not by the count less one)."""

    count: int
    mean: np.ndarray
    covariance: np.ndarray

    def around(self, point: np.ndarray) -> np.ndarray:
        """Second moment (D, D) around another point (D,) than the mean."""
        shift = self.mean - point
        return self.covariance + np.outer(shift, shift)


def moments(blocks: Iterable[np.ndarray]) -> Moments:
    """Mean and covariance of the rows of all blocks (n, D).

    Each block is centred on its own mean before it is multiplied, and blocks are joined by Chan's formula, so nothing
    is lost to cancellation.
    """
    count, mean, scatter = 0, np.zeros(0), np.zeros((0, 0))
    for block in blocks:
        rows = block.astype(np.float64)
        block_mean = rows.mean(axis=0)
        rows -= block_mean
        if not count:
            count, mean, scatter = len(rows), block_mean, rows.T @ rows
            continue
        total = count + len(rows)
        shift = block_mean - mean
        scatter += rows.T @ rows
        scatter += np.outer(shift, shift) * (count * len(rows) / total)
        mean = mean + shift * (len(rows) / total)
        count = total
    if not count:
        raise LattqeError("no rows to learn from")
    return Moments(count, mean, scatter / count)


@dataclass(frozen=True)
class PairMoments:
    """Of the rows that have partners: their mean (D,), and the second moment (D, D) of a row less a partner."""

    mean: np.ndarray
    differences: np.ndarray


def pair_moments(blocks: Iterable[np.ndarray], labels: np.ndarray) -> PairMoments:
    """Second moment of xᵢ - xⱼ over pairs of one label: each row once, with every partner at equal weight.

    That is what drawing one random positive for each row gives in expectation, without drawing: for a class of n rows
    with sum s, the sum over ordered pairs is 2 (n Σ x xᵀ - s sᵀ). Rows without a partner and rows with a negative
    label (unlabelled) take no part. Memory: one block, and one vector for each class.
    """
    classes, numbers, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    paired = (sizes > 1) & (classes >= 0)
    used = paired[numbers]
    if not used.any():
        raise LattqeError(f"no two of {len(labels)} rows have the same label: learned whitening needs pairs")
    weights = np.where(paired, 2.0 / np.maximum(sizes - 1, 1), 0.0) / used.sum()
    sums, total, start = np.zeros((0, 0)), np.zeros((0, 0)), 0
    origin = np.zeros(0)
    for block in blocks:
        if not start:  # differences do not depend on the origin; one near the mean keeps the numbers small
            origin = block.astype(np.float64).mean(axis=0)
            sums, total = np.zeros((len(classes), len(origin))), np.zeros((len(origin), len(origin)))
        stop = start + len(block)
        mine, number = used[start:stop], numbers[start:stop]
        rows = block[mine].astype(np.float64) - origin
        np.add.at(sums, number[mine], rows)
        total += (rows * (weights * sizes)[number[mine]][:, None]).T @ rows
        start = stop
    total -= (sums * weights[:, None]).T @ sums
    return PairMoments(sums.sum(axis=0) / used.sum() + origin, total)


# Unsupervised methods scale the direction of eigenvalue λ by λ to this power.
POWERS = {"pca": 0.0, "half": -0.25, "full": -0.5}
METHODS = (*POWERS, "learned")

# Directions with less than this share of the largest variance are noise of the arithmetic.
NO_VARIANCE = 1e-12

# Rows read at a time: 64 MiB in float32 at 2048-D.
BLOCK_ROWS = 8192


def learn(features: FeatureSet, method: str = "half", dim: int | None = None) -> Whitening:
    """Learn a whitening from a feature set, reading it block by block; `dim` keeps the first directions only.

    pca: rotate to the axes of largest variance. half: and divide by the fourth root of their variance. full: by the
    square root. learned: whiten the differences within classes, then rotate (Mikolajczyk and Matas; Radenović et al.).
    """
    if method not in METHODS:
        raise LattqeError(f"method {method!r} is not known: use one of {', '.join(METHODS)}")
    if dim is not None and not 1 <= dim <= features.dim:
        raise LattqeError(f"dim {dim} is not between 1 and the features' {features.dim}")
    all_rows = moments(block for _, block in features.blocks(BLOCK_ROWS))
    if method == "learned":
        pairs = pair_moments((block for _, block in features.blocks(BLOCK_ROWS)), features.labels())
        return supervised(all_rows, pairs, dim)
    return principal(all_rows, POWERS[method], dim, method)


def principal(all_rows: Moments, power: float, dim: int | None = None, method: str = "pca") -> Whitening:
    """Projection rows λᵢ^power vᵢᵀ, eigenvalues descending. Without `dim` the directions of no variance are dropped."""
    values, vectors = _eigen(all_rows.covariance)
    kept = _dimensions(values, dim, needs_variance=power < 0)
    scale = values[:kept] ** power if power else np.ones(kept)
    return Whitening(all_rows.mean, vectors[:kept] * scale[:, None], _config(method, all_rows.count, values, kept))


def supervised(all_rows: Moments, pairs: PairMoments, dim: int | None = None) -> Whitening:
    """P = Eᵀ L⁻¹: L Lᵀ is the second moment of differences within classes, E the axes of what L⁻¹ makes of all rows."""
    from scipy.linalg import solve_triangular  # only here: a search in an adapted index does not wait for scipy

    lower, added = _cholesky(pairs.differences)
    inverse = solve_triangular(lower, np.eye(len(lower)), lower=True)
    values, vectors = _eigen(inverse @ all_rows.around(pairs.mean) @ inverse.T)
    kept = _dimensions(values, dim, needs_variance=False)
    config = {**_config("learned", all_rows.count, values, kept), "added_to_diagonal": added}
    return Whitening(pairs.mean, vectors[:kept] @ inverse, config)


def _eigen(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues descending, and eigenvectors as rows, each with its largest component positive."""
    values, columns = np.linalg.eigh((matrix + matrix.T) / 2)
    rows = columns[:, ::-1].T
    largest = np.abs(rows).argmax(axis=1)
    return values[::-1], rows * np.sign(rows[np.arange(len(rows)), largest])[:, None]


def _dimensions(values: np.ndarray, dim: int | None, needs_variance: bool) -> int:
    rank = int((values > NO_VARIANCE * max(values[0], 0.0)).sum())
    if rank == 0:
        raise LattqeError("all rows are equal: there is nothing to whiten")
    if needs_variance and dim is not None and dim > rank:
        raise LattqeError(f"dim {dim} requested, but the rows vary in only {rank} directions: use at most --dim {rank}")
    return dim if dim is not None else (rank if needs_variance else len(values))


def _cholesky(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """Lower factor; a growing share of the mean diagonal is added until the matrix is positive definite."""
    added = 0.0
    for share in (0.0, *(10.0**exponent for exponent in range(-10, 1))):
        added = share * float(np.trace(matrix)) / len(matrix)
        try:
            return np.linalg.cholesky(matrix + added * np.eye(len(matrix))), added
        except np.linalg.LinAlgError:
            continue
    raise LattqeError("rows of one label do not differ at all: learned whitening needs pairs of different vectors")


def _config(method: str, rows: int, values: np.ndarray, kept: int) -> dict[str, Any]:
    positive = np.maximum(values, 0)
    return {"method": method, "rows": rows, "dim": kept, "variance_kept": float(positive[:kept].sum() / positive.sum())}


def load_map(uri: str) -> tuple[Whitening | Adaptation, Manifest]:
    """What turns vectors into others: a stored whitening, or the adaptation of an index."""
    tensors, config, _, manifest = load_model(uri)
    kind = Adaptation if config.get("kind") == adaptation.KIND else Whitening
    return kind.of_model(uri, tensors, config), manifest


def begin_whitened(features: FeatureSet, whitening_uri: str, to: str, dtype: str | None = None) -> Pending:
    """Claim the destination of whitened (or adapted) rows, or join an earlier run of the same task."""
    whitening, model = load_map(whitening_uri)
    if whitening.input_dim != features.dim:
        raise LattqeError(
            f"{whitening_uri} whitens {whitening.input_dim}-D vectors, {features.uri} has {features.dim}-D ones"
        )
    fields = features.content_fields() | {"dim": whitening.dim, "dtype": dtype or features.dtype}
    role = adaptation.KIND if isinstance(whitening, Adaptation) else KIND
    return Pending.begin(
        to,
        "features",
        fields,
        part_row_counts(features.rows, row_bytes("features", fields)),
        {role: dict(whitening.config)},
        {"features": features.as_input(), role: {"uri": whitening_uri, "digest": model.digest, "kind": "model"}},
        schema=_schema(features, whitening.dim, fields["dtype"]),
    )


def whiten_features(
    features: FeatureSet,
    whitening_uri: str,
    to: str,
    dtype: str | None = None,
    on_part: Callable[[int, int], None] = lambda rows, total: None,
) -> Manifest:
    """Write the whitened rows to `to`, with all other columns as they are. `on_part(rows, total)`: after each part.

    In memory: one part of the source and one of the destination, and a block between them.
    """
    pending = begin_whitened(features, whitening_uri, to, dtype)
    missing, worker = set(pending.missing()), WhitenWorker(features.uri, whitening_uri, to)
    for part, rows in enumerate(pending.part_rows):
        if part in missing:
            worker.run(part)
        on_part(rows, features.rows)
    return pending.finish()


class WhitenWorker:
    """Whitens parts of a feature set, in this process or on Ray: the same bytes. Built from URIs only."""

    def __init__(self, features: str, whitening: str, to: str, cache: str | None = None) -> None:
        self.features, self.pending = FeatureSet.open(features, cache), Pending.attach(to)
        self.whitening = load_map(whitening)[0]

    def run(self, part: int) -> dict[str, Any]:
        """Whiten and publish one part; returns what it took. By one thread: the last bits depend on how many."""
        counts, fields = self.pending.part_rows, self.pending.plan["fields"]
        start = sum(counts[:part])
        schema = _schema(self.features, self.whitening.dim, fields["dtype"])
        with threadpool_limits(1):
            rows = _whiten_rows(self.features, self.whitening, start, start + counts[part], schema, fields["dtype"])
        self.pending.publish(part, rows)
        return {"traffic": traffic.take(), "peak_bytes": peak_bytes()}


def _schema(features: FeatureSet, dim: int, dtype: str) -> pa.Schema:
    source = features.table(0, 0).schema
    extra = [column for column in source if column.name not in ("id", "vector", "label")]
    return features_schema(dim, dtype, features.has_labels, extra)


def _whiten_rows(
    features: FeatureSet, whitening: Whitening | Adaptation, start: int, stop: int, schema: pa.Schema, dtype: str
) -> pa.Table:
    pieces = []
    for low in range(start, stop, BLOCK_ROWS):
        high = min(low + BLOCK_ROWS, stop)
        pieces.append(matrix_column(whitening.apply(features.read(low, high), dtype)))
    others = features.table(start, stop)
    columns = [pa.chunked_array(pieces) if name == "vector" else others.column(name) for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)
