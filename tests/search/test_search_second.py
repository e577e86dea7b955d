"""faiss as the second engine: the same answers, whatever it finds."""

import numpy as np
import pytest
from test_search_exact import KINDS, data, slow_graph, unit

from lattqe.search import knn_graph, second
from lattqe.search.pairing import Clock
from lattqe.search.products import Block, NumpyProducts
from lattqe.search.second import faiss_graph, faiss_lists
from lattqe.search.topk import search_block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_graph_by_faiss_is_the_definition(kind, dtype):
    xb = data(kind, np.random.default_rng(1), 400, 24, dtype)
    for found, expected in zip(faiss_graph(xb, 9), slow_graph(xb, 9)):
        np.testing.assert_array_equal(found, expected)


def test_ordinary_rows_have_a_certificate():
    clock = Clock()
    xb = unit(np.random.default_rng(2), 3000, 64)
    ids, scores = faiss_graph(xb, 10, clock=clock)
    assert clock.counts["uncertain"] == 0
    expected = knn_graph(xb, 10)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(scores, expected[1])


def test_candidates_that_are_wrong_get_no_certificate(monkeypatch):
    """A search that loses the best of some rows, as a broken faiss might, is told apart only by what it claims."""
    rng = np.random.default_rng(3)
    products = NumpyProducts()
    rows, others = (Block.load(unit(rng, n, 16), products, widen=True) for n in (50, 900))
    exact = rows.stored @ others.stored.T
    order = np.argsort(-exact, axis=1)[:, 20:60]  # claims the 20th best to be the first, but is honest about the last
    claimed = np.take_along_axis(exact, order, axis=1)
    monkeypatch.setattr(second, "_candidates", lambda *_: (np.full_like(claimed, claimed[:, :1]), order))
    clock = Clock()
    found = faiss_lists(rows, others, 5, clock=clock)
    assert clock.counts["uncertain"] == 50
    expected = search_block(rows, others, 5, products)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_fewer_rows_than_k():
    xb = unit(np.random.default_rng(4), 6, 8)
    for n in (1, 6):
        for found, expected in zip(faiss_graph(xb[:n], 9), slow_graph(xb[:n], 9)):
            np.testing.assert_array_equal(found, expected)
    assert faiss_graph(xb[:0], 9)[0].shape == (0, 9)
