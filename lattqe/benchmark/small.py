"""An index of few rows that is asked for positions again and again: whole rankings instead of counting.

Counting is made for a million rows in shards. A grid of settings over some thousand rows is several times faster when
every query's scores are sorted once; the positions are the same integers.
"""

import numpy as np

from lattqe.search import FlatIndex
from lattqe.search.exact import norms

ENTRIES = 1 << 21  # scores sorted at once: with their order some 50 MB


class SmallIndex(FlatIndex):
    """A FlatIndex over xb (nb, D) whose `count_above` ranks all rows for each query."""

    def __init__(self, xb: np.ndarray) -> None:
        super().__init__(xb)
        self._wide = np.ascontiguousarray(xb, dtype=np.float64).T
        self._longest = float(norms(xb).max(initial=0.0))

    def count_above(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """See Index: (nq, m) rows that stand before each of `rows` (nq, m), whose exact scores are given."""
        counts = np.zeros(rows.shape, dtype=np.int64)
        step = max(1, ENTRIES // max(self.rows, 1))
        for start in range(0, len(xq), step):
            part = slice(start, start + step)
            counts[part] = self._positions(xq[part], scores[part], np.asarray(rows[part]))
        return counts

    def _positions(self, xq: np.ndarray, scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Positions in the order of float64 products; where two of these are too close to tell, counted exactly.

        A product and the exact score differ by the rounding of two sums, so neighbors in the order that are further
        apart than two such errors stand as they do in the exact order, whatever is tied elsewhere.
        """
        products = xq.astype(np.float64) @ self._wide
        order = np.argsort(-products, axis=1)
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(self.rows)[None], axis=1)
        error = 2.0**-52 * self.dim * norms(xq) * self._longest + 1e-300
        ranked = np.take_along_axis(products, order, axis=1)
        close = ranked[:, :-1] - ranked[:, 1:] <= 2 * error[:, None]
        unclear = np.zeros(products.shape, dtype=bool)
        unclear[:, :-1] |= close
        unclear[:, 1:] |= close
        real = rows >= 0
        found = np.where(real, np.take_along_axis(place, np.maximum(rows, 0), axis=1), 0)
        doubtful = real & np.take_along_axis(unclear, found, axis=1)
        queries = np.flatnonzero(doubtful.any(axis=1))
        if len(queries):
            exact = super().count_above(xq[queries], scores[queries], np.where(doubtful[queries], rows[queries], -1))
            found[queries] = np.where(doubtful[queries], exact, found[queries])
        return found
