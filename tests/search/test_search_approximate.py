"""Approximate graphs: clusters by brute force, a recall that is what it says, the same bytes for any cut."""

import numpy as np
import pytest
import torch
from test_search_exact import KINDS, data, slow_graph, slow_scores, slow_topk, unit

import lattqe
from lattqe.errors import LattqeError
from lattqe.search import approximate as module
from lattqe.search import knn_graph
from lattqe.search.approximate import (
    Membership,
    Recall,
    approximate,
    approximate_graph,
    exact_lists,
    least_margin,
    lists_of,
    lists_of_rows,
    margins_needed,
    nearest_clusters,
    shares_found,
    shares_met,
    within_margin,
)
from lattqe.search.lanes import lanes_on
from lattqe.search.products import Block
from lattqe.search.rows import in_one

K = 9


def slow_lists(xb, nearest, k):
    """Compare each row with those whose first cluster is one of its own; with all rows where these are fewer than k."""
    ids, scores = slow_graph(xb, k)
    all_scores, first = slow_scores(xb, xb), nearest[:, 0].tolist()
    for row, mine in enumerate(map(set, nearest.tolist())):
        met = [other for other, theirs in enumerate(first) if other != row and theirs in mine]
        if len(met) < min(k, len(xb) - 1):
            continue
        line = all_scores[row].tolist()
        best = sorted(met, key=lambda other: (-line[other], other))[:k]
        ids[row], scores[row] = best, all_scores[row, best]
    return ids, scores


def fast_lists(xb, nearest, clusters, k=K):
    with lanes_on() as lanes:
        whole = Block.load(xb, lanes[0], k)
        scores, ids = lists_of(whole, Membership(nearest, clusters, whole.surplus), 0, len(xb), k, lanes)
    return ids, scores


def towns(rng, n, dim=16, count=30):
    """Unit rows around some centres: what clusters are good for."""
    x = unit(rng, count, dim)[rng.integers(0, count, n)] + 0.6 * unit(rng, n, dim)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def small(monkeypatch):
    """Sets of some thousand rows are approximated too."""
    monkeypatch.setattr(module, "LEAST_ROWS", 500)
    monkeypatch.setattr(module, "MEASURED_ROWS", 200)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_lists_are_the_best_of_the_rows_in_the_clusters_searched(kind, dtype):
    rng = np.random.default_rng(1)
    xb, centroids = data(kind, rng, 120, 16, dtype), unit(rng, 12, 16)
    nearest = np.argsort(-slow_scores(xb, centroids), axis=1, kind="stable").astype(np.int32)
    uneven = np.where(np.arange(5) <= rng.integers(0, 5, (120, 1)), nearest[:, :5], -1)
    for searched in (nearest[:, :1], nearest[:, :3], uneven):
        for found, wanted in zip(fast_lists(xb, searched, 12), slow_lists(xb, searched, K)):
            np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(fast_lists(xb, nearest, 12), knn_graph(xb, K)):
        np.testing.assert_array_equal(found, wanted, "with all clusters for each row the graph is the exact one")


def test_nearest_clusters_are_those_of_brute_force():
    rng = np.random.default_rng(2)
    xb, centroids = unit(rng, 300, 8), unit(rng, 20, 8)
    with lanes_on() as lanes:
        found, gaps = nearest_clusters(xb, centroids, 6, lanes)
    scores, numbers = slow_topk(xb, centroids, 6)
    np.testing.assert_array_equal(found, numbers)
    np.testing.assert_allclose(gaps, scores[:, :1] - scores, atol=1e-6)


def test_a_neighbor_is_found_where_its_cluster_is_searched():
    """What is predicted of a margin from exact lists is what the lists made with it have."""
    xb = towns(np.random.default_rng(3), 1200)
    rows = np.arange(0, 1200, 7)
    with lanes_on() as lanes:
        whole = Block.load(xb, lanes[0], K)
        ranked, gaps = nearest_clusters(xb, module.find_centroids(xb, 40), 10, lanes)
        sizes, truth = np.bincount(ranked[:, 0], minlength=40), exact_lists(whole, rows, K, lanes)
        needed = margins_needed(ranked, gaps, rows, truth)
        for wanted in (0.5, 0.8, 0.9):
            margin = least_margin(needed, lambda recall, wanted=wanted: recall.mean >= wanted)
            assert (needed <= margin).mean() >= wanted > (needed < margin).mean(), "the smallest that is enough"
            nearest = np.where(within_margin(ranked, gaps, sizes, K, margin), ranked, -1)
            found = lists_of_rows(whole, Membership(nearest, 40, whole.surplus), rows, K, lanes[0])[1]
            shares = shares_met(nearest, rows, truth)
            np.testing.assert_array_equal(shares_found(found, truth), shares)
            assert shares.mean() >= (needed <= margin).mean()
        assert np.isinf(least_margin(needed, lambda recall: False))
    np.testing.assert_array_equal(truth, slow_topk(xb[rows], xb, K, exclude=rows)[1])


def test_recall_is_that_of_the_graph(small):
    xb = towns(np.random.default_rng(4), 2000)
    ids, _, how = approximate_graph(xb, K, 0.9)
    true = shares_found(ids, knn_graph(xb, K)[0]).mean()
    assert how.kept
    assert how.recall.rows == 200
    assert how.recall.low <= true <= how.recall.high
    assert how.facts()["searched"] == how.searched < how.clusters


