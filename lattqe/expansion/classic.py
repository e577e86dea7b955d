"""The classic methods: AQE, AQEwD and αQE, with weights by a formula of rank or similarity, and DQE, with an SVM's.

DQE's are the weight vector of a linear SVM, neighbors against low-ranked items (Arandjelović and Zisserman 2012). Many
small SVMs are solved at once, the dual of the C-SVM from batched Gram matrices:

    min ½ aᵀ Q a - Σ a_i   with   0 ≤ a_i ≤ C,  Σ y_i a_i = 0,  Q_ij = y_i y_j <x_i, x_j>

by a primal-dual interior-point method with Mehrotra's predictor and corrector: about fifteen steps whatever the data,
each one batched Cholesky factorisation, so that thousands of problems cost thousands of tiny factorisations and no
Python loop over problems. Duplicates (a singular Q) need no care: the diagonal it adds is positive, and of the
equivalent solutions it approaches the central one, which treats equal points equally.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import numpy as np
import torch

from lattqe.errors import LattqeError
from lattqe.expansion.base import Lists, Method, RowSource, is_finite, parameter

STEPS = 60  # never reached in practice: most problems take 10 to 20
TOLERANCE = 1e-13  # of the complementarity in units of C, which leaves an error around 1e-6 in the weight vector
LARGEST_C = 1e12  # and 1 over the smallest: far beyond both, nothing but rounding is left of the other terms
RIDGE = 1e-11  # relative to C: keeps the factorisation of a singular Q positive, far below the tolerance of the weights
STAY_INSIDE = 0.995  # share of the step to the nearest bound


@dataclass
class AverageExpansion(Method):
    """AQE: the item and its k nearest neighbors, averaged (Chum et al. 2007): w_i = 1."""

    name: ClassVar[str] = "aqe"
    default_k: ClassVar[int] = 2
    default_k_dba: ClassVar[int] = 4
    label: ClassVar[str] = "AQE"
    dba_label: ClassVar[str] = "ADBA"
    tries_k: ClassVar[tuple[int, ...]] = (1, 2, 4, 6, 8, 12, 16)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((2, 4, 8), (2, 4, 8))

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k) ones."""
        return torch.ones_like(lists.items[:, : 1 + lists.k, 0])


@dataclass
class DecayExpansion(Method):
    """AQEwD: weights that decay with rank (Gordo et al. 2017): w_i = (k - i) / k, so the last neighbor has 0.

    k counts the valid neighbors of the row, and i counts among them: a row with fewer candidates than requested
    gets the weights it would get with that smaller k.
    """

    name: ClassVar[str] = "aqewd"
    default_k: ClassVar[int] = 4
    default_k_dba: ClassVar[int] = 4
    label: ClassVar[str] = "AQEwD"
    dba_label: ClassVar[str] = "ADBAwD"
    tries_k: ClassVar[tuple[int, ...]] = (2, 4, 6, 8, 10, 12, 16, 24)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((4, 8, 12), (4, 6, 8, 12))

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k), from 1 down to 0."""
        valid = lists.valid[:, 1 : 1 + lists.k].float()
        k = valid.sum(dim=1, keepdim=True).clamp(min=1)
        rank = torch.cat([torch.zeros_like(k), valid.cumsum(dim=1)], dim=1)
        return (k - rank) / k


@dataclass
class AlphaExpansion(Method):
    """αQE: a power of the similarity (Radenović et al. 2018): w_i = max(sim(q, d_i), 0)^α, the item itself with 1.

    Similarities below zero count as zero: a power of a negative number would be complex, or flip its sign with α.
    """

    name: ClassVar[str] = "alphaqe"
    default_k: ClassVar[int] = 72
    default_k_dba: ClassVar[int] = 36
    label: ClassVar[str] = "αQE"
    dba_label: ClassVar[str] = "αDBA"
    tries_k: ClassVar[tuple[int, ...]] = (8, 10, 16, 24, 36, 48, 72)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((10, 24, 36), (4, 10, 24))
    # 3 is the value of the paper's comparison; 0 is AQE over all k
    alpha: float = parameter(3.0, "Power of the similarity", symbol="α", tries=(1.0, 2.0, 3.0, 4.0))

    def __post_init__(self) -> None:
        if not (is_finite(self.alpha) and self.alpha >= 0):
            raise LattqeError(f"alphaqe: alpha is {self.alpha!r}: use a finite number that is not negative, such as 3")

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k), none negative."""
        own = torch.ones_like(lists.items[:, :1, 0])
        return torch.cat([own, lists.scores.clamp(min=0) ** self.alpha], dim=1)


