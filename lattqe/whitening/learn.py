"""Learning a whitening from moments: rotation by PCA, half or full whitening, or the supervised one."""

from typing import Any

import numpy as np
from scipy.linalg import solve_triangular

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet
from lattqe.whitening.model import Whitening
from lattqe.whitening.moments import Moments, PairMoments, moments, pair_moments

# Unsupervised methods scale the direction of eigenvalue λ by λ to this power.
POWERS = {"pca": 0.0, "half": -0.25, "full": -0.5}
METHODS = (*POWERS, "learned")

# Directions with less than this share of the largest variance are noise of the arithmetic.
NO_VARIANCE = 1e-12
BLOCK_ROWS = 8192


def learn(features: FeatureSet, method: str = "half", dim: int | None = None) -> Whitening:
    """Learn a whitening from a feature set, reading it block by block; `dim` keeps the first directions only.

    pca: rotate to the axes of largest variance. half: and divide by the fourth root of their variance. full: by the
    square root. learned: whiten the differences within classes, then rotate (Mikolajczyk and Matas; Radenović et al.).
    """
    if method not in METHODS:
        raise LattqeError(f"method {method!r} is not known: use one of {', '.join(METHODS)}")
    if dim is not None and not 1 <= dim <= features.dim:
        raise LattqeError(f"dim {dim} is not within 1 and the features' {features.dim}")
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
        raise LattqeError(f"dim {dim} asked for, but the rows vary in {rank} directions only: use at most --dim {rank}")
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
