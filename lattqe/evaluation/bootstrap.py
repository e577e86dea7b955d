"""How sure a difference in mAP is: paired bootstrap over queries."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.scores import Scores

_DRAWS_AT_ONCE = 1 << 20  # drawn query numbers in memory: 8 MB


@dataclass(frozen=True)
class Interval:
    """A difference (after - before) of mean average precisions, in 0..1, and its percentile interval.

    not_better: share of the resamples in which `after` was not better.
    """

    difference: float
    low: float
    high: float
    not_better: float
    confidence: float
    samples: int
    seed: int

    @property
    def significant(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "significant": self.significant}


def paired_bootstrap(
    before: Sequence[Sequence[Scores]],
    after: Sequence[Sequence[Scores]],
    *,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Confidence interval for the mean difference over all given scores.

    before, after: for each data set its scores, one for each setup: [[oxford M, oxford H], [paris M, paris H]]. The
    value is the plain mean of the differences of their mAPs, as in the last column of Table 3. Queries are resampled
    within each data set, the same ones for all its setups and for both methods.
    """
    if samples < 1 or not 0 < confidence < 1:
        raise LattqeError(f"bootstrap needs samples >= 1 and 0 < confidence < 1, got {samples} and {confidence}")
    if [len(scores) for scores in before] != [len(scores) for scores in after] or not any(map(len, before)):
        raise LattqeError("paired bootstrap needs the same data sets and setups on both sides")
    rng = np.random.default_rng(seed)
    count = sum(len(scores) for scores in before)
    difference, resampled = 0.0, np.zeros(samples)
    for set_before, set_after in zip(before, after):
        gains, weights = _gains(set_before, set_after)
        difference += _mean_gain(gains.sum(axis=0), weights.sum(axis=0))
        resampled += _resample(gains, weights, samples, rng)
    resampled /= count
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    not_better = float((resampled <= 0).mean())
    return Interval(difference / count, float(low), float(high), not_better, confidence, samples, seed)


def _gains(before: Sequence[Scores], after: Sequence[Scores]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(nq, setups) gain in AP and 1 or 0 for counted or not, for one data set."""
    for one, other in zip(before, after):
        if len(one.ap) != len(before[0].ap) or not np.array_equal(one.positives, other.positives):
            raise LattqeError(f"setup {one.setup!r}: the two sides were not scored with the same queries and truth")
    weights = np.stack([scores.evaluated for scores in before], axis=1).astype(np.float64)
    gains = np.stack([other.ap - one.ap for one, other in zip(before, after)], axis=1)
    return gains * weights, weights


def _mean_gain(total: NDArray[np.float64], counted: NDArray[np.float64]) -> Any:
    """Sum over setups (last axis) of total gain / counted queries; a setup without any counted query adds 0."""
    return (total / np.maximum(counted, 1)).sum(axis=-1)


def _resample(
    gains: NDArray[np.float64], weights: NDArray[np.float64], samples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """(samples,) what `_mean_gain` gives for queries drawn with replacement."""
    queries = len(gains)
    result = np.zeros(samples)
    at_once = max(1, _DRAWS_AT_ONCE // max(queries, 1))
    for start in range(0, samples if queries else 0, at_once):
        drawn = rng.integers(queries, size=(min(at_once, samples - start), queries))
        total = np.stack([column[drawn].sum(axis=1) for column in gains.T], axis=1)
        counted = np.stack([column[drawn].sum(axis=1) for column in weights.T], axis=1)
        result[start : start + len(drawn)] = _mean_gain(total, counted)
    return result
