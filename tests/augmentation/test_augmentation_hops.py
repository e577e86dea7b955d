"""Hops against a dense float64 twin, cut in any way, with every degenerate row there is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

import lattqe
from lattqe.device import SparseSums
from lattqe.errors import LattqeError
from lattqe.expansion import create
from lattqe.expansion.base import CANCELLED, MOST_HOPS, check_hops
from lattqe.expansion.diffusion import column_groups, directed, hop, hopped, transition, unit_rows
from lattqe.expansion.rows import augment_rows
from lattqe.search import FlatIndex, knn_graph


def dense_sums(weights, rows, x, alpha, hops):
    """The definition, in dense float64, before rows are normalised."""
    n = len(x)
    W = np.zeros((n, n))
    for i in range(n):
        for j, w in zip(rows[i, 1:], weights[i, 1:]):
            if j >= 0 and w > 0:
                W[i, j] += float(w)
    A = (W + W.T) / 2 + np.diag(np.maximum(weights[:, 0].astype(np.float64), 0))
    alone = A.sum(axis=1) == 0
    A[alone, alone] = 1
    S, X = A / A.sum(axis=1, keepdims=True), x.astype(np.float64)
    H = X
    for _ in range(hops):
        H = alpha * S @ H + (1 - alpha) * X
    return H


def dense_hop(weights, rows, x, alpha, hops):
    """The definition, normalised."""
    H = dense_sums(weights, rows, x, alpha, hops)
    norms = np.linalg.norm(H, axis=1, keepdims=True)
    return np.where(norms > CANCELLED, H / np.maximum(norms, CANCELLED), x)


def world(seed, n, k, dim, dropped=0.3, missing=0.1):
    """Random lists with dropped weights, missing neighbors and duplicates."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim)).astype(np.float32)
    x[n // 2] = x[0]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    near = rng.integers(0, n, (n, k))
    near[rng.random((n, k)) < missing] = -1
    weights = rng.random((n, 1 + k)).astype(np.float32)
    weights[rng.random((n, 1 + k)) < dropped] *= -1
    return weights, np.concatenate([np.arange(n)[:, None], near], axis=1).astype(np.int32), x


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 40),
    k=st.integers(1, 9),
    dim=st.integers(2, 20),
    alpha=st.floats(0.01, 0.99),
    hops=st.integers(1, 9),
    dropped=st.floats(0, 1),
)
def test_hops_are_what_the_dense_product_gives(seed, n, k, dim, alpha, hops, dropped):
    weights, rows, x = world(seed, n, k, dim, dropped)
    ours = hop(weights, rows, x, alpha, hops)
    assert ours.dtype == np.float32
    # A direction that is left of terms that nearly cancel has the rounding of the terms.
    clear = np.linalg.norm(dense_sums(weights, rows, x, alpha, hops), axis=1) > 1e-3
    np.testing.assert_allclose(ours[clear], dense_hop(weights, rows, x, alpha, hops)[clear], atol=2e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 60),
    k=st.integers(1, 9),
    dim=st.integers(2, 40),
    cut=st.integers(1, 60),
    columns=st.integers(1, 40),
    hops=st.integers(1, 4),
)
def test_any_cut_by_rows_and_columns_gives_the_same_bytes(seed, n, k, dim, cut, columns, hops):
    weights, rows, x = world(seed, n, k, dim)
    whole = hop(weights, rows, x, 0.8, hops)
    bands = [slice(start, min(start + cut, n)) for start in range(0, n, cut)]
    W = [directed(weights[band], rows[band], n) for band in bands]
    S = []
    for band, own in zip(bands, W):
        incoming = np.concatenate([each[:, band].T.toarray() for each in W], axis=1)
        S.append(transition(own, csr_array(incoming), weights[band, 0], band.start))
    H = x
    for _ in range(hops):
        following = np.empty_like(x)
        for low in range(0, dim, columns):
            some = slice(low, low + columns)
            for band, part in zip(bands, S):
                following[band, some] = hopped(part @ np.ascontiguousarray(H[:, some]), x[band, some], 0.8)
        H = following
    cut_up = np.concatenate([unit_rows(H[band], x[band]) for band in bands])
    assert cut_up.tobytes() == whole.tobytes()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 60),
    k=st.integers(1, 9),
    dim=st.integers(1, 20),
    size=st.integers(1, 2000),
    stays=st.booleans(),
)
def test_sums_on_a_device_are_those_of_scipy(seed, n, k, dim, size, stays):
    weights, rows, x = world(seed, n, k, dim)
    S = directed(weights, rows, n)  # with empty rows, which a hop never has
    sums = SparseSums(torch.device("cpu"))
    sums.block_bytes = size
    for H in (x, -x):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("lattqe.device.room_on", lambda device: x.nbytes if stays else x.nbytes - 1)
            sums.take(H)
        np.testing.assert_allclose(sums.multiply(S), S @ H, rtol=0, atol=1e-5)


def test_rows_without_edges_and_with_nothing_but_dropped_weights_stay_themselves():
    x = np.eye(4, dtype=np.float32)
    rows = np.array([[0, -1, -1], [1, 2, -1], [2, 1, 3], [3, 0, -1]], np.int32)
    weights = np.array([[0, 5, 5], [0, 1, 1], [0, 1, -2], [-1, -1, 0]], np.float32)
    done = hop(weights, rows, x, 0.5, 3)
    np.testing.assert_array_equal(done[[0, 3]], x[[0, 3]])
    np.testing.assert_allclose(done, dense_hop(weights, rows, x, 0.5, 3), atol=1e-6)
    assert done[1, 2] > 0.4


