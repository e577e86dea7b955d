"""Each loss against plain loops over pairs."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from lattqe.training.config import TrainingConfig
from lattqe.training.sampling import Batch
from lattqe.training.stage import RANKING, auxiliary, total_loss


def unit(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=shape)), dim=-1)


@pytest.fixture
def batch() -> Batch:
    """Four queries that search thirty candidates, the first of which are the queries themselves."""
    rng = np.random.default_rng(5)
    labels, own = torch.from_numpy(rng.integers(0, 3, 30)), torch.tensor([0, 1, 2, 0])
    labels[:4] = own
    candidates = unit(rng, 30, 6)
    usable = torch.ones(4, 30, dtype=torch.bool)
    usable[torch.arange(4), torch.arange(4)] = False
    return Batch(
        items=unit(rng, 4, 8, 6),
        valid=torch.from_numpy(rng.random((4, 8)) < 0.7),
        relevant=torch.from_numpy(rng.random((4, 7)) < 0.5),
        positives=unit(rng, 4, 3, 6),
        candidates=candidates,
        same=labels == own[:, None],
        usable=usable,
        queries=16,
        k=7,
    )


@pytest.fixture
def expanded(batch: Batch) -> torch.Tensor:
    """Near enough to their candidates that the margin bites."""
    noise = 0.02 * unit(np.random.default_rng(6), 4, 6)
    return torch.nn.functional.normalize(batch.candidates[[9, 12, 20, 25]] + noise, dim=-1).requires_grad_()


CONFIG = TrainingConfig(margin=0.4, negatives=2, listwise_temperature=0.2, smooth_ap_temperature=0.1)


def dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum())


def slow(name: str, q: torch.Tensor, batch: Batch, row: int) -> float:
    """The loss of one query by loops over pairs."""
    every = range(len(batch.candidates))
    score = [dot(q, batch.candidates[j]) for j in every]
    usable = [j for j in every if batch.usable[row, j]]
    positive = [j for j in usable if batch.same[row, j]]
    negative = sorted((j for j in usable if not batch.same[row, j]), key=lambda j: -score[j])
    if name == "contrastive":
        pulled = [float((q - p).norm()) ** 2 for p in batch.positives[row]]
        pushed = [max(0.0, CONFIG.margin - float((q - batch.candidates[j]).norm())) ** 2 for j in negative[:2]]
        return sum(pulled) / len(pulled) + sum(pushed)
    if name == "pull":
        return sum(1 - score[j] for j in positive) / len(positive)
    if name == "listwise":
        power = [math.exp(value / CONFIG.listwise_temperature) for value in score]
        total = sum(power[j] for j in usable)
        return -sum(math.log(power[j] / total) for j in positive) / len(positive)
    precision = []
    for p in batch.positives[row]:
        above = {j: 1 / (1 + math.exp(-(score[j] - dot(q, p)) / CONFIG.smooth_ap_temperature)) for j in usable}
        precision.append((0.5 + sum(above[j] for j in positive)) / (0.5 + sum(above.values())))
    return 1 - sum(precision) / len(precision)


@pytest.mark.parametrize("name", RANKING)
def test_a_ranking_loss_equals_loops_over_pairs(name: str, batch: Batch, expanded: torch.Tensor) -> None:
    fast = RANKING[name](expanded, batch, CONFIG)
    assert fast.tolist() == pytest.approx([slow(name, q, batch, row) for row, q in enumerate(expanded.detach())])


@pytest.mark.parametrize("name", RANKING)
def test_the_gradient_of_a_loss_is_that_of_finite_differences(name: str, batch: Batch, expanded: torch.Tensor) -> None:
    assert torch.autograd.gradcheck(lambda q: RANKING[name](q, batch, CONFIG).sum(), (expanded,))


def test_a_negative_on_top_of_the_query_has_a_finite_gradient(batch: Batch) -> None:
    hardest = int(torch.where(~batch.same[0] & batch.usable[0])[0][0])
    on_top = batch.candidates[[hardest] * 4].clone().requires_grad_()
    RANKING["contrastive"](on_top, batch, CONFIG).sum().backward()
    assert torch.isfinite(on_top.grad).all()


def test_too_few_negatives_are_no_error(batch: Batch, expanded: torch.Tensor) -> None:
    everyone = torch.ones_like(batch.same)
    alone = Batch(**{**vars(batch), "same": everyone})
    pulled = (expanded[:, None] - batch.positives).square().sum(-1).mean(1)
    assert torch.equal(RANKING["contrastive"](expanded, alone, CONFIG), pulled)


def test_the_auxiliary_loss_equals_a_loop(batch: Batch) -> None:
    logits = torch.from_numpy(np.random.default_rng(7).normal(size=(4, 7)))
    for row, value in enumerate(auxiliary(logits, batch).tolist()):
        kept = [column for column in range(7) if batch.valid[row, 1 + column]]
        chance = [1 / (1 + math.exp(-float(logits[row, column]))) for column in kept]
        wanted = [-math.log(p if batch.relevant[row, column] else 1 - p) for p, column in zip(chance, kept)]
        assert value == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
    first = dataclasses.replace(batch, valid=batch.valid[:, :4], relevant=batch.relevant[:, :3])
    assert torch.equal(auxiliary(logits[:, :3], batch), auxiliary(logits[:, :3], first)), "a list longer than k"


def test_the_total_is_a_share_of_the_global_batch(batch: Batch, expanded: torch.Tensor) -> None:
    config = TrainingConfig(contrastive=0.5, listwise=2.0, auxiliary=0.25)
    logits = torch.zeros(4, 7)
    total, parts = total_loss(expanded, logits, batch, config)
    assert set(parts) == {"contrastive", "listwise", "auxiliary"}
    assert float(parts["auxiliary"]) == pytest.approx(4 * math.log(2) / 16)
    wanted = 0.5 * parts["contrastive"] + 2 * parts["listwise"] + 0.25 * parts["auxiliary"]
    assert total.item() == pytest.approx(wanted.item())
