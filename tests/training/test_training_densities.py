"""Worlds of every density: what they hold, that a step decides them, and a world that is augmented through hops."""

import dataclasses

import numpy as np
import pytest
import torch

from lattqe import adaptation
from lattqe.adaptation import adapt_to
from lattqe.errors import LattqeError
from lattqe.evaluation.truth import keep_of_each
from lattqe.expansion import create
from lattqe.expansion.diffusion import hop as sparse_hop
from lattqe.model import LAttQE
from lattqe.search import FlatIndex
from lattqe.store import load_model
from lattqe.training import make, train
from lattqe.training.checkpoint import Team
from lattqe.training.config import GATED, preset
from lattqe.training.densities import (
    WHOLE,
    DensitySampler,
    _adapted,
    _altered,
    _around,
    _clusters,
    _shrunk,
    scaled_rows,
)
from lattqe.training.plan import join
from lattqe.training.stage import TrainingStage, hop
from lattqe.training.validation import ValidationSet, density_sets

SMALL = [
    "world_rows=300",
    "hop_rows=150",
    "hop_k=8",
    "batch=8",
    "network.background=16",
    "network.width=16",
    "network.ffn=16",
    "network.layers=1",
    "widths=8",
    "synthetic=0",
    "clusters=0",
    "ordinary=0",
    "k_min=4",
    "k_max=12",
]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    sets = []
    for number in range(3):
        centres = rng.standard_normal((20, 16))
        labels = np.repeat(np.arange(20), 12) + 100 * number
        x = centres[labels - 100 * number] + 0.8 * rng.standard_normal((240, 16))
        sets.append(((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels))
    return join([x for x, _ in sets], [labels for _, labels in sets], shared_labels=True)


@pytest.fixture(scope="module")
def config():
    return preset("universal", 16, SMALL)


def test_a_batch_is_a_function_of_its_step_and_parts_add_up(data, config):
    sampler = DensitySampler(data, config)
    for step in range(8):
        whole = sampler.batch(step, slice(0, 8))
        again = DensitySampler(data, config).batch(step, slice(0, 8))
        halves = [sampler.batch(step, part) for part in (slice(0, 4), slice(4, 8))]
        assert torch.equal(whole.items, again.items)
        assert torch.equal(whole.candidates, again.candidates)
        assert torch.equal(whole.items, torch.cat([half.items for half in halves]))
        assert torch.equal(whole.same, torch.cat([half.same for half in halves]))
        assert (whole.hops > 0) == (step % config.hop_every == 0)


def test_a_batch_of_one_hop_has_a_hop_and_neighbors(data):
    """Draws around the smallest settings: no hop at all would be a batch of queries alone."""
    sampler = DensitySampler(data, preset("universal", 16, [*SMALL, "hops=1", "hop_k=1", "hop_every=1"]))
    for step in range(12):
        batch = sampler.batch(step, slice(0, 8))
        assert batch.hops >= 1
        assert batch.row_k >= 1


@pytest.mark.parametrize("changes", GATED.values(), ids=GATED)
def test_every_ablation_can_be_trained(data, changes):
    config = preset("universal", 16, [*SMALL, "slots=4", *changes])
    sampler, stage = DensitySampler(data, config), TrainingStage(LAttQE(config.network), config, Team())
    before = {name: value.clone() for name, value in stage.network.state_dict().items()}
    losses = [stage.update(step, sampler.batch(step, slice(0, 8))) for step in range(config.accumulate)]
    assert torch.isfinite(torch.cat([*losses, stage.rest()])).all()
    assert any(not torch.equal(before[name], value) for name, value in stage.network.state_dict().items())


def test_every_query_has_something_to_find_and_never_itself(data, config):
    sampler = DensitySampler(data, config)
    for step in range(40):
        batch = sampler.batch(step, slice(0, 8))
        assert ((batch.same & batch.usable).sum(1) >= 1).all()
        assert torch.gather(batch.same & batch.usable, 1, batch.positive_rows).all()
        lengths = batch.candidates.norm(dim=1)
        assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-4)
        if batch.hops:  # queries are no rows of the world
            assert ((batch.items[:, 0] @ batch.candidates.T) < 1 - 1e-6).all()


