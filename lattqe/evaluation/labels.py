"""Labels as people give them: whole numbers, texts, or those of stored sets, which may have names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.truth import LabelTruth
from lattqe.own_rows import own_rows
from lattqe.store import FeatureSet
from lattqe.store.features import Labelled, comparable_labels

Rows: TypeAlias = NDArray[np.integer[Any]]


@runtime_checkable
class Loaded(Protocol):
    """A set that was loaded (`lattqe.load`): its labels (n,) and their names, if it has any, and where it is stored."""

    @property
    def labels(self) -> np.ndarray | None:
        """Of each row."""

    @property
    def label_names(self) -> list[str] | None:
        """What the numbers mean."""

    @property
    def uri(self) -> str | None:
        """Its address."""


Labels: TypeAlias = ArrayLike | Path | Loaded  # a single text is an address, too


@dataclass(frozen=True)
class GivenLabels:
    """Labels (n,) and the names of their numbers, None where they are plain numbers; `uri` says what they are of."""

    uri: str
    numbers: NDArray[np.integer[Any]]
    label_names: list[str] | None = None

    def labels(self) -> NDArray[np.integer[Any]]:
        """All of them, (n,)."""
        return self.numbers


def label_truth(labels: Labelled, query_labels: Labelled | None, query_rows: Rows | None) -> LabelTruth:
    """Relevant is what has the query's label, by name where labels have names; query_rows (nq,) as in `LabelTruth`."""
    if query_labels is None:
        return LabelTruth(labels.labels(), query_rows=query_rows)
    own, asked = comparable_labels(labels, query_labels)
    return LabelTruth(own, asked, query_rows)


def truth_of(
    labels: Labels, query_labels: Labels | None, query_rows: Rows | None, known: Rows | None = None
) -> LabelTruth:
    """The truth of labels of rows and of queries as they are given.

    query_rows (nq,): the row of each query that is itself a row; without it, `known` (nq,), or what is found out where
    both are stored sets.
    """
    if query_labels is None and query_rows is None:
        raise LattqeError("labels given without query_labels: give these too, or query_rows if all queries are rows")
    if query_rows is None:
        rows, queries = _stored(labels), _stored(query_labels)
        query_rows = own_rows(rows, queries) if known is None and rows and queries else known
    asked = None if query_labels is None else _labelled(query_labels, "the queries")
    return label_truth(_labelled(labels, "the rows"), asked, query_rows)


def _stored(given: Labels | None) -> FeatureSet | None:
    """The set that an address, or what was loaded from it, stands for."""
    uri = given.uri if isinstance(given, Loaded) else given if isinstance(given, str | Path) else None
    return None if uri is None else FeatureSet.open(str(uri))


def _labelled(given: Labels, what: str) -> Labelled:
    """Labels with their names; texts are numbered in their order."""
    if isinstance(given, str | Path):
        return FeatureSet.open(str(given))
    if isinstance(given, Loaded):
        if given.labels is None:
            raise LattqeError(f"{given.uri or what} has no labels: import it with --labels")
        return GivenLabels(given.uri or what, given.labels, given.label_names)
    try:
        values = np.asarray(given)
    except ValueError as error:  # lists of different lengths
        raise LattqeError(f"the labels of {what} are not a list: {error}") from error
    if values.ndim != 1:
        raise LattqeError(f"the labels of {what} have shape {values.shape}: give one for each, (n,)")
    if values.dtype.kind in "OSU":
        names, numbers = np.unique(values.astype(str), return_inverse=True)
        return GivenLabels(what, numbers, names.tolist())
    if values.dtype.kind not in "biu" and values.size:
        raise LattqeError(f"the labels of {what} are {values.dtype}: give whole numbers (-1: of no class) or texts")
    return GivenLabels(what, values.astype(np.int64))
