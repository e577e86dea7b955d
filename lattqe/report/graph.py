"""The figure of a neighbor graph: how near the nearest neighbors are, and how unequally rows are named."""

import matplotlib.pyplot as plt
import numpy as np

from lattqe.report.figures import PALETTE, STYLE, to_svg
from lattqe.search.statistics import GraphStatistics

BINS = 60


def graph_figure(statistics: GraphStatistics) -> str:
    """An SVG of two panels: first-neighbor similarities; and the share of list entries that the top rows have."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.0))
        left.hist(statistics.first, bins=BINS, color=PALETTE[3])
        left.set(xlabel="similarity of the first neighbor", ylabel="rows")
        named = np.sort(statistics.in_degrees)[::-1]
        points = np.unique(np.linspace(0, len(named), 201).astype(int))
        shares = np.concatenate([[0.0], np.cumsum(named)]) / max(1, int(named.sum()))
        right.plot(100 * points / len(named), 100 * shares[points], color=PALETTE[0])
        right.plot([0, 100], [0, 100], color="#777777", linewidth=0.8)
        right.set(
            xlabel="rows, most named first (%)",
            ylabel="entries in lists (%)",
            title=f"Gini {statistics.gini:.2f}, skewness {statistics.skewness:.1f}",
        )
        return to_svg(figure)
