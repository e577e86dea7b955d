"""The synthetic world: any row on its own, disjoint splits, truth by visibility, and the structure it promises."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lattqe.datasets.revisited import load_gnd, save_gnd
from lattqe.datasets.synthetic import PLANS, SPLITS, SyntheticWorld, Views, landmark_sizes
from lattqe.errors import LattqeError
from lattqe.evaluation import score_ranking

SMALL = SyntheticWorld(seed=5, dim=16, scale=0.2, distractors=3000)
WHOLE = {name: SMALL.split(name).vectors() for name in SPLITS}


@given(st.sampled_from(SPLITS), st.data())
@settings(max_examples=40)
def test_any_range_is_a_function_of_seed_and_rows(name, data):
    rows = len(WHOLE[name])
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    fresh = SyntheticWorld(seed=5, dim=16, scale=0.2, distractors=3000).split(name)
    np.testing.assert_array_equal(fresh.vectors(start, stop), WHOLE[name][start:stop])
    np.testing.assert_array_equal(fresh.labels(start, stop), SMALL.split(name).labels()[start:stop])
    assert fresh.ids(start, stop) == SMALL.split(name).ids()[start:stop]


def test_blocks_join_to_the_whole():
    split = SMALL.split("oxford")
    vectors, ids, labels = zip(*split.blocks(300))
    np.testing.assert_array_equal(np.concatenate(vectors), WHOLE["oxford"])
    assert [name for names in ids for name in names] == split.ids()
    np.testing.assert_array_equal(np.concatenate(labels), split.labels())


def test_more_distractors_keep_the_first_ones():
    more = SyntheticWorld(seed=5, dim=16, scale=0.2, distractors=5000).split("distractors")
    np.testing.assert_array_equal(more.vectors(0, 3000), WHOLE["distractors"])


def test_the_end_of_a_million_rows_comes_at_once_and_in_little_memory():
    split = SyntheticWorld(distractors=1_000_000).split("distractors")
    tracemalloc.start()
    vectors = split.vectors(999_500, 1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert vectors.shape == (500, 128)
    assert peak < 32 << 20


def test_splits_are_disjoint_and_well_formed():
    labels = {name: set(SMALL.split(name).labels()[SMALL.split(name).labels() >= 0]) for name in SPLITS}
    assert not labels["distractors"]
    assert [len(labels[name]) for name in PLANS] == [round(plan.landmarks * 0.2) for plan in PLANS.values()]
    assert len(set.union(*labels.values())) == sum(map(len, labels.values()))
    for name in SPLITS:
        split = SMALL.split(name)
        assert WHOLE[name].shape == (split.rows, 16)
        assert WHOLE[name].dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(WHOLE[name], axis=1), 1, atol=1e-5)
        assert len(set(split.ids())) == split.rows
        assert len(np.unique(WHOLE[name], axis=0)) == split.rows
        assert split.query_vectors.shape == (split.queries, 16)
        assert set(split.query_labels) <= labels[name]
    assert not np.array_equal(SyntheticWorld(seed=6, dim=16, scale=0.2).split("val").vectors(0, 9), WHOLE["val"][:9])


def test_sizes_are_heavy_tailed_and_the_same_for_every_seed():
    train = landmark_sizes(PLANS["train"])
    assert (train.min(), train.max() > 250) == (3, True)
    assert train.mean() > 2 * np.median(train)
    assert np.sort(train)[-len(train) // 10 :].sum() > 0.5 * train.sum()
    oxford, paris = (SyntheticWorld(seed=seed).split(name) for seed, name in ((1, "oxford"), (2, "paris")))
    assert (oxford.rows, oxford.queries, paris.rows, paris.queries) == (3637, 70, 4012, 70)
    np.testing.assert_array_equal(
        np.sort(np.unique(oxford.labels(), return_counts=True)[1][1:]), np.sort(landmark_sizes(PLANS["oxford"]))
    )


def test_truth_equals_plain_loops():
    split, config = SMALL.split("oxford"), SMALL.model.config
    views, labels = split._all_views(), split.labels()
    for query in range(split.queries):
        mine = split.truth.judgements(query, query + 1)
        expected = {}
        for row in np.flatnonzero(labels == split.query_labels[query]):
            common = sum(float(a) * float(b) for a, b in zip(views.seen[row], split._query_views.seen[query]))
            visible = common / (1 + float(views.clutter[row]) ** 2) ** 0.5
            expected[int(row)] = 0 if visible >= config.easy else 1 if visible >= config.hard else 2
        assert dict(zip(mine.rows.tolist(), mine.grades.tolist())) == expected


def test_ground_truth_can_be_written_and_read(tmp_path):
    split = SMALL.split("paris")
    save_gnd(tmp_path / "gnd.json", split.revisited())
    again = load_gnd(tmp_path / "gnd.json")
    again.check_database(split.ids())
    again.check_queries(split.query_ids)
    np.testing.assert_array_equal(np.sort(again.truth.graded.rows), np.sort(split.truth.graded.rows))
    assert split.label_truth.counts.sum() == len(split.truth.graded.rows)


def test_wrong_use_is_refused():
    with pytest.raises(LattqeError, match=r"unknown split 'tset'"):
        SMALL.split("tset")
    with pytest.raises(LattqeError, match=r"rows 5..4 are not within"):
        SMALL.split("val").vectors(5, 4)
    with pytest.raises(LattqeError, match=r"got seed=-1"):
        SyntheticWorld(seed=-1)


@pytest.fixture(scope="module")
def world():
    return SyntheticWorld(seed=0)


def test_views_form_chains(world):
    """Near views are alike, far ends of a landmark hardly more than strangers, and steps of near views join them."""
    split = world.split("paris")
    views, labels, vectors = split._all_views(), split.labels(), split.vectors()
    landmark = max(set(labels) - {-1}, key=lambda label: split._landmarks.count[label % 10_000_000])
    rows = np.flatnonzero(labels == landmark)
    place = (views.seen[rows] * np.arange(views.seen.shape[1])).sum(axis=1) / views.seen[rows].sum(axis=1)
    rows = rows[np.argsort(place)]
    similarity = vectors[rows] @ vectors[rows].T
    fifth = len(rows) // 5
    near, ends = similarity[:fifth, :fifth].mean(), similarity[:fifth, -fifth:].mean()
    strangers = (vectors[rows] @ vectors[labels == -1].T).mean()
    assert near > 0.4
    assert ends < strangers + 0.15
    assert min(similarity[i * fifth : (i + 1) * fifth, (i + 1) * fifth : (i + 2) * fifth].max() for i in range(4)) > 0.6


def test_visibility_is_what_makes_images_alike(world):
    split = world.split("oxford")
    views, scores = split._all_views(), split.query_vectors @ split.vectors().T
    pairs = []
    for query in range(split.queries):
        rows = np.flatnonzero(split.labels() == split.query_labels[query])
        mine = Views(split._query_views.seen[[query]], split._query_views.clutter[[query]])
        visible = world.model.visibility(mine, Views(views.seen[rows], views.clutter[rows]))
        pairs.append(np.stack([visible, scores[query, rows]]))
    visible, score = np.concatenate(pairs, axis=1)
    means = [score[(visible >= low) & (visible < low + 0.2)].mean() for low in (0.0, 0.2, 0.4, 0.6, 0.8)]
    assert means == sorted(means)
    assert means[-1] - means[0] > 0.4


def expand(xq, xb, ranking, k, alpha):
    neighbors = xb[ranking[:, :k]]
    similarity = (neighbors @ xq[:, :, None])[:, :, 0]
    x = xq + (np.maximum(similarity, 0)[:, None, :] ** alpha @ neighbors)[:, 0]
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.slow
def test_difficulty_and_trade_offs_are_those_of_the_documentation(world):
    """Search without expansion is as hard as in the paper, distractors hurt, and no classic setting is good at both."""
    distractors = world.split("distractors").vectors(0, 10_000)

    def measure(name, k=0, alpha=0, more=0):
        split = world.split(name)
        xb = np.concatenate([split.vectors(), distractors[:more]])
        ranking = np.argsort(-(split.query_vectors @ xb.T), axis=1)
        if k:
            ranking = np.argsort(-(expand(split.query_vectors, xb, ranking, k, alpha) @ xb.T), axis=1)
        return 100 * score_ranking(ranking, split.truth)["medium"].mean_ap

    oxford, paris = measure("oxford"), measure("paris")
    assert 60 < oxford < 70 < 75 < paris < 85
    assert measure("oxford", more=10_000) < oxford - 5
    assert measure("paris", more=10_000) < paris - 5
    assert measure("oxford", k=4) > oxford + 5  # a short average helps where little is relevant,
    assert measure("oxford", k=64) < oxford  # a long one harms;
    assert measure("paris", k=64) > measure("paris", k=4) + 2  # where much is relevant the long one is better;
    assert measure("paris", k=72, alpha=3) > measure("paris", k=4) + 2  # alphaQE serves the latter,
    assert measure("oxford", k=72, alpha=3) < measure("oxford", k=4) - 2  # at the cost of the former.