def test_worlds_are_dense_and_sparse(data, config):
    sampler = DensitySampler(data, config)
    found = [
        int((batch.same & batch.usable).sum(1).min())
        for batch in (sampler.batch(step, slice(0, 8)) for step in range(60))
    ]
    assert min(found) == 1
    assert max(found) >= 8
    widths = {sampler.batch(step, slice(0, 8)).candidates.shape[1] for step in range(12)}
    assert {8, 16} <= widths <= {8, 16, 64}  # 64: rectified


def test_a_world_that_is_made_smaller_keeps_classes_that_it_has():
    inverse, sizes = np.repeat([7, 31], 60), np.zeros(40, dtype=np.int64)
    sizes[[7, 31]] = 60
    limit = np.where(sizes > 0, WHOLE, 0)
    for seed in range(200):
        kept = _shrunk(np.random.default_rng(seed), np.arange(120), inverse, sizes, limit, 40)
        assert 0 < len(kept) <= 120


def test_worlds_cut_alike_have_no_large_class(data):
    sampler = DensitySampler(data, preset("universal", 16, [*SMALL, "alike=0.99", "world_rows=1000"]))
    worlds = [sampler.world(np.random.default_rng(seed), 1000, ordinary=False) for seed in range(40)]
    spread = [np.bincount(world.labels) for world in worlds]
    assert all(world.asked.all() for world in worlds)
    even = [counts for counts in spread if counts.max() == counts.min()]
    assert len(even) > 10, "most have one number for all classes"
    assert min(counts.max() for counts in spread) == 2, "one image to be found, of every class"
    assert max(map(len, spread)) == 60, "the classes of all three sets"


def test_the_dense_hop_of_training_is_the_sparse_hop_of_use(data):
    x = torch.from_numpy(data.vectors[:90].astype(np.float32))
    scores = x @ x.T
    scores.fill_diagonal_(-2)
    near = scores.topk(6).indices
    weights = torch.rand(90, 7, generator=torch.Generator().manual_seed(0)) - 0.2
    weights[:, 0] = weights[:, 0].abs()
    ours = hop(weights, near, x, torch.tensor(0.8), 4)
    rows = np.concatenate([np.arange(90)[:, None], near.numpy()], axis=1)
    assert np.allclose(ours.numpy(), sparse_hop(weights.numpy(), rows, x.numpy(), 0.8, 4), atol=1e-5)


def test_where_only_some_rows_hop_the_others_stay(data):
    x = torch.from_numpy(data.vectors[:60].astype(np.float32))
    own = torch.arange(0, 60, 3)
    scores = x[own] @ x.T
    scores[torch.arange(len(own)), own] = -2
    near = scores.topk(5).indices
    weights = torch.rand(len(own), 6, generator=torch.Generator().manual_seed(1))
    ours = hop(weights, near, x, torch.tensor(0.7), 3, own)
    W = np.zeros((60, 60))
    for row, (w, lists) in enumerate(zip(weights.numpy(), near.numpy())):
        W[own[row], lists] = w[1:]
    stays = np.setdiff1d(np.arange(60), own.numpy())
    A = (W + W.T) / 2
    A[:, stays] = W[:, stays]  # as if such edges led both ways
    A[own, own] += weights[:, 0].numpy()
    A[stays] = 0
    A[stays, stays] = 1
    S, H = A / A.sum(1, keepdims=True), x.numpy().astype(np.float64)
    for _ in range(3):
        H = np.where(np.isin(np.arange(60), stays)[:, None], x, 0.7 * S @ H + 0.3 * x.numpy())
    expected = H / np.linalg.norm(H, axis=1, keepdims=True)
    assert torch.equal(ours[stays], x[stays])
    np.testing.assert_allclose(ours[own].numpy(), expected[own], atol=1e-5)
    everywhere = torch.arange(len(own))
    lists, some = torch.searchsorted(own, own[near % len(own)]), x[own]
    whole = hop(weights, lists, some, torch.tensor(0.7), 3)
    assert torch.equal(whole, hop(weights, lists, some, torch.tensor(0.7), 3, everywhere))


def test_what_hops_is_the_positives_and_what_lies_nearest_to_the_queries(data):
    x = torch.from_numpy(data.vectors[:80].astype(np.float32))
    queries, positive = x[:2] + 0.01, np.array([[70, 71], [72, 70]])
    assert torch.equal(_around(x, queries, positive, 80), torch.arange(80))
    chosen = _around(x, queries, positive, 20).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 20
    assert {70, 71, 72} <= set(chosen)
    ranks = np.argsort(np.argsort(-(queries @ x.T).numpy(), axis=1), axis=1).min(axis=0)
    others = sorted(set(chosen) - {70, 71, 72})
    left = sorted(set(range(80)) - set(chosen))
    assert ranks[others].max() <= ranks[left].min()


