"""Many small linear SVMs at once: the dual of the C-SVM from batched Gram matrices.

    min ½ aᵀ Q a - Σ a_i   with   0 ≤ a_i ≤ C,  Σ y_i a_i = 0,  Q_ij = y_i y_j <x_i, x_j>

Solved by a primal-dual interior-point method with Mehrotra's predictor and corrector: about fifteen steps whatever
the data, each one batched Cholesky factorisation, so that thousands of problems cost thousands of tiny factorisations
and no Python loop over problems. Duplicates (a singular Q) need no care: the diagonal it adds is positive, and of
the equivalent solutions it approaches the central one, which treats equal points equally.
"""

from dataclasses import dataclass

import torch

STEPS = 60  # never reached in practice: most problems take 10 to 20
TOLERANCE = 1e-13  # of the complementarity in units of C, which leaves an error around 1e-6 in the weight vector
RIDGE = 1e-11  # relative to C: keeps the factorisation of a singular Q positive, far below the tolerance of the weights
STAY_INSIDE = 0.995  # share of the step to the nearest bound


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
    # Padding becomes a point of its own that no other one feels; its optimum is the lower bound.
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
