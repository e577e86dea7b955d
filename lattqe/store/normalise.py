"""Vectors on their way in: L2-normalised in float64, rounded once to the stored dtype."""

import numpy as np

from lattqe.errors import LattqeError

# Rows converted to float64 at a time: a few MiB of working memory for any width.
CHUNK_VALUES = 1 << 19

# How far the norm of a stored vector may be from 1: rounding of each component, and some.
NORM_TOLERANCE = {"float16": 2e-3, "float32": 1e-5}


def norms(vectors: np.ndarray) -> np.ndarray:
    """L2 norms (n,) float64 of vectors (n, D); NaN or infinity where a component is."""
    out = np.empty(len(vectors))
    step = max(1, CHUNK_VALUES // max(1, vectors.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(vectors), step):
            chunk = vectors[start:start + step].astype(np.float64)
            out[start:start + step] = np.sqrt(np.einsum("ij,ij->i", chunk, chunk))
    return out


def normalised(vectors: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (n, D) in `dtype`, and which rows are good (n,): the others are zero or not finite."""
    out = np.empty(vectors.shape, dtype)
    good = np.empty(len(vectors), bool)
    step = max(1, CHUNK_VALUES // max(1, vectors.shape[1]))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start in range(0, len(vectors), step):
            chunk = vectors[start:start + step].astype(np.float64)
            # Scaling by the largest component first keeps squares of very large or small vectors in range.
            chunk /= np.abs(chunk).max(axis=1, keepdims=True)
            chunk /= np.sqrt(np.einsum("ij,ij->i", chunk, chunk))[:, None]
            good[start:start + step] = np.isfinite(chunk).all(axis=1)
            out[start:start + step] = chunk
    return out, good


def as_matrix(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Check that an array is a numeric (n, dim) matrix."""
    vectors = np.asarray(vectors)
    if vectors.dtype.kind not in "fiu":
        raise LattqeError(f"vectors are numbers, not {vectors.dtype}")
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise LattqeError(f"vectors have shape {vectors.shape}, (n, {dim}) is needed")
    return vectors
