"""Results looked at: stored ranks with all that is needed to judge them, and what stands behind a difference in mAP.

Ranks name the database, the queries and the distractors that they were made from; each may have moved since.

Of a difference: how sure it is (paired bootstrap over queries), where an expansion helps (figure 4: queries grouped by
number of positives, or by average precision before it), and what weights it gave.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.datasets.revisited import RevisitedSet, load_gnd
from lattqe.duplicates import own_rows
from lattqe.errors import LattqeError
from lattqe.evaluation.scores import Scores, query_blocks, score_ranking
from lattqe.evaluation.truth import GroundTruth, Setup, label_truth
from lattqe.formats.source import local_files
from lattqe.store import FeatureSet, Ranks

_DRAWS_AT_ONCE = 1 << 20  # drawn query numbers in memory: 8 MB


def read_gnd(uri: str) -> RevisitedSet:
    """Read a ground-truth file, .pkl or .json, from disk or S3."""
    with local_files({"truth": uri}) as local:
        return load_gnd(local["truth"])


@dataclass(frozen=True)
class JudgedRanks:
    """Ranks, their queries, and the feature sets whose rows they number: the database, then any distractors."""

    ranks: Ranks
    queries: FeatureSet
    searched: tuple[FeatureSet, ...]
    gnd: RevisitedSet | None = None

    @classmethod
    def open(
        cls,
        uri: str,
        truth: str | None = None,
        database: str | None = None,
        queries: str | None = None,
        distractors: str | None = None,
    ) -> "JudgedRanks":
        """Open ranks and what they were made from: at the addresses they remember, or at those given."""
        ranks = Ranks.open(uri)
        given = {"database": database, "queries": queries, "distractors": distractors}
        opened = {
            role: _open_input(ranks, role, given[role])
            for role in given
            if given[role] is not None or role in ranks.manifest.inputs
        }
        for role in ("database", "queries"):
            if role not in opened:
                raise LattqeError(f"{uri} does not record what its {role} was: give --{role}")
        searched = tuple(opened[role] for role in ("database", "distractors") if role in opened)
        gnd = None if truth is None else read_gnd(truth)
        if gnd is not None:
            _check_gnd(gnd, searched[0], opened["queries"], str(truth))
        if opened["queries"].rows != ranks.rows:
            raise LattqeError(
                f"{uri} has {ranks.rows} lists and {opened['queries'].uri} {opened['queries'].rows} "
                "queries: give the --queries that were asked"
            )
        return cls(ranks, opened["queries"], searched, gnd)

    @property
    def has_truth(self) -> bool:
        """Whether it is known what is relevant."""
        return self.gnd is not None or (self.queries.has_labels and self.searched[0].has_labels)

    @cached_property
    def truth(self) -> GroundTruth:
        """The ground truth given, or labels: relevant is what has the query's label."""
        if self.gnd is not None:
            return self.gnd.truth
        if not self.has_truth:
            raise LattqeError(
                f"{self.searched[0].uri} or {self.queries.uri} has no labels: give --truth gnd_*.pkl, or "
                "import both with labels"
            )
        return label_truth(self.searched[0], self.queries, self.own_rows)

    @cached_property
    def own_rows(self) -> NDArray[np.int64] | None:
        """The row (nq,) of each query that is itself in the database, and no answer to itself; -1 for the others."""
        return own_rows(self.searched[0], self.queries)

    @cached_property
    def scores(self) -> dict[str, Scores]:
        """Scores of each setup. Lists that are shorter than the database can only lower them."""
        return score_ranking(self.ranks, self.truth)

    def names(self, rows: Iterable[int]) -> dict[int, str]:
        """Ids of some rows of what was searched; only the parts that hold them are read."""
        wanted = np.unique(np.fromiter((row for row in rows if row >= 0), dtype=np.int64))
        found: dict[int, str] = {}
        first = 0
        for features in self.searched:
            mine: NDArray[np.int64] = wanted[(wanted >= first) & (wanted < first + features.rows)] - first
            for batch, places, within in features.parts.groups(mine):
                names = batch.column("id").take(within).to_pylist()
                found.update(zip((mine[places] + first).tolist(), names))
            first += features.rows
        outside = wanted[wanted >= first]
        if len(outside):
            raise LattqeError(
                f"{self.ranks.uri} names row {outside[0]}, but what was searched has {first} rows: give "
                "the --database (and --distractors) that it was made from"
            )
        return found


def _open_input(ranks: Ranks, role: str, given: str | None) -> FeatureSet:
    """What the ranks were made from, refused where it is another one now."""
    remembered: Mapping[str, str] = ranks.manifest.inputs.get(role, {})
    uri = given or remembered["uri"]
    try:
        features = FeatureSet.open(uri)
    except LattqeError as error:
        raise LattqeError(
            f"the {role} of {ranks.uri}: {error}" + ("" if given else f" (give --{role} where it is now)")
        ) from error
    if remembered and features.digest != remembered["digest"]:
        raise LattqeError(
            f"{ranks.uri} was made from another {role} than {uri} holds: search again, or give the original --{role}"
        )
    return features


