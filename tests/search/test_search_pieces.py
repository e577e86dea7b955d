"""The pieces of the search: pairing, duplicates, error bound, running top-k, joining of stored lists."""

import threading
from collections import Counter

import numpy as np
import pytest

from lattqe.search.compare import Lists
from lattqe.search.exact import exact_scores, float32_error, norms
from lattqe.search.graph import join_lists, knn_graph
from lattqe.search.products import Block, NumpyProducts
from lattqe.search.rows import Pairing, all_pairs, run_pairs, surplus_rows
from lattqe.search.topk import RunningTopK


def unit(rng, n, dim, dtype=np.float32):
    x = rng.standard_normal((n, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_pairs_never_share_a_block(workers):
    pairs = all_pairs(9)
    pairing = Pairing(pairs, first=[(a, a) for a in range(9)])
    running, done = [], []
    while pairing.left:
        while len(running) < workers and (pair := pairing.take()) is not None:
            running.append(pair)
        busy = [block for pair in running for block in set(pair)]
        assert len(busy) == len(set(busy))
        done.append(running.pop(0))
        pairing.finish(done[-1])
    assert Counter(done) == Counter(pairs)
    assert {pair for pair in done[:9] if pair[0] == pair[1]} == {(a, a) for a in range(9)}
    assert pairing.take() is None


def test_a_released_pair_comes_again():
    pairing = Pairing([(0, 1)])
    assert pairing.take() == (0, 1)
    assert pairing.take() is None
    pairing.release((0, 1))
    assert pairing.take() == (0, 1)


def test_an_error_in_one_thread_reaches_the_caller():
    def compare(lane, pair):
        if pair == (1, 2):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_pairs(all_pairs(6), compare, [1, 2])
    assert threading.active_count() < 20


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_surplus_rows_are_those_with_enough_twins_before_them(dtype):
    rng = np.random.default_rng(0)
    x = unit(rng, 5, 7, dtype)[rng.integers(0, 5, 300)]
    x[::50, 5] = 0  # the same start, another end
    slow = [sum((x[other] == x[row]).all() for other in range(row)) > 4 for row in range(300)]
    np.testing.assert_array_equal(surplus_rows(x, 4), slow)
    assert surplus_rows(unit(rng, 300, 7, dtype), 4) is None
    assert surplus_rows(x, 299) is None


@pytest.mark.parametrize("dim", [1, 7, 64, 1000, 4096])
@pytest.mark.parametrize("kind", ["random", "constant", "growing"])
def test_float32_products_stay_within_the_bound(dim, kind):
    rng = np.random.default_rng(dim)
    x = {
        "random": unit(rng, 50, dim),
        "constant": np.full((50, dim), 0.1, dtype=np.float32),
        "growing": np.exp(np.linspace(-20, 5, dim)).astype(np.float32)[None] * unit(rng, 50, dim),
    }[kind]
    exact = x.astype(np.float64) @ x.astype(np.float64).T
    error = np.abs((x @ x.T).astype(np.float64) - exact)
    assert (error <= float32_error(dim, norms(x)[:, None], norms(x)[None])).all()
    assert (norms(x) >= np.sqrt(np.diag(exact))).all()


def test_a_running_list_survives_any_order_and_size_of_offers():
    rng = np.random.default_rng(1)
    xq, xb = unit(rng, 40, 12), unit(rng, 30, 12)[rng.integers(0, 30, 2000)]
    products = NumpyProducts()
    rows, others = Block.load(xq, products), Block.load(xb, products, k=6)
    running = RunningTopK(rows, others, 6, products.error(rows, others))
    scores = xq @ xb.T
    for columns in np.array_split(rng.permutation(2000), [3, 4, 500, 501, 1990]):
        i, j = np.divmod(np.arange(40 * len(columns)), len(columns))
        running.offer(slice(None), i, columns[j], scores[i, columns[j]])
    running.settle(0, 40)
    running.prepare_scores()
    running.score(0, 40)
    ids = running.lists(0, 40)[1]
    exact = np.vecdot(xq[:, None].astype(np.float64), xb.astype(np.float64))
    expected = np.lexsort((np.broadcast_to(np.arange(2000), exact.shape), -exact), axis=-1)[:, :6]
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_joining_stored_lists_is_the_graph_of_all(dtype):
    """Known lists hold rounded scores; many ties make the rounding matter."""
    rng = np.random.default_rng(2)
    x = np.concatenate([unit(rng, 60, 5, dtype), rng.integers(-1, 2, (200, 5)).astype(dtype)])[rng.permutation(260)]
    own, k = 90, 8
    ids, scores = knn_graph(x[own:], k)
    ids = np.where(ids < 0, -1, ids + own).astype(np.int32)
    rows, among = np.repeat(np.arange(own, 260), own), np.tile(np.arange(own), 170)
    exact = exact_scores(x, x, rows, among).reshape(170, own)
    order = np.lexsort((np.broadcast_to(np.arange(own), exact.shape), -exact), axis=-1)[:, :k]
    newcomers = Lists(np.take_along_axis(exact, order, axis=1), order.astype(np.int32))
    rescored = []

    def rescore(i, j):
        rescored.append(len(i))
        return exact_scores(x[own:], x, i, j)

    joined = join_lists(ids, scores, newcomers, rescore)
    expected = knn_graph(x, k)
    np.testing.assert_array_equal(joined[0], expected[0][own:])
    np.testing.assert_array_equal(joined[1], expected[1][own:])
    assert sum(rescored), "no score was unclear: this shows nothing"
