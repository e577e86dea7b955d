"""The Python API, for notebooks, with arrays or addresses: neighbors, search, expand, adapt, augment, evaluate, load.

Wherever vectors are expected, give an array (n, D), L2-normalised, float16 or float32; or the address of a stored
feature set, a folder or s3://bucket/prefix. Everything runs in this process and is exact unless asked otherwise.
`progress(done, total)` is called as work is done.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from lattqe.adaptation import Adaptation, adapt_to
from lattqe.augmentation.recipe import adaptation_for, adaptation_of, is_augmented
from lattqe.device import gpu_or_none
from lattqe.errors import LattqeError
from lattqe.evaluation import GroundTruth, LabelTruth, Scores, score_ranking
from lattqe.evaluation.analysis import JudgedRanks, read_gnd
from lattqe.expansion import METHODS, create
from lattqe.expansion.attention import load_network
from lattqe.expansion.base import Method, check_hops
from lattqe.expansion.diffusion import hop
from lattqe.expansion.rows import augment_rows, expand_queries, list_lengths, shared_table, shares
from lattqe.model import LAttQE
from lattqe.search import FlatIndex, knn_graph
from lattqe.search.approximate import Recall, approximate_graph, check_recall, reason_for_exact
from lattqe.search.graph import fastest_kind, sample_size
from lattqe.search.rows import check_k
from lattqe.search.stored import ProductClock
from lattqe.store import FeatureSet, NeighborGraph, Ranks, open_place, read_manifest
from lattqe.store.artifacts import model_address

# Rows augmented, or queries expanded, between two calls of `progress`; their weights never need much memory.
ROW_BLOCK = 4096
# How far a norm may be from 1: float16 vectors are normalised only so well.
NORM_SLACK = 0.01

Vectors = np.ndarray | str | Path
Progress = Callable[[int, int], None]


class Found(NamedTuple):
    """Lists of rows: scores D (n, k) float32, best first, and row numbers I (n, k) int32, -1 where there are fewer."""

    D: np.ndarray
    I: np.ndarray


@dataclass(frozen=True)
class Features:
    """A stored feature set: vectors x (n, D), ids (n), labels (n,) int32 and their names, each None without them."""

    x: np.ndarray
    ids: list[str]
    labels: np.ndarray | None
    label_names: list[str] | None


@dataclass(frozen=True)
class RankedQueries:
    """Stored ranks: ids (nq) of the queries, scores D (nq, k) and row numbers I (nq, k) of what they found."""

    ids: list[str]
    D: np.ndarray
    I: np.ndarray


def load(uri: str | Path) -> Features | Found | RankedQueries | LAttQE:
    """What is stored at an address, as arrays: features, a neighbor graph, ranks; or a model as its network."""
    uri = model_address(str(uri))  # "universal" is the model that ships
    kind = read_manifest(open_place(uri)).kind
    if kind == "features":
        stored = FeatureSet.open(str(uri))
        return Features(
            stored.read(),
            stored.ids(),
            stored.labels() if stored.has_labels else None,
            None if stored.label_names is None else list(stored.label_names),
        )
    if kind == "neighbors":
        return Found(*NeighborGraph.open(str(uri)).read()[::-1])
    if kind == "ranks":
        ranks = Ranks.open(str(uri))
        return RankedQueries(ranks.ids(), *ranks.read()[::-1])
    if kind == "model":
        return load_network(str(uri))
    raise LattqeError(f"{uri} holds {kind}: features, neighbors, ranks and models can be loaded")


class ApproximateFound(Found):
    """Lists that lack some neighbors: `recall` says how many have been found (mean, low, high, rows), `kept` whether
    that is what was requested. `recall` is None where the lists are exact after all, because there are few rows.
    """

    recall: Recall | None = None
    kept: bool = True


def neighbors(
    x: Vectors, k: int = 64, *, approximate: bool = False, recall: float | None = None, progress: Progress | None = None
) -> Found:
    """The exact k nearest other rows of each row of x (n, D); a row is never its own neighbor.

    With `approximate`, for speed, about the share `recall` of them (by default 0.95): an `ApproximateFound`, which says
    what share of the true neighbors 1,000 random rows have. Fewer than 20,000 rows are always searched exactly.
    """
    if recall is not None and not approximate:
        raise LattqeError("recall given without approximate=True: exact lists have all neighbors")
    x = _unit_rows(x, "x")
    k = check_k(k, len(x))
    if approximate:
        check_recall(recall := 0.95 if recall is None else recall)
        if reason_for_exact(len(x), k) is None:
            return _approximate_neighbors(x, k, recall, progress)
    total = max(len(x) * len(x) // 2, 1)
    device = gpu_or_none("auto")
    sample = x[:: max(len(x) // sample_size(x.shape[1]), 1)]
    kind = fastest_kind(sample, k, len(x), device)[0]
    lists = knn_graph(x, k, device=device, kind=kind, clock=ProductClock(_counted(total, progress)))
    return (ApproximateFound if approximate else Found)(*lists[::-1])


def _approximate_neighbors(x: np.ndarray, k: int, recall: float, progress: Progress | None) -> ApproximateFound:
    I, D, how = approximate_graph(x, k, recall, on_rows=_counted(len(x), progress))
    found = ApproximateFound(D, I)
    found.recall, found.kept = how.recall, how.kept
    return found


def _counted(total: int, progress: Progress | None) -> Callable[[int], None]:
    """What counts single pieces of work, from several threads, for `progress`."""
    done, lock = 0, Lock()

    def advance(amount: int) -> None:
        nonlocal done
        with lock:
            done = min(done + amount, total)
            if progress is not None:
                progress(done, total)

    return advance


def search(
    xq: Vectors,
    xb: Vectors,
    k: int = 100,
    expand: str | Method | None = None,
    nqe: int | None = None,
    *,
    progress: Progress | None = None,
    **params: Any,
) -> Found:
    """The exact k best rows of xb (nb, D) for each query of xq (nq, D), expanded first if `expand` names a method.

    nqe: neighbors to expand from; params: the method's, as in `lattqe.expand`.
    """
    if expand is None and (nqe is not None or params):
        raise LattqeError(
            f"{', '.join([*(['nqe'] if nqe is not None else []), *params])} given without expand: name "
            "the method, as in expand='alphaqe'"
        )
    queries, rows = _queries(xq, xb), _unit_rows(xb, "xb")
    k = check_k(k, len(rows))
    if expand is not None:
        queries = _expanded(queries, xb, rows, expand, nqe, progress, params)
    return Found(*FlatIndex(rows, gpu_or_none("auto")).search(queries, k))


def expand(
    xq: Vectors,
    xb: Vectors,
    method: str | Method = "lattqe",
    k: int | None = None,
    *,
    progress: Progress | None = None,
    **params: Any,
) -> np.ndarray:
    """Expand queries xq (nq, D) from their k nearest rows of xb (nb, D): (nq, D) float32, L2-normalised.

    `method` is one of aqe, aqewd, alphaqe, dqe, lattqe, … (or what `create` gave), `params` its parameters (alpha; C,
    negatives; model, precision; device); without a model lattqe is the one that ships. `k` by default: what the model's
    training chose, for a stored augmented index what it chose with one; otherwise the paper's number.
    """
    return _expanded(_queries(xq, xb), xb, _unit_rows(xb, "xb"), method, k, progress, params)


def _queries(xq: Vectors, xb: Vectors) -> np.ndarray:
    """Queries (nq, D), in the space of the rows where those are a stored index that was adapted to its collection."""
    rows = _unit_rows(xq, "xq")
    if not isinstance(xb, str | Path):
        return rows
    index = FeatureSet.open(str(xb))
    space = adaptation_for(index, FeatureSet.open(str(xq))) if isinstance(xq, str | Path) else adaptation_of(index)
    return rows if space is None else space.apply(rows)


def adapt(xb: Vectors) -> Adaptation:
    """The adaptation of a space to a collection xb (nb, D), learned without labels, as `lattqe augment` does.

    Its `apply` takes rows and queries alike: `space = lattqe.adapt(xb); xb, xq = space.apply(xb), space.apply(xq)`,
    before the rows are augmented. A stored index has it inside, and queries of `search` and `expand` go through it.
    """
    return adapt_to(FlatIndex(_unit_rows(xb, "xb"), gpu_or_none("auto")))


def _expanded(
    xq: np.ndarray,
    given: Vectors,
    xb: np.ndarray,
    method: str | Method,
    k: int | None,
    progress: Progress | None,
    params: dict[str, Any],
) -> np.ndarray:
    theta = _method(method, params)
    if not len(xb):
        return xq.astype(np.float32)
    augmented = isinstance(given, str | Path) and is_augmented(FeatureSet.open(str(given)))
    done = 0

    def advance(queries: int) -> None:
        nonlocal done
        done += queries
        if progress is not None:
            progress(done, len(xq))

    k = theta.suggested_k(dba=False, augmented=augmented) if k is None else k
    return expand_queries(FlatIndex(xb, gpu_or_none(theta.device)), xq, theta, k, on_done=advance).vectors


def augment(
    xb: Vectors,
    method: str | Method = "lattqe",
    k: int | None = None,
    *,
    hops: int | None = None,
    hop_alpha: float | None = None,
    progress: Progress | None = None,
    **params: Any,
) -> np.ndarray:
    """Expand every row of xb (nb, D) from its k nearest other rows (database-side augmentation): (nb, D) float32.

    As `expand`; only original vectors are read, a row is never its own neighbor (its duplicates may be), and lattqe
    takes the tempered softmax. Search this instead of xb, with queries expanded from it (for the shipped model, adapt
    both first: see `lattqe.adapt`). `hops`: above 1, features
    flow that many times over the weighted edges of all rows (`lattqe.expansion.diffusion`), each time with a share
    `hop_alpha` from the neighbors; by default what the model was trained for.
    """
    xb = _unit_rows(xb, "xb")
    theta = _method(method, params, dba=True)
    k = theta.suggested_k(dba=True) if k is None else k
    hops = theta.default_hops if hops is None else hops
    alpha = theta.hop_alpha(len(xb)) if hop_alpha is None else hop_alpha
    check_hops(hops, alpha)
    if not len(xb):
        return xb.astype(np.float32)
    device = gpu_or_none(theta.device)
    I, D = knn_graph(xb, list_lengths(theta, k, max(len(xb) - 1, 1))[1], device=device)
    index = FlatIndex(xb, device)
    table = shared_table(theta, len(xb), [xb]) if shares(theta, len(xb)) else None
    out = np.empty(xb.shape, dtype=np.float32)
    weights, rows_of = [], []
    for start in range(0, len(xb), ROW_BLOCK):
        rows = np.arange(start, min(start + ROW_BLOCK, len(xb)))
        done = augment_rows(index, rows, D[rows], I[rows], theta, k, table)
        out[rows] = done.vectors
        if hops > 1:
            weights.append(done.weights[:, : 1 + k])
            rows_of.append(done.rows[:, : 1 + k])
        if progress is not None:
            progress(int(rows[-1]) + 1, len(xb))
    return hop(np.concatenate(weights), np.concatenate(rows_of), xb, alpha, hops) if hops > 1 else out


def evaluate(
    ranks: np.ndarray | Found | str | Path,
    truth: GroundTruth | str | Path | None = None,
    *,
    labels: np.ndarray | None = None,
    query_labels: np.ndarray | None = None,
    query_rows: np.ndarray | None = None,
    ks: tuple[int, ...] = (1, 5, 10),
) -> dict[str, Scores]:
    """Score rankings I (nq, k), what `search` gave, or stored ranks: `Scores` by setup (easy, medium, hard; or label).

    truth: a ground-truth file (gnd_*.pkl, .json) or object. Without one, labels (nb,) of the rows, numbers (-1: of no
    class) or text, with query_labels (nq,), or with query_rows (nq,) where the queries are rows themselves; stored
    ranks know both.
    """
    given = read_gnd(str(truth)).truth if isinstance(truth, str | Path) else truth
    if isinstance(ranks, str | Path):
        judged = JudgedRanks.open(str(ranks), str(truth) if isinstance(truth, str | Path) else None)
        return score_ranking(judged.ranks, given or judged.truth, ks=ks)
    if given is None and labels is None:
        raise LattqeError("it is not known what is relevant: give truth, or labels with query_labels or query_rows")
    rows = ranks.I if isinstance(ranks, Found) else np.asarray(ranks)
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        raise LattqeError(f"ranks are {rows.dtype} of shape {rows.shape}: give row numbers (nq, k), as in found.I")
    if given is None:
        own, asked = _numbered(np.asarray(labels), None if query_labels is None else np.asarray(query_labels))
        if (last := rows.max(initial=-1)) >= len(own):
            raise LattqeError(f"row {last} was found, but there are {len(own)} labels: give one for every row, or -1")
        given = LabelTruth(own, asked, query_rows)
    return score_ranking(rows, given, ks=ks)


def _numbered(labels: np.ndarray, asked: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Labels of rows and of queries as numbers: texts get those of their order, the same on both sides."""
    texts = [one.dtype.kind in "UO" for one in (labels, asked) if one is not None]
    if not any(texts):
        return labels, asked
    if not all(texts):
        raise LattqeError("labels and query_labels must be both text or both numbers: else they cannot be compared")
    names = np.concatenate([labels, labels[:0] if asked is None else asked]).astype(str)
    numbers = np.unique(names, return_inverse=True)[1]
    return numbers[: len(labels)], None if asked is None else numbers[len(labels) :]


