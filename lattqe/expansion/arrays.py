"""For arrays in a notebook: expand queries from a database, or a whole database from itself, in one call."""

from typing import Any

import numpy as np

from lattqe.device import pick_device
from lattqe.errors import LattqeError
from lattqe.expansion.base import Method
from lattqe.expansion.lowest import lowest_outside
from lattqe.expansion.registry import create
from lattqe.expansion.rows import expand_rows, shared_table, shares
from lattqe.search import FlatIndex, knn_graph

# Queries searched and expanded at once, so that their lists never need much memory.
QUERY_BLOCK = 1024
# How far a norm may be from 1: float16 vectors are normalised only so well.
NORM_SLACK = 0.01


def expand(
    xq: np.ndarray, xb: np.ndarray, method: str | Method = "alphaqe", k: int | None = None, **params: Any
) -> np.ndarray:
    """Expand queries xq (nq, D) from their k nearest rows of xb (nb, D): (nq, D) float32, L2-normalised.

    Vectors are L2-normalised, float16 or float32. `method` is one of aqe, aqewd, alphaqe, dqe, lattqe (or what
    `create` gave), `params` its parameters (alpha; C, negatives; model, precision; device), `k` by default the
    paper's number. The search is exact.
    """
    xq, xb = _unit_rows(xq, "xq"), _unit_rows(xb, "xb")
    theta = _method(method, params)
    k = _neighbors(k, theta.suggested_k(dba=False), len(xb))
    if not len(xb):
        return xq.astype(np.float32)
    index = FlatIndex(xb, _search_device(theta))
    out = np.empty(xq.shape, dtype=np.float32)
    for start in range(0, len(xq), QUERY_BLOCK):
        x = xq[start : start + QUERY_BLOCK]
        D, I = index.search(x, min(theta.depth(k), len(xb)))  # noqa: E741
        negatives = lowest_outside(index, x, I, theta.negatives) if theta.negatives else None
        out[start : start + QUERY_BLOCK] = expand_rows(theta, x, I, D, xb.__getitem__, negatives, k=k)
    return out


def augment(xb: np.ndarray, method: str | Method = "lattqe", k: int | None = None, **params: Any) -> np.ndarray:
    """Expand every row of xb (nb, D) from its k nearest other rows (database-side augmentation): (nb, D) float32.

    As `expand`; only original vectors are read, a row is never its own neighbor (its duplicates may be), and lattqe
    takes the tempered softmax. Search this instead of xb, with queries expanded from it.
    """
    xb = _unit_rows(xb, "xb")
    theta = _method(method, {"dba": True, **params} if method == "lattqe" else params)
    k = _neighbors(k, theta.suggested_k(dba=True), len(xb))
    if not len(xb):
        return xb.astype(np.float32)
    device = _search_device(theta)
    I, D = knn_graph(xb, theta.depth(k), device=device)  # noqa: E741
    if shares(theta, len(xb)):
        table = shared_table(theta, len(xb), [xb])
        return expand_rows(theta, xb, I, D, xb.__getitem__, shared=(table, np.arange(len(xb))))
    negatives = None
    if theta.negatives:
        negatives = lowest_outside(FlatIndex(xb, device), xb, I, theta.negatives, own=np.arange(len(xb)))
    return expand_rows(theta, xb, I, D, xb.__getitem__, negatives, k=k)


def _method(method: str | Method, params: dict[str, Any]) -> Method:
    if isinstance(method, str):
        return create(method, **params)
    if params:
        raise LattqeError(f"{', '.join(params)} given beside a finished {method.name}: give them to create instead")
    return method


def _search_device(method: Method) -> Any:
    """A GPU for the search too where the method has one; None is the CPU."""
    device = pick_device(method.device)
    return device if device.type == "cuda" else None


def _neighbors(k: int | None, default: int, rows: int) -> int:
    if k is not None and k < 1:
        raise LattqeError(f"k is {k}: use at least 1 neighbor")
    return max(1, min(default if k is None else k, rows))


def _unit_rows(x: np.ndarray, name: str) -> np.ndarray:
    """Refuse what is not a matrix of L2-normalised rows."""
    x = np.asarray(x)
    if x.ndim != 2:
        raise LattqeError(f"{name} has shape {x.shape}: want (rows, D)")
    if x.dtype not in (np.float16, np.float32):
        x = x.astype(np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float32))
    bad = np.flatnonzero(~(np.abs(norms - 1) <= NORM_SLACK))
    if len(bad):
        raise LattqeError(f"{name} row {bad[0]} has norm {norms[bad[0]]:.4g}: L2-normalise {name} first")
    return x