def _check_gnd(gnd: RevisitedSet, database: FeatureSet, queries: FeatureSet, truth: str) -> None:
    if database.rows < gnd.database_rows or queries.rows != gnd.queries:
        raise LattqeError(
            f"{truth} covers {gnd.database_rows} images and {gnd.queries} queries, but {database.uri} "
            f"has {database.rows} rows and {queries.uri} {queries.rows}: they do not belong together"
        )
    gnd.check_database(database.ids(0, gnd.database_rows), f"the database {database.uri}")
    gnd.check_queries(queries.ids(), f"the queries {queries.uri}")


@dataclass(frozen=True)
class Interval:
    """A difference (after - before) of mean average precisions, in 0..1, and its percentile interval.

    not_better: share of the resamples in which `after` was not better.
    """

    difference: float
    low: float
    high: float
    not_better: float
    confidence: float
    samples: int
    seed: int

    @property
    def significant(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "significant": self.significant}


def paired_bootstrap(
    before: Sequence[Sequence[Scores]],
    after: Sequence[Sequence[Scores]],
    *,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Confidence interval for the mean difference over all given scores.

    before, after: for each data set its scores, one for each setup: [[oxford M, oxford H], [paris M, paris H]]. The
    value is the plain mean of the differences of their mAPs, as in the last column of Table 3. Queries are resampled
    within each data set, the same ones for all its setups and for both methods.
    """
    if samples < 1 or not 0 < confidence < 1:
        raise LattqeError(f"bootstrap needs samples >= 1 and 0 < confidence < 1, got {samples} and {confidence}")
    if [len(scores) for scores in before] != [len(scores) for scores in after] or not any(map(len, before)):
        raise LattqeError("paired bootstrap needs the same data sets and setups on both sides")
    rng = np.random.default_rng(seed)
    count = sum(len(scores) for scores in before)
    difference, resampled = 0.0, np.zeros(samples)
    for set_before, set_after in zip(before, after):
        gains, weights = _gains(set_before, set_after)
        difference += _mean_gain(gains.sum(axis=0), weights.sum(axis=0))
        resampled += _resample(gains, weights, samples, rng)
    resampled /= count
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    not_better = float((resampled <= 0).mean())
    return Interval(difference / count, float(low), float(high), not_better, confidence, samples, seed)


def _gains(before: Sequence[Scores], after: Sequence[Scores]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(nq, setups) gain in AP and 1 or 0 for counted or not, for one data set."""
    for one, other in zip(before, after):
        if len(one.ap) != len(before[0].ap) or not np.array_equal(one.positives, other.positives):
            raise LattqeError(f"setup {one.setup!r}: the two sides were not scored with the same queries and truth")
    weights = np.stack([scores.evaluated for scores in before], axis=1).astype(np.float64)
    gains = np.stack([other.ap - one.ap for one, other in zip(before, after)], axis=1)
    return gains * weights, weights


def _mean_gain(total: NDArray[np.float64], counted: NDArray[np.float64]) -> Any:
    """Sum over setups (last axis) of total gain / counted queries; a setup without any counted query adds 0."""
    return (total / np.maximum(counted, 1)).sum(axis=-1)


def _resample(
    gains: NDArray[np.float64], weights: NDArray[np.float64], samples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """(samples,) what `_mean_gain` gives for queries drawn with replacement."""
    queries = len(gains)
    result = np.zeros(samples)
    at_once = max(1, _DRAWS_AT_ONCE // max(queries, 1))
    for start in range(0, samples if queries else 0, at_once):
        drawn = rng.integers(queries, size=(min(at_once, samples - start), queries))
        total = np.stack([column[drawn].sum(axis=1) for column in gains.T], axis=1)
        counted = np.stack([column[drawn].sum(axis=1) for column in weights.T], axis=1)
        result[start : start + len(drawn)] = _mean_gain(total, counted)
    return result


PERCENTILES = (33, 66)


@dataclass(frozen=True)
class Group:
    """The queries of one regime.

    level: mean of what they were grouped by (number of positives, or AP before), the figure's axis label.
    relative: mean over queries of (after - before) / before, the figure's bar. It is not the gain of the means: only
    means of per-query gains fit the paper's figure and its Table 3 together.
    undefined: queries whose AP before was 0 (possible with truncated lists only), left out of `relative`.
    """

    queries: int
    level: float
    map_before: float
    map_after: float
    relative: float
    undefined: int

    @property
    def relative_of_means(self) -> float:
        """(mAP after - mAP before) / mAP before; 0 if mAP before is 0."""
        return (self.map_after - self.map_before) / self.map_before if self.map_before else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "relative_of_means": self.relative_of_means}


def group_queries(values: NDArray[Any]) -> list[NDArray[np.bool_]]:
    """Cut queries into three groups at percentiles 33 and 66 of `values` (n,); returns three masks (n,).

    A cut-off is the smallest value at or above its percentile, and belongs to the lower group: queries of equal value
    are never separated. With the published ground truth this gives the group means printed under the paper's figure.
    """
    values = np.asarray(values)
    if not len(values):
        raise LattqeError("no query has positives: there is nothing to group")
    low, high = np.percentile(values, PERCENTILES, method="higher")
    return [values <= low, (values > low) & (values <= high), values > high]


def regimes(before: NDArray[np.float64], after: NDArray[np.float64], by: NDArray[Any]) -> list[Group]:
    """Compare AP (n,) before and after expansion in the three groups of `by` (n,): positives, or AP before.

    Queries of several data sets are pooled (concatenated) by the caller, without those that have no positives.
    """
    before, after, by = np.asarray(before), np.asarray(after), np.asarray(by)
    if not len(before) == len(after) == len(by):
        raise LattqeError(f"regimes need three values for each query, got {len(before)}, {len(after)} and {len(by)}")
    return [_summarise(before[mask], after[mask], by[mask]) for mask in group_queries(by)]


def _summarise(before: NDArray[np.float64], after: NDArray[np.float64], by: NDArray[Any]) -> Group:
    if not len(before):  # ties can leave a group without queries
        return Group(0, 0.0, 0.0, 0.0, 0.0, 0)
    defined = before > 0
    gains = (after[defined] - before[defined]) / before[defined]
    return Group(
        queries=len(before),
        level=float(by.mean()),
        map_before=float(before.mean()),
        map_after=float(after.mean()),
        relative=float(gains.mean()) if len(gains) else 0.0,
        undefined=int((~defined).sum()),
    )


DEFAULT_QUANTILES = (0.1, 0.5, 0.9)
BUDGET = 1 << 22  # graded rows in memory at once


@dataclass(frozen=True)
class RankProfile:
    """Statistics of weights at each rank 1..k; where count is 0 the other values are 0 and mean nothing.

    count: (k,) neighbors; mean: (k,); quantiles: (len(levels), k).
    """

    count: NDArray[np.int64]
    mean: NDArray[np.float64]
    quantiles: NDArray[np.float64]
    levels: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "count": self.count.tolist(),
            "mean": self.mean.tolist(),
            "quantiles": {str(level): values.tolist() for level, values in zip(self.levels, self.quantiles)},
        }


def weights_by_rank(
    weights: NDArray[np.floating[Any]],
    neighbors: NDArray[np.integer[Any]],
    truth: GroundTruth,
    setup: Setup | None = None,
    *,
    levels: Sequence[float] = DEFAULT_QUANTILES,
) -> dict[str, RankProfile]:
    """Profiles of 'relevant' and 'irrelevant' neighbors over rank. Junk and missing neighbors (-1) are in neither.

    weights: (nq, 1 + k + m) as an expansion returns them: the query, its k neighbors, then any negatives.
    neighbors: (nq, k) database rows. setup: by default the middle one of the truth's, Medium of the revisited three.
    Each query's weights are divided by their largest magnitude, because only their proportions matter once the
    expanded vector is normalised: so methods can be compared.
    """
    if len(weights) != truth.queries or len(neighbors) != truth.queries or weights.shape[1] <= neighbors.shape[1]:
        raise LattqeError(
            f"weights {weights.shape} and neighbors {neighbors.shape} do not fit {truth.queries} queries:"
            " expected (nq, 1 + k + negatives) and (nq, k)"
        )
    setup = setup or truth.setups[len(truth.setups) // 2]
    k = neighbors.shape[1]
    scale = np.abs(weights).max(axis=1, keepdims=True)
    scaled = np.asarray(weights[:, 1 : 1 + k] / np.where(scale > 0, scale, 1), dtype=np.float64)
    grades = np.concatenate(
        [np.empty((0, k), np.int8)]
        + [truth.judgements(*block).grades_of(neighbors[slice(*block)]) for block in query_blocks(truth.counts, BUDGET)]
    )
    relevant = np.isin(grades, setup.positive)
    irrelevant = ~relevant & ~np.isin(grades, setup.junk) & (neighbors >= 0)
    return {"relevant": _profile(scaled, relevant, levels), "irrelevant": _profile(scaled, irrelevant, levels)}


def _profile(values: NDArray[np.float64], mask: NDArray[np.bool_], levels: Sequence[float]) -> RankProfile:
    k = values.shape[1]
    count = mask.sum(axis=0)
    mean, quantiles = np.zeros(k), np.zeros((len(levels), k))
    for rank in np.flatnonzero(count):
        column = values[mask[:, rank], rank]
        mean[rank] = column.mean()
        quantiles[:, rank] = np.quantile(column, levels)
    return RankProfile(count.astype(np.int64), mean, quantiles, tuple(levels))