def _method(method: str | Method, params: dict[str, Any], dba: bool = False) -> Method:
    if isinstance(method, str):
        return create(method, **(METHODS[method].row_params if dba and method in METHODS else {}) | params)
    if params:
        raise LattqeError(
            f"{', '.join(params)} given with an already created {method.name}: give them to create instead"
        )
    return method


def _unit_rows(x: Vectors, name: str) -> np.ndarray:
    """The rows of an array, or of a stored feature set; what is not a matrix of L2-normalised rows is refused."""
    try:
        x = FeatureSet.open(str(x)).read() if isinstance(x, str | Path) else np.asarray(x)
    except ValueError as error:  # lists of different lengths
        raise LattqeError(f"{name} is no matrix (rows, D): {error}") from error
    if x.ndim != 2:
        raise LattqeError(f"{name} has shape {x.shape}: want (rows, D)")
    if x.dtype.kind not in "fiu":
        raise LattqeError(f"{name} holds {x.dtype}: real numbers are needed")
    if x.dtype not in (np.float16, np.float32):
        x = x.astype(np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float32))
    bad = np.flatnonzero(~(np.abs(norms - 1) <= NORM_SLACK))
    if len(bad):
        raise LattqeError(f"{name} row {bad[0]} has norm {norms[bad[0]]:.4g}: L2-normalise {name} first")
    return x
