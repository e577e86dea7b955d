"""`lattqe.expand` and `lattqe.augment` against a loop over rows with a full float64 ranking."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_expansion_weights import dual_of_sklearn, twin_expand, twin_weights, unit

import lattqe
from lattqe.errors import LattqeError
from lattqe.expansion import create, rows
from lattqe.expansion.classic import lowest_outside
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search import FlatIndex


def vectors(rows, dim, seed, ties):
    """Unit vectors; with ties from a handful of directions, so that many are equal."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, size=(rows, dim)).astype(np.float64) if ties else rng.normal(size=(rows, dim))
    x[np.abs(x).sum(axis=1) == 0, 0] = 1
    return unit(x).astype(np.float32)


def ranking(x, xb, own=-1):
    """Row numbers of xb by float64 score, then row, without the row itself."""
    scores = xb.astype(np.float64) @ x.astype(np.float64)
    order = np.lexsort((np.arange(len(xb)), -scores))
    return order[order != own], scores


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["aqe", "aqewd", "alphaqe"]),
    queries=st.integers(0, 4),
    rows=st.integers(0, 12),
    k=st.integers(1, 15),
    dim=st.integers(1, 9),
    seed=st.integers(0, 999),
    ties=st.booleans(),
    dba=st.booleans(),
)
def test_simple_methods_equal_a_loop(name, queries, rows, k, dim, seed, ties, dba):
    xb = vectors(rows, dim, seed, ties)
    xq = xb if dba else vectors(queries, dim, seed + 1, ties)
    result = lattqe.augment(xb, name, k=k) if dba else lattqe.expand(xq, xb, method=name, k=k)
    assert result.shape == xq.shape
    assert result.dtype == np.float32
    for i, x in enumerate(xq):
        order, scores = ranking(x, xb, own=i if dba else -1)
        listed = order[:k]
        weights = twin_weights(name, scores[listed], np.ones(len(listed), dtype=bool))
        np.testing.assert_allclose(result[i], twin_expand(x, xb[listed], weights), atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 14), k=st.integers(1, 5), m=st.integers(1, 6), seed=st.integers(0, 999), dba=st.booleans())
def test_dqe_takes_the_lowest_rows_that_are_no_neighbors(rows, k, m, seed, dba):
    xb = vectors(rows, 6, seed, ties=seed % 3 == 0)
    xq = xb if dba else vectors(3, 6, seed + 1, ties=False)
    params = {"C": 0.5, "negatives": m, "k": k}
    result = lattqe.augment(xb, "dqe", **params) if dba else lattqe.expand(xq, xb, "dqe", **params)
    for i, x in enumerate(xq):
        order, scores = ranking(x, xb, own=i if dba else -1)
        listed = order[:k]
        rest = order[k:]
        negatives = rest[np.lexsort((rest, scores[rest]))][:m]
        if not len(negatives):
            np.testing.assert_allclose(result[i], x, atol=1e-6)
            continue
        points = np.concatenate([x[None], xb[listed], xb[negatives]]).astype(np.float64)
        y = np.array([1] * (1 + len(listed)) + [-1] * len(negatives))
        _, w = dual_of_sklearn(points, y, 0.5)
        if np.linalg.norm(w) > 1e-3:
            np.testing.assert_allclose(result[i], unit(w), atol=1e-4)


def test_negatives_when_all_scores_are_equal():
    xb = np.tile(unit(np.ones(4)), (7, 1)).astype(np.float32)
    index = FlatIndex(xb)
    neighbors = index.search(xb[:2], 3)[1]
    assert lowest_outside(index, xb[:2], neighbors, 2, own=np.array([5, 3])).tolist() == [[3, 4], [4, 5]]
    assert lowest_outside(index, xb[:1], neighbors[:1], 6).tolist() == [[3, 4, 5, 6, -1, -1]]


def network(max_k=9):
    torch.manual_seed(0)
    return LAttQE(LAttQEConfig(dim=16, heads=4, layers=2, max_k=max_k, positional_start="small")).eval()


