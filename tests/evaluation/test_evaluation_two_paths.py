"""Counting gives what full rankings give, to the last digit, whatever the ties, the blocks and the distractors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_twins import SlowIndex

from lattqe.errors import LattqeError
from lattqe.evaluation import GradedTruth, Judgements, LabelTruth, evaluate, score_ranking
from lattqe.evaluation.scores import query_blocks
from lattqe.search import FlatIndex
from lattqe.store import Pending, Ranks, ranks_table


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name].ap, other[name].ap)
        np.testing.assert_array_equal(one[name].precision, other[name].precision)
        np.testing.assert_array_equal(one[name].positives, other[name].positives)
        assert one[name].mean_ap == other[name].mean_ap


@st.composite
def searched_world(draw):
    """Few distinct small-integer vectors, so that duplicates and equal scores are the rule."""
    rows, queries, dim = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    number = st.integers(-1, 1)
    matrix = st.lists(st.lists(number, min_size=dim, max_size=dim), min_size=rows, max_size=rows)
    queries_matrix = st.lists(st.lists(number, min_size=dim, max_size=dim), min_size=queries, max_size=queries)
    return np.array(draw(matrix), np.float32), np.array(draw(queries_matrix), np.float32)


@given(searched_world(), st.data())
@settings(max_examples=60)
def test_revisited_by_counting_equals_full_rankings(world, data):
    xb, xq = world
    known = data.draw(st.integers(1, len(xb)))  # the rest are distractors
    grades = [data.draw(st.lists(st.integers(-1, 2), min_size=known, max_size=known)) for _ in xq]
    lists = [[[row for row, g in enumerate(mine) if g == grade] for mine in grades] for grade in (0, 1, 2)]
    truth = GradedTruth(Judgements.from_lists(*lists), known)
    index = SlowIndex(xb)
    _, full = index.search(xq, len(xb))
    by_ranking = score_ranking(full, truth)
    for budget in (1, 5, 1 << 20):
        assert_same(by_ranking, evaluate(index, xq, truth, budget=budget))
        assert_same(by_ranking, score_ranking(full, truth, budget=budget))


@given(searched_world(), st.data())
@settings(max_examples=60)
def test_labels_by_counting_equals_full_rankings(world, data):
    xb, xq = world
    index = SlowIndex(xb)
    labels = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=len(xb), max_size=len(xb))))
    if data.draw(st.booleans()):
        rows = np.array(data.draw(st.lists(st.integers(0, len(xb) - 1), min_size=1, max_size=4)))
        xq, truth = xb[rows], LabelTruth(labels, query_rows=rows)
    else:
        wanted = data.draw(st.lists(st.integers(-1, 3), min_size=len(xq), max_size=len(xq)))
        truth = LabelTruth(labels, query_labels=np.array(wanted))
    full = index.search(xq, len(xb))[1]
    assert_same(score_ranking(full, truth), evaluate(index, xq, truth, budget=data.draw(st.integers(1, 30))))


def test_the_real_index_and_many_positives():
    """Unit vectors with duplicates, hundreds of positives for each query, distractors after the labelled rows."""
    rng = np.random.default_rng(3)
    xb = rng.standard_normal((1500, 16)).astype(np.float32)
    xb[700:900] = xb[100:300]
    xb /= np.linalg.norm(xb, axis=1, keepdims=True)
    xq = np.concatenate([xb[:20], rng.standard_normal((20, 16)).astype(np.float32)])
    truth = LabelTruth(rng.integers(0, 3, 1200), query_labels=rng.integers(0, 3, 40))
    index = FlatIndex(xb)
    full = index.search(xq, len(xb))[1]
    by_ranking = score_ranking(full, truth)
    assert 0.2 < by_ranking["label"].mean_ap < 0.5
    assert_same(by_ranking, evaluate(index, xq, truth))
    assert_same(by_ranking, evaluate(index, xq, truth, budget=2000))


def test_wrong_sizes_are_refused():
    truth = LabelTruth(np.arange(5), query_labels=np.arange(2))
    index = SlowIndex(np.eye(4, dtype=np.float32))
    with pytest.raises(LattqeError, match=r"covers 5 database rows and the index has 4"):
        evaluate(index, np.eye(4, dtype=np.float32)[:2], truth)
    with pytest.raises(LattqeError, match=r"got 3 queries, but the ground truth has 2"):
        evaluate(SlowIndex(np.eye(5, dtype=np.float32)), np.eye(5, dtype=np.float32)[:3], truth)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 120))
def test_blocks_cover_every_query_within_the_budget(counts, budget):
    counts = np.array(counts, dtype=np.int64)
    blocks = list(query_blocks(counts, budget, most=8))
    assert [query for start, stop in blocks for query in range(start, stop)] == list(range(len(counts)))
    for start, stop in blocks:
        assert stop - start <= 8
        assert stop - start == 1 or (stop - start) * max(counts[start:stop].max(), 1) <= budget


def test_counting_sends_no_more_than_the_budget():
    class Watcher(SlowIndex):
        largest = 0

        def score(self, xq, rows):
            self.largest = max(self.largest, rows.size)
            return super().score(xq, rows)

    rng = np.random.default_rng(0)
    xb = rng.standard_normal((60, 4))
    index = Watcher(xb)
    truth = LabelTruth(np.arange(60) % 3, query_labels=np.arange(12) % 3)
    evaluate(index, xb[:12], truth, budget=45)
    assert index.largest == 40  # two queries of 20 positives each


def test_a_stored_ranking_is_scored_again(tmp_path):
    rng = np.random.default_rng(1)
    lists = np.array([rng.permutation(30)[:12] for _ in range(9)], dtype=np.int32)
    truth = LabelTruth(np.arange(30) % 4, query_labels=np.arange(9) % 4)
    pending = Pending.begin(str(tmp_path / "ranks"), "ranks", {"k": 12}, part_rows=[5, 4])
    scores = np.linspace(1, 0, 12, dtype=np.float32) + np.zeros((9, 1), np.float32)
    for part, (start, stop) in enumerate([(0, 5), (5, 9)]):
        names = [f"q{query}" for query in range(start, stop)]
        pending.publish(part, ranks_table(names, lists[start:stop], scores[start:stop]))
    pending.finish()
    assert_same(score_ranking(Ranks.open(str(tmp_path / "ranks")), truth, budget=20), score_ranking(lists, truth))
