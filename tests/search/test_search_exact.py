"""Search and graph against a slow twin that scores every pair in float64 and sorts."""

from contextlib import nullcontext
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattqe.errors import LattqeError
from lattqe.search import FlatIndex, count_above, knn_graph, merge, score, topk
from lattqe.search import compare as compare_module
from lattqe.search import graph as graph_module
from lattqe.search import lanes as lanes_module
from lattqe.search import products as products_module
from lattqe.search.exact import exact_order, published
from lattqe.search.products import Block, MklProducts, NumpyProducts, TorchProducts
from lattqe.search.rows import Clock
from lattqe.search.topk import running_topk


def slow_scores(xq, xb):
    return np.stack([np.vecdot(xb.astype(np.float64), q) for q in xq.astype(np.float64)])


def slow_topk(xq, xb, k, largest=True, exclude=None, first_row=0):
    """Score every pair, sort by (score, row): the definition."""
    all_scores = slow_scores(xq, xb)
    ids = np.full((len(xq), k), -1)
    scores = np.zeros((len(xq), k), dtype=np.float32)
    for q, line in enumerate(all_scores):
        order = np.lexsort((np.arange(len(xb)), -line if largest else line))
        if exclude is not None:
            order = order[order != exclude[q] - first_row]
        order = order[:k]
        ids[q, : len(order)], scores[q, : len(order)] = order + first_row, line[order]
    return scores, ids


def slow_graph(xb, k):
    scores, ids = slow_topk(xb, xb, k, exclude=np.arange(len(xb)))
    return ids, scores


