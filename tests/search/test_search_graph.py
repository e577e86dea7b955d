"""Other ways to the exact graph: by faiss, whatever it finds, and by an update, row number for row number."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search_exact import KINDS, data, slow_graph, unit, use_lanes

from lattqe.errors import LattqeError
from lattqe.search import graph, knn_graph
from lattqe.search.graph import faiss_graph, faiss_lists, update_graph
from lattqe.search.index import search_block
from lattqe.search.lanes import kinds_for
from lattqe.search.products import Block, NumpyProducts, TorchProducts
from lattqe.search.rows import Clock


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
    monkeypatch.setattr(graph, "_candidates", lambda *_: (np.full_like(claimed, claimed[:, :1]), order))
    clock = Clock()
    found = faiss_lists(rows, others, 5, clock=clock)
    assert clock.counts["uncertain"] == 50
    expected = search_block(rows, others, 5, products)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_faiss_with_fewer_rows_than_k():
    xb = unit(np.random.default_rng(4), 6, 8)
    for n in (1, 6):
        for found, expected in zip(faiss_graph(xb[:n], 9), slow_graph(xb[:n], 9)):
            np.testing.assert_array_equal(found, expected)
    assert faiss_graph(xb[:0], 9)[0].shape == (0, 9)


@pytest.mark.parametrize(("k", "asked", "uncertain"), [(9, 9 + 32, 0), (2060, 2048, 20)])
def test_faiss_on_a_gpu_gives_the_same_lists_whatever_it_may_select(k, asked, uncertain, monkeypatch):
    """Of more candidates than a GPU selects, the lists have no certificate, and are searched again."""
    import faiss

    calls = []

    def knn_gpu(resources, xq, xb, count, metric, device):
        calls.append((resources, count, metric, device))
        return faiss.knn(xq, xb, count, metric=metric)

    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: "resources", raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu, raising=False)
    products, clock = NumpyProducts(), Clock()
    rows, others = (Block.load(unit(np.random.default_rng(n), n, 16), products, widen=True) for n in (20, 2100))
    found = faiss_lists(rows, others, k, device=torch.device("cuda:2"), clock=clock)
    assert calls == [("resources", asked, faiss.METRIC_INNER_PRODUCT, 2)]
    assert clock.counts["uncertain"] == uncertain
    for one, other in zip(found, search_block(rows, others, k, products)):
        np.testing.assert_array_equal(one, other)


def test_a_faiss_without_gpus_is_refused_for_one(monkeypatch):
    import faiss

    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(LattqeError, match=r"no GPU support: pip install 'lattqe\[gpu\]', or leave --engine faiss out"):
        faiss_graph(unit(np.random.default_rng(7), 20, 8), 3, device=torch.device("cuda"))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_next_block_is_sent_to_a_device_while_this_one_is_compared(dtype, monkeypatch):
    sent, changed, compared = [], threading.Condition(), []

    class Watched(TorchProducts):
        def hold(self, x):
            there = super().hold(x)
            with changed:
                sent.append(threading.current_thread())
                changed.notify_all()
            return there

    def meanwhile(compare):
        def watched(*arguments, **options):
            compared.append(compare.__name__)
            with changed:  # nothing is compared before the next rows are there: they do not wait for it
                assert changed.wait_for(lambda: len(sent) > min(len(compared), 5), timeout=60)
            return compare(*arguments, **options)

        return watched

    for name in ("compare_within", "compare_between"):
        monkeypatch.setattr(graph, name, meanwhile(getattr(graph, name)))
    xb = data("near", np.random.default_rng(8), 120, 16, dtype)
    expected = slow_graph(xb, 7)
    use_lanes(monkeypatch, [Watched(torch.device("cpu"), tile=32)])
    for found, wanted in zip(knn_graph(xb, 7, block_rows=50), expected):
        np.testing.assert_array_equal(found, wanted)
    within, between = "compare_within", "compare_between"
    assert compared == [within, between, between, within, between, within]
    assert len(sent) == 6
    assert threading.main_thread() not in sent


def test_blocks_are_loaded_by_the_thread_that_compares_where_there_is_no_device(monkeypatch):
    loaded = []

    class Watched(NumpyProducts):
        def hold(self, x):
            loaded.append(threading.current_thread())
            return super().hold(x)

    use_lanes(monkeypatch, [Watched()])
    knn_graph(unit(np.random.default_rng(8), 60, 16), 7, block_rows=40)
    assert loaded == [threading.main_thread()] * 3


def vectors(rng, n, dim, duplicates):
    x = rng.standard_normal((n, dim)).astype(np.float32)
    if duplicates and n:
        x = x[rng.integers(0, max(1, n // 3), n)]
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    old=st.integers(1, 60),
    new=st.integers(0, 40),
    removed=st.integers(0, 20),
    k=st.integers(1, 12),
    dim=st.integers(1, 9),
    duplicates=st.booleans(),
    half=st.booleans(),
)
def test_an_update_equals_from_scratch(seed, old, new, removed, k, dim, duplicates, half):
    rng = np.random.default_rng(seed)
    everything = vectors(rng, old + new, dim, duplicates).astype(np.float16 if half else np.float32)
    keep = np.ones(old, dtype=bool)
    keep[rng.permutation(old)[: min(removed, old - 1)]] = False
    I, D = knn_graph(everything[:old], k)
    number = np.where(keep, np.cumsum(keep) - 1, -2)
    renumbered = np.where(I < 0, -1, number[np.maximum(I, 0)])[keep]
    stale = (renumbered == -2).any(axis=1)
    xb = np.concatenate([everything[:old][keep], everything[old:]])
    got = update_graph(xb, renumbered, D[keep], stale)
    expected = knn_graph(xb, k)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


def test_a_graph_of_more_rows_is_refused():
    with pytest.raises(LattqeError, match="5 rows cannot belong to 4"):
        update_graph(np.eye(4, dtype=np.float32), np.zeros((5, 2), np.int32), np.zeros((5, 2), np.float32))


@pytest.mark.parametrize(("share", "chosen"), [(0.95, 0), (0.8, 1)])
def test_another_kind_must_be_clearly_faster_than_the_first(share, chosen, monkeypatch):
    """By clocks that say what each takes: on real ones, equals are ahead of each other in turn.

    Other programs hold the processor while the first kind is at work, so that on the wall's clock it is the slower one.
    """
    now, busy, kinds = [0.0], [0.0], kinds_for()[:2]

    def compute(x, k, device, kind):
        busy[0] += len(x) * (1.0 if kind == kinds[0] else share)
        now[0] += len(x) * (4.0 if kind == kinds[0] else share)

    monkeypatch.setattr(graph, "kinds_for", lambda device: kinds)
    monkeypatch.setattr(graph, "knn_graph", compute)
    monkeypatch.setattr(graph.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(graph.time, "process_time", lambda: busy[0])
    x = np.zeros((1000, 16), np.float32)
    kind, rate = graph.fastest_kind(x, 8, rows=10**6)
    assert kind == kinds[chosen]
    assert rate == pytest.approx(1000**2 / 2 / (1000 * (4.0, share)[chosen]))  # a second of a user's time


def test_kinds_are_measured_only_where_the_graph_is_worth_it(monkeypatch):
    computed = []
    monkeypatch.setattr(
        graph, "knn_graph", lambda x, k, device, kind: computed.append((len(x), kind)) or knn_graph(x, k, kind=kind)
    )
    x = unit(np.random.default_rng(4), 600, 16)
    first = kinds_for()[0]
    kind, rate = graph.fastest_kind(x, 8, rows=600, seconds=0.0)
    assert (kind, computed) == (first, [(200, first)] * 2)  # a trial of one kind, for the expected time
    assert rate > 0
    computed.clear()
    graph.fastest_kind(x, 8, rows=10**6, seconds=0.0)
    assert {kind for _, kind in computed} == set(kinds_for())
    assert len(x) in {rows for rows, _ in computed}


def test_a_sample_of_no_rows_takes_the_first_kind():
    kind, rate = graph.fastest_kind(np.zeros((0, 16), np.float32), 8, rows=0)
    assert kind == kinds_for()[0]
    assert rate == 0
