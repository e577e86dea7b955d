"""What the samplers draw: pure functions of (seed, step), with the paper's statistics."""

import dataclasses
import gc
import threading
import weakref

import numpy as np
import pyarrow as pa
import pytest
import torch
from training_sets import clusters

from lattqe.search import knn_graph
from lattqe.store import FeatureSet, FeatureWriter
from lattqe.training.config import TrainingConfig
from lattqe.training.plan import TrainingData, join, load, published_pairs
from lattqe.training.sampling import Batch, Members, Sampler, TupleSampler, WorldSampler, prefetched
from lattqe.training.stage import contrastive, hardest

WHOLE = slice(None)


@pytest.fixture(scope="module")
def data() -> TrainingData:
    """Two sets of 20 and 10 classes with the same labels, and their graphs."""
    sets = [clusters(1, 20, 15), clusters(2, 10, 8)]
    return join([x for x, _ in sets], [labels for _, labels in sets], [knn_graph(x, 24)[0] for x, _ in sets])


@pytest.fixture
def config(tiny: TrainingConfig) -> TrainingConfig:
    """The paper's ranges, scaled down; one number of neighbors for each batch."""
    return dataclasses.replace(
        tiny, k_for="batch", batch=32, slots=4, k_min=8, k_max=16, pool=200, pool_steps=3, positives=2, world_rows=60
    )


@pytest.fixture(params=["tuples", "worlds"])
def sampler(request: pytest.FixtureRequest, data: TrainingData, config: TrainingConfig) -> Sampler:
    """Each of the samplers in turn."""
    return (TupleSampler if request.param == "tuples" else WorldSampler)(data, config)


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


def row_of(data: TrainingData, vectors: torch.Tensor) -> np.ndarray:
    """Which training row each vector (..., D) is."""
    everyone = torch.from_numpy(data.gather(np.arange(data.rows)))
    return (vectors @ everyone.T).argmax(-1).numpy()


def test_a_batch_is_a_function_of_seed_and_step(sampler: Sampler, data: TrainingData, config: TrainingConfig) -> None:
    again = type(sampler)(data, config)  # type: ignore[call-arg]
    again.batch(2, WHOLE)
    for name, value in tensors(sampler.batch(7, WHOLE)).items():
        assert torch.equal(value, tensors(again.batch(7, WHOLE))[name]), name
    other = type(sampler)(data, dataclasses.replace(config, seed=1))  # type: ignore[call-arg]
    assert not torch.equal(sampler.batch(7, WHOLE).items[:, 0], other.batch(7, WHOLE).items[:, 0])
    assert not torch.equal(sampler.batch(7, WHOLE).items[:, 0], sampler.batch(9, WHOLE).items[:, 0])


def test_the_parts_of_a_batch_make_the_whole(sampler: Sampler) -> None:
    whole = tensors(sampler.batch(4, WHOLE))
    parts = [tensors(sampler.batch(4, part)) for part in (slice(0, 8), slice(8, 32))]
    for name, value in whole.items():
        joined = parts[0][name] if name in ("candidates", "classes") else torch.cat([part[name] for part in parts])
        assert torch.equal(joined, value), name


def test_neighbors_are_of_the_same_set_and_never_the_query(sampler: Sampler, data: TrainingData) -> None:
    for step in range(4):
        rows = row_of(data, sampler.batch(step, WHOLE).items)
        world = np.searchsorted(data.bounds, rows, side="right")
        assert (world == world[:, :1]).all()
        assert (rows[:, 1:] != rows[:, :1]).all()


def test_labels_decide_what_is_relevant(sampler: Sampler, data: TrainingData) -> None:
    batch = sampler.batch(1, WHOLE)
    rows, candidates, positives = (row_of(data, x) for x in (batch.items, batch.candidates, batch.positives))
    own = data.labels[rows[:, :1]]
    assert np.array_equal(batch.relevant.numpy(), data.labels[rows[:, 1:]] == own)
    assert np.array_equal(batch.same.numpy(), data.labels[candidates] == own)
    assert np.array_equal(batch.usable.numpy(), candidates != rows[:, :1])
    assert (data.labels[positives] == own).all()
    assert (positives != rows[:, :1]).all()


