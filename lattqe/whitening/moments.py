"""Means and covariances of a feature set in one pass over its blocks, in float64, in the memory of one block."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lattqe.errors import LattqeError


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
