"""The label protocol: relevant is whatever carries the query's label."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError
from lattqe.evaluation.judgements import EASY, JUNK, LABEL, Judgements, Setup


class LabelTruth:
    """Ground truth by labels, for queries inside or outside the database.

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
        """Give query_labels (nq,) for queries outside the database, or query_rows (nq,) for queries that are its rows.

        A query that is itself a database row is taken out of its own ranking, by row number.
        """
        if (query_labels is None) == (query_rows is None):
            raise LattqeError(
                "label protocol: give either the queries' labels (queries outside the database) or their row numbers "
                "(queries that are rows of the database), not both and not neither"
            )
        labels = np.asarray(database_labels)
        self._query_rows: NDArray[np.int64] | None = None
        if query_rows is not None:
            rows = np.asarray(query_rows, dtype=np.int64)
            if len(rows) and (rows.min() < 0 or rows.max() >= len(labels)):
                outside = rows[(rows < 0) | (rows >= len(labels))][0]
                raise LattqeError(f"query row {outside} is not in the database of {len(labels)} rows")
            self._query_rows, query_labels = rows, labels[rows]
        wanted = np.asarray(query_labels)
        self.database_rows = len(labels)
        self.queries = len(wanted)
        # Stable, so that the rows of one label stay in ascending order.
        self._order = np.argsort(labels, kind="stable")
        in_order = labels[self._order]
        self._first = np.searchsorted(in_order, wanted, side="left")
        last = np.searchsorted(in_order, wanted, side="right")
        self.counts: NDArray[np.int64] = np.where(wanted < 0, 0, last - self._first).astype(np.int64)

    def judgements(self, start: int, stop: int) -> Judgements:
        """The judgements of queries start..stop-1: same label is EASY, the query itself JUNK."""
        counts = self.counts[start:stop]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        query = np.repeat(np.arange(start, stop), counts)
        within = np.arange(offsets[-1]) - offsets[query - start]
        rows = self._order[self._first[query] + within].astype(np.int64)
        grades = np.full(len(rows), EASY, dtype=np.int8)
        if self._query_rows is not None:
            grades[rows == self._query_rows[query]] = JUNK
        return Judgements(offsets, rows, grades)