def test_neighbors_keep_their_ranks_when_some_are_dropped(sampler: Sampler) -> None:
    batch = sampler.batch(3, WHOLE)
    scores = torch.einsum("bd,bkd->bk", batch.items[:, 0], batch.items[:, 1:])
    assert (scores.diff(dim=1) <= 1e-6).all()
    assert batch.valid[:, 0].all()
    assert not batch.valid.all()


def test_tuples_search_the_whole_set(data: TrainingData, config: TrainingConfig) -> None:
    batch = TupleSampler(data, config).batch(0, WHOLE)
    rows = row_of(data, batch.items)
    assert data.neighbors is not None
    assert np.array_equal(rows[:, 1:], data.neighbors[rows[:, 0], : rows.shape[1] - 1])


def test_counts_and_drops_have_the_papers_distribution(data: TrainingData, config: TrainingConfig) -> None:
    sampler = TupleSampler(data, config)
    batches = [sampler.batch(step, WHOLE) for step in range(300)]
    counts = np.bincount([batch.items.shape[1] - 1 for batch in batches], minlength=17)
    assert (counts[:8] == 0).all()
    assert (counts[8:] > 300 / 9 / 3).all()  # nine counts, equally likely
    share = np.concatenate([(~batch.valid[:, 1:]).float().mean(1).numpy() for batch in batches])
    assert share.mean() == pytest.approx(0.3, abs=0.01)  # of U(0, 0.6)
    # Var of a mean of k Bernoulli draws with random p: Var(p) + E[p(1 - p)] / k; with one p for all it would be less.
    assert share.std() == pytest.approx(np.sqrt(0.03 + 0.18 / 12), abs=0.01)


def test_the_number_of_neighbors_is_drawn_for_each_query(data: TrainingData, config: TrainingConfig) -> None:
    """Lists of one batch end at different ranks, uniformly from k_min to k_max; what is dropped stays in its place."""
    config = dataclasses.replace(config, k_for="query", drop_max=0.0)
    sampler = TupleSampler(data, config)
    lengths = []
    for step in range(100):
        batch = sampler.batch(step, WHOLE)
        valid = batch.valid[:, 1:].numpy()
        ends = valid.sum(axis=1)
        assert (valid == (np.arange(valid.shape[1]) < ends[:, None])).all(), "a list has no holes without drops"
        assert batch.k == valid.shape[1] == ends.max()
        lengths.append(ends)
    counts = np.bincount(np.concatenate(lengths), minlength=17)
    assert counts[:8].sum() == 0
    assert counts[8:] == pytest.approx(100 * 32 / 9, rel=0.25)


def test_published_pairs_decide_queries_and_positives(config: TrainingConfig) -> None:
    """In a set that has pairs only they count; a set without any goes by its labels."""
    sets = [clusters(1, 10, 6), clusters(2, 4, 6)]
    pairs = np.array([[7, 8], [0, 3], [0, 5], [30, 31]])
    data = join(
        [x for x, _ in sets],
        [labels for _, labels in sets],
        [knn_graph(x, 16)[0] for x, _ in sets],
        pairs=[pairs, np.empty((0, 2), np.int64)],
    )
    for published, queries in ((True, {0, 7, 30, *range(60, 84)}), (False, set(range(84)))):
        sampler = TupleSampler(data, dataclasses.replace(config, pairs="published" if published else "labels"))
        drawn: dict[int, set[int]] = {}
        for step in range(120):
            batch = sampler.batch(step, WHOLE)
            for query, found in zip(row_of(data, batch.items[:, 0]), row_of(data, batch.positives)):
                drawn.setdefault(int(query), set()).update(found.tolist())
        assert set(drawn) == queries
        for query, found in drawn.items():
            same = set(np.flatnonzero(data.labels == data.labels[query])) - {query}
            mine = set(pairs[pairs[:, 0] == query, 1].tolist())
            assert found == (mine if published and query < 60 else same), query