def test_lattqe_equals_the_module_row_by_row():
    xb, xq, model = vectors(25, 16, 0, False), vectors(5, 16, 1, False), network()
    for dba, result in [
        (False, lattqe.expand(xq, xb, "lattqe", k=6, model=model, device="cpu")),
        (True, lattqe.augment(xb, "lattqe", k=6, model=model, device="cpu")),
    ]:
        for i, x in enumerate(xb if dba else xq):
            items = np.concatenate([x[None], xb[ranking(x, xb, own=i if dba else -1)[0][:6]]])
            with torch.no_grad():
                weights = model(torch.from_numpy(items[None]), dba=dba).weights[0].numpy()
            np.testing.assert_allclose(result[i], unit(weights @ items), atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
def test_lattqe_with_fewer_rows_than_neighbors(rows):
    xb = vectors(rows, 16, 0, False)
    result = lattqe.augment(xb, model=network(), device="cpu")
    np.testing.assert_allclose(np.linalg.norm(result, axis=1), 1, atol=1e-5)
    if rows == 1:
        np.testing.assert_allclose(result, xb, atol=1e-6)


def test_sharing_does_not_show(monkeypatch):
    xb, model = vectors(30, 16, 0, True), network()
    shared = lattqe.augment(xb, model=model, k=5, device="cpu")
    monkeypatch.setattr(rows, "SHARED_BYTES", 0)
    np.testing.assert_allclose(lattqe.augment(xb, model=model, k=5, device="cpu"), shared, atol=1e-4)


def test_blocks_of_queries_do_not_show(monkeypatch):
    xb, xq = vectors(40, 8, 0, False), vectors(11, 8, 1, False)
    whole = lattqe.expand(xq, xb, "dqe")
    monkeypatch.setattr(rows, "QUERY_BLOCK", 3)
    np.testing.assert_allclose(lattqe.expand(xq, xb, "dqe"), whole, atol=1e-6)


def test_half_precision_vectors_are_taken():
    xb, xq = vectors(40, 64, 0, False), vectors(5, 64, 1, False)
    result = lattqe.expand(xq.astype(np.float16), xb.astype(np.float16), k=5)
    np.testing.assert_allclose(result, lattqe.expand(xq, xb, k=5), atol=5e-3)


def test_the_number_of_neighbors_by_default(tmp_path):
    xb = vectors(100, 16, 0, False)
    np.testing.assert_array_equal(
        lattqe.expand(xb[:3], xb, "alphaqe"), lattqe.expand(xb[:3], xb, "alphaqe", k=72, alpha=3.0)
    )
    np.testing.assert_array_equal(lattqe.augment(xb, "alphaqe"), lattqe.augment(xb, "alphaqe", k=36))
    model = network(max_k=20)
    assert create("lattqe", model=model).suggested_k(dba=True) == 20
    model.save(str(tmp_path / "model"), {"nqe": 7, "ndba": 5})
    stored = create("lattqe", model=str(tmp_path / "model"))
    assert (stored.suggested_k(dba=False), stored.suggested_k(dba=True)) == (7, 5)


def test_a_finished_method_is_taken():
    xb = vectors(20, 8, 0, False)
    method = create("alphaqe", alpha=2.0)
    np.testing.assert_array_equal(lattqe.expand(xb, xb, method, k=3), lattqe.expand(xb, xb, "alphaqe", k=3, alpha=2.0))
    with pytest.raises(LattqeError, match="alpha given with"):
        lattqe.expand(xb, xb, method, alpha=3.0)


def test_refusals():
    xb = vectors(5, 8, 0, False)
    with pytest.raises(LattqeError, match="xb row 2 has norm 2"):
        lattqe.augment(xb * np.array([1, 1, 2, 1, 1])[:, None], "aqe")
    with pytest.raises(LattqeError, match="xq row 0 has norm nan"):
        lattqe.expand(np.full((1, 8), np.nan), xb)
    with pytest.raises(LattqeError, match="k is 0"):
        lattqe.expand(xb, xb, k=0)
    with pytest.raises(LattqeError, match="expected \\(rows, D\\)"):
        lattqe.expand(xb[0], xb)
    with pytest.raises(LattqeError, match="12 neighbors, but this network was made for 9"):
        lattqe.expand(vectors(1, 16, 0, False), vectors(30, 16, 1, False), "lattqe", k=12, model=network())


def test_importing_lattqe_is_quick():
    code = "import lattqe, sys; assert not {'torch', 'faiss', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        _ = lattqe.nothing