def test_gradients_through_hops_reach_gates_loops_and_alpha(data, config):
    sampler, network = DensitySampler(data, config), LAttQE(config.network)
    stage = TrainingStage(network, dataclasses.replace(config, accumulate=1), Team())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    for step in range(0, 3 * config.hop_every, config.hop_every):
        assert torch.isfinite(stage.update(step, sampler.batch(step, slice(0, 8)))).all()
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert {
        "head.rows.linear.weight",
        "head.loop.weight",
        "head.alpha_logit",
        "head.queries.linear.weight",
        "head.beta.weight",
        "head.relevance.weight",
    } <= changed


def test_an_update_waits_for_all_of_its_batches(data, config):
    sampler, network = DensitySampler(data, config), LAttQE(config.network)
    stage = TrainingStage(network, config, Team())
    before = network.state_dict()["head.queries.linear.weight"].clone()
    for step in range(config.accumulate):
        assert torch.equal(network.state_dict()["head.queries.linear.weight"], before)
        stage.update(step, sampler.batch(step, slice(0, 8)))
    assert not torch.equal(network.state_dict()["head.queries.linear.weight"], before)


def test_cut_sets_keep_so_many_of_each_class_and_smaller_cuts_are_parts_of_larger_ones():
    labels = np.array([0] * 5 + [1] * 2 + [-1] * 3 + [7] * 9)
    for m in (1, 2, 4):
        kept = keep_of_each(labels, m)
        assert [int((kept & (labels == c)).sum()) for c in (0, 1, 7)] == [min(m, 5), min(m, 2), min(m, 9)]
        assert kept[labels < 0].all()
        assert (keep_of_each(labels, m + 1) | ~kept).all()


def test_validation_meets_every_width_and_density():
    rng = np.random.default_rng(0)

    def one(name):
        x = rng.standard_normal((40, 8)).astype(np.float32)
        labels = np.arange(40) % 5 + (10 if name == "b" else 0)
        return ValidationSet(name, x, labels, x[:10] + 0.1, labels[:10])

    cells = density_sets([one("a"), one("b")], (1, 3), 4, queries=6)
    assert [cell.name for cell in cells[:8]] == [
        "a, 4 columns",
        "a, 4 columns, 1 relevant",
        "a, 4 columns, 1 relevant among others",
        "a, 4 columns, 1 relevant among others cut alike",
        "a, 4 columns, 3 relevant",
        "a, 4 columns, 3 relevant among others",
        "a, 4 columns, 3 relevant among others cut alike",
        "a, 4 columns, all relevant among others",
    ]
    assert len(cells) == 2 * 8
    assert [len(cell.xb) for cell in cells[:8]] == [40, 5, 45, 10, 15, 55, 30, 80]
    for cell in cells[1:4]:
        assert (np.bincount(cell.labels[cell.labels >= 0]) == 1).all()
    assert all(len(cell.xq) == 6 and np.allclose(np.linalg.norm(cell.xb, axis=1), 1, atol=1e-5) for cell in cells)


def test_validation_in_a_shifted_space_ranks_nearly_as_before_but_around_a_mean():
    x = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    one = ValidationSet("a", x, np.arange(400) % 5, x[:10], np.arange(10) % 5)
    plain, shifted = (density_sets([one], (), 8, queries=10, shift=shift)[0] for shift in (0.0, 2.0))
    assert shifted.name == "a, 8 columns shifted by 2"
    assert np.linalg.norm(plain.xb.mean(axis=0)) < 0.2
    assert np.linalg.norm(shifted.xb.mean(axis=0)) > 0.8
    assert np.allclose(np.linalg.norm(shifted.xq, axis=1), 1, atol=1e-5)


def test_clusters_are_worlds_of_their_own():
    """Unit vectors of some width, whose classes stand out from chance: the nearest is of the same class more often."""
    for seed in range(6):
        pool = _clusters(np.random.default_rng(seed))
        scores = pool.vectors @ pool.vectors.T
        np.fill_diagonal(scores, -2)
        sizes = np.bincount(pool.labels)
        chance = (sizes / sizes.sum() * sizes).sum() / sizes.sum()
        assert (pool.labels[scores.argmax(axis=1)] == pool.labels).mean() > 1.5 * chance
        assert sizes.min() >= 2