def test_pairs_are_read_from_the_column_of_ids(tmp_path) -> None:
    """As `lattqe dataset sfm120k` writes them; a positive that is no longer in the set does not count."""
    x, labels = clusters(1, 3, 4)
    column = pa.field("positives", pa.list_(pa.string()))
    with FeatureWriter(str(tmp_path / "set"), x.shape[1], "float32", labels=True, extra=[column]) as writer:
        lists = [["row-2", "row-1"], [], ["row-0", "elsewhere"], *([] for _ in range(9))]
        writer.append(x, [f"row-{row}" for row in range(12)], labels, {"positives": pa.array(lists, column.type)})
    with FeatureWriter(str(tmp_path / "plain"), x.shape[1], "float32", labels=True) as writer:
        writer.append(x, [f"other-{row}" for row in range(12)], labels)
    assert published_pairs(FeatureSet.open(str(tmp_path / "set"))).tolist() == [[0, 2], [0, 1], [2, 0]]
    data = load([str(tmp_path / "plain"), str(tmp_path / "set")], [], 4)
    assert data.pairs is not None
    assert data.pairs.tolist() == [[12, 14], [12, 13], [14, 12]]
    assert load([str(tmp_path / "plain")], [], 4).pairs is None


def test_at_most_one_hard_negative_of_each_class(data: TrainingData, config: TrainingConfig) -> None:
    """Against a loop over candidates by falling score."""
    batch = TupleSampler(data, config).batch(0, WHOLE)
    assert batch.classes is not None
    scores = (batch.items[:, 0] @ batch.candidates.T).masked_fill(batch.same | ~batch.usable, -torch.inf)
    best, rows = hardest(scores, 5, batch.classes)
    for query in range(len(scores)):
        expected: list[int] = []
        for row in scores[query].argsort(descending=True, stable=True).tolist():
            if len(expected) < 5 and batch.classes[row] not in batch.classes[expected]:
                expected.append(row)
        assert rows[query].tolist() == expected
        assert torch.equal(best[query], scores[query][expected])
    few = torch.zeros(2, 6), torch.tensor([1, 1, 2, 2, 2, 1])
    assert (hardest(*few[:1], 4, few[1])[0] > -torch.inf).sum(1).tolist() == [2, 2], "two classes, two negatives"
    distinct = dataclasses.replace(config, distinct_negatives=True, margin=2.0)
    plain = dataclasses.replace(config, distinct_negatives=False, margin=2.0)
    assert (contrastive(batch.items[:, 0], batch, distinct) <= contrastive(batch.items[:, 0], batch, plain)).all()


def test_queries_are_uniform_and_classes_of_one_image_never_asked(config: TrainingConfig) -> None:
    x, labels = clusters(3, 5, 8)
    labels[0] = 99  # the only image of its class
    data = join([x], [labels], [knn_graph(x, 16)[0]])
    assert data.skipped == 1
    sampler = TupleSampler(data, config)
    asked = np.bincount(np.concatenate([row_of(data, sampler.batch(step, WHOLE).items[:, 0]) for step in range(200)]))
    assert asked[0] == 0
    assert asked[1:] == pytest.approx(200 * 32 / 39, rel=0.25)


def test_the_pool_changes_every_so_many_updates(data: TrainingData, config: TrainingConfig) -> None:
    sampler = TupleSampler(data, config)
    pools = [sampler.batch(step, WHOLE).candidates for step in range(7)]
    assert len(pools[0]) == 200
    same = [torch.equal(pools[step], pools[step + 1]) for step in range(6)]
    assert same == [True, True, False, True, True, False]


def test_worlds_vary_in_size_and_take_the_sets_in_turn(data: TrainingData, config: TrainingConfig) -> None:
    sampler = WorldSampler(data, config)
    sizes = []
    for step in range(100):
        rows = row_of(data, sampler.batch(step, WHOLE).candidates)
        start, stop = data.bounds[step % 2], data.bounds[step % 2 + 1]
        assert ((rows >= start) & (rows < stop)).all()
        sizes.append(len(rows))
    assert max(sizes) <= config.world_rows
    assert len(set(sizes)) > 20


