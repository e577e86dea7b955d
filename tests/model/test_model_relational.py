"""The relational network against plain loops, and what must not change it."""

import dataclasses

import numpy as np
import pytest
import torch

from lattqe.errors import LattqeError
from lattqe.expansion import create
from lattqe.expansion.base import aggregate
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.model.encoder import HEAD_OF_LIST, background_share, relate

CONFIG = LAttQEConfig(
    dim=12,
    layers=2,
    heads=4,
    width=16,
    ffn=24,
    max_k=20,
    activation="gelu",
    visual=False,
    relation_bias=True,
    relational=True,
    background=15,
    auxiliary="none",
    temperature_start=0.4,
)


def unit(seed: int, *shape: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=shape).astype(np.float32)) + 0.5, dim=-1)


def network(config: LAttQEConfig = CONFIG) -> LAttQE:
    """A network whose heads, which start at zero, say something."""
    torch.manual_seed(0)
    made = LAttQE(config)
    with torch.no_grad():
        for layer in (made.head.weight, made.head.beta):
            if layer is not None:
                layer.weight.normal_(std=0.3)
    return made.eval()


@pytest.fixture
def items() -> torch.Tensor:
    """Five lists of a query and twenty neighbors, by falling similarity."""
    x = unit(1, 5, 21, 12)
    order = torch.einsum("nd,nkd->nk", x[:, 0], x[:, 1:]).argsort(descending=True)
    return torch.cat([x[:, :1], torch.stack([row[1:][places] for row, places in zip(x, order)])], dim=1)


def slow_features(x: np.ndarray, background: np.ndarray) -> np.ndarray:
    """The fourteen numbers of each token of one list (t, D), one by one."""
    k = len(x) - 1
    direction = background / np.linalg.norm(background)
    vectors = [*x, direction]
    apart = [(v - background) / np.linalg.norm(v - background) for v in x] + [np.zeros_like(background)]
    s = [float(v @ x[0]) for v in vectors]
    mean, spread = np.mean(s[1:-1]), np.sqrt(np.var(s[1:-1]) + 1e-6)
    head = range(1, 1 + min(HEAD_OF_LIST, k))
    rows = []
    for i, v in enumerate(vectors):
        likeness = [float(v @ d) for d in x[1:]]
        first = np.mean([float(v @ x[j]) for j in head])
        rows.append(
            [
                s[i],
                np.log1p(i) / 3,
                float(i == 0),
                float(i == k + 1),
                np.clip((s[i] - mean) / spread, -3, 3) / 2,
                mean,
                5 * spread,
                np.mean(likeness),
                first,
                3 * (first - float(v @ direction)),
                np.mean([value > s[i] for value in likeness]),
                2 * float(apart[i] @ apart[0]),
                2 * np.mean([float(apart[i] @ apart[j]) for j in head]),
                min(i / k, 1),
            ]
        )
    return np.array(rows)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_features_equal_a_loop(items: torch.Tensor, k: int) -> None:
    valid = torch.ones(items.shape[:2], dtype=torch.bool)
    background = (background_share(valid, 15)[..., None] * items).sum(1)
    found = relate(items[:, : 1 + k], valid[:, : 1 + k], background).features
    for row, x in enumerate(items.numpy()):
        assert background[row].numpy() == pytest.approx(x[1:16].mean(0), abs=1e-6)
        np.testing.assert_allclose(found[row], slow_features(x[: 1 + k], background[row].numpy()), atol=2e-5)


def test_the_weights_are_those_of_a_background_taken_away(items: torch.Tensor) -> None:
    made, k = network(), 8
    with torch.no_grad():
        weights = made(items, k=k).weights
        found = aggregate(weights, items)
    background = items[:, 1:16].mean(1)
    assert (weights[:, 16:] == 0).all()
    assert torch.allclose(weights[:, 9:16], weights[:, 9:10].expand(-1, 7))  # only the background's share
    beta = -15 * weights[:, 9]
    raw = weights + beta[:, None] / 15 * (torch.arange(21) > 0) * (torch.arange(21) < 16)
    expanded = (raw[..., None] * items).sum(1)
    assert expanded.norm(dim=1).tolist() == pytest.approx([1] * 5, abs=1e-5)
    wanted = torch.nn.functional.normalize(expanded - beta[:, None] * background, dim=1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert made.depth(8) == 15
    assert LAttQE(dataclasses.replace(CONFIG, background=0)).depth(8) == 8


def test_an_untrained_network_is_its_prior(items: torch.Tensor) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        weights = LAttQE(dataclasses.replace(CONFIG, background=0)).eval()(items).weights
    s = torch.einsum("nd,nkd->nk", items[:, 0], items[:, 1:])
    z = ((s - s.mean(1, keepdim=True)) / (s.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt()).clamp(-3, 3)
    prior = torch.cat([torch.ones(5, 1), 0.3 * s + 0.1 * z], dim=1)
    torch.testing.assert_close(weights / weights[:, :1], prior, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dba", [False, True])
def test_padding_changes_nothing_whatever_it_holds(items: torch.Tensor, dba: bool) -> None:
    made = network()
    padded = torch.cat([items, 100 * torch.randn(5, 4, 12)], dim=1)
    valid = torch.ones(5, 25, dtype=torch.bool)
    valid[:, 21:] = False
    padded[~valid] = 0
    with torch.no_grad():
        torch.testing.assert_close(made(padded, valid, dba).weights[:, :21], made(items, dba=dba).weights)


def test_a_list_does_not_depend_on_the_others(items: torch.Tensor) -> None:
    made = network()
    with torch.no_grad():
        together, alone = made(items).weights, torch.cat([made(row[None]).weights for row in items])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_turning_the_space_changes_nothing(items: torch.Tensor) -> None:
    """Without content only relations matter: what is learned in one space holds in another."""
    turn = torch.linalg.qr(torch.from_numpy(np.random.default_rng(3).normal(size=(12, 12)).astype(np.float32)))[0]
    made = network()
    with torch.no_grad():
        torch.testing.assert_close(made(items @ turn).weights, made(items).weights, atol=1e-4, rtol=1e-3)


def test_database_rows_keep_their_background(items: torch.Tensor) -> None:
    with torch.no_grad():
        weights = network()(items, dba=True, k=8).weights
    assert (weights[:, :9] > 0).all()
    assert (weights[:, 9:] == 0).all()
    assert weights.sum(1).tolist() == pytest.approx([1] * 5)


def test_all_parameters_learn(items: torch.Tensor) -> None:
    made = network()
    expanded = aggregate(made(items).weights, items).sum() + aggregate(made(items, dba=True).weights, items).sum()
    expanded.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_method_weighs_k_and_sees_the_background(items: torch.Tensor) -> None:
    made = network()
    method = create("lattqe", model=made, device="cpu")
    assert method.depth(4) == 15
    x, near = items[:, 0].numpy(), items[:, 1:16].numpy()
    found = method.expand(x, near, np.einsum("nd,nkd->nk", x, near), k=4)
    with torch.no_grad():
        wanted = made(items[:, :16], k=4).weights
    np.testing.assert_allclose(found.weights, wanted, atol=1e-5)
    assert found.weights.shape == (5, 16)


def test_a_background_without_relations_is_refused() -> None:
    with pytest.raises(LattqeError, match="background is for relational"):
        LAttQEConfig(background=3)
    with pytest.raises(LattqeError, match="background is -1"):
        dataclasses.replace(CONFIG, background=-1)
