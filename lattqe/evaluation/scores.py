"""Scoring: from ground truth and exact positions to per-query and mean results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.average_precision import score_positions
from lattqe.evaluation.judgements import GroundTruth, Judgements, Setup
from lattqe.evaluation.positions import CountingIndex, positions_by_counting, positions_in_ranking, query_blocks

DEFAULT_KS = (1, 5, 10)

# Graded rows (with padding) in memory at once: a handful of 8-byte arrays of this many entries, about 200 MB.
DEFAULT_BUDGET = 1 << 22


@dataclass(frozen=True)
class Scores:
    """The result of one setup. All values are in 0..1; queries without positives have 0 and are left out of the means.

    ap: (nq,) average precision; positives: (nq,) number of positives; precision: (nq, len(ks)) precision at each k.
    """

    setup: str
    ap: NDArray[np.float64]
    positives: NDArray[np.int64]
    precision: NDArray[np.float64]
    ks: tuple[int, ...]

    @property
    def evaluated(self) -> NDArray[np.bool_]:
        """(nq,) the queries that have positives."""
        return self.positives > 0

    @property
    def mean_ap(self) -> float:
        """Mean average precision over the queries that have positives; 0 if there are none."""
        return float(self.ap[self.evaluated].mean()) if self.evaluated.any() else 0.0

    @property
    def mean_precision(self) -> NDArray[np.float64]:
        """(len(ks),) mean precision at each k over the queries that have positives; 0 if there are none."""
        return self.precision[self.evaluated].mean(axis=0) if self.evaluated.any() else np.zeros(len(self.ks))

    def summary(self) -> dict[str, Any]:
        """The means as JSON-able numbers, in 0..1, with how many queries they are means of."""
        return {
            "setup": self.setup,
            "map": self.mean_ap,
            **{f"mp@{k}": float(value) for k, value in zip(self.ks, self.mean_precision)},
            "queries": int(self.evaluated.sum()),
            "queries_without_positives": int((~self.evaluated).sum()),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, per query, JSON-able; `from_dict` gives back the same numbers to the last digit."""
        return {
            "setup": self.setup,
            "ks": list(self.ks),
            "ap": self.ap.tolist(),
            "positives": self.positives.tolist(),
            "precision": self.precision.tolist(),
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Scores":
        """The scores that `to_dict` described."""
        ap, ks = np.array(content["ap"], dtype=np.float64), tuple(content["ks"])
        precision = np.array(content["precision"], dtype=np.float64).reshape(len(ap), len(ks))
        return cls(content["setup"], ap, np.array(content["positives"], dtype=np.int64), precision, ks)


def evaluate(
    index: CountingIndex,
    xq: NDArray[np.float32],
    truth: GroundTruth,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    budget: int = DEFAULT_BUDGET,
) -> dict[str, Scores]:
    """Score queries (nq, D) against an index of any size, exactly, without making rankings.

    Returns the scores of each setup of the ground truth by name. Rows of the index beyond `truth.database_rows` are
    distractors. Queries are taken in blocks of at most `budget` graded rows.
    """
    _same_queries(len(xq), truth, "queries")
    if index.rows < truth.database_rows:
        raise LattqeError(
            f"the ground truth speaks of {truth.database_rows} database rows and the index has {index.rows}:"
            " index the whole database (distractors go after it)"
        )
    return _evaluate_blocks(
        truth, ks, budget, lambda start, stop, block: positions_by_counting(index, xq[start:stop], block)
    )


class StoredRanking(Protocol):
    """Rankings that were stored: `lattqe.store.Ranks` is one."""

    @property
    def rows(self) -> int:
        """Number of queries."""

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Row numbers (n, k) and scores (n, k) of queries start..stop-1."""


def score_ranking(
    ranking: NDArray[np.integer[Any]] | StoredRanking,
    truth: GroundTruth,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    budget: int = DEFAULT_BUDGET,
) -> dict[str, Scores]:
    """Score rankings (nq, k) that were made before, in memory or stored: database rows, best first, -1 for missing.

    A list shorter than the database can only lower the scores: positives outside it contribute 0.
    """
    _same_queries(len(ranking) if isinstance(ranking, np.ndarray) else ranking.rows, truth, "rankings")

    def locate(start: int, stop: int, block: Judgements) -> NDArray[np.int64]:
        lists = ranking[start:stop] if isinstance(ranking, np.ndarray) else ranking.read(start, stop)[0]
        return positions_in_ranking(lists, block, start)

    return _evaluate_blocks(truth, ks, budget, locate)


def _same_queries(count: int, truth: GroundTruth, what: str) -> None:
    if count != truth.queries:
        raise LattqeError(f"got {count} {what}, but the ground truth has {truth.queries} queries: they must correspond")


def _evaluate_blocks(
    truth: GroundTruth,
    ks: Sequence[int],
    budget: int,
    locate: Callable[[int, int, Judgements], NDArray[np.int64]],
) -> dict[str, Scores]:
    if any(k < 1 for k in ks):
        raise LattqeError(f"precision at k needs k >= 1, got {list(ks)}")
    pieces: dict[str, list[Scores]] = {setup.name: [] for setup in truth.setups}
    for start, stop in query_blocks(truth.counts, budget):
        block = truth.judgements(start, stop)
        positions = locate(start, stop, block)
        for setup in truth.setups:
            pieces[setup.name].append(score_block(block, positions, setup, ks))
    return {name: _join(name, parts, ks) for name, parts in pieces.items()}


def score_block(
    judgements: Judgements, positions: NDArray[np.int64], setup: Setup, ks: Sequence[int] = DEFAULT_KS
) -> Scores:
    """Score one setup from the positions (n,) of the graded rows (n,)."""
    positive = np.isin(judgements.grades, setup.positive)
    junk = np.isin(judgements.grades, setup.junk)
    query = judgements.query
    ap, precision = score_positions(query, positions, positive, junk, judgements.queries, ks)
    counts = np.bincount(query[positive], minlength=judgements.queries)
    return Scores(setup.name, ap, counts.astype(np.int64), precision, tuple(ks))


def _join(name: str, parts: list[Scores], ks: Sequence[int]) -> Scores:
    return Scores(
        name,
        np.concatenate([np.empty(0), *(part.ap for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.positives for part in parts)]),
        np.concatenate([np.empty((0, len(ks))), *(part.precision for part in parts)]),
        tuple(ks),
    )
