"""The data sets of a run, opened and checked: what does not fit together is refused by name before anything runs."""

from dataclasses import dataclass

import numpy as np
import xxhash

from lattqe.benchmark.spec import Dataset
from lattqe.datasets.revisited import RevisitedSet, load_gnd
from lattqe.errors import LattqeError
from lattqe.evaluation import GroundTruth, LabelTruth
from lattqe.formats.source import local_files
from lattqe.store import FeatureSet
from lattqe.store.features import comparable_labels
from lattqe.store.manifest import canonical_json


@dataclass(frozen=True)
class Inputs:
    """A data set: its rows, queries, ground truth, and the digest of the last."""

    database: FeatureSet
    queries: FeatureSet
    truth: GroundTruth
    truth_digest: str
    exclude: np.ndarray | None = None  # (nq,) the row of each query that is itself in the database

    @classmethod
    def open(cls, dataset: Dataset) -> "Inputs":
        """Open a data set; queries or rows that do not fit the ground truth are refused."""
        database, queries = FeatureSet.open(dataset.database), FeatureSet.open(dataset.queries)
        if database.dim != queries.dim:
            raise LattqeError(
                f"{dataset.name}: the database has {database.dim} dimensions and the queries "
                f"{queries.dim}: use one extractor for both"
            )
        if dataset.truth == "labels":
            rows = own_rows(dataset.name, database, queries)
            truth = _label_truth(dataset.name, database, queries, rows)
            return cls(database, queries, truth, "labels" if rows is None else "labels, queries are rows", rows)
        with local_files({"truth": dataset.truth}) as local:
            gnd = load_gnd(local["truth"])
        _check_rows(dataset.name, gnd, database, queries)
        content = {"gnd": [{grade: list(map(int, rows)) for grade, rows in one.items()} for one in gnd.gnd]}
        return cls(database, queries, gnd.truth, xxhash.xxh3_128_hexdigest(canonical_json(content)))


def rows_of_queries(database: FeatureSet, queries: FeatureSet) -> np.ndarray:
    """The row (nq,) of each query that is in the database, -1 for the others.

    A query is a row that has its id and its vector; sets whose ids are mere numbers share ids without being the same.
    """
    rows = database.find_ids(queries.id_column())
    named = np.flatnonzero(rows >= 0)
    if len(named):
        asked, stored = queries.read()[named], database.gather(rows[named])
        rows[named[np.any(asked != stored, axis=1)]] = -1
    return rows


def own_rows(name: str, database: FeatureSet, queries: FeatureSet) -> np.ndarray | None:
    """Which row each query is (nq,), where the queries are rows of the database: they must not find themselves."""
    rows = rows_of_queries(database, queries)
    inside = int((rows >= 0).sum())
    if 0 < inside < len(rows):
        raise LattqeError(
            f"{name}: {inside} of the {len(rows)} queries of {queries.uri} are also in {database.uri}: "
            "give queries that are all in the database or all outside it"
        )
    return rows if inside else None


def _label_truth(name: str, database: FeatureSet, queries: FeatureSet, rows: np.ndarray | None) -> LabelTruth:
    """Relevant is what has the query's label; a query without any is refused, because its AP would mean nothing."""
    for role, features in (("database", database), ("queries", queries)):
        if not features.has_labels:
            raise LattqeError(
                f"{name}: the {role} in {features.uri} have no labels: import them with labels, or "
                "give a ground truth file as truth"
            )
    labels, query_labels = comparable_labels(database, queries)
    truth = LabelTruth(labels, query_labels=query_labels) if rows is None else LabelTruth(labels, query_rows=rows)
    if not truth.counts.any():
        raise LattqeError(
            f"{name}: no query has a label that is in the database: do the labels of {database.uri} and "
            f"{queries.uri} belong together?"
        )
    return truth


def _check_rows(name: str, gnd: RevisitedSet, database: FeatureSet, queries: FeatureSet) -> None:
    """Refuse features that are not those of imlist and qimlist; ids tell what is missing, where there are any."""
    if database.rows > gnd.database_rows:
        raise LattqeError(
            f"{name}: the database has {database.rows} rows, but imlist of the ground truth "
            f"{gnd.database_rows}: distractors belong into [[distractors]]"
        )
    try:
        gnd.check_database(database.ids(), f"the database {database.uri}")
        gnd.check_queries(queries.ids(), f"the queries {queries.uri}")
    except LattqeError as error:
        raise LattqeError(f"{name}: {error}") from None
