"""Every weight formula against a slow twin written as loops; lists of every awkward shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lattqe.errors import LattqeError
from lattqe.expansion import METHODS, create
from lattqe.expansion.base import BLOCK_BYTES

SIMPLE = {"aqe": {}, "aqewd": {}, "alphaqe": {"alpha": 3.0}}


def unit(x):
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)


def random_lists(n, k, m, dim, seed=0, spread=1.0):
    """Items, neighbors by descending score, scores, negatives: unit vectors."""
    rng = np.random.default_rng(seed)
    x = unit(rng.normal(size=(n, dim)))
    neighbors = unit(x[:, None] + spread * rng.normal(size=(n, k, dim)) / np.sqrt(dim))
    scores = np.einsum("nkd,nd->nk", neighbors, x)
    order = np.argsort(-scores, axis=1, kind="stable")
    neighbors = np.take_along_axis(neighbors, order[..., None], axis=1)
    negatives = unit(rng.normal(size=(n, m, dim)))
    return (a.astype(np.float32) for a in (x, neighbors, np.take_along_axis(scores, order, axis=1), negatives))


def twin_weights(name, scores, valid, alpha=3.0):
    """Weights of one row by the formulas of the paper's Table 1."""
    k = int(valid.sum())
    weights, rank = [1.0], 0
    for score, ok in zip(scores, valid):
        if not ok:
            weights.append(0.0)
            continue
        rank += 1
        if name == "aqe":
            weights.append(1.0)
        elif name == "aqewd":
            weights.append((k - rank) / k)
        else:
            weights.append(max(float(score), 0.0) ** alpha)
    return np.array(weights)


def twin_expand(x, neighbors, weights):
    """The normalised weighted sum of one row, term by term."""
    total = weights[0] * x.astype(np.float64)
    for weight, neighbor in zip(weights[1:], neighbors):
        if weight != 0:
            total = total + weight * neighbor.astype(np.float64)
    norm = np.linalg.norm(total)
    return unit(x) if norm <= 1e-6 * np.abs(weights).sum() else total / norm


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SIMPLE)),
    n=st.integers(0, 5),
    k=st.integers(0, 9),
    dim=st.integers(1, 17),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.5, 3.0, 50.0]),  # duplicates, near, far, negative similarities
)
def test_simple_methods_equal_their_loops(name, n, k, dim, seed, spread):
    x, neighbors, scores, _ = random_lists(n, k, 0, dim, seed, spread)
    valid = np.random.default_rng(seed).random((n, k)) < 0.7
    neighbors[~valid] = np.nan  # padding may hold anything
    scores[~valid] = np.nan
    result = create(name, **SIMPLE[name]).expand(x, neighbors, scores, valid)
    for row in range(n):
        weights = twin_weights(name, scores[row], valid[row])
        np.testing.assert_allclose(result.weights[row], weights, atol=1e-6)
        np.testing.assert_allclose(result.vectors[row], twin_expand(x[row], neighbors[row], weights), atol=2e-6)
    assert result.vectors.dtype == result.weights.dtype == np.float32
    assert result.vectors.shape == (n, dim)
    assert result.weights.shape == (n, 1 + k)


def dual_of_sklearn(x, y, C):
    """(dual coefficients y_i a_i, weight vector) of LIBSVM, solved far below the tolerance of the comparison."""
    from sklearn.svm import SVC  # seconds of imports, for this alone

    svm = SVC(kernel="linear", C=C, tol=1e-10).fit(x, y)
    dual = np.zeros(len(y))
    dual[svm.support_] = svm.dual_coef_[0]
    return dual, svm.coef_[0]