@dataclass
class DiscriminativeExpansion(Method):
    """w_i = y_i a_i, with a the dual solution of a C-SVM on (item + neighbors: y = 1) against (negatives: y = -1).

    The SVM is that of LIBSVM, which the method was published with: hinge loss, an intercept that is not penalised,
    hence the constraint Σ y_i a_i = 0. The intercept shifts all scores alike, so ranking needs only Σ w_i d_i.
    Without a single valid negative there is nothing to tell apart: the row stays what it was.
    """

    name: ClassVar[str] = "dqe"
    default_k: ClassVar[int] = 4
    default_k_dba: ClassVar[int] = 4
    label: ClassVar[str] = "DQE"
    dba_label: ClassVar[str] = "DDBA"
    tries_k: ClassVar[tuple[int, ...]] = (2, 4, 8, 12)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((2, 4, 8), (2, 4, 8))
    # Defaults as tuned in the paper's comparison
    C: float = parameter(0.1, "The SVM's C, bound of each weight", tries=(0.1, 1.0))
    negatives: int = parameter(5, "Low-ranked negatives for each query or row", tries=(5, 50))

    def __post_init__(self) -> None:
        if not (is_finite(self.C) and 1 / LARGEST_C <= self.C <= LARGEST_C):
            raise LattqeError(
                f"dqe: C is {self.C!r}: use a number between {1 / LARGEST_C:g} and {LARGEST_C:g}, such as 0.1"
            )
        if isinstance(self.negatives, bool) or not isinstance(self.negatives, Integral) or self.negatives < 1:
            raise LattqeError(f"dqe: negatives is {self.negatives!r}: use a whole number from 1, such as 5")

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k + m): in [0, C] for item and neighbors, in [-C, 0] for negatives."""
        items = lists.items.double()  # duplicates make the Gram matrix singular: float32 noise would make it indefinite
        gram = torch.bmm(items, items.transpose(1, 2))
        if not gram.isfinite().all():
            raise LattqeError("dqe: NaN or infinite values in the vectors: clean them")
        label = torch.ones_like(lists.valid, dtype=torch.float64)
        label[:, 1 + lists.k :] = -1
        return (label * solve_dual(gram, label, lists.valid, self.C)).float()


def lowest_outside(
    index: RowSource, x: np.ndarray, neighbors: np.ndarray, m: int, own: np.ndarray | None = None
) -> np.ndarray:
    """Row numbers (n, m) int32 of the m lowest-ranked rows of `index` for x (n, D), ascending by score, then row.

    Rows listed in `neighbors` (n, k), and the row itself where x are rows of the index (`own` (n,)), are left out:
    a small database, or one full of equal scores, would offer a positive as a negative. Fewer than m: -1.
    """
    taken = neighbors if own is None else np.concatenate([own[:, None], neighbors], axis=1)
    lowest = index.lowest(x, m)[1]
    clash = (lowest[:, :, None] == taken[:, None, :]).any(axis=2) & (lowest >= 0)
    for row in np.flatnonzero(clash.any(axis=1)):
        more = index.lowest(x[row : row + 1], min(m + taken.shape[1], index.rows))[1][0]
        kept = more[(more >= 0) & ~np.isin(more, taken[row])][:m]
        lowest[row] = -1
        lowest[row, : len(kept)] = kept
    return lowest


@dataclass
class _State:
    """Iterates of B problems of size t, scaled to u = a / C: bounds 0 ≤ u ≤ 1 with multipliers z and v."""

    u: torch.Tensor  # (B, t)
    s: torch.Tensor  # (B, t) 1 - u, carried along: computed from u it would round to 0 near the upper bound
    z: torch.Tensor  # (B, t) multiplier of u ≥ 0
    v: torch.Tensor  # (B, t) multiplier of u ≤ 1
    b: torch.Tensor  # (B, 1) multiplier of yᵀu = 0, the intercept

    def moved(self, step: torch.Tensor, by: "_State") -> "_State":
        return _State(*(value + step * change for value, change in zip(self.all(), by.all())))

    def all(self) -> tuple[torch.Tensor, ...]:
        return self.u, self.s, self.z, self.v, self.b

    def gap(self) -> torch.Tensor:
        """Mean complementarity (B, 1)."""
        return ((self.z * self.u + self.v * self.s).mean(dim=1, keepdim=True)) / 2


def solve_dual(gram: torch.Tensor, label: torch.Tensor, valid: torch.Tensor, C: float) -> torch.Tensor:
    """Dual solutions a (B, t) float64 for gram (B, t, t) float64, label (B, t) of ±1 and valid (B, t) bool.

    Invalid points get 0; a problem that has only one class has the solution 0.
    """
    y = torch.where(valid, label, 0)
    solvable = ((y > 0).any(dim=1) & (y < 0).any(dim=1)).nonzero()[:, 0]
    result = torch.zeros_like(label)
    # Padding becomes a separate point that does not affect the others; its optimum is the lower bound.
    hessian = C * y[:, :, None] * y[:, None, :] * gram
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    diagonal.copy_(torch.where(valid, diagonal + RIDGE * C, 1.0))
    linear = torch.where(valid, -1.0, 1.0).to(gram)
    active, hessian, linear, y = solvable, hessian[solvable], linear[solvable], y[solvable]
    half = torch.full_like(y, 0.5)
    state = _State(half, half, torch.ones_like(y), torch.ones_like(y), torch.zeros_like(y[:, :1]))
    for _ in range(STEPS):
        if not len(active):
            break
        state = _mehrotra_step(state, hessian, linear, y)
        result[active] = state.u
        going = (state.gap()[:, 0] > TOLERANCE * min(C, 1 / C)).nonzero()[:, 0]
        if len(going) < len(active):  # finished problems leave, so that none depends on how long its batch runs
            active, hessian, linear, y = active[going], hessian[going], linear[going], y[going]
            state = _State(*(value[going] for value in state.all()))
    return torch.where(valid, C * result, 0)


def _mehrotra_step(state: _State, hessian: torch.Tensor, linear: torch.Tensor, y: torch.Tensor) -> _State:
    """One predictor, one corrector, and the longest step that stays inside the bounds."""
    u, s, z, v, b = state.all()
    dual_residual = (hessian @ u[..., None])[..., 0] + linear + y * b - z + v
    primal_residual = (y * u).sum(dim=1, keepdim=True)
    factor = torch.linalg.cholesky(hessian + torch.diag_embed(z / u + v / s))
    solved_y = torch.cholesky_solve(y[..., None], factor)[..., 0]
    y_solved_y = (y * solved_y).sum(dim=1, keepdim=True)

    def direction(target_z: torch.Tensor, target_v: torch.Tensor) -> _State:
        """The Newton direction towards z u = target_z + z u and v s = target_v + v s."""
        right = -dual_residual + target_z / u - target_v / s
        solved = torch.cholesky_solve(right[..., None], factor)[..., 0]
        db = ((y * solved).sum(dim=1, keepdim=True) + primal_residual) / y_solved_y
        du = solved - solved_y * db
        return _State(du, -du, (target_z - z * du) / u, (target_v + v * du) / s, db)

    predicted = direction(-z * u, -v * s)
    gap = state.gap()
    centering = (state.moved(_longest(state, predicted), predicted).gap() / gap) ** 3
    target = centering * gap
    corrected = direction(target - z * u - predicted.u * predicted.z, target - v * s + predicted.u * predicted.v)
    return state.moved(STAY_INSIDE * _longest(state, corrected), corrected)


def _longest(state: _State, by: _State) -> torch.Tensor:
    """The longest step (B, 1), at most 1, after which u, s, z and v are still not negative."""
    values, changes = torch.cat(state.all()[:4], dim=1), torch.cat(by.all()[:4], dim=1)
    limits = torch.where(changes < 0, -values / changes, torch.inf)
    return limits.amin(dim=1, keepdim=True).clamp(max=1)
