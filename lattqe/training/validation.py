"""Validation: mean average precision of expanded queries on held-out sets, with and without augmented databases."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from lattqe.adaptation import adapt_to
from lattqe.device import room_on
from lattqe.duplicates import own_rows
from lattqe.errors import LattqeError
from lattqe.evaluation import LabelTruth, evaluate
from lattqe.evaluation.truth import keep_of_each
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.base import Expanded
from lattqe.expansion.diffusion import hop
from lattqe.expansion.rows import Found, augment_rows, candidates, expand_queries, nearest
from lattqe.model import LAttQE
from lattqe.search import FlatIndex, knn_graph
from lattqe.search.index import SmallIndex
from lattqe.store import FeatureSet
from lattqe.store.features import comparable_labels
from lattqe.training.checkpoint import Team
from lattqe.training.densities import scaled_rows

BLOCK = 64  # queries and rows are shared out in such units
SMALL_ROWS = 50_000


@dataclass(frozen=True)
class ValidationSet:
    """A database xb (nb, D) with labels (nb,), queries xq (nq, D) with labels (nq,).

    query_rows (nq,): the row of each query that is itself in the database and must not find itself, -1 for the others;
    None: none of them is.
    device: the GPU it is searched on, None for the CPU.
    """

    name: str
    xb: NDArray[np.float32]
    labels: NDArray[np.integer]
    xq: NDArray[np.float32]
    query_labels: NDArray[np.integer]
    query_rows: NDArray[np.int64] | None = None
    device: torch.device | None = None

    @cached_property
    def truth(self) -> LabelTruth:
        """Relevant is what has the query's label."""
        return LabelTruth(self.labels, self.query_labels, self.query_rows)

    @cached_property
    def index(self) -> FlatIndex:
        """The database as it is."""
        return ranking_index(self.xb, self.device)

    def depth(self, index: FlatIndex, wanted: int) -> int:
        """How many rows of an index each query can find, its own row excepted, of as many as are wanted."""
        return min(wanted, candidates(index, self.query_rows))

    def nearest(self, index: FlatIndex, depth: int) -> Found:
        """The nearest rows of each query, its own row excepted, as deep as there are any."""
        return nearest(index, self.xq, self.depth(index, depth), self.query_rows)

    def mean_ap(self, xq: NDArray[np.float32], index: FlatIndex) -> float:
        """Mean average precision in percent of the full ranking of an index by xq (nq, D)."""
        (scores,) = evaluate(index, xq, self.truth, ks=()).values()
        return 100 * scores.mean_ap


def ranking_index(xb: NDArray[np.float32], device: torch.device | None = None) -> FlatIndex:
    """An index that many settings are ranked in: whole rankings are faster than counting while there are few rows.

    Searched on a GPU that has room for the rows beside the training; the results are the same anywhere.
    """
    if device is not None and xb.nbytes > room_on(device):
        device = None
    return SmallIndex(xb, device) if len(xb) <= SMALL_ROWS else FlatIndex(xb, device)


def load_set(
    database: str, queries: str | None, cache: str | None = None, device: torch.device | None = None
) -> ValidationSet:
    """Read a labelled database and its queries; without queries its rows query each other, each leaving itself out.

    Queries that are rows of the database (`own_rows`) leave themselves out too.
    """
    stored = FeatureSet.open(database, cache=cache)
    asked = stored if queries is None else FeatureSet.open(queries, cache=cache)
    for one in (stored, asked):
        if not one.has_labels:
            raise LattqeError(f"{one.uri} has no labels: validation needs them")
    if asked.dim != stored.dim:
        raise LattqeError(f"{asked.uri} has {asked.dim} columns and {stored.uri} has {stored.dim}")
    name = stored.uri.rstrip("/").rsplit("/", 1)[-1]
    labels, query_labels = comparable_labels(stored, asked)
    return ValidationSet(
        name,
        stored.read().astype(np.float32),
        labels,
        asked.read().astype(np.float32),
        query_labels,
        own_rows(stored, asked),
        device,
    )


