"""The report: one HTML file with everything in it, for a screen, a phone or paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from lattqe.benchmark.spec import is_learned
from lattqe.report.figures import nqe_trends, query_gains, regime_bars, weight_profile
from lattqe.report.tables import CHOSEN, KINDS, column_title, describe_setting, map_columns, map_lines

if TYPE_CHECKING:
    from lattqe.report.examples import Examples

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN_QUERIES = 5  # best and worst of each data set


@dataclass(frozen=True)
class Illustration:
    """One or several panels under one title, with what to look for."""

    title: str
    note: str
    panels: tuple[str, ...]


def render_page(results: Mapping[str, Any], examples: "Examples | None" = None) -> str:
    """Make the page of a run's results, with pictures of its extreme queries where there are any."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    table, paper = results["table3"], results["published"]
    columns = map_columns(table)
    one_setup = len({setup for _, setup in columns}) == 1
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        results=results,
        columns=columns,
        kinds=KINDS,
        chosen=CHOSEN,
        figures=_figures(results),
        describe=describe_setting,
        is_learned=is_learned,
        everything=[
            (title, sorted(results["everything"], key=lambda row: -row[mean]), values, mean)
            for title, values, mean in (
                ("Everything, one setting each", "map", "mean"),
                ("Everything, tuned for each set", "tuned", "tuned_mean"),
            )
        ],
        titles=[column_title(column, setup, one_setup) for column, setup in columns],
        lines=map_lines(table, paper.get("table3", [])),
        gains=_gain_counts(results),
        extremes=_extremes(results),
        examples=examples,
        ablations=[
            part
            for part in (("This run", results["table2"]), ("The paper", paper.get("table2", [])))
            if results["table2"] and part[1]
        ],
    )


def _figures(results: Mapping[str, Any]) -> list[Illustration]:
    regimes = results["figure4"]
    figures = [
        Illustration(
            "mAP over the number of neighbors",
            "Mean over the tested sets, without distractors; other parameters as in the table.",
            (nqe_trends(results["figure3"]),),
        ),
        Illustration(
            "Gain by number of relevant images",
            "Mean over queries of the relative gain in AP, in three groups cut at percentiles 33 and 66; "
            "below each group its mean number of relevant images.",
            _bars(regimes["by_positives"], "relevant images"),
        ),
        Illustration(
            "Gain by accuracy before expansion",
            "The same by AP before expansion: queries that were hard to begin with are on the left.",
            _bars(regimes["by_ap_before"], "AP before expansion (%)"),
        ),
    ]
    weights = results["weights"]
    if weights["profiles"]:
        note = (
            f"The first {weights['k']} neighbors on {weights['dataset']}, each query's weights divided by their "
            "largest; mean, and band from 10 to 90 %. A method that tells neighbors apart separates the two lines; "
            "αQE only decays with similarity. Learned weights may be negative."
        )
        figures.append(
            Illustration("Weights by rank", note, tuple(weight_profile(profile) for profile in weights["profiles"]))
        )
    figures.append(
        Illustration(
            "Gains and losses of single queries",
            "Without distractors. Where a line crosses zero, queries begin to lose.",
            tuple(query_gains(_name(table), _gains(results, table, "qe")) for table in results["per_query"]),
        )
    )
    return figures


def _bars(groups: Mapping[str, Mapping[str, Any]], xlabel: str) -> tuple[str, ...]:
    return tuple(regime_bars(setup, content, xlabel) for setup, content in groups.items())


def _name(table: Mapping[str, Any]) -> str:
    """'oxford, hard', or 'cub200' where relevance goes by labels."""
    return table["dataset"] if table["setup"] == "label" else f"{table['dataset']}, {table['setup']}"


def _gains(
    results: Mapping[str, Any], table: Mapping[str, Any], kind: str | None = None
) -> list[tuple[str, str, Sequence[float]]]:
    """(method, label, gain of each query) of the rows of Table 3, or of one kind of them."""
    return [
        (
            row["method"],
            row["label"],
            [after - before for after, before in zip(table["after"][row["label"]], table["before"])],
        )
        for row in results["table3"]
        if row["label"] in table["after"] and kind in (None, row["kind"])
    ]


def _gain_counts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How many queries gained and lost, by data set and method."""
    return [
        {
            "name": _name(table),
            "label": label,
            "won": sum(gain > 0 for gain in gains),
            "lost": sum(gain < 0 for gain in gains),
            "mean": sum(gains) / max(len(gains), 1),
            "best": max(gains, default=0.0),
            "worst": min(gains, default=0.0),
        }
        for table in results["per_query"]
        for _, label, gains in _gains(results, table)
    ]


def best_expansion(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of Table 3 whose single queries are looked at: what is learned, then the best query expansion."""
    expanding = [row for row in results["table3"] if row["kind"] == "qe"]
    rows = expanding or [row for row in results["table3"] if row["kind"] != "none"]
    return max(rows, key=lambda row: (is_learned(row["method"]), row["mean"]))


def _extremes(results: Mapping[str, Any]) -> dict[str, Any]:
    """The queries that the best query expansion helps and harms most, in each data set."""
    best = best_expansion(results)
    lines = []
    for table in results["per_query"]:
        found = zip(table["ids"], table["positives"], table["before"], table["after"][best["label"]])
        ordered = sorted(found, key=lambda query: query[2] - query[3])
        ends = ordered if len(ordered) <= 2 * SHOWN_QUERIES else ordered[:SHOWN_QUERIES] + ordered[-SHOWN_QUERIES:]
        lines += [
            {"name": _name(table), "id": name, "positives": positives, "before": before, "after": after}
            for name, positives, before, after in ends
        ]
    return {"label": best["label"], "lines": lines}
