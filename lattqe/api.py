"""The Python API, for notebooks, with arrays or addresses: neighbors, search, expand, adapt, augment, evaluate, load.

Wherever vectors are expected, give an array (n, D), L2-normalised, float16 or float32; or the address of a stored
feature set, a folder or s3://bucket/prefix. Everything runs in this process and is exact unless asked otherwise.
`progress(done, total)` is called as work is done, by all that may take long: `load` and `evaluate` have none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lattqe.adaptation import ADAPTING_STAGES, Adaptation, adapt_to, sample_rows
from lattqe.augmentation.recipe import adaptation_for, adaptation_of, is_augmented
from lattqe.device import gpu_or_none
from lattqe.duplicates import own_rows
from lattqe.errors import LattqeError, Progress, as_rows, counted
from lattqe.evaluation import GroundTruth, Scores, score_ranking
from lattqe.evaluation.analysis import JudgedRanks, read_gnd
from lattqe.evaluation.truth import Labels, truth_of
from lattqe.expansion import METHODS, create
from lattqe.expansion.attention import load_network
from lattqe.expansion.base import Method, check_hops
from lattqe.expansion.diffusion import column_groups, hop
from lattqe.expansion.rows import augment_rows, expand_queries, list_lengths, shared_table, shares
from lattqe.model import LAttQE
from lattqe.search import FlatIndex, knn_graph
from lattqe.search.approximate import Recall, approximate_graph, check_recall, reason_for_exact
from lattqe.search.graph import fastest_kind, sample_size
from lattqe.search.rows import check_k
from lattqe.search.stored import ProductClock
from lattqe.store import FeatureSet, NeighborGraph, Ranks, open_place, read_manifest
from lattqe.store.models import model_address

# Rows augmented, or queries searched, between two calls of `progress`; their weights never need much memory.
ROW_BLOCK = 4096
# Of a large database fewer queries at once, but so many: products of numbers that take a few seconds.
SEARCHED_AT_ONCE, FEWEST_QUERIES = 2 * 10**11, 256
# How far a norm may be from 1: float16 vectors are normalised only so well.
NORM_SLACK = 0.01

Vectors = np.ndarray | str | Path


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
    uri: str | None = None  # where it is stored


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
            stored.uri,
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
    lists = knn_graph(x, k, device=device, kind=kind, clock=ProductClock(counted(total, progress)))
    return (ApproximateFound if approximate else Found)(*lists[::-1])


def _approximate_neighbors(x: np.ndarray, k: int, recall: float, progress: Progress | None) -> ApproximateFound:
    I, D, how = approximate_graph(x, k, recall, on_rows=counted(len(x), progress))
    found = ApproximateFound(D, I)
    found.recall, found.kept = how.recall, how.kept
    return found


def search(
    xq: Vectors,
    xb: Vectors,
    k: int = 100,
    expand: str | Method | None = None,
    nqe: int | None = None,
    *,
    query_rows: np.ndarray | None = None,
    progress: Progress | None = None,
    **params: Any,
) -> Found:
    """The exact k best rows of xb (nb, D) for each query of xq (nq, D), expanded first if `expand` names a method.

    nqe: neighbors to expand from; query_rows and params (the method's): as in `lattqe.expand`. A query that is itself a
    row is found, too: `lattqe.evaluate` leaves it out.
    """
    of_expansion = {"nqe": nqe, "query_rows": query_rows}
    alone = [*(name for name, value in of_expansion.items() if value is not None), *params]
    if expand is None and alone:
        raise LattqeError(f"{', '.join(alone)} given without expand: name the method, as in expand='alphaqe'")
    queries, rows = _queries(xq, xb), _unit_rows(xb, "xb")
    k = check_k(k, len(rows))
    advance = counted(len(queries) * (1 if expand is None else 2), progress)
    if expand is not None:
        own = _own_rows(xq, xb, query_rows, len(queries), len(rows))
        queries = _expanded(queries, xb, rows, expand, nqe, own, advance, params)
    index, lists = FlatIndex(rows, gpu_or_none("auto")), []
    at_once = int(np.clip(SEARCHED_AT_ONCE // max(rows.size, 1), FEWEST_QUERIES, ROW_BLOCK))
    for start in range(0, max(len(queries), 1), at_once):
        lists.append(index.search(queries[start : start + at_once], k))
        advance(len(lists[-1][0]))
    return Found(*map(np.concatenate, zip(*lists)))


def expand(
    xq: Vectors,
    xb: Vectors,
    method: str | Method = "lattqe",
    k: int | None = None,
    *,
    query_rows: np.ndarray | None = None,
    progress: Progress | None = None,
    **params: Any,
) -> np.ndarray:
    """Expand queries xq (nq, D) from their k nearest rows of xb (nb, D): (nq, D) float32, L2-normalised.

    `method` is one of aqe, aqewd, alphaqe, dqe, lattqe, … (or what `create` gave), `params` its parameters (alpha; C,
    negatives; model, precision; device); without a model lattqe is the one that ships. `k` by default: what the model's
    training chose, for a stored augmented index what it chose with one; otherwise the paper's number.
    `query_rows` (nq,): the row of each query that is itself in xb, and must not be its own neighbor; -1 for the others.
    By default found by id and vector where both are addresses, and none where they are arrays.
    """
    queries, rows = _queries(xq, xb), _unit_rows(xb, "xb")
    own = _own_rows(xq, xb, query_rows, len(queries), len(rows))
    return _expanded(queries, xb, rows, method, k, own, counted(len(queries), progress), params)


def _own_rows(xq: Vectors, xb: Vectors, given: np.ndarray | None, queries: int, rows: int) -> np.ndarray | None:
    """The row (nq,) of each query that is itself among the rows, -1 for the others: as given, or of stored sets."""
    if given is None:
        stored = isinstance(xq, str | Path) and isinstance(xb, str | Path)
        return own_rows(FeatureSet.open(str(xb)), FeatureSet.open(str(xq))) if stored else None
    numbers = np.asarray(given)
    fitting = numbers.shape == (queries,) and numbers.dtype.kind in "iu"
    if not fitting or (queries and not -1 <= numbers.min() <= numbers.max() < rows):
        raise LattqeError(
            f"query_rows: give for each of the {queries} queries the number of its row, below {rows}, or -1 for none"
        )
    return numbers


def _queries(xq: Vectors, xb: Vectors) -> np.ndarray:
    """Queries (nq, D), in the space of the rows where those are a stored index that was adapted to its collection."""
    rows = _unit_rows(xq, "xq")
    if not isinstance(xb, str | Path):
        return rows
    index = FeatureSet.open(str(xb))
    space = adaptation_for(index, FeatureSet.open(str(xq))) if isinstance(xq, str | Path) else adaptation_of(index)
    return rows if space is None else space.apply(rows)


def adapt(xb: Vectors, *, progress: Progress | None = None) -> Adaptation:
    """The adaptation of a space to a collection xb (nb, D), learned without labels, as `lattqe augment` does.

    Its `apply` takes rows and queries alike: `space = lattqe.adapt(xb); xb, xq = space.apply(xb), space.apply(xq)`,
    before the rows are augmented. A stored index has it inside, and queries of `search` and `expand` go through it.
    """
    rows = _unit_rows(xb, "xb")
    total = ADAPTING_STAGES * len(sample_rows(*rows.shape))
    advance = counted(total, progress)
    space = adapt_to(FlatIndex(rows, gpu_or_none("auto")), advance)
    advance(total)  # few rows, or equal ones, are not learned from
    return space


def _expanded(
    xq: np.ndarray,
    given: Vectors,
    xb: np.ndarray,
    method: str | Method,
    k: int | None,
    own: np.ndarray | None,
    on_done: Callable[[int], None],
    params: dict[str, Any],
) -> np.ndarray:
    theta = _method(method, params)
    if not len(xb):
        on_done(len(xq))
        return xq.astype(np.float32)
    augmented = isinstance(given, str | Path) and is_augmented(FeatureSet.open(str(given)))
    k = theta.suggested_k(dba=False, augmented=augmented) if k is None else k
    index = FlatIndex(xb, gpu_or_none(theta.device))
    return expand_queries(index, xq, theta, k, exclude=own, on_done=on_done).vectors


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
    device, n = gpu_or_none(theta.device), len(xb)
    advance = counted(n * (2 if hops == 1 else 2 + hops), progress)  # the graph, the rows, any hops
    clock = ProductClock(as_rows(n * (n - 1) // 2, n, advance))
    I, D = knn_graph(xb, list_lengths(theta, k, max(n - 1, 1))[1], device=device, clock=clock)
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
        advance(len(rows))
    if hops == 1:
        return out
    on_hop = as_rows(hops * len(column_groups(*xb.shape)), hops * n, advance)
    return hop(np.concatenate(weights), np.concatenate(rows_of), xb, alpha, hops, on_hop=lambda: on_hop(1))


def evaluate(
    ranks: np.ndarray | Found | RankedQueries | str | Path,
    truth: GroundTruth | str | Path | None = None,
    *,
    labels: Labels | None = None,
    query_labels: Labels | None = None,
    query_rows: np.ndarray | None = None,
    ks: tuple[int, ...] = (1, 5, 10),
) -> dict[str, Scores]:
    """Score rankings I (nq, k), what `search` gave, or stored ranks: `Scores` by setup (easy, medium, hard; or label).

    truth: a ground-truth file (gnd_*.pkl, .json) or object. Without one, labels (nb,) of the rows with query_labels
    (nq,): numbers (-1: of no class), texts, addresses of feature sets or what `load` gave for them, compared by name
    where they have names. query_rows (nq,): the row of each query that is itself a row, and no answer to itself, -1 for
    the others; known where both are stored. It suffices where all queries are rows. Stored ranks know the labels of
    their sets; others that are given take their place.
    """
    of_labels = {"labels": labels, "query_labels": query_labels, "query_rows": query_rows}
    named = [name for name, value in of_labels.items() if value is not None]
    if named and (truth is not None or labels is None):
        instead = "a truth, which says all: leave out one of them" if truth is not None else "no labels: give these too"
        raise LattqeError(f"{', '.join(named)} given with {instead}")
    stored = None
    if isinstance(ranks, str | Path):
        stored = JudgedRanks.open(str(ranks), str(truth) if isinstance(truth, str | Path) else None)
    lists = stored.ranks if stored is not None else _row_lists(ranks)
    if labels is not None:
        known = None if stored is None else stored.own_rows
        given: GroundTruth = truth_of(labels, query_labels, query_rows, known)
        _check_covered(given, lists, stored)
    elif truth is not None and not isinstance(truth, str | Path):
        given = truth
    elif stored is not None:
        given = stored.truth
    elif truth is not None:
        given = read_gnd(str(truth)).truth
    else:
        raise LattqeError("it is not known what is relevant: give truth, or labels with query_labels or query_rows")
    return score_ranking(lists, given, ks=ks)


def _row_lists(ranks: Any) -> np.ndarray:
    """Row numbers (nq, k) of an array, or of what `search` gave."""
    rows = ranks.I if isinstance(ranks, Found | RankedQueries) else np.asarray(ranks)
    if rows.ndim != 2 or rows.dtype.kind not in "iu":
        raise LattqeError(f"ranks are {rows.dtype} of shape {rows.shape}: give row numbers (nq, k), as in found.I")
    return rows


def _check_covered(truth: GroundTruth, lists: np.ndarray | Ranks, stored: JudgedRanks | None) -> None:
    """Refuse labels that are not those of all rows which were searched; distractors need none."""
    labels = truth.database_rows
    if stored is not None:
        rows = [each.rows for each in stored.searched]
        if labels not in (rows[0], sum(rows)):
            raise LattqeError(
                f"{stored.searched[0].uri} has {rows[0]} rows, but there are {labels} labels: give one for each"
            )
    elif isinstance(lists, np.ndarray) and (last := lists.max(initial=-1)) >= labels:
        raise LattqeError(f"row {last} was found, but there are {labels} labels: give one for every row, or -1")


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
        raise LattqeError(f"{name} is not a matrix (rows, D): {error}") from error
    if x.ndim != 2:
        raise LattqeError(f"{name} has shape {x.shape}: expected (rows, D)")
    if x.dtype.kind not in "fiu":
        raise LattqeError(f"{name} holds {x.dtype}: real numbers are needed")
    if x.dtype not in (np.float16, np.float32):
        x = x.astype(np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float32))
    bad = np.flatnonzero(~(np.abs(norms - 1) <= NORM_SLACK))
    if len(bad):
        raise LattqeError(f"{name} row {bad[0]} has norm {norms[bad[0]]:.4g}: L2-normalise {name} first")
    return x