def unit(rng, n, dim, dtype=np.float32):
    x = rng.standard_normal((n, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype)


def data(kind, rng, n, dim, dtype):
    if kind == "random":
        return unit(rng, n, dim, dtype)
    if kind == "equal":
        return np.tile(unit(rng, 1, dim, dtype), (n, 1))
    if kind == "duplicates":  # a few vectors, each many times, shuffled
        return unit(rng, 7, dim, dtype)[rng.integers(0, 7, n)]
    if kind == "near":  # differences at the edge of float32
        return (np.tile(unit(rng, 1, dim), (n, 1)) + 1e-6 * rng.standard_normal((n, dim))).astype(dtype)
    if kind == "lattice":  # distinct vectors with many equal scores
        return rng.integers(-1, 2, (n, dim)).astype(dtype)
    if kind == "one-hot":
        x = np.zeros((n, dim), dtype)
        x[np.arange(n), np.arange(n) % dim] = 1
        return x
    raise AssertionError(kind)


KINDS = ("random", "equal", "duplicates", "near", "lattice", "one-hot")


def use_lanes(monkeypatch, lanes):
    monkeypatch.setattr(graph_module, "lanes_on", lambda device, kind: nullcontext(lanes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_topk_is_the_definition(kind, dtype):
    rng = np.random.default_rng(1)
    xb, xq = data(kind, rng, 700, 24, dtype), data(kind, rng, 30, 24, dtype)
    for largest in (True, False):
        scores, ids = topk(xq, xb, 13, largest=largest, first_row=5)
        expected_scores, expected_ids = slow_topk(xq, xb, 13, largest=largest, first_row=5)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_array_equal(scores, expected_scores)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("dim", "block_rows"), [(40, None), (40, 97), (400, 170)])
def test_graph_is_the_definition(kind, dtype, dim, block_rows, monkeypatch):
    monkeypatch.setattr(compare_module, "MIRROR_DIM", 400)
    xb = data(kind, np.random.default_rng(2), 300, dim, dtype)
    ids, scores = knn_graph(xb, 9, block_rows=block_rows)
    expected_ids, expected_scores = slow_graph(xb, 9)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)
    assert ids.dtype == np.int32
    assert scores.dtype == np.float32


def test_a_pair_in_two_lists_is_scored_once_where_vectors_are_long(monkeypatch):
    xb = unit(np.random.default_rng(16), 400, 16)
    found, scored = {}, {}
    for least in (16, 17):
        monkeypatch.setattr(compare_module, "MIRROR_DIM", least)
        clock = Clock()
        found[least] = knn_graph(xb, 20, clock=clock)
        scored[least] = clock.counts["scored"]
    assert scored[16] < 0.8 * scored[17]
    for once, twice in zip(found[16], found[17]):
        np.testing.assert_array_equal(once, twice)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape(draw):
    dim = draw.draw(st.sampled_from([1, 2, 3, 17, 130, 4096]))
    n = draw.draw(st.integers(1, 60))
    k = draw.draw(st.integers(1, 70))
    kind = draw.draw(st.sampled_from(KINDS))
    dtype = draw.draw(st.sampled_from([np.float16, np.float32]))
    rng = np.random.default_rng(draw.draw(st.integers(0, 1000)))
    xb = data(kind, rng, n, dim, dtype)
    ids, scores = knn_graph(xb, k, block_rows=draw.draw(st.integers(1, 60)))
    expected_ids, expected_scores = slow_graph(xb, k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)
    xq = data(kind, rng, 3, dim, dtype)
    exclude = rng.integers(-1, n, 3)
    np.testing.assert_array_equal(topk(xq, xb, k, exclude=exclude)[1], slow_topk(xq, xb, k, exclude=exclude)[1])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_buffers_that_are_cut_back_lose_nothing(draw):
    """Every pair is offered, in any order, to buffers that hold 64 or three times k."""
    rng = np.random.default_rng(draw.draw(st.integers(0, 1000)))
    kind, k = draw.draw(st.sampled_from(KINDS)), draw.draw(st.integers(1, 50))
    xq, xb = data(kind, rng, draw.draw(st.integers(1, 5)), 12, np.float32), data(kind, rng, 400, 12, np.float32)
    products = NumpyProducts()
    rows, others = (Block.load(x, products, widen=True) for x in (xq, xb))
    running, tile = running_topk(products, rows, others, k), products.multiply(rows.held, others.held)
    for part in np.array_split(rng.permutation(400), draw.draw(st.integers(1, 30))):
        i, place = np.divmod(np.arange(len(xq) * len(part)), len(part))
        running.offer(slice(None), i, part[place], tile[i, part[place]])
    running.settle(0, len(xq))
    for row, fill in enumerate(running._fill):
        np.testing.assert_array_equal(running._scores[row, :fill], tile[row, running._ids[row, :fill]])
        assert np.isneginf(running._scores[row, fill:]).all()
    assert 2 * running._fill.max() <= running._scores.shape[1]  # exact scores, twice as wide, take the same memory
    running.prepare_scores()
    running.score(0, len(xq))
    scores, ids = published(*running.lists(0, len(xq)))
    expected_scores, expected_ids = slow_topk(xq, xb, k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(scores, expected_scores)


def test_small_tiles_and_buffers_change_nothing(monkeypatch):
    """Every border of tile, block and buffer is crossed many times."""
    rng = np.random.default_rng(3)
    xb = np.concatenate([unit(rng, 300, 16), data("duplicates", rng, 300, 16, np.float32)])[rng.permutation(600)]
    expected = slow_graph(xb, 5)
    use_lanes(monkeypatch, [NumpyProducts(tile=37) for _ in range(3)])
    np.testing.assert_array_equal(knn_graph(xb, 5, block_rows=150)[0], expected[0])


@cache
def many_rows(kind):
    """750 rows and their graph with k = 60, of which shorter lists are the beginning."""
    rng = np.random.default_rng(13)
    if kind in ("sorted", "periodic"):
        centers = unit(rng, 30, 24)
        which = np.sort(rng.integers(0, 30, 750)) if kind == "sorted" else np.arange(750) % 30
        xb = (centers[which] + 0.1 * unit(rng, 750, 24)).astype(np.float32)
    else:
        xb = data(kind, rng, 750, 24, np.float32)
    return xb, slow_graph(xb, 60)


@pytest.mark.parametrize("kind", [*KINDS, "sorted", "periodic"])
@pytest.mark.parametrize("k", [12, 60])
def test_thresholds_guessed_from_a_sample_change_nothing(kind, k, monkeypatch):
    """Tiles of 25 of 750 rows; in periodic data a row's own tile holds all its near ones, so every guess fails."""
    xb, expected = many_rows(kind)
    use_lanes(monkeypatch, [NumpyProducts(tile=25) for _ in range(2)])
    clock = Clock()
    ids, scores = knn_graph(xb, k, clock=clock)
    np.testing.assert_array_equal(ids, expected[0][:, :k])
    np.testing.assert_array_equal(scores, expected[1][:, :k])
    again = (clock.counts["products"] - 750 * 775 // 2) / 750
    if kind in ("random", "sorted"):
        assert again < 37
    if (kind, k) == ("periodic", 60):
        assert again == 750


@pytest.mark.slow
@pytest.mark.parametrize(
    "lanes", [lambda: [NumpyProducts(tile=25)], lambda: [TorchProducts(torch.device("cpu"), tile=25)]]
)
@pytest.mark.parametrize("kind", ["random", "sorted", "periodic", "near", "lattice"])
def test_thresholds_guessed_anew_keep_fewer_candidates_and_change_nothing(kind, lanes, monkeypatch):
    """Tiles of 25 of 750 rows: a row's first guess is made from 24 others, the next ones from 100 and 275."""
    xb, expected = many_rows(kind)
    offered = {}
    for moments in ((), compare_module.SHARPER):
        taken = offered.setdefault(moments, [])

        def watched(products, *arguments, taken=taken):
            running = running_topk(products, *arguments)
            offer = running.offer
            running.offer = lambda cut, i, *candidates: (taken.append(len(i)), offer(cut, i, *candidates))
            return running

        monkeypatch.setattr(compare_module, "SHARPER", moments)
        monkeypatch.setattr(compare_module, "running_topk", watched)
        use_lanes(monkeypatch, lanes())
        ids, scores = knn_graph(xb, 50)
        np.testing.assert_array_equal(ids, expected[0][:, :50])
        np.testing.assert_array_equal(scores, expected[1][:, :50])
    without, sharper = (sum(taken) for taken in offered.values())
    assert sharper < 0.8 * without if kind in ("random", "sorted") else sharper <= without


@pytest.mark.parametrize("kind", ["random", "duplicates", "near"])
def test_the_gpu_path_gives_the_same_bytes(kind, monkeypatch):
    """The torch implementation that serves GPUs, on torch's CPU device."""
    xb = data(kind, np.random.default_rng(4), 240, 33, np.float16)
    expected = knn_graph(xb, 7)
    use_lanes(monkeypatch, [TorchProducts(torch.device("cpu"), tile=64)])
    ids, scores = knn_graph(xb, 7, block_rows=110)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(scores, expected[1])


def test_duplicates_are_looked_for_once_for_each_k(monkeypatch):
    looked = []
    monkeypatch.setattr(products_module, "surplus_rows", lambda x, k: looked.append(k))
    rng = np.random.default_rng(14)
    index = FlatIndex(unit(rng, 200, 8))
    for k in (3, 3, 5, 3, 5):
        index.search(unit(rng, 4, 8), k)
    assert looked == [3, 5]


def test_all_equal_rows_in_their_thousands_are_quick():
    xb = np.tile(unit(np.random.default_rng(5), 1, 64, np.float16), (2500, 1))
    ids, _ = knn_graph(xb, 20)
    expected = np.array([np.delete(np.arange(21), row)[:20] if row < 21 else np.arange(20) for row in range(2500)])
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_count_above_is_the_rank(kind):
    rng = np.random.default_rng(6)
    xb, xq = data(kind, rng, 300, 20, np.float32), data(kind, rng, 12, 20, np.float32)
    rows = rng.integers(-1, 300, (12, 9))
    scores = score(xq, xb, rows)
    _, order = slow_topk(xq, xb, 300)
    expected = np.array(
        [[0 if row < 0 else np.flatnonzero(order[q] == row)[0] for row in line] for q, line in enumerate(rows)]
    )
    np.testing.assert_array_equal(count_above(xq, xb, scores, rows), expected)
    halves = sum(count_above(xq, xb[a:b], scores, rows, first_row=a) for a, b in ((0, 111), (111, 300)))
    np.testing.assert_array_equal(halves, expected)


def test_scores_depend_on_the_two_vectors_only():
    rng = np.random.default_rng(7)
    xb = unit(rng, 500, 301)
    rows = rng.integers(0, 500, (500, 40))
    together = score(xb, xb, rows)
    np.testing.assert_array_equal(together[3:4], score(xb[3:4], xb, rows[3:4]))
    np.testing.assert_array_equal(together[:3], np.take_along_axis(slow_scores(xb[:3], xb), rows[:3], axis=1))
    np.testing.assert_array_equal(score(xb[:7], xb, rows[:7, :1]), together[:7, :1])
    half = xb.astype(np.float16)
    in_any_order = (half[rows[0], ::-1].astype(np.float64) * half[0, ::-1]).sum(axis=1)
    np.testing.assert_array_equal(score(half[:1], half, rows[:1])[0], in_any_order)


@pytest.mark.parametrize("width", [0, 1, 2, 3, 64, 257])
@pytest.mark.parametrize("kind", ["random", "ulps", "ties", "zeros", "missing", "extreme"])
def test_the_order_of_lists_is_that_of_two_keys(kind, width):
    """Also where scores differ in their last bits only, which the first sort does not see."""
    rng = np.random.default_rng(15)
    shape = 50, width
    scores = {
        "random": rng.standard_normal(shape),
        "ulps": rng.choice([-1.0, 1.0], (50, 1)) * (1 + 2.0**-52 * rng.integers(0, 600, shape)),
        "ties": rng.integers(-3, 3, shape) / 4,
        "zeros": rng.choice([0.0, -0.0, 5e-324, -5e-324], shape),
        "missing": np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape)),
        "extreme": rng.choice([1e308, -1e308, 1e-308, -1.7e308], shape) * rng.random(shape),
    }[kind]
    ids = np.where(np.isneginf(scores), -1, np.argsort(rng.random(shape), axis=1)).astype(np.int32)
    order, ordered = exact_order(scores, ids)
    expected = np.lexsort((ids, -scores), axis=-1)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.broadcast_to(np.arange(width), shape))
    np.testing.assert_array_equal(np.take_along_axis(ids, order, axis=1), np.take_along_axis(ids, expected, axis=1))
    exactly = np.take_along_axis(scores, expected, axis=1)
    np.testing.assert_array_equal(ordered.view(np.int64), exactly.view(np.int64))