def test_an_edge_works_both_ways_and_a_self_loop_holds_a_row_back():
    x = np.eye(2, dtype=np.float32)
    rows = np.array([[0, 1], [1, -1]], np.int32)
    one_way = hop(np.array([[0, 1], [0, 0]], np.float32), rows, x, 0.5, 1)
    assert one_way[1, 0] > 0.5
    held = hop(np.array([[0, 1], [9, 0]], np.float32), rows, x, 0.5, 1)
    assert 0 < held[1, 0] < 0.1


def test_no_rows_float16_and_a_sum_that_cancels():
    assert hop(
        np.empty((0, 3), np.float32), np.empty((0, 3), np.int32), np.empty((0, 4), np.float32), 0.9, 2
    ).shape == (0, 4)
    weights, rows, x = world(1, 20, 3, 6)
    half = x.astype(np.float16)
    np.testing.assert_array_equal(hop(weights, rows, half, 0.9, 2), hop(weights, rows, half.astype(np.float32), 0.9, 2))
    opposite = np.array([[1, 0], [-1, 0]], np.float32)
    lists = np.array([[0, 1], [1, 0]], np.int32)
    np.testing.assert_array_equal(hop(np.array([[0, 1], [0, 1]], np.float32), lists, opposite, 0.5, 1), opposite)


def test_columns_are_cut_by_the_number_of_rows_alone():
    assert column_groups(1000, 128) == [slice(0, 128)]
    cut = column_groups(10**7, 128)
    assert [group.stop - group.start for group in cut] == [8] * 16
    assert [c for group in cut for c in range(group.start, group.stop)] == list(range(128))


@pytest.mark.parametrize(
    ("hops", "alpha", "said"),
    [
        (0, 0.9, "hops is 0: use a whole number from 1"),
        (1000, 0.9, "hops is 1000"),
        (-1, 0.9, "hops is -1"),
        (MOST_HOPS + 1, 0.9, "hops is 65"),
        (2, 0.0, "the share of the neighbors is 0.0: use a number between 0 and 1"),
        (2, 1.0, "is 1.0"),
        (2, -0.5, "is -0.5"),
        (2, float("nan"), "is nan"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(hops, alpha, said):
    with pytest.raises(LattqeError, match=said):
        check_hops(hops, alpha)


def test_edges_of_other_features_and_bad_weights_are_refused():
    weights, rows, x = world(2, 10, 3, 6)
    with pytest.raises(LattqeError, match="edges of 10 rows, but 9 vectors"):
        hop(weights, rows, x[:9], 0.9, 2)
    beyond = rows.copy()
    beyond[3, 1] = 10
    with pytest.raises(LattqeError, match="edges to row 10, but there are 10 rows"):
        hop(weights, beyond, x, 0.9, 2)
    weights[4, 2] = np.nan
    with pytest.raises(LattqeError, match="edges of row 4: NaN"):
        hop(weights, rows, x, 0.9, 2)
    with pytest.raises(LattqeError, match="do not fit"):
        hop(weights[:, :2], rows, x, 0.9, 2)


@pytest.mark.parametrize("method", ["aqe", "aqewd", "alphaqe", "dqe"])
def test_augment_hops_over_the_edges_of_any_method(method):
    x = world(3, 60, 1, 8)[2]
    theta = create(method)
    I, D = knn_graph(x, 5)
    one = augment_rows(FlatIndex(x), np.arange(60), D, I, theta, 5)
    np.testing.assert_array_equal(lattqe.augment(x, theta, 5), one.vectors)
    np.testing.assert_array_equal(lattqe.augment(x, theta, 5, hops=1), one.vectors)
    expected = dense_hop(one.weights, one.rows, x, theta.hop_alpha(len(x)), 4)
    np.testing.assert_allclose(lattqe.augment(x, theta, 5, hops=4), expected, atol=1e-5)
    other = dense_hop(one.weights, one.rows, x, 0.3, 4)
    np.testing.assert_allclose(lattqe.augment(x, theta, 5, hops=4, hop_alpha=0.3), other, atol=1e-5)


def test_features_flow_less_in_a_very_small_database():
    """A learned share grows with the square of the rows up to 200; a share that is asked for is taken as it is."""
    theta = create("lattqe", dba=True)
    learned = theta.hop_alpha(200)
    assert [theta.hop_alpha(rows) / learned for rows in (10, 100, 200, 10**6)] == pytest.approx([0.0025, 0.25, 1, 1])
    x = world(3, 60, 1, 8)[2]
    few = lattqe.augment(x)
    np.testing.assert_array_equal(few, lattqe.augment(x, hop_alpha=learned * 0.09))
    assert np.abs(few - lattqe.augment(x, hop_alpha=learned)).max() > 0.01


def test_augment_refuses_hops_that_mean_nothing():
    x = np.eye(3, dtype=np.float32)
    for hops in (0, 1000):
        with pytest.raises(LattqeError, match=f"hops is {hops}"):
            lattqe.augment(x, "aqe", 2, hops=hops)
