"""Weights by rank, for relevant and irrelevant neighbors."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lattqe.errors import LattqeError
from lattqe.evaluation import REVISITED, GradedTruth, Judgements
from lattqe.evaluation.analysis import weights_by_rank


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2), st.integers(0, 2**31))
def test_equals_plain_loops(queries, k, negatives, seed):
    rng = np.random.default_rng(seed)
    grades = rng.integers(-1, 3, (queries, 8))
    truth = GradedTruth(Judgements.from_lists(*([np.flatnonzero(g == v) for g in grades] for v in (0, 1, 2))), 8)
    neighbors = np.array([rng.permutation(8)[:k] for _ in range(queries)])
    neighbors[rng.random(neighbors.shape) < 0.2] = -1
    weights = rng.standard_normal((queries, 1 + k + negatives)).astype(np.float32)
    with patch("lattqe.evaluation.analysis.BUDGET", 10):
        profiles = weights_by_rank(weights, neighbors, truth, levels=(0.5,))
    for rank in range(k):
        groups = {"relevant": [], "irrelevant": []}
        for i in range(queries):
            row = neighbors[i, rank]
            if row >= 0 and grades[i, row] != 2:
                kind = "relevant" if grades[i, row] in (0, 1) else "irrelevant"
                groups[kind].append(weights[i, 1 + rank] / max(abs(w) for w in weights[i]))
        for kind, values in groups.items():
            assert profiles[kind].count[rank] == len(values)
            assert profiles[kind].mean[rank] == pytest.approx(np.mean(values) if values else 0.0, abs=1e-6)
            assert profiles[kind].quantiles[0, rank] == pytest.approx(np.median(values) if values else 0.0, abs=1e-6)


def test_setup_decides_and_shapes_are_checked():
    truth = GradedTruth(Judgements.from_lists([[0]], [[1]], [[]]), 3)
    neighbors, weights = np.array([[0, 1, 2]]), np.array([[2.0, 1.0, 0.5, 0.0]])
    hard = weights_by_rank(weights, neighbors, truth, REVISITED[2])
    np.testing.assert_array_equal(hard["relevant"].count, [0, 1, 0])
    np.testing.assert_array_equal(hard["irrelevant"].count, [0, 0, 1])
    assert hard["relevant"].to_dict()["mean"] == [0.0, 0.25, 0.0]
    assert weights_by_rank(np.zeros((1, 4)), neighbors, truth)["relevant"].mean.tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(LattqeError, match="do not fit 1 queries"):
        weights_by_rank(weights[:, :3], neighbors, truth)
