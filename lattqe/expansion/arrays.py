"""For arrays in a notebook: expand queries from a database, or a whole database from itself, in one call."""

from typing import Any

import numpy as np

from lattqe.augmentation.hops import check_hops, hop
from lattqe.device import pick_device
from lattqe.errors import LattqeError
from lattqe.expansion.base import Method
from lattqe.expansion.registry import METHODS, create
from lattqe.expansion.rows import augment_rows, expand_queries, list_lengths, shared_table, shares
from lattqe.search import FlatIndex, knn_graph

# Rows augmented at once, so that their weights never need much memory.
ROW_BLOCK = 4096
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
    if not len(xb):
        return xq.astype(np.float32)
    index = FlatIndex(xb, _search_device(theta))
    return expand_queries(index, xq, theta, _given(k, theta.suggested_k(dba=False))).vectors


def augment(xb: np.ndarray, method: str | Method = "lattqe", k: int | None = None, *, hops: int | None = None,
            hop_alpha: float | None = None, **params: Any) -> np.ndarray:
    """Expand every row of xb (nb, D) from its k nearest other rows (database-side augmentation): (nb, D) float32.

    As `expand`; only original vectors are read, a row is never its own neighbor (its duplicates may be), and lattqe
    takes the tempered softmax. Search this instead of xb, with queries expanded from it. `hops`: above 1, features
    flow that many times over the weighted edges of all rows (`lattqe.augmentation.hops`), each time with a share
    `hop_alpha` from the neighbors; by default what the model was trained for.
    """
    xb = _unit_rows(xb, "xb")
    theta = _method(method, params, dba=True)
    k = _given(k, theta.suggested_k(dba=True))
    hops = theta.default_hops if hops is None else hops
    alpha = theta.hop_alpha if hop_alpha is None else hop_alpha
    check_hops(hops, alpha)
    if not len(xb):
        return xb.astype(np.float32)
    device = _search_device(theta)
    I, D = knn_graph(xb, list_lengths(theta, k, max(len(xb) - 1, 1))[1], device=device)  # noqa: E741
    index = FlatIndex(xb, device)
    table = shared_table(theta, len(xb), [xb]) if shares(theta, len(xb)) else None
    out = np.empty(xb.shape, dtype=np.float32)
    weights, rows_of = [], []
    for start in range(0, len(xb), ROW_BLOCK):
        rows = np.arange(start, min(start + ROW_BLOCK, len(xb)))
        done = augment_rows(index, rows, D[rows], I[rows], theta, k, table)
        out[rows] = done.vectors
        if hops > 1:
            weights.append(done.weights)
            rows_of.append(done.rows)
    return hop(np.concatenate(weights), np.concatenate(rows_of), xb, alpha, hops) if hops > 1 else out


def _method(method: str | Method, params: dict[str, Any], dba: bool = False) -> Method:
    if isinstance(method, str):
        return create(method, **(METHODS[method].row_params if dba and method in METHODS else {}) | params)
    if params:
        raise LattqeError(f"{', '.join(params)} given beside a finished {method.name}: give them to create instead")
    return method


def _search_device(method: Method) -> Any:
    """A GPU for the search too where the method has one; None is the CPU."""
    device = pick_device(method.device)
    return device if device.type == "cuda" else None


def _given(k: int | None, default: int) -> int:
    return default if k is None else k


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