@pytest.mark.parametrize("C", [1e-3, 0.1, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize(("k", "m", "dim"), [(4, 5, 64), (1, 1, 3), (30, 40, 16), (4, 60, 8)])
def test_dqe_agrees_with_scikit_learn(C, k, m, dim):
    n = 12
    x, neighbors, scores, negatives = random_lists(n, k, m, dim, seed=k, spread=1.5)
    result = create("dqe", C=C, negatives=m).expand(x, neighbors, scores, negatives=negatives)
    y = np.array([1] * (1 + k) + [-1] * m)
    for row in range(n):
        points = np.concatenate([x[row, None], neighbors[row], negatives[row]]).astype(np.float64)
        dual, w = dual_of_sklearn(points, y, C)
        np.testing.assert_allclose(result.weights[row] @ points, w, atol=1e-4 * np.linalg.norm(w))
        np.testing.assert_allclose(result.vectors[row], unit(w), atol=1e-4)
        if np.linalg.matrix_rank(points) == len(points):  # else the dual is not unique, only its vector is
            np.testing.assert_allclose(result.weights[row], dual, atol=1e-4 * np.abs(dual).max())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000), k=st.integers(0, 6), m=st.integers(1, 6), C=st.sampled_from([0.01, 0.1, 1.0, 100.0])
)
def test_dqe_with_gaps_and_duplicates_equals_the_svm_of_what_is_there(seed, k, m, C):
    n, dim = 3, 12
    rng = np.random.default_rng(seed)
    x, neighbors, scores, negatives = random_lists(n, k, m, dim, seed, spread=2.0)
    valid, negatives_valid = rng.random((n, k)) < 0.7, rng.random((n, m)) < 0.7
    if k:
        neighbors[0, -1] = x[0]  # a positive twice
        negatives[1, 0] = neighbors[1, 0]  # a point of both classes
    neighbors[~valid] = np.nan
    negatives[~negatives_valid] = np.nan
    result = create("dqe", C=C, negatives=m).expand(x, neighbors, scores, valid, negatives, negatives_valid)
    mask = np.concatenate([np.ones((n, 1), bool), valid, negatives_valid], axis=1)
    assert np.isfinite(result.vectors).all()
    assert (result.weights[~mask] == 0).all()
    for row in range(n):
        if not negatives_valid[row].any():
            np.testing.assert_allclose(result.vectors[row], x[row], atol=1e-6)
            continue
        points = np.concatenate([x[row, None], neighbors[row], negatives[row]])[mask[row]].astype(np.float64)
        y = np.concatenate([np.ones(1 + k), -np.ones(m)])[mask[row]]
        _, w = dual_of_sklearn(points, y, C)
        if np.linalg.norm(w) > 1e-3 * C:
            np.testing.assert_allclose(result.weights[row][mask[row]] @ points, w, atol=1e-4 * np.linalg.norm(w))


def test_dqe_bounds_and_balance():
    x, neighbors, scores, negatives = random_lists(200, 6, 9, 32, spread=2.0)
    w = create("dqe", C=0.3, negatives=9).expand(x, neighbors, scores, negatives=negatives).weights
    assert (w[:, :7] >= -1e-6).all()
    assert (w[:, 7:] <= 1e-6).all()
    assert np.abs(w).max() <= 0.3 + 1e-6
    np.testing.assert_allclose(w.sum(axis=1), 0, atol=1e-5)


@pytest.mark.parametrize("name", ["aqe", "aqewd", "alphaqe", "dqe"])
def test_a_row_does_not_depend_on_the_others(name):
    n, k, dim = 40, 5, 24
    x, neighbors, scores, negatives = random_lists(n, k, 5, dim)
    method = create(name)
    together = method.expand(x, neighbors, scores, negatives=negatives)
    for row in (0, 17, n - 1):
        one = slice(row, row + 1)
        alone = method.expand(x[one], neighbors[one], scores[one], negatives=negatives[one])
        np.testing.assert_allclose(alone.vectors[0], together.vectors[row], atol=1e-6)
        np.testing.assert_allclose(alone.weights[0], together.weights[row], atol=1e-6)


def test_blocks_do_not_show(monkeypatch):
    x, neighbors, scores, negatives = random_lists(50, 4, 5, 16)
    whole = create("dqe").expand(x, neighbors, scores, negatives=negatives)
    monkeypatch.setattr("lattqe.expansion.base.BLOCK_BYTES", 3 * 10 * 16 * 4)
    cut = create("dqe").expand(x, neighbors, scores, negatives=negatives)
    assert BLOCK_BYTES > 50 * 10 * 16 * 4
    np.testing.assert_allclose(cut.vectors, whole.vectors, atol=1e-6)


