"""Validation: mean average precision of expanded queries on held-out sets, with and without augmented databases."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation import LabelTruth, score_ranking
from lattqe.expansion.base import aggregate
from lattqe.model import LAttQE
from lattqe.search import knn_graph, topk
from lattqe.store import FeatureSet
from lattqe.store.features import comparable_labels
from lattqe.training.team import Team

BLOCK = 64  # queries expanded at once
SCORES = 1 << 24  # scores ranked at once


@dataclass(frozen=True)
class ValidationSet:
    """A database xb (nb, D) with labels (nb,), queries xq (nq, D) with labels (nq,).

    query_rows (nq,): the row of each query that is itself in the database and must not find itself, or None.
    """

    name: str
    xb: NDArray[np.float32]
    labels: NDArray[np.integer]
    xq: NDArray[np.float32]
    query_labels: NDArray[np.integer]
    query_rows: NDArray[np.int64] | None = None

    @cached_property
    def truth(self) -> LabelTruth:
        """Relevant is what has the query's label."""
        if self.query_rows is not None:
            return LabelTruth(self.labels, query_rows=self.query_rows)
        return LabelTruth(self.labels, query_labels=self.query_labels)

    def neighbors(self, xq: NDArray[np.float32], xb: NDArray[np.float32], k: int) -> NDArray[np.int32]:
        """The k nearest rows (nq, k) of each query, its own row excepted."""
        return topk(xq, xb, min(k, len(xb) - 1), exclude=self.query_rows)[1]

    def mean_ap(self, xq: NDArray[np.float32], xb: NDArray[np.float32]) -> float:
        """Mean average precision in percent of the full ranking of xb (nb, D) by xq (nq, D)."""
        rows = max(1, SCORES // len(xb))
        ranking = np.concatenate([np.argsort(-(xq[start : start + rows] @ xb.T), axis=1, kind="stable")
                                  for start in range(0, len(xq), rows)])
        (scores,) = score_ranking(ranking, self.truth, ks=()).values()
        return 100 * scores.mean_ap


def load_set(database: str, queries: str | None, cache: str | None = None) -> ValidationSet:
    """Read a labelled database and its queries; without queries its rows query each other, each leaving itself out.

    Queries whose ids are in the database leave themselves out too.
    """
    stored = FeatureSet.open(database, cache=cache)
    asked = stored if queries is None else FeatureSet.open(queries, cache=cache)
    for one in (stored, asked):
        if not one.has_labels:
            raise LattqeError(f"{one.uri} has no labels: validation needs them")
    if asked.dim != stored.dim:
        raise LattqeError(f"{asked.uri} has {asked.dim} columns and {stored.uri} has {stored.dim}")
    place = {identity: row for row, identity in enumerate(stored.ids())}
    rows = np.array([place.get(identity, -1) for identity in asked.ids()], dtype=np.int64)
    inside = int((rows >= 0).sum())
    if 0 < inside < len(rows):
        raise LattqeError(f"{inside} of the {len(rows)} queries of {asked.uri} are also in {stored.uri}: "
                          "give queries that are all in the database or all outside it")
    name = stored.uri.rstrip("/").rsplit("/", 1)[-1]
    labels, query_labels = comparable_labels(stored, asked)
    return ValidationSet(name, _unit(stored.read()), labels, _unit(asked.read()), query_labels,
                         rows if inside else None)


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    wide = vectors.astype(np.float32)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)


@torch.no_grad()
def expand(
    network: LAttQE, x: NDArray[np.float32], xb: NDArray[np.float32], near: NDArray[np.integer], k: int, team: Team,
    dba: bool = False,
) -> NDArray[np.float32]:
    """Expand x (n, D) from rows near (n, k or more) of xb (nb, D); the workers share the rows and all get (n, D)."""
    network.eval()
    near = near[:, : network.depth(k)]
    mine = team.share(len(x), BLOCK)
    result = torch.zeros(x.shape)
    for start in range(mine.start, mine.stop, BLOCK):
        rows = slice(start, min(start + BLOCK, mine.stop))
        found = near[rows]
        items = torch.from_numpy(np.concatenate((x[rows, None], xb[found]), axis=1)).to(team.device)
        valid = torch.from_numpy(np.pad(found >= 0, ((0, 0), (1, 0)), constant_values=True)).to(team.device)
        result[rows] = aggregate(network(items, valid, dba=dba, k=k).weights, items).cpu()
    return team.total(result).numpy()


def validate(
    network: LAttQE, sets: list[ValidationSet], ks: tuple[int, ...], team: Team
) -> dict[str, dict[str, float]]:
    """LAttQE's mAP in percent for each number of neighbors and set, and the mean: {"64": {"mean": …, name: …}}."""
    result: dict[str, dict[str, float]] = {str(k): {} for k in ks}
    for one in sets:
        near = one.neighbors(one.xq, one.xb, network.depth(max(ks)))
        for k in ks:
            result[str(k)][one.name] = one.mean_ap(expand(network, one.xq, one.xb, near, k, team), one.xb)
    return {k: {"mean": float(np.mean(list(found.values()))), **found} for k, found in result.items()}


def validate_dba(
    network: LAttQE, sets: list[ValidationSet], n_dba: tuple[int, ...], n_qe: tuple[int, ...], team: Team
) -> dict[str, dict[str, float]]:
    """Mean mAP over the sets with augmented databases, queries expanded from them: {nDBA: {nQE: mAP}}.

    nQE 0 searches the augmented database with the query as it is.
    """
    total = {str(m): dict.fromkeys(map(str, (0, *n_qe)), 0.0) for m in n_dba}
    for one in sets:
        graph = knn_graph(one.xb, min(network.depth(max(n_dba)), len(one.xb) - 1))[0]
        for m in n_dba:
            xb = expand(network, one.xb, one.xb, graph, m, team, dba=True)
            near = one.neighbors(one.xq, xb, network.depth(max(n_qe)))
            for k in (0, *n_qe):
                xq = expand(network, one.xq, xb, near, k, team) if k else one.xq
                total[str(m)][str(k)] += one.mean_ap(xq, xb) / len(sets)
    return total