def test_worlds_draw_each_class_equally(config: TrainingConfig) -> None:
    x, labels = clusters(4, 2, 30)
    labels = np.where(np.arange(60) < 10, 0, 1).astype(np.int32)  # 10 and 50 images
    config = dataclasses.replace(config, world_classes=1.0, world_images=1.0, batch=4, slots=4)
    data = join([x], [labels])
    sampler = WorldSampler(data, config)
    asked = np.concatenate([data.labels[row_of(data, sampler.batch(step, WHOLE).items[:, 0])] for step in range(300)])
    assert asked.mean() == pytest.approx(0.5, abs=0.05)


def test_labels_of_two_sets_are_two_classes_unless_shared() -> None:
    x, labels = clusters(1, 3, 4)
    assert len(join([x, x], [labels, labels]).class_sizes) == 6
    assert len(join([x, x], [labels, labels], shared_labels=True).class_sizes) == 3


def test_labels_below_zero_belong_to_nothing() -> None:
    x, labels = clusters(1, 3, 4)
    labels[:4] = -1
    data = join([x, x], [labels, labels])
    assert sorted(data.class_sizes.tolist()) == [1] * 8 + [4] * 4
    assert data.skipped == 8


def test_others_never_gives_the_row_itself_and_gives_all_others() -> None:
    labels = np.array([2, 0, 1, 0, 2, 0, 2, 2])
    members = Members(labels)
    found = members.others(np.arange(8)[labels != 1], np.linspace(0, 1, 50, endpoint=False)[None].repeat(7, 0))
    for row, others in zip(np.arange(8)[labels != 1], found):
        assert set(others) == set(np.flatnonzero(labels == labels[row])) - {row}


def test_the_pool_goes_to_the_device_once_for_each_refresh(data: TrainingData, config: TrainingConfig) -> None:
    """The device "meta" holds nothing, and is another one than the CPU."""
    sampler, device = TupleSampler(data, config), torch.device("meta")
    moved = [sampler.batch(step, WHOLE).to(device) for step in range(config.pool_steps + 1)]
    assert all(tensor.device.type == "meta" for batch in moved for tensor in tensors(batch).values())
    pools = [batch.candidates for batch in moved]
    assert all(pool is pools[0] for pool in pools[: config.pool_steps])
    assert pools[-1] is not pools[0]
    here = sampler.batch(0, WHOLE)
    assert here.to(torch.device("cpu")) is here


def test_batches_for_a_gpu_are_pinned_ahead(
    sampler: Sampler, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that makes them; a pool that batches share is pinned, and later sent, once."""
    pinned: dict[int, torch.Tensor] = {}

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        assert threading.current_thread().name.startswith("sampler")
        copy = tensor.clone()
        pinned[id(copy)] = copy
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    steps = range(config.pool_steps + 1)
    with prefetched(sampler, steps, WHOLE, torch.device("cuda")) as batches:
        found = list(batches)
    for step, batch in zip(steps, found):
        expected = tensors(sampler.batch(step, WHOLE))
        for name, value in tensors(batch).items():
            assert id(value) in pinned, name
            assert torch.equal(value, expected[name]), name
    pools = len({id(batch.candidates) for batch in found})
    assert pools == (2 if isinstance(sampler, TupleSampler) else len(found))
    assert len(pinned) == sum(len(tensors(batch)) - 1 for batch in found) + pools
    pinned.clear()
    with prefetched(sampler, steps, WHOLE, torch.device("cpu")) as batches:
        assert len(list(batches)) == len(steps)
    assert not pinned


def test_a_pool_that_is_freed_here_is_freed_there(data: TrainingData, config: TrainingConfig) -> None:
    sampler = TupleSampler(data, config)
    there = weakref.ref(sampler.batch(0, WHOLE).to(torch.device("meta")).candidates)
    assert there() is not None  # the sampler still has the pool
    for number in (1, 2):  # it keeps two
        sampler.batch(number * config.pool_steps, WHOLE)
    gc.collect()
    assert there() is None
