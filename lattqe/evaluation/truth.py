"""What is known about each query: graded database rows or labels, and the setups that say which grades count.

How many images are relevant decides what expansion does, so a test set can be cut to a number of them. Labels
are whole numbers, texts, or those of stored sets, which may have names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lattqe.duplicates import own_rows
from lattqe.errors import LattqeError
from lattqe.store import FeatureSet
from lattqe.store.features import Labelled, comparable_labels

EASY, HARD, JUNK = 0, 1, 2
UNGRADED = -1
GRADE_NAMES = {EASY: "easy", HARD: "hard", JUNK: "junk"}


@dataclass(frozen=True)
class Setup:
    """One way to score graded rows. Junk is taken out of the ranking before positions are counted."""

    name: str
    positive: tuple[int, ...]
    junk: tuple[int, ...]


REVISITED = (
    Setup("easy", positive=(EASY,), junk=(HARD, JUNK)),
    Setup("medium", positive=(EASY, HARD), junk=(JUNK,)),
    Setup("hard", positive=(HARD,), junk=(EASY, JUNK)),
)
LABEL = (Setup("label", positive=(EASY, HARD), junk=(JUNK,)),)


@dataclass(frozen=True)
class Judgements:
    """The graded rows of some consecutive queries; every other row of the database is a negative.

    offsets: (nq + 1,) int64, query i owns entries offsets[i]:offsets[i + 1].
    rows: (n,) int64 database rows; grades: (n,) int8, EASY, HARD or JUNK.
    """

    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    grades: NDArray[np.int8]

    @classmethod
    def from_lists(
        cls, easy: Sequence[ArrayLike], hard: Sequence[ArrayLike], junk: Sequence[ArrayLike]
    ) -> "Judgements":
        """Join lists of rows, one easy, one hard and one junk list for each query."""
        parts = [
            (np.asarray(rows, dtype=np.int64).reshape(-1), grade)
            for lists in zip(easy, hard, junk, strict=True)
            for rows, grade in zip(lists, (EASY, HARD, JUNK))
        ]
        lengths = np.array([len(rows) for rows, _ in parts], dtype=np.int64)
        return cls(
            offsets=np.concatenate(([0], np.cumsum(lengths.reshape(-1, 3).sum(axis=1)))).astype(np.int64),
            rows=np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in parts)]),
            grades=np.repeat(np.array([grade for _, grade in parts], dtype=np.int8), lengths),
        )

    @property
    def queries(self) -> int:
        """Number of queries."""
        return len(self.offsets) - 1

    @property
    def query(self) -> NDArray[np.int64]:
        """(n,) the query that each entry belongs to."""
        return np.repeat(np.arange(self.queries), np.diff(self.offsets))

    def slice(self, start: int, stop: int) -> "Judgements":
        """The judgements of queries start..stop-1."""
        first, last = self.offsets[start], self.offsets[stop]
        return Judgements(self.offsets[start : stop + 1] - first, self.rows[first:last], self.grades[first:last])

    def grades_of(self, neighbors: NDArray[np.integer[Any]]) -> NDArray[np.int8]:
        """(nq, k) the grade of each neighbor in the lists (nq, k), UNGRADED for negatives and for missing ones (-1)."""
        grades = np.full(neighbors.shape, UNGRADED, dtype=np.int8)
        for i in range(self.queries):
            mine = slice(self.offsets[i], self.offsets[i + 1])
            if mine.start == mine.stop:
                continue
            order = np.argsort(self.rows[mine])
            rows, row_grades = self.rows[mine][order], self.grades[mine][order]
            place = np.minimum(np.searchsorted(rows, neighbors[i]), len(rows) - 1)
            grades[i] = np.where(rows[place] == neighbors[i], row_grades[place], UNGRADED)
        return grades


class GroundTruth(Protocol):
    """What both evaluation paths need to know. Implemented by GradedTruth and LabelTruth."""

    @property
    def setups(self) -> tuple[Setup, ...]:
        """The ways in which it is scored."""

    @property
    def queries(self) -> int:
        """Number of queries."""

    @property
    def database_rows(self) -> int:
        """Number of rows it covers; rows after them are distractors, negatives for everyone."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """(nq,) graded rows of each query."""

    def judgements(self, start: int, stop: int) -> Judgements:
        """The judgements of queries start..stop-1."""


@dataclass(frozen=True)
class GradedTruth:
    """Easy, hard and junk rows for each query: the revisited protocol."""

    graded: Judgements
    database_rows: int
    setups: tuple[Setup, ...] = REVISITED

    def __post_init__(self) -> None:
        """Refuse rows outside the database and rows graded twice, naming the query."""
        for i in range(self.graded.queries):
            rows = self.graded.rows[self.graded.offsets[i] : self.graded.offsets[i + 1]]
            outside = rows[(rows < 0) | (rows >= self.database_rows)]
            if len(outside):
                raise LattqeError(
                    f"ground truth of query {i} names row {outside[0]}, but the database has {self.database_rows} rows:"
                    " it belongs to another database"
                )
            unique, times = np.unique(rows, return_counts=True)
            if len(unique) < len(rows):
                raise LattqeError(
                    f"ground truth of query {i} grades row {unique[times > 1][0]} more than once:"
                    " easy, hard and junk must be disjoint and without repetition"
                )

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.graded.queries

    @property
    def counts(self) -> NDArray[np.int64]:
        """(nq,) graded rows of each query."""
        return np.diff(self.graded.offsets)

    def judgements(self, start: int, stop: int) -> Judgements:
        """The judgements of queries start..stop-1."""
        return self.graded.slice(start, stop)


class LabelTruth:
    """Ground truth by labels, for queries inside or outside the database, or some of each.

    Only the labels are kept, (rows,) and (nq,): the lists of relevant rows, which may be long, are made for a few
    queries at a time. A label below 0 means 'belongs to nothing': such rows are negatives for everyone.
    """

    setups: tuple[Setup, ...] = LABEL

    def __init__(
        self,
        database_labels: NDArray[np.integer[Any]],
        query_labels: NDArray[np.integer[Any]] | None = None,
        query_rows: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Give query_labels (nq,), and query_rows (nq,) where queries are rows of the database: -1 for those outside.

        A query that is itself a database row is taken out of its own ranking, by row number. Without query_labels all
        queries are rows, and have their labels.
        """
        labels = np.asarray(database_labels)
        own = None if query_rows is None else _checked_rows(query_rows, len(labels), outside=query_labels is not None)
        if query_labels is None and own is None:
            raise LattqeError(
                "label protocol: give the queries' labels, or their row numbers where all of them are rows of the "
                "database"
            )
        wanted = np.asarray(query_labels) if query_labels is not None else labels[own]
        if own is not None and len(own) != len(wanted):
            raise LattqeError(f"{len(wanted)} labels of queries and {len(own)} row numbers: give one of each per query")
        self.database_rows = len(labels)
        self.queries = len(wanted)
        # Stable, so that the rows of one label stay in ascending order.
        self._order = np.argsort(labels, kind="stable")
        in_order = labels[self._order]
        self._first = np.searchsorted(in_order, wanted, side="left")
        last = np.searchsorted(in_order, wanted, side="right")
        self._same: NDArray[np.int64] = np.where(wanted < 0, 0, last - self._first).astype(np.int64)
        self._own = np.full(len(wanted), -1) if own is None else own
        # Where the own row of a query has another label, it would be listed nowhere, and count as a negative.
        apart = (wanted >= 0) & (self._own >= 0)
        apart[apart] = labels[self._own[apart]] != wanted[apart]
        self.counts: NDArray[np.int64] = self._same + apart

    def judgements(self, start: int, stop: int) -> Judgements:
        """The judgements of queries start..stop-1: same label is EASY, the query itself JUNK."""
        counts = self.counts[start:stop]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        query = np.repeat(np.arange(start, stop), counts)
        within = np.arange(offsets[-1]) - offsets[query - start]
        listed = within < self._same[query]
        rows = self._own[query]
        rows[listed] = self._order[self._first[query[listed]] + within[listed]]
        grades = np.where(rows == self._own[query], JUNK, EASY).astype(np.int8)
        return Judgements(offsets, rows, grades)


def _checked_rows(rows: NDArray[np.integer[Any]], database_rows: int, outside: bool) -> NDArray[np.int64]:
    """Row numbers (nq,) of queries that are rows of the database; `outside`: -1 is for those that are not."""
    numbers = np.asarray(rows)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise LattqeError(f"query rows are {numbers.dtype} of shape {numbers.shape}: give whole numbers (nq,)")
    numbers = numbers.astype(np.int64)
    wrong = numbers[(numbers < (-1 if outside else 0)) | (numbers >= database_rows)]
    if len(wrong):
        raise LattqeError(f"query row {wrong[0]} is not in the database of {database_rows} rows")
    return numbers


def keep_of_each(labels: NDArray[np.integer], m: int, seed: int = 0) -> NDArray[np.bool_]:
    """Which rows (n,) stay where each class of labels (n,) is cut to m images; a label below 0 belongs to no class.

    The images of a smaller cut are among those of a larger one.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    sizes = np.unique(labels, return_counts=True)[1]
    place = np.empty(len(labels), dtype=np.int64)  # of a row among the rows of its class, in random order
    place[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return (place < m) | (np.asarray(labels) < 0)


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