def test_merging_shards_is_searching_all():
    rng = np.random.default_rng(8)
    xb, xq = data("duplicates", rng, 400, 12, np.float32), unit(rng, 20, 12)
    whole = FlatIndex(xb).search_exact(xq, 30)
    for cuts in ([0, 400], [0, 3, 400], [0, 100, 250, 399, 400]):
        shards = [FlatIndex(xb[a:b], first_row=a).search_exact(xq, 30) for a, b in pairwise(cuts)]
        scores, ids = merge(shards, 30)
        np.testing.assert_array_equal(ids, whole[1])
        np.testing.assert_array_equal(scores, whole[0])


def test_flat_index():
    rng = np.random.default_rng(9)
    xb, xq = unit(rng, 50, 8, np.float16), unit(rng, 4, 8)
    index = FlatIndex(xb, first_row=100)
    assert (index.rows, index.dim) == (50, 8)
    np.testing.assert_array_equal(index.search(xq, 5)[1], slow_topk(xq, xb, 5, first_row=100)[1])
    np.testing.assert_array_equal(index.lowest(xq, 5)[1], slow_topk(xq, xb, 5, largest=False, first_row=100)[1])
    np.testing.assert_array_equal(index.gather(np.array([149, 100])), xb[[49, 0]].astype(np.float32))
    with pytest.raises(LattqeError, match="row 150"):
        index.gather(np.array([150]))
    with pytest.raises(LattqeError, match="row 99"):
        index.score(xq[:1], np.array([[99]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: topk(x[:, :2], x, 3), "2 dimensions and the database 4"),
        (lambda x: topk(x, x, 0), "k must be at least 1, got 0"),
        (lambda x: knn_graph(x[0], 3), "matrix"),
        (lambda x: knn_graph(np.where(x == x[1, 1], np.nan, x), 3), "row 1 .* NaN"),
        (lambda x: topk(x.astype(int), x, 1), "float16 or float32, got int64"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(LattqeError, match=message):
        call(unit(np.random.default_rng(0), 5, 4))


def test_input_may_be_read_only_and_strided():
    x = unit(np.random.default_rng(0), 40, 8, np.float16)
    x.setflags(write=False)
    ids, _ = knn_graph(x[::2], 3)
    np.testing.assert_array_equal(ids, slow_graph(x[::2], 3)[0])


@pytest.mark.parametrize("faster", [NumpyProducts, MklProducts])
def test_much_work_is_multiplied_by_the_faster_library_and_gives_the_same(monkeypatch, faster):
    """A search that is worth it asks which float32 products are faster; the answer does not depend on it."""
    rng = np.random.default_rng(0)
    xb, xq, asked = unit(rng, 300, 24), unit(rng, 20, 24), []
    monkeypatch.setattr(lanes_module, "LARGE", 24 * 300 * 20)
    monkeypatch.setattr(lanes_module, "faster_float32", lambda dim: asked.append(dim) or faster.kind)
    D, I = FlatIndex(xb).search(xq, 7)
    assert asked == [24]
    scores, ids = slow_topk(xq, xb, 7)
    np.testing.assert_array_equal(I, ids)
    np.testing.assert_array_equal(D, scores)
    FlatIndex(xb).search(xq[:19], 7)
    assert asked == [24]  # too little to ask


@pytest.mark.parametrize(("numpy_takes", "torch_takes", "expected"), [(3, 1, MklProducts), (1, 1, NumpyProducts)])
def test_the_faster_library_is_found_by_multiplying(monkeypatch, numpy_takes, torch_takes, expected):
    """The one that takes clearly less time; the first where they are alike."""
    now = [0.0]
    monkeypatch.setattr(lanes_module.time, "thread_time", lambda: now[0])
    for kind, takes in ((NumpyProducts, numpy_takes), (MklProducts, torch_takes)):

        def product(self, a, b, out, takes=takes):
            now[0] += takes
            return out

        monkeypatch.setattr(kind, "_product", product)
    lanes_module.faster_float32.cache_clear()
    assert lanes_module.faster_float32(8) == expected.kind
    lanes_module.faster_float32.cache_clear()