def density_sets(
    sets: list[ValidationSet], densities: tuple[int, ...], width: int, queries: int, shift: float = 0.0
) -> list[ValidationSet]:
    """The sets at their first columns, whole and cut to each density, alone and with the others as distractors, these
    whole or, where the set is cut, cut alike.

    At most so many queries of each set, chosen once. shift: the length of a mean that is added to all unit vectors, as
    descriptors have that were never centred. A set whose queries are rows of its database stays whole: cutting it
    would cut its queries.
    """
    result = []
    narrow = [_narrowed(one, width, queries, shift) for one in sets]
    space = f"{width} columns" + (f" shifted by {shift:g}" if shift else "")
    for number, one in enumerate(narrow):
        result.append(dataclasses.replace(one, name=f"{one.name}, {space}"))
        others = [other for place, other in enumerate(narrow) if place != number]
        if one.query_rows is not None:
            continue
        for m in (*densities, None):
            name, kept = f"{one.name}, {space}, {m or 'all'} relevant", _kept(one, m)
            if m is not None:
                result.append(dataclasses.replace(one, name=name, xb=one.xb[kept], labels=one.labels[kept]))
            for kind, cut in (
                (("among others", None), ("among others cut alike", m)) if m else (("among others", None),)
            ):
                more = [other.xb[_kept(other, cut)] for other in others]
                if more:
                    labels = np.concatenate([one.labels[kept], np.full(sum(map(len, more)), -1)])
                    xb = np.concatenate([one.xb[kept], *more])
                    result.append(dataclasses.replace(one, name=f"{name} {kind}", xb=xb, labels=labels))
    return result


def _kept(one: ValidationSet, m: int | None) -> NDArray[np.bool_]:
    """The rows (nb,) that stay where every class is cut to m images; None: all."""
    return np.ones(len(one.labels), dtype=bool) if m is None else keep_of_each(one.labels, m)


def _narrowed(one: ValidationSet, width: int, queries: int, shift: float) -> ValidationSet:
    """A set at its first columns, with some of its queries."""
    some = np.sort(np.random.default_rng(0).permutation(len(one.xq))[:queries])
    mean = np.random.default_rng(1).standard_normal((1, width)).astype(np.float32)
    xb, xq = (scaled_rows(scaled_rows(x[:, :width]) + shift * scaled_rows(mean)) for x in (one.xb, one.xq[some]))
    rows = None if one.query_rows is None else one.query_rows[some]
    return dataclasses.replace(one, xb=xb, xq=xq, query_labels=one.query_labels[some], query_rows=rows)


def expand(
    method: AttentionExpansion, index: FlatIndex, one: ValidationSet, found: Found, k: int, team: Team
) -> NDArray[np.float32]:
    """Expand the queries of a set as every search does; the workers share them and all get (nq, D)."""
    mine = team.share(len(one.xq), BLOCK)
    exclude = None if one.query_rows is None else one.query_rows[mine]
    done = expand_queries(index, one.xq[mine], method, k, found=(found[0][mine], found[1][mine]), exclude=exclude)
    return _together(one.xq.shape, mine, done.vectors, team)


def augment(method: AttentionExpansion, index: FlatIndex, graph: Found, k: int, team: Team) -> Expanded:
    """Augment all rows as `lattqe augment` does, from their graph's D and I (nb, t); all workers get all rows."""
    mine = team.share(index.rows, BLOCK)
    rows = np.arange(index.rows)[mine]
    done = augment_rows(index, rows, graph[0][mine], graph[1][mine], method, k)
    vectors, weights = (
        _together((index.rows, part.shape[1]), mine, part, team) for part in (done.vectors, done.weights)
    )
    return Expanded(vectors, weights, _numbers(index.rows, mine, done.rows, team))


def _numbers(count: int, mine: slice, rows: NDArray[np.int32], team: Team) -> NDArray[np.int32]:
    """Row numbers (count, t) of all workers, from each one's own."""
    result = torch.zeros(count, rows.shape[1], dtype=torch.int64)
    result[mine] = torch.from_numpy(rows.astype(np.int64))
    return team.total(result).numpy().astype(np.int32)


def _together(shape: tuple[int, ...], mine: slice, vectors: NDArray[np.float32], team: Team) -> NDArray[np.float32]:
    result = torch.zeros(shape)
    result[mine] = torch.from_numpy(vectors)
    return team.total(result).numpy()


def _no_lists(rows: int, depth: int) -> Found:
    """Lists of zeros, for workers that do not search."""
    return np.zeros((rows, depth), np.float32), np.zeros((rows, depth), np.int32)


