"""Diffusion and propagation beside dense solves of their definitions; isolated rows, duplicates and refusals."""

import numpy as np
import pytest

from lattqe.errors import LattqeError
from lattqe.expansion import diffusion
from lattqe.expansion.diffusion import Diffusion, GraphRows, OfflineDiffusion, Propagation


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def clusters(n: int = 120, d: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((6, d))
    xb = unit(centers[rng.integers(0, 6, n)] + 0.6 * rng.standard_normal((n, d)))
    xb[7] = xb[90] = xb[3]  # duplicates
    return xb, unit(centers[rng.integers(0, 6, 9)] + 0.6 * rng.standard_normal((9, d)))


def dense_lists(xb: np.ndarray, k: int) -> list[list[int]]:
    scores = xb.astype(np.float64) @ xb.T.astype(np.float64)
    return [[j for j in np.lexsort((np.arange(len(xb)), -scores[i])) if j != i][:k] for i in range(len(xb))]


def dense_graph(xb: np.ndarray, kd: int, gamma: float) -> np.ndarray:
    """Loops over all pairs."""
    near = dense_lists(xb, kd)
    A = np.zeros((len(xb), len(xb)))
    for i in range(len(xb)):
        for j in range(len(xb)):
            if j in near[i] and i in near[j]:
                A[i, j] = max(float(xb[i].astype(np.float64) @ xb[j].astype(np.float64)), 0) ** gamma
    degree = A.sum(axis=1)
    scale = np.array([1 / np.sqrt(value) if value else 0 for value in degree])
    return scale[:, None] * A * scale[None]


def dense_seeds(xb: np.ndarray, xq: np.ndarray, kq: int, gamma: float) -> np.ndarray:
    y = np.zeros((len(xq), len(xb)))
    scores = xq.astype(np.float64) @ xb.T.astype(np.float64)
    for q in range(len(xq)):
        for j in np.lexsort((np.arange(len(xb)), -scores[q]))[:kq]:
            y[q, j] = max(scores[q, j], 0) ** gamma
    return y


@pytest.mark.parametrize(("kq", "kd", "gamma", "alpha"), [(5, 20, 3.0, 0.99), (10, 4, 6.0, 0.9), (1, 119, 1.0, 0.5)])
def test_diffusion_is_the_dense_solution(kq: int, kd: int, gamma: float, alpha: float) -> None:
    xb, xq = clusters()
    S, y = dense_graph(xb, kd, gamma), dense_seeds(xb, xq, kq, gamma)
    expected = np.linalg.solve(np.eye(len(xb)) - alpha * S, y.T).T
    rows, ours = GraphRows(xb), Diffusion(kq=kq, kd=kd, gamma=gamma, alpha=alpha)
    np.testing.assert_allclose(ours.graph(rows).todense(), S, atol=1e-6)
    np.testing.assert_allclose(ours.flow(rows, y), expected, atol=1e-4 * expected.max())
    whole = OfflineDiffusion(kq=kq, kd=kd, gamma=gamma, alpha=alpha, truncation=len(xb))
    np.testing.assert_allclose(whole.flow(rows, y), expected, atol=1e-4 * expected.max())


def test_truncated_flows_are_dense_solutions_of_the_cut_graph() -> None:
    xb, xq = clusters()
    S, near = dense_graph(xb, 10, 3.0), dense_lists(xb, 15)
    flows = np.zeros((len(xb), len(xb)))
    for i in range(len(xb)):
        inside = [i, *near[i]]
        flows[i, inside] = np.linalg.solve(np.eye(16) - 0.95 * S[np.ix_(inside, inside)], np.eye(16)[0])
    y = dense_seeds(xb, xq, 4, 3.0)
    ours = OfflineDiffusion(kq=4, kd=10, gamma=3.0, alpha=0.95, truncation=15)
    np.testing.assert_allclose(ours.flow(GraphRows(xb), y), y @ flows, atol=1e-4)


def test_rankings_go_by_flow_then_similarity_then_row(monkeypatch: pytest.MonkeyPatch) -> None:
    xb, xq = clusters()
    ours = Diffusion(kq=2, kd=5, gamma=3.0, alpha=0.9)
    rows = GraphRows(xb)
    whole = np.concatenate(list(ours.rankings(rows, xq)))
    f = ours.flow(rows, dense_seeds(xb, xq, 2, 3.0))
    scores = xq.astype(np.float64) @ xb.T.astype(np.float64)
    for ranking, flow, own in zip(whole, f, scores):
        assert sorted(ranking) == list(range(len(xb)))
        assert np.all(np.diff(flow[ranking]) <= 1e-9)
        unreached = [row for row in ranking if flow[row] == 0]
        assert len(unreached) > 10
        assert np.all(np.diff(own[unreached]) <= 1e-6)
        assert list(ranking).index(3) < list(ranking).index(7) < list(ranking).index(90), "duplicates in their order"
    monkeypatch.setattr(diffusion, "BLOCK_FLOATS", 2 * len(xb))
    np.testing.assert_array_equal(np.concatenate(list(ours.rankings(rows, xq))), whole)


def test_a_row_without_mutual_neighbors_keeps_what_the_query_gave_it() -> None:
    xb = np.eye(6, dtype=np.float32)  # all orthogonal: no edge has any weight
    ours = Diffusion(kq=2, kd=3)
    (ranking,) = ours.rankings(GraphRows(xb), xb[2:3])
    assert ranking[0].tolist() == [2, 0, 1, 3, 4, 5]
    y = np.eye(6)[2:3]
    np.testing.assert_array_equal(ours.flow(GraphRows(xb), y), y)
    np.testing.assert_array_equal(OfflineDiffusion().flow(GraphRows(xb), y), y)


@pytest.mark.parametrize("method", [Diffusion(), OfflineDiffusion()])
def test_one_row_and_equal_rows_are_ranked(method: diffusion.Ranker) -> None:
    one = unit(np.ones((1, 4)))
    assert [ranking.tolist() for ranking in method.rankings(GraphRows(one), one)] == [[[0]]]
    same = np.repeat(one, 5, axis=0)
    assert [ranking.tolist() for ranking in method.rankings(GraphRows(same), one)] == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize(("k", "hops", "alpha"), [(10, 8, 0.9), (3, 1, 0.99), (119, 2, 0.5)])
def test_propagation_is_its_definition(k: int, hops: int, alpha: float) -> None:
    xb, _ = clusters()
    n = len(xb)
    W = np.zeros((n, n))
    for i, near in enumerate(dense_lists(xb, k)):
        for rank, j in enumerate(near):
            W[i, j] = (k - rank) / k
    A = (W + W.T) / 2
    S = A / A.sum(axis=1, keepdims=True)
    H = xb.astype(np.float64)
    for _ in range(hops):
        H = alpha * S @ H + (1 - alpha) * xb
    ours = Propagation(k=k, hops=hops, alpha=alpha).augment(GraphRows(xb))
    np.testing.assert_allclose(ours, unit(H), atol=1e-5)
    assert ours.dtype == np.float32


def test_propagation_leaves_what_has_no_neighbors_or_cancels() -> None:
    one = unit(np.ones((1, 4)))
    np.testing.assert_array_equal(Propagation().augment(GraphRows(one)), one)
    opposite = np.array([[1, 0], [-1, 0]], dtype=np.float32)  # ½ of each: the sum is nothing
    np.testing.assert_array_equal(Propagation(k=1, hops=1, alpha=0.5).augment(GraphRows(opposite)), opposite)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Diffusion(alpha=1.0), "diffusion: alpha is 1.0: use a share from 0 to below 1"),
        (lambda: Diffusion(alpha=float("nan")), "alpha is nan"),
        (lambda: Diffusion(kq=0), "kq is 0: use a whole number from 1"),
        (lambda: Diffusion(gamma=-1.0), "gamma is -1.0"),
        (lambda: OfflineDiffusion(truncation=0), "offline-diffusion: truncation is 0"),
        (lambda: Propagation(hops=0), "hops is 0: use a whole number from 1"),
        (lambda: Propagation(hops=1000), "hops is 1000"),
        (lambda: Propagation(alpha=1.5), "the share of the neighbors is 1.5"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(make, words: str) -> None:
    with pytest.raises(LattqeError, match=words):
        make()


def test_too_many_rows_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion, "MOST_ROWS", 50)
    with pytest.raises(LattqeError, match="120 rows: diffusion and propagation work in one process, up to 50 rows"):
        GraphRows(clusters()[0])
