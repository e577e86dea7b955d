"""Stored ranks with all that is needed to judge them: who asked, what was searched, and what is relevant.

Ranks name the database, the queries and the distractors that they were made from; each may have moved since.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lattqe.datasets.revisited import RevisitedSet, load_gnd
from lattqe.errors import LattqeError
from lattqe.evaluation.scores import Scores, score_ranking
from lattqe.evaluation.truth import GroundTruth, LabelTruth
from lattqe.formats.source import local_files
from lattqe.store import FeatureSet, Ranks
from lattqe.store.features import comparable_labels


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
                raise LattqeError(f"{uri} does not say what its {role} was: give --{role}")
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
        """Whether it can be told what is relevant."""
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
        labels, query_labels = comparable_labels(self.searched[0], self.queries)
        rows = self.searched[0].find_ids(self.queries.id_column())
        if len(rows) and (rows >= 0).all():  # queries from the database are no answers to themselves
            return LabelTruth(labels, query_rows=rows)
        return LabelTruth(labels, query_labels=query_labels)

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
            f"{ranks.uri} was made from another {role} than {uri} holds: search again, or give the --{role} of then"
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