def test_worlds_that_are_never_altered_are_as_they_are():
    x = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    for seed in range(20):
        assert np.array_equal(_altered(np.random.default_rng(seed), x, x.std(axis=0), often=0), scaled_rows(x))


def test_the_first_updates_meet_ordinary_spaces_alone(data, config):
    """Before the given share of the updates every world is rows of the sets as they are; after it most are not."""
    settled = dataclasses.replace(config, steps=60, ordinary=0.5, clusters=0.5, altered=1.0, hop_every=0)
    sampler = DensitySampler(data, settled)
    known = {width: {row.tobytes() for row in scaled_rows(data.vectors[:, :width])} for width in (8, 16)}

    def is_ordinary(step):
        world = sampler.batch(step, slice(0, 8)).candidates.numpy()
        return world.shape[1] in known and all(row.tobytes() in known[world.shape[1]] for row in world)

    assert all(is_ordinary(step) for step in range(30))
    assert sum(is_ordinary(step) for step in range(30, 60)) < 15


def test_a_share_of_the_worlds_is_adapted_and_a_step_decides_which(data, config):
    plain, half, whole = (
        DensitySampler(data, dataclasses.replace(config, adapted=share, altered=0.0, hop_every=0))
        for share in (0.0, 0.5, 1.0)
    )
    again = DensitySampler(data, half.config)
    changed = 0
    for step in range(30):
        worlds = [sampler.batch(step, slice(0, 8)).candidates for sampler in (plain, half, whole, again)]
        assert torch.equal(worlds[1], worlds[3]), "a world is a function of the seed and the step"
        assert torch.equal(worlds[0], worlds[2]) == (len(worlds[0]) < adaptation.FEWEST)
        assert torch.allclose(worlds[2].norm(dim=1), torch.ones(len(worlds[2])), atol=1e-4)
        changed += not torch.equal(worlds[0], worlds[1])
    assert 8 <= changed <= 22, "about half of 30"


def test_an_adapted_world_is_what_the_adaptation_of_a_collection_gives(data):
    x = scaled_rows(data.vectors[:240])
    made = _adapted(np.random.default_rng(0), x, often=1.0)
    np.testing.assert_allclose(made, adapt_to(FlatIndex(x)).apply(x), atol=1e-4)
    assert _adapted(np.random.default_rng(0), x, often=0.0) is x
    few = x[: adaptation.FEWEST - 1]
    assert _adapted(np.random.default_rng(0), few, often=1.0) is few, "too few to learn from"


def test_a_model_trained_in_adapted_spaces_says_so(sets, tmp_path):
    short = [
        "steps=3",
        "hop_every=0",
        "validate_shift=0",
        "warmup=0",
        "validate_every=3",
        "checkpoint_every=3",
        "validate_k=4",
        "validate_densities=1",
    ]
    choose = ["validate_widths=16", "choose_qe=4", "choose_dba=4", "choose_hops=1", "network.max_k=16"]
    for adapt, said in ((True, True), (False, None)):
        config = preset("universal", 16, [*SMALL, *short, *choose, f"adapt={adapt}", "adapted=0.5"])
        to = str(tmp_path / f"model-{adapt}")
        plan = make(to, config, [sets["a"], sets["b"]], [(sets["database"], sets["queries"])])
        plan.claim()
        train(plan)
        metrics = load_model(to)[2]
        assert metrics.get("adapt") is said
        assert metrics["chosen"].get("adapt") is said
        assert create("lattqe", model=to).adapts is bool(said)


def test_altered_spaces_are_unit_vectors_without_nan():
    x = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    x[3] = 0
    for seed in range(60):
        made = _altered(np.random.default_rng(seed), x, x.std(axis=0))
        assert np.isfinite(made).all()
        assert np.allclose(np.delete(np.linalg.norm(made, axis=1), 3), 1, atol=1e-5)


def test_settings_that_do_not_fit_are_refused():
    for setting, match in (
        ("temperature_steps=5", "no temperature"),
        ("accumulate=7", "multiple of accumulate"),
        ("sampler=tuples", "learns from worlds"),
        ("validate_densities=0", "whole numbers from 1"),
        ("altered=1.5", "from 0 to 1"),
        ("adapted=-0.1", "from 0 to 1"),
        ("clusters=1", "a share from 0 to below 1"),
        ("validate_shift=-1", "a number from 0"),
    ):
        with pytest.raises(LattqeError, match=match):
            preset("universal", 16, [*SMALL, setting])
