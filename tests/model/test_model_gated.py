"""The gated network: no width, no domain, gates that close, and nothing that could become NaN."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattqe.errors import LattqeError
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.base import aggregate
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.model.gated import FEATURES, WholeList, read

GATED = LAttQEConfig(
    dim=16,
    relational=True,
    relation_bias=True,
    background=12,
    gated=True,
    visual=False,
    width=16,
    heads=2,
    ffn=16,
    layers=2,
    max_k=8,
    activation="gelu",
    dropout=0.0,
)


def make(seed=0, config=GATED):
    """A network whose zero-initialised parts say something too."""
    torch.manual_seed(seed)
    network = LAttQE(config).eval()
    with torch.no_grad():
        for parameter in network.head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def unit(*shape, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32))


def ranked(n, depth, dim, seed=0):
    """Lists (n, 1 + depth, D) by descending similarity to their first row."""
    items = unit(n, 1 + depth, dim, seed=seed)
    items[:, 1:] = torch.nn.functional.normalize(items[:, 1:] + 0.5 * items[:, :1], dim=-1)
    order = (items[:, 1:] @ items[:, 0, :, None])[..., 0].argsort(descending=True)
    items[:, 1:] = torch.gather(items[:, 1:], 1, order[..., None].expand(-1, -1, dim))
    return items


@pytest.mark.parametrize("dim", [4, 64, 300])
def test_any_width_and_any_rotation_give_the_same_weights(dim):
    network, items = make(), ranked(3, 12, dim)
    wide = torch.nn.functional.pad(items, (0, 50))
    rotation = torch.linalg.qr(torch.from_numpy(np.random.default_rng(1).standard_normal((dim + 50, dim + 50))))[0]
    turned = (wide.double() @ rotation).float()
    for dba in (False, True):
        ours, theirs = (network(x, dba=dba, k=6).weights for x in (items, turned))
        assert torch.allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("neighbors", [1, 6])
@pytest.mark.parametrize("dba", [False, True])
def test_one_neighbor_or_copies_of_one_leave_the_item_as_it_is(neighbors, dba):
    network, items = make(), ranked(3, 2, 16)[:, [0] + neighbors * [1]]
    weights = network(items, dba=dba, k=6).weights
    assert (weights[:, 0] > 0).all()
    assert (weights[:, 1:] == 0).all()


def test_a_network_with_content_still_refuses_other_widths():
    content = LAttQEConfig(dim=16, relational=True, relation_bias=True, visual=True, width=16, heads=2, layers=1)
    with pytest.raises(LattqeError, match="20 columns, but this network was made for 16"):
        LAttQE(content)(ranked(1, 4, 20))


def test_gates_are_between_closed_and_open_and_rows_have_self_loops():
    network, items = make(), ranked(5, 12, 16)
    rows = network(items, dba=True, k=6).weights
    assert (rows[:, 1:7] > 0).all()
    assert (rows[:, 1:7] < 1).all()
    assert (rows[:, 0] > 0).all()
    assert (rows[:, 7:] == 0).all()


def test_what_is_not_valid_has_no_say():
    network, items = make(), ranked(2, 12, 16)
    valid = torch.ones(items.shape[:2], dtype=torch.bool)
    valid[:, 9:] = False
    other = items.clone()
    other[:, 9:] = 7.0
    other[:, 9:] *= valid[:, 9:, None]  # padding is zeros, as everywhere
    items = items * valid[..., None]
    assert torch.equal(network(items, valid, k=6).weights, network(other, valid, k=6).weights)
    assert torch.allclose(network(items, valid, k=6).weights[:, :9], network(items[:, :9], k=6).weights, atol=1e-5)


def test_a_list_known_by_its_mean_and_its_scores_is_weighed_like_the_list_itself():
    network, items = make(), ranked(4, 12, 16)
    whole = WholeList(
        items[:, 1:].mean(1), (items[:, 1:] @ items[:, 0, :, None])[..., 0], torch.ones(4, 12, dtype=torch.bool)
    )
    found, beta = network.weigh(items[:, :7], torch.ones(4, 7, dtype=torch.bool), whole)
    expanded = torch.bmm(found.weights[:, None], items[:, :7])[:, 0] - beta[:, None] * whole.background
    assert torch.allclose(
        torch.nn.functional.normalize(expanded, dim=-1), aggregate(network(items, k=6).weights, items), atol=1e-5
    )


def test_features_of_a_list_are_what_a_loop_finds():
    items = ranked(1, 5, 8)
    whole = WholeList(
        items[:, 1:].mean(1), (items[:, 1:] @ items[:, 0, :, None])[..., 0], torch.ones(1, 5, dtype=torch.bool)
    )
    reading = read(items, torch.ones(1, 6, dtype=torch.bool), whole)
    x, b = items[0].double().numpy(), whole.background[0].double().numpy()
    centred = (x - b) / np.linalg.norm(x - b, axis=1, keepdims=True)
    scores = x[1:] @ x[0]
    spread = np.sqrt(scores.var() + 1e-6)
    for i in range(1, 6):
        features = reading.features[0, i].double().numpy()
        assert features.shape == (FEATURES,)
        assert features[0] == pytest.approx(x[i] @ x[0], abs=1e-5)
        assert features[4] == pytest.approx((x[i] @ x[0] - scores.mean()) / spread / 4, abs=1e-4)
        assert features[10] == pytest.approx(np.mean([x[i] @ x[j] > x[i] @ x[0] for j in range(1, 6)]), abs=1e-6)
        assert features[15] == pytest.approx(2 * np.mean([centred[i] @ centred[j] for j in range(i)]), abs=1e-4)
        friends = sorted((centred[i] @ centred[j] for j in range(1, 6) if j != i), reverse=True)
        assert features[17] == pytest.approx(friends[0], abs=1e-4)
        assert features[18] == pytest.approx(friends[2], abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 8), st.sampled_from(["equal", "zero", "far", "random"]), st.booleans())
def test_degenerate_lists_give_finite_unit_vectors(depth, k, kind, dba):
    items = ranked(2, depth, 8)
    if kind == "equal":
        items[:] = items[:1, :1]
    elif kind == "zero":
        items[:, 1:] = 0
    elif kind == "far":
        items[:, 1:] = -items[:, :1]
    weights = make()(items, dba=dba, k=k).weights
    assert torch.isfinite(weights).all()
    lengths = aggregate(weights, items).norm(dim=1)
    assert torch.allclose(lengths, torch.ones(2), atol=1e-4)


def test_small_databases_stay_in_shape():
    method = AttentionExpansion(make(), device="cpu")
    for rows in (1, 2, 3):
        x = unit(rows, 16).numpy()
        near, scores = np.repeat(x[None], rows, axis=0), x @ x.T
        assert np.isfinite(method.expand(x, near, scores, k=rows).vectors).all()


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(LattqeError, match="a gated network reads relations"):
        dataclasses.replace(GATED, background=0)
    with pytest.raises(LattqeError, match="a gated network reads relations"):
        dataclasses.replace(GATED, visual=True)
