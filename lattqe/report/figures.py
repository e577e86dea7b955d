"""The figures of a benchmark run as SVG: the same bytes for the same numbers."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# One colour for each method wherever it appears; distinguishable without red and green alone.
COLOURS = {"none": "#777777", "aqe": "#d55e00", "aqewd": "#009e73", "dqe": "#0072b2", "alphaqe": "#e0a800",
           "lattqe": "#000000"}
MARKERS = {"aqe": "o", "aqewd": "s", "dqe": "^", "alphaqe": "D", "lattqe": "o"}
STYLE = {"svg.hashsalt": "lattqe", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3,
         "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True}


def to_svg(figure: Figure) -> str:
    """Render and close a figure; the XML prologue is left out, so that it can stand inside a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg"):]


def _axes(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False)
    return figure, [axis for row in axes for axis in row]


def nqe_trends(figure3: Mapping[str, Any]) -> str:
    """Mean mAP over the number of neighbors used for the query, for every method (the paper's figure 3)."""
    with plt.rc_context(STYLE):
        figure, (axis,) = _axes(1, 1, 7.2, 4.2)
        axis.axhline(figure3["no_qe"], color=COLOURS["none"], linestyle="--", linewidth=2, label="no expansion")
        for series in figure3["series"]:
            axis.plot(figure3["nqe"], series["map"], color=_shade(series), marker=MARKERS.get(series["method"], "x"),
                      markersize=3, linewidth=1.6 if series["method"] == "lattqe" else 1.1, label=series["label"])
        axis.set_xscale("symlog", base=2, linthresh=1)
        axis.set_xticks(figure3["nqe"], [str(k) for k in figure3["nqe"]])
        axis.set(xlabel="neighbors used for query expansion (nQE)", ylabel="mean mAP (%)")
        axis.legend(fontsize=8, framealpha=0.8)
        return to_svg(figure)


def _shade(series: Mapping[str, Any]) -> str:
    """A method's colour; variants of one method (alphaQE with other powers) differ in lightness."""
    colour = COLOURS.get(series["method"], "#cc79a7")
    variant = int(series.get("variant", 0))
    if not variant:
        return colour
    rgb = matplotlib.colors.to_rgb(colour)
    return matplotlib.colors.to_hex([1 - (1 - part) * 0.6**variant for part in rgb])


def regime_bars(groups: Mapping[str, Mapping[str, Any]], xlabel: str) -> str:
    """Relative gain in three groups of queries, one panel for each setup (the paper's figure 4)."""
    with plt.rc_context(STYLE):
        figure, axes = _axes(1, len(groups), 3.8 * len(groups), 3.0)
        for axis, (setup, content) in zip(axes, groups.items()):
            series = content["series"]
            for number, one in enumerate(series):
                offsets = [group + (number - (len(series) - 1) / 2) * 0.8 / len(series) for group in range(3)]
                axis.bar(offsets, one["relative"], 0.8 / len(series), color=COLOURS.get(one["method"], "#cc79a7"),
                         label=one["label"])
            axis.set_xticks(range(3), [f"{level:.3g}" for level in content["level"]])
            axis.axhline(0, color="black", linewidth=0.6)
            axis.set(title=setup, xlabel=xlabel, ylabel="relative gain in mAP (%)")
        axes[0].legend(fontsize=7)
        return to_svg(figure)


def weight_profiles(profiles: Sequence[Mapping[str, Any]]) -> str:
    """Mean weight by rank of relevant and of irrelevant neighbors, one panel for each method."""
    with plt.rc_context(STYLE):
        figure, axes = _axes(1, len(profiles), 3.6 * len(profiles), 3.0)
        for axis, profile in zip(axes, profiles):
            for kind, colour in (("relevant", "#009e73"), ("irrelevant", "#d55e00")):
                one = profile[kind]
                ranks = [rank for rank, count in enumerate(one["count"], start=1) if count]
                axis.plot(ranks, [one["mean"][rank - 1] for rank in ranks], color=colour, label=kind)
                low, high = (one["quantiles"][level] for level in ("0.1", "0.9"))
                axis.fill_between(ranks, [low[rank - 1] for rank in ranks], [high[rank - 1] for rank in ranks],
                                  color=colour, alpha=0.15, linewidth=0)
            axis.axhline(0, color="black", linewidth=0.6)
            axis.set(title=profile["label"], xlabel="rank of the neighbor", ylabel="weight (largest = 1)")
        axes[0].legend(fontsize=7)
        return to_svg(figure)


def query_gains(gains: Mapping[str, Sequence[float]]) -> str:
    """Per-query gain in AP, sorted, one line for each method: how many queries win, how many lose."""
    with plt.rc_context(STYLE):
        figure, (axis,) = _axes(1, 1, 7.2, 3.2)
        for label, values in gains.items():
            ordered = sorted(values, reverse=True)
            axis.plot(range(1, len(ordered) + 1), ordered, label=label, linewidth=1.2,
                      color=COLOURS.get(_method_of(label), "#cc79a7"))
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set(xlabel="queries, best gain first", ylabel="gain in AP (points)")
        axis.legend(fontsize=8)
        return to_svg(figure)


def _method_of(label: str) -> str:
    """'αQE' -> 'alphaqe', 'LAttDBA + LAttQE' -> 'lattqe'."""
    last = label.rsplit(" ", 1)[-1].lower().replace("α", "alpha")
    return last if last in COLOURS else "other"


def learning_curve(steps: Sequence[int], series: Mapping[str, Sequence[float]], ylabel: str) -> str:
    """Values over training steps."""
    with plt.rc_context(STYLE):
        figure, (axis,) = _axes(1, 1, 7.2, 3.2)
        for name, values in series.items():
            axis.plot(steps, values, label=name, linewidth=1.2)
        axis.set(xlabel="step", ylabel=ylabel)
        axis.legend(fontsize=8)
        return to_svg(figure)
