"""What a method does with its neighbors: weights by rank, for relevant and for irrelevant ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.judgements import GroundTruth, Setup
from lattqe.evaluation.positions import query_blocks

DEFAULT_QUANTILES = (0.1, 0.5, 0.9)
BUDGET = 1 << 22  # graded rows in memory at once


@dataclass(frozen=True)
class RankProfile:
    """Statistics of weights at each rank 1..k; where count is 0 the other values are 0 and mean nothing.

    count: (k,) neighbors; mean: (k,); quantiles: (len(levels), k).
    """

    count: NDArray[np.int64]
    mean: NDArray[np.float64]
    quantiles: NDArray[np.float64]
    levels: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "count": self.count.tolist(),
            "mean": self.mean.tolist(),
            "quantiles": {str(level): values.tolist() for level, values in zip(self.levels, self.quantiles)},
        }


def weights_by_rank(
    weights: NDArray[np.floating[Any]],
    neighbors: NDArray[np.integer[Any]],
    truth: GroundTruth,
    setup: Setup | None = None,
    *,
    levels: Sequence[float] = DEFAULT_QUANTILES,
) -> dict[str, RankProfile]:
    """Profiles of 'relevant' and 'irrelevant' neighbors over rank. Junk and missing neighbors (-1) are in neither.

    weights: (nq, 1 + k + m) as an expansion returns them: the query, its k neighbors, then any negatives.
    neighbors: (nq, k) database rows. setup: by default the middle one of the truth's, Medium of the revisited three.
    Each query's weights are divided by their largest magnitude, because only their proportions matter once the
    expanded vector is normalised: so methods can be compared.
    """
    if len(weights) != truth.queries or len(neighbors) != truth.queries or weights.shape[1] <= neighbors.shape[1]:
        raise LattqeError(
            f"weights {weights.shape} and neighbors {neighbors.shape} do not fit {truth.queries} queries:"
            " expected (nq, 1 + k + negatives) and (nq, k)"
        )
    setup = setup or truth.setups[len(truth.setups) // 2]
    k = neighbors.shape[1]
    scale = np.abs(weights).max(axis=1, keepdims=True)
    scaled = np.asarray(weights[:, 1 : 1 + k] / np.where(scale > 0, scale, 1), dtype=np.float64)
    grades = np.concatenate(
        [np.empty((0, k), np.int8)]
        + [truth.judgements(*block).grades_of(neighbors[slice(*block)]) for block in query_blocks(truth.counts, BUDGET)]
    )
    relevant = np.isin(grades, setup.positive)
    irrelevant = ~relevant & ~np.isin(grades, setup.junk) & (neighbors >= 0)
    return {
        "relevant": _profile(scaled, relevant, levels),
        "irrelevant": _profile(scaled, irrelevant, levels),
    }


def _profile(values: NDArray[np.float64], mask: NDArray[np.bool_], levels: Sequence[float]) -> RankProfile:
    k = values.shape[1]
    count = mask.sum(axis=0)
    mean, quantiles = np.zeros(k), np.zeros((len(levels), k))
    for rank in np.flatnonzero(count):
        column = values[mask[:, rank], rank]
        mean[rank] = column.mean()
        quantiles[:, rank] = np.quantile(column, levels)
    return RankProfile(count.astype(np.int64), mean, quantiles, tuple(levels))
