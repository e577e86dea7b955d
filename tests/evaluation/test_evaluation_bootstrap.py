"""The paired bootstrap against loops, against theory, and against its own seed."""

import numpy as np
import pytest

from lattqe.errors import LattqeError
from lattqe.evaluation import Scores
from lattqe.evaluation.analysis import paired_bootstrap


def scores(ap, positives=None, setup="medium"):
    ap = np.asarray(ap, dtype=float)
    positives = np.ones(len(ap), np.int64) if positives is None else np.asarray(positives)
    return Scores(setup, ap, positives, np.zeros((len(ap), 0)), ())


def test_equals_plain_loops():
    rng = np.random.default_rng(5)
    sets = [(rng.random((2, 6, 2)), np.array([1, 1, 0, 2, 1, 1])), (rng.random((2, 4, 2)), np.ones(4, np.int64))]
    before = [[scores(ap[0, :, j], n) for j in range(2)] for ap, n in sets]
    after = [[scores(ap[1, :, j], n) for j in range(2)] for ap, n in sets]
    result = paired_bootstrap(before, after, samples=200, confidence=0.8, seed=9)

    draws = np.random.default_rng(9)
    values = np.zeros(200)
    for ap, n in sets:
        for sample, rows in enumerate(draws.integers(len(n), size=(200, len(n)))):
            rows = [row for row in rows if n[row] > 0]
            for j in range(2):  # the same rows for both setups
                values[sample] += sum(ap[1, row, j] - ap[0, row, j] for row in rows) / max(len(rows), 1) / 4
    low, high = np.quantile(values, [0.1, 0.9])
    assert (result.low, result.high) == pytest.approx((low, high))
    assert result.not_better == pytest.approx((values <= 0).mean())
    direct = np.mean([a.mean_ap - b.mean_ap for one, other in zip(before, after) for b, a in zip(one, other)])
    assert result.difference == pytest.approx(direct)


def test_agrees_with_the_normal_interval_for_many_queries():
    rng = np.random.default_rng(1)
    before = rng.random(2000)
    gain = rng.normal(0.01, 0.1, 2000)
    result = paired_bootstrap([[scores(before)]], [[scores(before + gain)]], samples=4000)
    margin = 1.96 * gain.std() / np.sqrt(2000)
    assert result.low == pytest.approx(gain.mean() - margin, abs=0.1 * margin)
    assert result.high == pytest.approx(gain.mean() + margin, abs=0.1 * margin)
    assert result.significant


def test_is_seeded_and_pairs():
    rng = np.random.default_rng(2)
    one, other = scores(rng.random(50)), scores(rng.random(50))
    assert paired_bootstrap([[one]], [[other]], seed=3) == paired_bootstrap([[one]], [[other]], seed=3)
    assert paired_bootstrap([[one]], [[other]], seed=3) != paired_bootstrap([[one]], [[other]], seed=4)
    shifted = paired_bootstrap([[one]], [[scores(one.ap + 0.25)]])
    assert (shifted.low, shifted.difference, shifted.high) == pytest.approx((0.25, 0.25, 0.25))
    assert not paired_bootstrap([[one]], [[one]]).significant
    assert paired_bootstrap([[one]], [[one]]).to_dict()["difference"] == 0.0


def test_unequal_sides_are_refused():
    with pytest.raises(LattqeError, match="same data sets and setups"):
        paired_bootstrap([[scores([1.0])]], [[scores([1.0]), scores([1.0])]])
    with pytest.raises(LattqeError, match="not scored with the same queries"):
        paired_bootstrap([[scores([1.0, 0.5])]], [[scores([1.0, 0.5], [1, 2])]])
    with pytest.raises(LattqeError, match="samples >= 1"):
        paired_bootstrap([[scores([1.0])]], [[scores([1.0])]], samples=0)