def search(one: ValidationSet, index: FlatIndex, depth: int, team: Team) -> Found:
    """The nearest rows of a set's queries; the leader searches, all workers get D and I (nq, depth)."""
    return team.from_leader(lambda: one.nearest(index, depth), _no_lists(len(one.xq), one.depth(index, depth)))


def row_graph(one: ValidationSet, depth: int, team: Team) -> Found:
    """The nearest other rows of a set's rows; the leader searches, all workers get D and I (nb, depth)."""
    return team.from_leader(lambda: knn_graph(one.xb, depth, device=one.device)[::-1], _no_lists(len(one.xb), depth))


def mean_ap(one: ValidationSet, xq: NDArray[np.float32], index: FlatIndex, team: Team) -> float:
    """What `ValidationSet.mean_ap` gives; the leader ranks, all workers get the number."""
    (found,) = team.from_leader(lambda: (np.array([one.mean_ap(xq, index)]),), (np.zeros(1),))
    return float(found[0])


def after_hops(one: ValidationSet, done: Expanded, alpha: float, hops: int, team: Team) -> NDArray[np.float32]:
    """The rows (nb, D) of a set after so many hops over their edges; the leader computes them, all workers get them."""
    if hops == 1:
        return done.vectors
    (xb,) = team.from_leader(
        lambda: (hop(done.weights, done.rows, one.xb, alpha, hops),), (np.zeros(one.xb.shape, np.float32),)
    )
    return xb


def adapted(one: ValidationSet, team: Team) -> ValidationSet:
    """A set in the space that `lattqe augment` gives its database; the leader adapts, all workers get it."""

    def apply() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        space = adapt_to(one.index)
        return space.apply(one.xb), space.apply(one.xq)

    xb, xq = team.from_leader(apply, (np.zeros(one.xb.shape, np.float32), np.zeros(one.xq.shape, np.float32)))
    return dataclasses.replace(one, xb=xb, xq=xq)


def validate(
    network: LAttQE, sets: list[ValidationSet], ks: tuple[int, ...], team: Team
) -> dict[str, dict[str, float]]:
    """LAttQE's mAP in percent for each number of neighbors and set, and the mean: {"64": {"mean": …, name: …}}."""
    result: dict[str, dict[str, float]] = {str(k): {} for k in ks}
    method = AttentionExpansion(network, device=str(team.device))
    for one in sets:
        index = one.index
        found = search(one, index, method.depth(max(ks)), team)
        for k in ks:
            xq = expand(method, index, one, found, k, team)
            result[str(k)][one.name] = mean_ap(one, xq, index, team)
    return {k: {"mean": float(np.mean(list(found.values()))), **found} for k, found in result.items()}


def validate_dba(
    network: LAttQE,
    sets: list[ValidationSet],
    n_dba: tuple[int, ...],
    n_qe: tuple[int, ...],
    team: Team,
    hops: tuple[int, ...] = (1,),
    adapt: bool = False,
) -> dict[str, dict[str, float]]:
    """Mean mAP over the sets with augmented databases, queries expanded from them: {"nDBA": {"nQE": mAP}}.

    nQE 0 searches the augmented database with the query as it is. Of more than one hop: {"nDBA × hops": …}. adapt:
    the space of each set is adapted to its database before.
    """
    total = {setting_name(m, h): dict.fromkeys(map(str, (0, *n_qe)), 0.0) for m in n_dba for h in hops}
    method = AttentionExpansion(network, device=str(team.device))
    for_rows = AttentionExpansion(network, dba=True, device=str(team.device))
    for given in sets:
        one = adapted(given, team) if adapt else given
        graph = row_graph(one, min(for_rows.depth(max(n_dba)), max(len(one.xb) - 1, 1)), team)
        for m in n_dba:
            done = augment(for_rows, one.index, graph, m, team)
            for h in hops:
                index = ranking_index(after_hops(one, done, for_rows.hop_alpha(len(one.xb)), h, team), one.device)
                found = search(one, index, method.depth(max(n_qe)), team)
                for k in (0, *n_qe):
                    xq = expand(method, index, one, found, k, team) if k else one.xq
                    total[setting_name(m, h)][str(k)] += mean_ap(one, xq, index, team) / len(sets)
    return total


def setting_name(n_dba: int, hops: int) -> str:
    """How results with augmented databases are filed: "48", or "32 × 8" for hops."""
    return str(n_dba) if hops == 1 else f"{n_dba} × {hops}"
