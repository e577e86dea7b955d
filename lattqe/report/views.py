"""Results as tables (for the page, CSV, the screen) and as figures in SVG: the same bytes for the same numbers."""

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from lattqe.benchmark.spec import GRAPH_METHODS, describe_setting, is_learned, setting_parts
from lattqe.expansion import METHODS
from lattqe.expansion.diffusion import UNMEASURED
from lattqe.search.stored import GraphStatistics
from lattqe.store.export import plain_cell

KINDS = {
    "none": "No expansion",
    "qe": "Query expansion",
    "dba+qe": "Database-side augmentation + query expansion",
    "graph": "The whole graph: hops, diffusion and propagation",
}
CHOSEN = {
    "fixed": "fixed",
    "validation": "chosen on validation",
    "test": "tuned on test",
    "model": "chosen on validation, in training",
}
SHORT = {"fixed": "fixed", "validation": "on val.", "test": "on test", "model": "on val."}
# Colours and markers go to methods in the order of their registration; distinguishable without red and green alone.
PALETTE = ("#d55e00", "#009e73", "#e0a800", "#0072b2", "#cc79a7", "#56b4e9", "#7f3c8d", "#8c6d31", "#a0522d", "#5f8f00")
MARKERS = "osD^vPX<>h"
GREY, BLACK = "#777777", "#000000"
SHADES = (BLACK, "#b5123e", "#1f5fd0")  # of learned methods where one figure has several
# Names come from users: a dollar in one is a dollar, not the beginning of a formula.
STYLE = {
    "text.parse_math": False,
    "svg.hashsalt": "lattqe",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}
WIDE, PANEL = (5.6, 3.8), (3.6, 2.8)  # inches; panels stand beside each other, or below each other on a phone
BINS = 60


@dataclass(frozen=True)
class Illustration:
    """One or several panels under one title, with what to look for; `name` is what its files are called."""

    name: str
    title: str
    note: str
    panels: tuple[str, ...]

    def files(self) -> dict[str, str]:
        """The panels as separate files: {'nqe.svg': text}, numbered where there are several."""
        if len(self.panels) == 1:
            return {f"{self.name}.svg": self.panels[0]}
        return {f"{self.name}-{number}.svg": panel for number, panel in enumerate(self.panels, start=1)}


def colour(method: str) -> str:
    """One colour for each method wherever it appears; what is learned is black."""
    return BLACK if is_learned(method) else GREY if method == "none" else PALETTE[_place(method) % len(PALETTE)]


def marker(method: str) -> str:
    """One marker for each method, likewise."""
    return "*" if is_learned(method) else MARKERS[_place(method) % len(MARKERS)]


def _place(method: str) -> int:
    plain = [*(name for name in METHODS if not is_learned(name)), *GRAPH_METHODS]
    return plain.index(method) if method in plain else len(plain)


