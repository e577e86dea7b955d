"""The revisited protocol against the published algorithm, and against exact fractions."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_twins import exact_average_precision, published_map, published_setups

from lattqe.errors import LattqeError
from lattqe.evaluation import REVISITED, GradedTruth, Judgements, Scores, average_precision, score_ranking
from lattqe.evaluation.truth import EASY, HARD, JUNK, UNGRADED

KS = (1, 5, 10)


@st.composite
def graded_world(draw):
    """A database of 1..12 rows, queries with any grading (all junk, nothing at all...), and full rankings."""
    rows = draw(st.integers(1, 12))
    queries = draw(st.integers(1, 4))
    grades = draw(
        st.lists(
            st.lists(st.sampled_from([EASY, HARD, JUNK, UNGRADED]), min_size=rows, max_size=rows),
            min_size=queries,
            max_size=queries,
        )
    )
    rankings = [draw(st.permutations(range(rows))) for _ in range(queries)]
    gnd = [
        {
            name: [row for row in range(rows) if mine[row] == grade]
            for name, grade in (("easy", EASY), ("hard", HARD), ("junk", JUNK))
        }
        for mine in grades
    ]
    return rows, gnd, np.array(rankings)


def truth_of(gnd, rows):
    lists = ([g[name] for g in gnd] for name in ("easy", "hard", "junk"))
    return GradedTruth(Judgements.from_lists(*lists), rows)


@given(graded_world())
def test_equals_the_published_algorithm_and_exact_fractions(world):
    rows, gnd, rankings = world
    scores = score_ranking(rankings, truth_of(gnd, rows), ks=KS)
    assert list(scores) == ["easy", "medium", "hard"]
    for name, setup in published_setups(gnd).items():
        mean, aps, mean_precision, precisions = published_map(rankings.T, setup, KS)
        result = scores[name]
        np.testing.assert_allclose(result.ap, aps, atol=1e-14)
        np.testing.assert_array_equal(result.precision, precisions)
        assert result.mean_ap == pytest.approx(mean, abs=1e-14)
        np.testing.assert_allclose(result.mean_precision, mean_precision, atol=1e-14)
        np.testing.assert_array_equal(result.positives, [len(g["ok"]) for g in setup])
        for i, g in enumerate(setup):
            if g["ok"]:
                assert result.ap[i] == pytest.approx(float(exact_average_precision(rankings[i], g["ok"], g["junk"])))


@given(graded_world(), st.data())
def test_truncation_only_lowers(world, data):
    rows, gnd, rankings = world
    depth = data.draw(st.integers(0, rows))
    whole = score_ranking(rankings, truth_of(gnd, rows), ks=KS)
    short = score_ranking(rankings[:, :depth], truth_of(gnd, rows), ks=KS)
    padded = np.where(np.arange(rows) < depth, rankings, -1)
    for setup, cut in short.items():
        assert (cut.ap <= whole[setup].ap + 1e-15).all()
        assert (cut.precision <= whole[setup].precision + 1e-15).all()
        again = score_ranking(padded, truth_of(gnd, rows), ks=KS)[setup]
        np.testing.assert_array_equal(cut.ap, again.ap)
        np.testing.assert_array_equal(cut.precision, again.precision)
    for i, g in enumerate(published_setups(gnd)["medium"]):
        if g["ok"]:
            expected = exact_average_precision(rankings[i, :depth], g["ok"], g["junk"])
            assert short["medium"].ap[i] == pytest.approx(float(expected))


@given(graded_world(), st.data())
@settings(max_examples=50)
def test_distractors_are_negatives_for_everyone(world, data):
    rows, gnd, _ = world
    more = data.draw(st.integers(1, 5))
    rankings = np.array([data.draw(st.permutations(range(rows + more))) for _ in gnd])
    scores = score_ranking(rankings, truth_of(gnd, rows), ks=KS)
    for name, setup in published_setups(gnd).items():
        np.testing.assert_allclose(scores[name].ap, published_map(rankings.T, setup, KS)[1], atol=1e-14)


def test_real_ground_truth_equals_the_published_algorithm(real_gnd):
    from lattqe.datasets.revisited import load_gnd

    truth = load_gnd(real_gnd)
    rng = np.random.default_rng(0)
    rankings = np.array([rng.permutation(truth.database_rows) for _ in range(truth.queries)])
    for i, g in enumerate(truth.gnd):  # bring the relevant ones forward, so that the numbers are not all near 0
        rankings[i] = sorted(rankings[i], key=lambda row, near=set(g["easy"]) | set(g["junk"]): row not in near)
    scores = score_ranking(rankings, truth.truth, ks=KS)
    for name, setup in published_setups(truth.gnd).items():
        mean, aps, mean_precision, _ = published_map(rankings.T, setup, KS)
        np.testing.assert_allclose(scores[name].ap, aps, atol=1e-13)
        assert scores[name].mean_ap == pytest.approx(mean, abs=1e-13)
        np.testing.assert_allclose(scores[name].mean_precision, mean_precision, atol=1e-13)


def test_numbers_by_hand():
    # Positives at 0-based positions 0 and 2: (1 + 1)/2 and (1/2 + 2/3)/2, over two positives.
    assert average_precision([2, 0], 2) == pytest.approx((1 + (1 / 2 + 2 / 3) / 2) / 2)
    assert average_precision([], 3) == 0.0
    # The last positive stands at 1-based position 3: precision at 10 is taken over 3 results.
    truth = truth_of([{"easy": [4, 5], "hard": [], "junk": []}], 10)
    scores = score_ranking(np.array([[4, 9, 5, 6]]), truth, ks=(2, 10))
    np.testing.assert_allclose(scores["medium"].mean_precision, [1 / 2, 2 / 3])


def test_queries_without_positives_are_counted_not_averaged():
    gnd = [{"easy": [0], "hard": [], "junk": []}, {"easy": [], "hard": [], "junk": [0, 1]}]
    scores = score_ranking(np.array([[0, 1], [0, 1]]), truth_of(gnd, 2))
    means = {"map": 1.0, "mp@1": 1.0, "mp@5": 1.0, "mp@10": 1.0}
    assert scores["easy"].summary() == {"setup": "easy", **means, "queries": 1, "queries_without_positives": 1}
    assert scores["hard"].summary()["queries"] == 0
    for setup in scores.values():
        again = Scores.from_dict(json.loads(json.dumps(setup.to_dict(), allow_nan=False)))
        assert again.to_dict() == setup.to_dict()
        assert again.summary() == setup.summary()
    assert scores["hard"].mean_ap == 0.0
    assert np.isfinite(scores["hard"].mean_precision).all()


def test_truth_refuses_by_name():
    with pytest.raises(LattqeError, match=r"query 1 names row 7, but the database has 5 rows"):
        truth_of([{"easy": [0], "hard": [], "junk": []}, {"easy": [], "hard": [7], "junk": []}], 5)
    with pytest.raises(LattqeError, match=r"query 0 grades row 3 more than once"):
        truth_of([{"easy": [3, 1], "hard": [], "junk": [3]}], 5)
    truth = truth_of([{"easy": [3, 1], "hard": [], "junk": []}], 5)
    with pytest.raises(LattqeError, match=r"got 2 rankings, but the ground truth has 1 queries"):
        score_ranking(np.zeros((2, 3), np.int32), truth)
    with pytest.raises(LattqeError, match=r"ranking of query 0 contains row 3 more than once"):
        score_ranking(np.array([[3, 1, 3]]), truth)
    with pytest.raises(LattqeError, match=r"k >= 1"):
        score_ranking(np.array([[3, 1]]), truth, ks=(0,))


def test_grades_of_neighbors():
    judgements = Judgements.from_lists([[5, 2], []], [[7], []], [[1], [3]])
    neighbors = np.array([[7, 2, 0, -1, 1], [3, 5, -1, -1, -1]])
    expected = [[HARD, EASY, UNGRADED, UNGRADED, JUNK], [JUNK, UNGRADED, UNGRADED, UNGRADED, UNGRADED]]
    np.testing.assert_array_equal(judgements.grades_of(neighbors), expected)
    assert [setup.name for setup in REVISITED] == ["easy", "medium", "hard"]