@pytest.mark.parametrize("name", ["aqe", "aqewd", "alphaqe", "dqe"])
def test_no_neighbors_leaves_the_vector(name):
    x, neighbors, scores, _ = random_lists(4, 3, 0, 8)
    none_valid = np.zeros((4, 3), dtype=bool)
    np.testing.assert_allclose(create(name).expand(x, neighbors, scores, none_valid).vectors, x, atol=1e-6)
    empty = create(name).expand(x, neighbors[:, :0], scores[:, :0])
    np.testing.assert_allclose(empty.vectors, x, atol=1e-6)


def test_a_sum_that_cancels_leaves_the_vector():
    x = unit(np.random.default_rng(0).normal(size=(3, 8))).astype(np.float32)
    result = create("aqe").expand(x, -x[:, None], -np.ones((3, 1), dtype=np.float32))
    np.testing.assert_allclose(result.vectors, x, atol=1e-6)


def test_float16_and_read_only_arrays_are_taken_and_not_changed():
    x, neighbors, scores, _ = random_lists(6, 4, 0, 16)
    x, neighbors = x.astype(np.float16), neighbors.astype(np.float16)
    before = neighbors.copy()
    for array in (x, neighbors, scores):
        array.flags.writeable = False
    result = create("alphaqe").expand(x, neighbors, scores, scores > 0.5)
    assert (neighbors == before).all()
    np.testing.assert_allclose(np.linalg.norm(result.vectors, axis=1), 1, atol=1e-6)


def test_methods_without_negatives_give_them_no_weight():
    x, neighbors, scores, negatives = random_lists(3, 2, 4, 8)
    result = create("aqe").expand(x, neighbors, scores, negatives=negatives)
    assert result.weights.shape == (3, 1 + 2 + 4)
    assert (result.weights[:, 3:] == 0).all()


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("nosuch", {}, ["nosuch", "aqe, aqewd, alphaqe, dqe, lattqe"]),
        ("alphaqe", {"aplha": 3}, ["aplha", "alpha"]),
        ("alphaqe", {"alpha": -1.0}, ["alpha is -1"]),
        ("alphaqe", {"alpha": float("nan")}, ["alpha is nan"]),
        ("dqe", {"C": 0.0}, ["C is 0"]),
        ("dqe", {"negatives": 0}, ["negatives is 0"]),
        ("dqe", {"negatives": 2.5}, ["negatives is 2.5"]),
        ("lattqe", {"model": "lattqe://nosuch"}, ["nosuch", "lattqe://universal"]),
    ],
)
def test_refusals_name_what_and_the_remedy(name, params, words):
    with pytest.raises(LattqeError) as error:
        create(name, **params)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_arrays_that_do_not_fit_are_refused():
    x, neighbors, scores, negatives = random_lists(3, 2, 4, 8)
    method = create("dqe")
    for arguments in [
        (x[:2], neighbors, scores),
        (x, neighbors[..., :5], scores),
        (x, neighbors, scores[:, :1]),
        (x, neighbors, scores, np.ones((3, 5), bool)),
        (x, neighbors, scores, None, negatives[..., :4]),
        (x, neighbors, scores, None, negatives, np.ones((3, 3), bool)),
        (x, neighbors, scores, None, None, np.ones((3, 4), bool)),
    ]:
        with pytest.raises(LattqeError, match="fit"):
            method.expand(*arguments)


def test_nan_in_a_vector_is_refused_not_passed_on():
    x, neighbors, scores, _ = random_lists(5, 2, 0, 8)
    neighbors[3, 1, 0] = np.nan
    with pytest.raises(LattqeError, match="row 3"):
        create("aqe").expand(x, neighbors, scores)
    with pytest.raises(LattqeError, match="NaN"):
        create("dqe").expand(x, neighbors, scores, negatives=neighbors)


def test_params_are_what_decides_the_result():
    assert create("alphaqe", alpha=2.5, device="cpu").params == {"alpha": 2.5}
    assert create("dqe", C=1.0).params == {"C": 1.0, "negatives": 5}
    assert create("dqe", negatives=7).negatives == 7
    assert create("aqe").negatives == 0
    assert list(METHODS) == ["aqe", "aqewd", "alphaqe", "dqe", "lattqe"]
