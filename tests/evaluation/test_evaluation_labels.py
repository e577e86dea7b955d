"""The label protocol: same label is relevant, a query inside the database is not its own answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_twins import exact_average_precision

from lattqe.errors import LattqeError
from lattqe.evaluation import LabelTruth, score_ranking

LABELS = st.lists(st.integers(-1, 3), min_size=1, max_size=12)


@given(LABELS, st.data())
def test_queries_inside_the_database(labels, data):
    rows = np.array(data.draw(st.lists(st.integers(0, len(labels) - 1), min_size=1, max_size=5)))
    rankings = np.array([data.draw(st.permutations(range(len(labels)))) for _ in rows])
    scores = score_ranking(rankings, LabelTruth(np.array(labels), query_rows=rows))["label"]
    for i, row in enumerate(rows):
        relevant = {r for r, label in enumerate(labels) if label == labels[row] and label >= 0 and r != row}
        assert scores.positives[i] == len(relevant)
        expected = float(exact_average_precision(rankings[i], relevant, {row})) if relevant else 0.0
        assert scores.ap[i] == pytest.approx(expected)


@given(LABELS, LABELS, st.data())
def test_queries_outside_the_database(labels, wanted, data):
    rankings = np.array([data.draw(st.permutations(range(len(labels)))) for _ in wanted])
    scores = score_ranking(rankings, LabelTruth(np.array(labels), query_labels=np.array(wanted)))["label"]
    for i, label in enumerate(wanted):
        relevant = {r for r, other in enumerate(labels) if other == label and label >= 0}
        assert scores.positives[i] == len(relevant)
        expected = float(exact_average_precision(rankings[i], relevant, set())) if relevant else 0.0
        assert scores.ap[i] == pytest.approx(expected)


@given(LABELS, st.data())
def test_some_queries_inside_the_database_some_outside(labels, data):
    """Each with a label of its own, which need not be that of its row."""
    row = st.integers(-1, len(labels) - 1)
    rows = np.array(data.draw(st.lists(row, min_size=1, max_size=5)))
    wanted = np.array([data.draw(st.integers(-1, 3)) for _ in rows])
    rankings = np.array([data.draw(st.permutations(range(len(labels)))) for _ in rows])
    truth = LabelTruth(np.array(labels), query_labels=wanted, query_rows=rows)
    scores = score_ranking(rankings, truth)["label"]
    for i, (row, label) in enumerate(zip(rows, wanted)):
        relevant = {r for r, other in enumerate(labels) if other == label and label >= 0 and r != row}
        assert scores.positives[i] == len(relevant)
        expected = float(exact_average_precision(rankings[i], relevant, {row})) if relevant else 0.0
        assert scores.ap[i] == pytest.approx(expected)


def test_judgements_come_block_by_block():
    truth = LabelTruth(np.array([2, 1, 2, 1, 2]), query_rows=np.array([4, 1, 0]))
    np.testing.assert_array_equal(truth.counts, [3, 2, 3])
    part = truth.judgements(1, 3)
    np.testing.assert_array_equal(part.rows, [1, 3, 0, 2, 4])
    np.testing.assert_array_equal(part.grades, [2, 0, 2, 0, 0])
    np.testing.assert_array_equal(part.offsets, [0, 2, 5])


def test_wrong_use_is_refused():
    with pytest.raises(LattqeError, match=r"give the queries' labels, or their row numbers"):
        LabelTruth(np.arange(3))
    with pytest.raises(LattqeError, match=r"query row -1 is not in the database of 3 rows"):
        LabelTruth(np.arange(3), query_rows=np.array([1, -1]))
    for wrong in (np.array([0.5]), np.array(["1"]), np.array([[1]])):
        with pytest.raises(LattqeError, match=r"query rows are .* of shape \(.*\): give whole numbers"):
            LabelTruth(np.arange(3), query_rows=wrong)
    with pytest.raises(LattqeError, match=r"2 labels of queries and 1 row numbers"):
        LabelTruth(np.arange(3), query_labels=np.arange(2), query_rows=np.array([1]))
    with pytest.raises(LattqeError, match=r"query row 3 is not in the database of 3 rows"):
        LabelTruth(np.arange(3), query_rows=np.array([1, 3]))
