"""Where an expansion helps (figure 4): queries grouped by number of positives, or by average precision before it."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lattqe.errors import LattqeError

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
