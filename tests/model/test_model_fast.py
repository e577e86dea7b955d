"""Fast inference equals the module; sharing, int8 and batches change nothing that matters."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_variants import ABLATIONS, ablation
from test_model_network import EXTENDED, SMALL, lists, make, random_valid

from lattqe.errors import LattqeError
from lattqe.expansion import create
from lattqe.model import FastLAttQE, LAttQE, LAttQEConfig
from lattqe.model.fast import Int8Linear

PROJECTED = dataclasses.replace(SMALL, width=24, ffn=40, relation_bias=True)


@pytest.mark.parametrize("dba", [False, True])
@pytest.mark.parametrize("config", [*(ablation(SMALL, name) for name in sorted(ABLATIONS)), EXTENDED, PROJECTED])
def test_fast_equals_the_module(config, dba):
    network = make(config)
    items, valid = lists(5, 9, 32), random_valid(5, 9)
    fast = FastLAttQE(network)
    for mask in (valid, torch.ones_like(valid)):
        with torch.no_grad():
            expected = network(items, mask, dba).weights
        torch.testing.assert_close(fast.weights(items, mask, dba), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_fast_equals_the_module_at_the_papers_size():
    torch.manual_seed(0)
    network = LAttQE(LAttQEConfig(positional_start="small")).eval()
    items, valid = lists(2, 64, 2048), random_valid(2, 64)
    with torch.no_grad():
        expected = network(items, valid).weights
    torch.testing.assert_close(FastLAttQE(network).weights(items, valid), expected, atol=1e-4, rtol=0)


def test_batches_do_not_show(monkeypatch):
    network = make(EXTENDED)
    items, valid = lists(23, 6, 32), random_valid(23, 6)
    whole = FastLAttQE(network).weights(items, valid)
    monkeypatch.setattr("lattqe.model.fast.TOKENS", 3 * 7)
    torch.testing.assert_close(FastLAttQE(network).weights(items, valid), whole, atol=1e-6, rtol=0)
    assert FastLAttQE(network).weights(items[:0], valid[:0]).shape == (0, 7)


def database(rows, dim, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def neighbor_lists(xb, k, missing=0.2, seed=0):
    """Row numbers (n, 1 + k), the row itself first, -1 for some neighbors, and their scores."""
    scores = xb @ xb.T
    np.fill_diagonal(scores, 9)
    rows = np.argsort(-scores, axis=1)[:, : 1 + k]
    rows[:, 1:][np.random.default_rng(seed).random((len(xb), k)) < missing] = -1
    return rows, np.where(rows[:, 1:] < 0, 0, np.take_along_axis(scores, rows[:, 1:], axis=1)).astype(np.float32)


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize(
    "config", [SMALL, PROJECTED, ablation(SMALL, "no-position")], ids=["paper", "projected", "none"]
)
def test_shared_equals_unshared(config, precision):
    method = create("lattqe", model=make(config), dba=True, precision=precision, device="cpu")
    xb = database(40, 32)
    rows, scores = neighbor_lists(xb, 8)
    table = np.concatenate([method.shared_rows(block) for block in np.array_split(xb, 3)])
    assert table.shape == (40, method.shared_width)
    assert method.shared_width == (3 if config.width is None else 4) * config.token_width
    plain = method.expand(xb, xb[rows[:, 1:]], scores, rows[:, 1:] >= 0)
    shared = method.expand_shared(xb, xb[rows[:, 1:]], scores, table, rows)
    # int8 rounds d and d + p to other steps; the weights agree within what int8 keeps
    atol = 1e-4 if precision == "float32" else 2e-2
    np.testing.assert_allclose(shared.weights, plain.weights, atol=atol)
    np.testing.assert_allclose(shared.vectors, plain.vectors, atol=atol)


def test_a_shared_table_may_be_half_and_memory_mapped(tmp_path):
    method = create("lattqe", model=make(), dba=True, device="cpu")
    xb = database(30, 32)
    rows, scores = neighbor_lists(xb, 5)
    np.save(tmp_path / "table.npy", method.shared_rows(xb).astype(np.float16))
    table = np.load(tmp_path / "table.npy", mmap_mode="r")
    shared = method.expand_shared(xb, xb[rows[:, 1:]], scores, table, rows)
    plain = method.expand(xb, xb[rows[:, 1:]], scores, rows[:, 1:] >= 0)
    np.testing.assert_allclose(shared.vectors, plain.vectors, atol=2e-3)


def test_networks_without_anything_to_share_say_so():
    for changes in ({"norm": "pre"}, {"attention": False}, {"visual": False}, {"similarity": True}):
        method = create("lattqe", model=make(dataclasses.replace(SMALL, **changes)), device="cpu")
        assert method.shared_width == 0
        with pytest.raises(LattqeError, match="nothing to share"):
            method.shared_rows(database(3, 32))


def test_shared_tables_that_do_not_fit_are_refused():
    method = create("lattqe", model=make(), device="cpu")
    xb = database(12, 32)
    rows, scores = neighbor_lists(xb, 4, missing=0)
    table = method.shared_rows(xb)
    neighbors = xb[rows[:, 1:]]
    with pytest.raises(LattqeError, match="expected \\(n, 1 \\+ k\\)"):
        method.expand_shared(xb, neighbors, scores, table, rows[:, 1:])
    with pytest.raises(LattqeError, match="shares 96 columns"):
        method.expand_shared(xb, neighbors, scores, table[:, :90], rows)
    with pytest.raises(LattqeError, match="not in the table of 5 rows"):
        method.expand_shared(xb, neighbors, scores, table[:5], rows)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 9), inputs=st.integers(1, 70), outputs=st.integers(1, 40), seed=st.integers(0, 999))
def test_int8_linear_rounds_and_nothing_else(rows, inputs, outputs, seed):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(inputs, outputs, bias=bool(seed % 2))
    x = torch.randn(rows, inputs) * 10.0 ** torch.randint(-4, 4, (rows, 1))
    if rows:
        x[0] = 0
    with torch.inference_mode():
        y = Int8Linear(linear)(x)
    weight = linear.weight.detach().double()
    step_w = weight.abs().amax(1, keepdim=True) / 127
    step_x = x.double().abs().amax(1, keepdim=True).clamp(min=1e-38) / 63
    expected = ((x / step_x).add(0.5).floor() * step_x) @ ((weight / step_w).round() * step_w).T
    if linear.bias is not None:
        expected += linear.bias.detach().double()
    # An input on the edge of two steps may fall to either side.
    slack = (step_x * weight.abs().amax(1)) * 1.01 + 1e-5 * expected.abs() + 1e-6
    assert ((y.double() - expected).abs() <= slack).all()


def test_int8_does_not_saturate():
    """Extreme weights and inputs of one sign: 16-bit sums of pairs would overflow with 8-bit inputs."""
    linear = torch.nn.Linear(512, 16, bias=False)
    torch.nn.init.ones_(linear.weight)
    with torch.inference_mode():
        torch.testing.assert_close(Int8Linear(linear)(torch.ones(3, 512)), torch.full((3, 16), 512.0))


def test_int8_stays_near_float32_and_rows_stay_independent():
    torch.manual_seed(0)
    network = LAttQE(LAttQEConfig(dim=256, heads=8)).eval()
    items = lists(24, 20, 256)
    x, neighbors = items[:, 0].numpy(), items[:, 1:].numpy()
    scores = np.einsum("nkd,nd->nk", neighbors, x)
    exact, rounded = (
        create("lattqe", model=network, precision=precision, device="cpu").expand(x, neighbors, scores)
        for precision in ("float32", "int8")
    )
    assert (exact.vectors * rounded.vectors).sum(axis=1).mean() > 0.999
    assert not np.array_equal(exact.weights, rounded.weights)
    int8 = create("lattqe", model=network, precision="int8", device="cpu")
    alone = int8.expand(x[7:8], neighbors[7:8], scores[7:8])
    np.testing.assert_allclose(alone.vectors[0], rounded.vectors[7], atol=1e-6)


@pytest.mark.parametrize("config", [SMALL, EXTENDED, PROJECTED], ids=["paper", "extended", "projected"])
def test_half_stays_near_float32(config, monkeypatch):
    """What a GPU computes in float16, computed slowly on the CPU."""
    monkeypatch.setattr("lattqe.model.fast.check_precision", lambda precision, device: None)
    network = make(config)
    items, valid = lists(6, 9, 32), random_valid(6, 9)
    half, full = FastLAttQE(network, "half"), FastLAttQE(network)
    torch.testing.assert_close(half.weights(items, valid), full.weights(items, valid), atol=2e-2, rtol=0)
    assert network.stack.encoders[0].qkv.weight.dtype == torch.float32
    if half.shared_width:
        rows = half.shared_rows(items.flatten(0, 1)).view(6, 10, -1)
        shared = half.weights(items, valid, shared=lambda batch: rows[batch])
        torch.testing.assert_close(shared, full.weights(items, valid), atol=2e-2, rtol=0)


def test_refusals():
    with pytest.raises(LattqeError, match="float32, int8, half"):
        FastLAttQE(make(), "float8")
    with pytest.raises(LattqeError, match="needs a GPU"):
        FastLAttQE(make(), "half")
    with pytest.raises(LattqeError, match="16 columns"):
        FastLAttQE(make()).weights(lists(1, 3, 16), torch.ones(1, 4, dtype=torch.bool))


def test_training_may_go_on_with_the_network_given():
    network = make().train()
    FastLAttQE(network).weights(lists(2, 4, 32), torch.ones(2, 5, dtype=torch.bool))
    network.train()
    network(lists(2, 4, 32)).weights.sum().backward()
    assert network.stack.encoders[0].qkv.weight.grad is not None
