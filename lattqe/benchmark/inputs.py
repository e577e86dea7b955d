"""The data sets of a run, opened and checked: what does not fit together is refused by name before anything runs."""

from dataclasses import dataclass

import xxhash

from lattqe.benchmark.spec import Dataset
from lattqe.datasets.revisited import RevisitedSet, load_gnd
from lattqe.errors import LattqeError
from lattqe.evaluation import GroundTruth, LabelTruth
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

    @classmethod
    def open(cls, dataset: Dataset) -> "Inputs":
        """Open a data set; queries or rows that do not fit the ground truth are refused."""
        database, queries = FeatureSet.open(dataset.database), FeatureSet.open(dataset.queries)
        if database.dim != queries.dim:
            raise LattqeError(f"{dataset.name}: the database has {database.dim} dimensions and the queries "
                              f"{queries.dim}: use one extractor for both")
        if dataset.truth == "labels":
            return cls(database, queries, _label_truth(dataset.name, database, queries), "labels")
        gnd = load_gnd(dataset.truth)
        _check_rows(dataset.name, gnd, database, queries)
        content = {"gnd": [{grade: list(map(int, rows)) for grade, rows in one.items()} for one in gnd.gnd]}
        return cls(database, queries, gnd.truth, xxhash.xxh3_128_hexdigest(canonical_json(content)))


def _label_truth(name: str, database: FeatureSet, queries: FeatureSet) -> LabelTruth:
    """Relevant is what has the query's label; a query without any is refused, because its AP would mean nothing."""
    for role, features in (("database", database), ("queries", queries)):
        if not features.has_labels:
            raise LattqeError(f"{name}: the {role} in {features.uri} have no labels: import them with labels, or "
                              "give a ground truth file as truth")
    labels, query_labels = comparable_labels(database, queries)
    truth = LabelTruth(labels, query_labels=query_labels)
    if not truth.counts.any():
        raise LattqeError(f"{name}: no query has a label that is in the database: do the labels of {database.uri} and "
                          f"{queries.uri} belong together?")
    return truth


def _check_rows(name: str, gnd: RevisitedSet, database: FeatureSet, queries: FeatureSet) -> None:
    """Refuse features that are not those of imlist and qimlist; ids tell what is missing, where there are any."""
    if database.rows > gnd.database_rows:
        raise LattqeError(f"{name}: the database has {database.rows} rows, but imlist of the ground truth "
                          f"{gnd.database_rows}: distractors belong into [[distractors]]")
    try:
        gnd.check_database(database.ids(), f"the database {database.uri}")
        gnd.check_queries(queries.ids(), f"the queries {queries.uri}")
    except LattqeError as error:
        raise LattqeError(f"{name}: {error}") from None
