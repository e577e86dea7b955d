"""What an untrained network does: the measured table that explains why public attempts at LAttQE failed.

Neighbors whose cosine to the query falls evenly from .85 to .25 (k = 32), 3 encoders, mean over seeds.
"""

from functools import cache

import pytest
import torch
from test_model_network import lists

from lattqe.model import LAttQE, LAttQEConfig

RANKS = [1, 16, 32]


@cache
def untrained(dim, heads, seeds=2, **changes):
    """Mean weights (33,) of untrained networks."""
    total = torch.zeros(33)
    for seed in range(seeds):
        torch.manual_seed(seed)
        network = LAttQE(LAttQEConfig(dim=dim, heads=heads, max_k=32, **changes)).eval()
        with torch.inference_mode():
            total += network(lists(4, 32, dim, seed)).weights.mean(dim=0)
    return total / seeds


# Drawing the 150 million weights of the paper's size takes a second for each network.
SIZES = [pytest.param(512, 16, id="512"), pytest.param(2048, 64, id="2048", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "heads"), SIZES)
def test_post_norm_with_zero_positions_is_alpha_qe_below_one(dim, heads):
    first, middle, last = untrained(dim, heads, seeds=1)[RANKS].tolist()
    assert 0.8 < first < 0.95
    assert first > middle + 0.1 > last + 0.2  # the order of similarity is kept
    assert last > 0.25 + 0.05  # flatter than the similarity itself: alpha < 1
    assert middle > 0.55


@pytest.mark.slow
def test_small_positions_damp_but_keep_the_order():
    first, middle, last = untrained(2048, 64, seeds=1, positional_start="small")[RANKS].tolist()
    zero = untrained(2048, 64, seeds=1)[RANKS].tolist()
    assert first > middle + 0.05 > last + 0.1
    assert first < zero[0] - 0.1
    assert middle < zero[1] - 0.05


def test_normal_positions_drown_the_vectors():
    weights = untrained(512, 16, seeds=3, positional_start="normal")
    assert weights[RANKS].abs().max() < 0.35
    assert abs(float(weights[1:9].mean() - weights[25:].mean())) < 0.1  # rank and similarity no longer show


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "heads"), SIZES)
def test_pre_norm_is_average_expansion_over_all_k(dim, heads):
    weights = untrained(dim, heads, seeds=1, norm="pre")
    assert weights.min() > 0.98