def _draw(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    return figure, figure.subplots()


def to_svg(figure: Figure) -> str:
    """Render a figure; the XML prologue is left out, so that it can stand inside a page.

    The canvas is asked itself: `Figure.savefig` would lay out a figure in one drawing and draw it in another.
    """
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def nqe_trends(figure3: Mapping[str, Any]) -> str:
    """Mean mAP over the number of neighbors used for the query, for every method (the paper's figure 3)."""
    with matplotlib.rc_context(STYLE):
        figure, axis = _draw(WIDE)
        axis.axhline(figure3["no_qe"], color=GREY, linestyle="--", linewidth=1.4, label="no expansion")
        for series in figure3["series"]:
            ours = is_learned(series["method"])
            axis.plot(
                series["nqe"],
                series["map"],
                color=colour(series["method"]),
                marker=marker(series["method"]),
                markersize=6 if ours else 3.5,
                linewidth=2 if ours else 1.2,
                label=series["label"],
            )
        ticks = sorted({k for series in figure3["series"] for k in series["nqe"]})
        axis.set_xscale("symlog", base=2, linthresh=1)
        axis.set_xticks(ticks, [str(k) for k in ticks])
        axis.minorticks_off()
        axis.set(xlabel="neighbors used for query expansion (nQE)", ylabel="mean mAP (%)")
        axis.legend(fontsize=8, framealpha=0.8)
        return to_svg(figure)


def regime_bars(setup: str, content: Mapping[str, Any], xlabel: str) -> str:
    """Relative gain in three groups of queries (the paper's figure 4); groups that ties left empty are left out."""
    groups = [group for group, count in enumerate(content["queries"]) if count]
    with matplotlib.rc_context(STYLE):
        figure, axis = _draw(PANEL)
        series, paper = content["series"], content.get("published", {})
        step = 0.8 / len(series)
        for number, one in enumerate(series):
            middle = [place + (number - (len(series) - 1) / 2) * step for place in range(len(groups))]
            width = step / 2 if one["method"] in paper else step
            axis.bar(
                [at - (step - width) / 2 for at in middle],
                [one["relative"][group] for group in groups],
                width,
                color=colour(one["method"]),
                label=one["label"],
            )
            if one["method"] in paper:  # the paper's bar beside ours
                axis.bar(
                    [at + width / 2 for at in middle],
                    [paper[one["method"]][group] for group in groups],
                    width,
                    fill=False,
                    edgecolor=colour(one["method"]),
                    hatch="////",
                    linewidth=0.8,
                )
        if any(one["method"] in paper for one in series):
            axis.bar([0], [0], 0, fill=False, edgecolor="black", hatch="////", linewidth=0.8, label="the paper")
        ticks = [f"{content['level'][group]:.3g}\n({content['queries'][group]} queries)" for group in groups]
        axis.set_xticks(range(len(groups)), ticks)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.grid(visible=False, axis="x")
        axis.set(title=setup, xlabel=xlabel, ylabel="relative gain in AP (%)")
        axis.legend(fontsize=7, framealpha=0.7)
        return to_svg(figure)


def weight_profile(profile: Mapping[str, Any]) -> str:
    """Mean weight by rank of relevant and of irrelevant neighbors under one method, with a band of 10 to 90 %."""
    with matplotlib.rc_context(STYLE):
        figure, axis = _draw(PANEL)
        for kind, colour, line in (("relevant", "#0072b2", "-"), ("irrelevant", "#d55e00", "--")):
            one = profile[kind]
            ranks = [rank for rank, count in enumerate(one["count"], start=1) if count]
            low, high = (one["quantiles"][level] for level in ("0.1", "0.9"))
            axis.fill_between(
                ranks,
                [low[rank - 1] for rank in ranks],
                [high[rank - 1] for rank in ranks],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
            axis.plot(ranks, [one["mean"][rank - 1] for rank in ranks], color=colour, linestyle=line, label=kind)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set(title=profile["label"], xlabel="rank of the neighbor", ylabel="weight (largest = 1)")
        axis.legend(fontsize=7)
        return to_svg(figure)


def query_gains(title: str, gains: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Gain in AP of each query, sorted, one line for each (method, label, gains): how many win, how many lose."""
    with matplotlib.rc_context(STYLE):
        figure, axis = _draw(PANEL)
        for method, label, values in gains:
            ordered = sorted(values, reverse=True)
            share = [100 * (place + 0.5) / len(ordered) for place in range(len(ordered))]
            axis.plot(share, ordered, label=label, linewidth=1.2, color=colour(method))
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set(title=title, xlabel="queries, best gain first (%)", ylabel="gain in AP (points)")
        axis.legend(fontsize=7)
        return to_svg(figure)


def density_gains(title: str, groups: Sequence[Mapping[str, Any]]) -> str:
    """Gain in mAP over no expansion for each number of relevant images; learned rows with their intervals."""
    with matplotlib.rc_context(STYLE):
        figure, axis = _draw((7.2, 3.8))
        places = range(len(groups))
        plain = [group["lines"][0]["one"] for group in groups]
        shades = itertools.cycle(SHADES)  # several learned lines lie close together here
        for number, line in enumerate(groups[0]["lines"]):
            if line["method"] == "none":
                continue
            ours = is_learned(line["method"])
            shade = next(shades) if ours else colour(line["method"])
            ones = [group["lines"][number]["one"] for group in groups]
            values = [np.nan if one is None else one - none for one, none in zip(ones, plain)]
            dashes = "-" if line["kind"] == "qe" else "--" if line["kind"] == "dba+qe" else ":"
            axis.plot(
                places,
                values,
                color=shade,
                marker=marker(line["method"]),
                linestyle=dashes,
                markersize=7 if ours else 3.5,
                linewidth=2 if ours else 1.1,
                label=line["label"],
            )
            if ours:
                sure = [
                    next(
                        one
                        for one in group["intervals"]
                        if one["after"] == line["label"] and one["before"] == "no expansion"
                    )
                    for group in groups
                ]
                axis.fill_between(
                    places,
                    [one["low"] for one in sure],
                    [one["high"] for one in sure],
                    color=shade,
                    alpha=0.12,
                    linewidth=0,
                )
        best = [
            max(other["tuned"] or 0 for other in group["lines"] if not is_learned(other["method"])) - none
            for group, none in zip(groups, plain)
        ]
        axis.plot(places, best, color=GREY, linewidth=1, marker="_", label="best other method, tuned for each set")
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xticks(places, [str(group["relevant"] or "all") for group in groups])
        axis.set(title=title, xlabel="relevant images per query", ylabel="gain in mAP (points)")
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return to_svg(figure)


def graph_figure(statistics: GraphStatistics) -> str:
    """An SVG of two panels: first-neighbor similarities; and the share of list entries that the top rows have."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 3.0))
        left, right = figure.subplots(1, 2)
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


@dataclass(frozen=True)
class Value:
    """A number of a table; `best` where it is the largest of its kind and column; `paper` is the published one."""

    number: float | None  # None: not measured, or a mean over what was not
    best: bool = False
    trace: str = ""  # where it comes from: the key of its cell
    paper: float | None = None

    @property
    def text(self) -> str:
        """The number as it is printed, or why there is none."""
        return f"{self.number:.1f}" if self.number is not None else UNMEASURED if self.trace else "–"


@dataclass(frozen=True)
class Line:
    """One row of Table 3."""

    kind: str
    label: str
    method: str
    setting: str
    chosen: str
    values: tuple[Value, ...]


def map_columns(table3: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(column, setup) in order, without the mean."""
    return [(column, setup) for column, setups in table3[0]["map"].items() for setup in setups]


def map_lines(table3: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]] = ()) -> list[Line]:
    """Table 3 with its mean as the last value; the best of each kind and column is marked, as printed."""
    columns = map_columns(table3)
    numbers = [[row["map"][column].get(setup) for column, setup in columns] + [row["mean"]] for row in table3]
    theirs = {(row["kind"], row["method"]): row for row in published}
    lines = []
    for row, own in zip(table3, numbers):
        rivals = [other for other, its in zip(numbers, table3) if its["kind"] == row["kind"]]
        best = [
            len(rivals) > 1
            and number is not None
            and round(number, 1) >= max(round(each[i] or 0, 1) for each in rivals)
            for i, number in enumerate(own)
        ]
        traces = [row["cells"][column] for column, _ in columns] + [""]
        paper = _published(theirs.get((row["kind"], row["method"])), columns)
        lines.append(
            Line(
                row["kind"],
                row["label"],
                row["method"],
                describe_setting(row),
                CHOSEN[row["choose"]],
                tuple(Value(*value) for value in zip(own, best, traces, paper)),
            )
        )
    return lines


def _published(row: Mapping[str, Any] | None, columns: Sequence[tuple[str, str]]) -> list[float | None]:
    """The paper's values of some columns and, where all its own columns are among them, its mean."""
    if row is None:
        return [None] * (len(columns) + 1)
    values = [row["map"].get(column, {}).get(setup) for column, setup in columns]
    whole = sum(len(setups) for setups in row["map"].values()) == sum(value is not None for value in values)
    return [*values, row["mean"] if whole else None]


def to_csv(results: Mapping[str, Any]) -> str:
    """One line for each number: kind, method, setting, how it was chosen, column, setup, measure, value, cell.

    Names that a spreadsheet would take for a formula get an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["kind", "label", "setting", "chosen", "dataset", "setup", "measure", "value", "cell"])
    for row in results["table3"]:
        start = [row["kind"], plain_cell(row["label"]), plain_cell(describe_setting(row)), CHOSEN[row["choose"]]]
        for column, setup in map_columns(results["table3"]):
            named, cell = plain_cell(column), row["cells"][column]
            value = row["map"][column].get(setup)
            writer.writerow([*start, named, setup, "mAP", UNMEASURED if value is None else f"{value:.6f}", cell])
            for k, precision in row["precision"][column].get(setup, {}).items():
                writer.writerow([*start, named, setup, f"mP@{k}", f"{precision:.6f}", cell])
        if row["mean"] is not None:
            writer.writerow([*start, "mean", "", "mAP", f"{row['mean']:.6f}", ""])
    return out.getvalue()


def column_title(column: str, setup: str, one_setup: bool) -> str:
    """'roxford5k M', or 'cub200' where all columns have the same setup."""
    return column if one_setup else f"{column} {setup[0].upper()}"


def to_text(results: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Table 3 for a terminal of 100 columns: for each kind a title and rows of texts, headings first.

    It is turned: methods go across and data sets down, with the settings below the numbers.
    """
    table = results["table3"]
    columns = map_columns(table)
    one_setup = len({setup for _, setup in columns}) == 1
    lines, plain = map_lines(table), map_lines(table)[0]
    names = [*(column_title(column, setup, one_setup) for column, setup in columns), "mean"]
    tables = []
    for kind, title in KINDS.items():
        rows = [(row, line) for row, line in zip(table, lines) if row["kind"] == kind != "none"]
        if not rows:
            continue
        text = [["mAP, * best", "none", *(line.label.replace(" + ", "+") for _, line in rows)]]
        for number, name in enumerate(names):
            values = [line.values[number] for _, line in rows]
            shown = [f"{value.text}{'*' if value.best else ' '}" for value in values]
            text.append([name, plain.values[number].text, *shown])
        settings = [setting_parts(row) for row, _ in rows]
        for name in dict.fromkeys(name for parts in settings for name in parts):
            text.append([name, "", *(parts.get(name, "") for parts in settings)])
        text.append(["chosen", "", *(SHORT[row["choose"]] for row, _ in rows)])
        tables.append((f"{results['title']}: {title[0].lower()}{title[1:]}", text))
    return tables