@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_for_any_threads_and_pieces(small, threads):
    xb = towns(np.random.default_rng(5), 1500).astype(np.float16)
    expected = approximate_graph(xb, K, 0.8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = approximate_graph(in_one([xb[:400], xb[400:]]), K, 0.8)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found[:2], expected[:2]):
        np.testing.assert_array_equal(one, other)
    assert found[2].facts() == expected[2].facts()


def test_a_row_searches_until_it_has_met_k_others():
    """Clusters of 5, 3, 9 and 1 rows, the first always nearest: by margin 0 alone most rows would meet too few."""
    ranked, gaps = np.array([[0, 1, 2, 3], [2, 3, 0, 1]]), np.arange(8, dtype=np.float32).reshape(2, 4) % 4
    sizes = np.array([5, 3, 9, 1])
    for k, margin, expected in ((4, 0, [1, 1]), (5, 0, [2, 1]), (8, 0, [3, 1]), (9, 0, [3, 2]), (4, 2, [3, 3])):
        searched = within_margin(ranked, gaps, sizes, k, margin)
        np.testing.assert_array_equal(searched, np.arange(4) < np.array(expected)[:, None])


def test_a_margin_that_falls_short_is_raised(small, monkeypatch):
    """A plan that is too hopeful: what was measured decides."""
    real, calls = module.least_margin, []
    monkeypatch.setattr(module, "least_margin", lambda *given: real(*given) if calls else calls.append(1) or 0.0)
    how = approximate_graph(towns(np.random.default_rng(6), 1500), K, 0.9)[2]
    assert how.planned < how.searched
    assert how.kept
    assert how.facts()["searched_planned"] == how.planned


def test_more_clusters_are_ranked_where_the_recall_needs_them(small, monkeypatch):
    """The number of clusters ranked at first bounds the work, not the recall."""
    monkeypatch.setattr(module, "DEPTH", 2)
    how = approximate_graph(towns(np.random.default_rng(6), 1500), K, 0.95)[2]
    assert how.kept
    assert how.nearest.shape[1] > 2


def test_a_promise_that_cannot_be_kept_is_told(small):
    """Rows without any structure: the margin ends where an exact graph is less work."""
    xb = unit(np.random.default_rng(7), 1500, 64)
    _, _, how = approximate_graph(xb, K, 0.999)
    assert not how.kept
    assert how.facts()["kept"] is False
    assert how.recall.mean < 0.999
    sizes = np.bincount(how.nearest[:, 0], minlength=how.clusters)
    assert sizes[how.nearest[how.nearest >= 0]].sum() <= len(xb) ** 2 / 2


def test_interval_of_a_recall():
    yes_or_no = np.repeat([1.0, 0.0], [95, 5])
    recall = Recall.of(yes_or_no)
    np.testing.assert_allclose([recall.low, recall.high], [0.8882, 0.9785], atol=1e-3)  # Wilson's, 95 of 100
    steady = Recall.of(np.full(100, 0.95) + np.tile([0.01, -0.01], 50))
    assert recall.low < steady.low < 0.95 < steady.high < recall.high
    assert Recall.of(np.ones(1000)).high == 1
    assert 0.99 < Recall.of(np.ones(1000)).low < 1


def test_python_api(small):
    xb = towns(np.random.default_rng(8), 1500)
    calls = []
    found = lattqe.neighbors(xb, 5, approximate=True, recall=0.7, progress=lambda done, total: calls.append(done))
    assert found.recall.mean >= 0.7
    assert found.kept
    assert found.I.shape == (1500, 5)
    assert calls[-1] == 1500
    few = lattqe.neighbors(xb[:400], 5, approximate=True)
    assert few.recall is None
    np.testing.assert_array_equal(few.I, lattqe.neighbors(xb[:400], 5).I)


@pytest.mark.parametrize("options", [{"recall": 0.9}, {"approximate": True, "recall": 1.0}])
def test_python_api_refuses(options):
    with pytest.raises(LattqeError, match="recall"):
        lattqe.neighbors(np.eye(4, dtype=np.float32), 2, **options)


@pytest.mark.parametrize("recall", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_impossible_recalls_are_refused(recall):
    with pytest.raises(LattqeError, match="is not possible"):
        approximate_graph(np.eye(4, dtype=np.float32), 2, recall)


def test_k_that_leaves_no_clusters_is_refused():
    with pytest.raises(LattqeError, match="k = 5000 is too large"):
        module.reason_for_exact(20_000, 5000)
    assert module.reason_for_exact(20_000, 64) is None
    assert "too few" in module.reason_for_exact(19_999, 5000)


def test_given_clusters_and_seed_decide(small):
    xb = towns(np.random.default_rng(9), 800)
    with lanes_on() as lanes:
        whole = Block.load(xb, lanes[0], K)
        one, other = (approximate(whole, K, 0.8, lanes, clusters=20, seed=seed) for seed in (0, 1))
    assert one.clusters == other.clusters == 20
    assert not np.array_equal(one.nearest, other.nearest)
