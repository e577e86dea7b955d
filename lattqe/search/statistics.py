"""What a finished neighbor graph says of a collection: hubs, rows that are alone, how near the nearest are."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lattqe.store import NeighborGraph

BLOCK_ROWS = 65_536
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class GraphStatistics:
    """Numbers of a graph of n rows and k neighbors.

    in_degrees (n,): in how many lists each row is. first (m,) float32: similarity of the first neighbor of the m rows
    that have one. rows: n.
    """

    in_degrees: np.ndarray = field(repr=False)
    first: np.ndarray = field(repr=False)
    rows: int

    @property
    def gini(self) -> float:
        """How unequal in-degrees are: 0 where all are equal, near 1 where a few rows are in all lists."""
        return gini(self.in_degrees)

    @property
    def skewness(self) -> float:
        """Of the in-degrees, the usual measure of hubness: 0 where they are symmetric, large where there are hubs."""
        centred = self.in_degrees - self.in_degrees.mean()
        spread = float(np.sqrt(np.mean(centred**2)))
        return float(np.mean(centred**3)) / spread**3 if spread > 0 else 0.0

    @property
    def orphans(self) -> int:
        """Rows that are in no list."""
        return int((self.in_degrees == 0).sum())

    @property
    def alone(self) -> int:
        """Rows without a neighbor."""
        return self.rows - len(self.first)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        top = np.sort(self.in_degrees)[::-1][: max(1, self.rows // 100)]
        quantiles = np.quantile(self.first, QUANTILES) if len(self.first) else []
        return {
            "in_degree": {
                "gini": round(self.gini, 4),
                "skewness": round(self.skewness, 4),
                "largest": int(self.in_degrees.max()),
                "largest_row": int(self.in_degrees.argmax()),
                "share_of_top_percent": round(float(top.sum()) / max(1, int(self.in_degrees.sum())), 4),
            },
            "rows_in_no_list": self.orphans,
            "rows_without_neighbors": self.alone,
            "first_similarity": {f"{100 * q:g}%": round(float(value), 4) for q, value in zip(QUANTILES, quantiles)},
        }


def graph_statistics(graph: NeighborGraph) -> GraphStatistics:
    """Read the graph once; 4 bytes for each row and 8 for its in-degree are held."""
    rows = graph.database_rows or graph.rows
    degrees, first = np.zeros(rows, np.int64), []
    for _, I, D in graph.blocks(BLOCK_ROWS):
        degrees += np.bincount(I[I >= 0], minlength=rows)
        first.append(D[I[:, 0] >= 0, 0])
    return GraphStatistics(degrees, np.concatenate(first), graph.rows)


def gini(values: np.ndarray) -> float:
    """The Gini coefficient of numbers (n,) from 0 on: half the mean difference of two of them over their mean."""
    total = float(values.sum())
    if not total:
        return 0.0
    ordered, ranks = np.sort(values).astype(np.float64), np.arange(1, len(values) + 1)
    return float((2 * ranks - len(values) - 1) @ ordered / (len(values) * total))
