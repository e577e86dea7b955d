"""The report: one HTML file with everything in it, for a screen, a phone or paper."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from lattqe.report.figures import nqe_trends, query_gains, regime_bars, weight_profiles
from lattqe.report.tables import CHOSEN, KINDS, describe_setting, map_columns, map_lines

TEMPLATE = Path(__file__).with_name("page.html")


def render_page(results: Mapping[str, Any]) -> str:
    """Make the page of a run's results."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)
    table = results["table3"]
    columns = map_columns(table)
    return environment.from_string(TEMPLATE.read_text()).render(
        results=results, columns=columns, one_setup=len({setup for _, setup in columns}) == 1,
        lines=map_lines(table), kinds=KINDS, chosen=CHOSEN, describe=describe_setting, figures=_figures(results),
        gains=_gain_counts(results))


def _figures(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each figure with its title and what to look for."""
    regimes = results["figure4"]
    figures = [
        {"title": "mAP over the number of neighbors", "svg": nqe_trends(results["figure3"]),
         "note": "Mean over the tested sets, without distractors; other parameters as in the table."},
        {"title": "Gain by number of relevant images", "svg": regime_bars(
            regimes["by_positives"], "mean number of positives in the group"),
         "note": "Mean over queries of the relative gain in AP; groups cut at percentiles 33 and 66."},
        {"title": "Gain by accuracy before expansion", "svg": regime_bars(
            regimes["by_ap_before"], "mAP of the group before expansion (%)"),
         "note": "Queries that were hard to begin with are on the left."}]
    profiles = [profile for profile in results["weights"]["profiles"] if "relevant" in profile]
    if profiles:
        figures.append({"title": f"Weights by rank on {results['weights']['dataset']}",
                        "svg": weight_profiles(profiles),
                        "note": "Mean and 10-90 % band. A good method separates the two lines; alphaQE only decays."})
    return figures + _gain_figures(results)


def _gain_figures(results: Mapping[str, Any]) -> list[dict[str, str]]:
    kinds = {row["label"]: row["kind"] for row in results["table3"]}
    figures = []
    for table in results["per_query"]:
        gains = {label: [after - before for after, before in zip(values, table["before"])]
                 for label, values in table["after"].items() if kinds[label] == "qe"}
        figures.append({"title": f"Gain of each query: {table['dataset']}, {table['setup']}",
                        "svg": query_gains(gains), "note": "Where a line crosses zero, queries begin to lose."})
    return figures


def _gain_counts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How many queries gained and lost, by data set and method."""
    counts = []
    for table in results["per_query"]:
        for label, values in table["after"].items():
            gains = [after - before for after, before in zip(values, table["before"])]
            counts.append({"dataset": table["dataset"], "setup": table["setup"], "label": label,
                           "won": sum(gain > 0 for gain in gains), "lost": sum(gain < 0 for gain in gains),
                           "best": max(gains, default=0.0), "worst": min(gains, default=0.0)})
    return counts
