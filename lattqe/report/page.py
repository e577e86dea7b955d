"""The reports of a benchmark and of a density benchmark: each one HTML file, for a screen, a phone or paper.

A benchmark's can show pictures: the queries that an expansion helps and harms most. A density benchmark's says what is
gained for how many relevant images; it is also printed and written as CSV.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from lattqe.benchmark.cells import OpenedDataset
from lattqe.benchmark.spec import Dataset, describe_setting, is_learned
from lattqe.evaluation.truth import Setup
from lattqe.expansion import create
from lattqe.expansion.diffusion import UNMEASURED
from lattqe.expansion.rows import Found, expand_queries, nearest
from lattqe.report.gallery import Card, Examples, Thumbnails, Tile, marks_of
from lattqe.report.views import (
    CHOSEN,
    KINDS,
    Illustration,
    column_title,
    density_gains,
    map_columns,
    map_lines,
    nqe_trends,
    query_gains,
    regime_bars,
    weight_profile,
)
from lattqe.search.index import StoredIndex
from lattqe.store.export import plain_cell

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN_QUERIES = 5  # best and worst of each data set
EXTREMES = 10  # largest gains, and as many losses
RESULTS = 8  # of each list
PICTURE_BYTES = 8_000_000
DENSITY_TEMPLATE = Path(__file__).with_name("density.html")
PAGES = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
PAGES.globals.update(describe=describe_setting, chosen=CHOSEN, is_learned=is_learned, unmeasured=UNMEASURED)
HARMLESS = 0.3  # points of mAP that count as no loss


def render_page(
    results: Mapping[str, Any], examples: "Examples | None" = None, figures: Sequence[Illustration] | None = None
) -> str:
    """Make the page of a run's results, with pictures of its extreme queries where there are any.

    figures: what `illustrations` gave, where they were drawn before.
    """
    table, paper = results["table3"], results["published"]
    columns = map_columns(table)
    one_setup = len({setup for _, setup in columns}) == 1
    return PAGES.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        results=results,
        columns=columns,
        kinds=KINDS,
        figures=illustrations(results) if figures is None else figures,
        everything=[
            (title, sorted(results["everything"], key=lambda row: -(row[mean] or 0)), values, mean)
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


def illustrations(results: Mapping[str, Any]) -> list[Illustration]:
    """The figures of a run."""
    regimes = results["figure4"]
    figures = [
        Illustration(
            "nqe",
            "mAP over the number of neighbors",
            "Mean over the tested sets, without distractors; other parameters as in the table.",
            (nqe_trends(results["figure3"]),),
        ),
        Illustration(
            "gain-by-relevant",
            "Gain by number of relevant images",
            "Mean over queries of the relative gain in AP, in three groups cut at percentiles 33 and 66; "
            "below each group its mean number of relevant images.",
            _bars(regimes["by_positives"], "relevant images"),
        ),
        Illustration(
            "gain-by-ap",
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
            Illustration(
                "weights", "Weights by rank", note, tuple(weight_profile(profile) for profile in weights["profiles"])
            )
        )
    figures.append(
        Illustration(
            "queries",
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
    return max(rows, key=lambda row: (is_learned(row["method"]), row["mean"] or 0))


def _extremes(results: Mapping[str, Any]) -> dict[str, Any]:
    """The queries that the best query expansion helps and harms most, in each data set."""
    best = best_expansion(results)
    lines = []
    for table in results["per_query"]:
        found = zip(table["ids"], table["positives"], table["before"], table["after"].get(best["label"], ()))
        ordered = sorted(found, key=lambda query: query[2] - query[3])
        ends = ordered if len(ordered) <= 2 * SHOWN_QUERIES else ordered[:SHOWN_QUERIES] + ordered[-SHOWN_QUERIES:]
        lines += [
            {"name": _name(table), "id": name, "positives": positives, "before": before, "after": after}
            for name, positives, before, after in ends
        ]
    return {"label": best["label"], "lines": lines}


@dataclass(frozen=True)
class Extreme:
    """A query of a run: where it stands, and its AP in percent before and after."""

    dataset: str
    setup: str
    id: str
    positives: int
    before: float
    after: float


def find_extremes(results: Mapping[str, Any], count: int = EXTREMES) -> tuple[list[Extreme], list[Extreme]]:
    """The largest gains and the largest losses of the best expansion over all data sets, each in its first setup."""
    label, seen, found = best_expansion(results)["label"], set(), []
    for table in results["per_query"]:
        if table["dataset"] not in seen:
            seen.add(table["dataset"])
            found += [
                Extreme(table["dataset"], table["setup"], *line)
                for line in zip(table["ids"], table["positives"], table["before"], table["after"].get(label, ()))
            ]
    ordered = sorted(found, key=lambda each: each.before - each.after)
    gains = [each for each in ordered[:count] if each.after > each.before]
    return gains, [each for each in ordered[::-1][:count] if each.after < each.before]


def make_examples(results: Mapping[str, Any], datasets: Sequence[Dataset], images: Sequence[str]) -> Examples:
    """Search for the extreme queries again, before and after, and fetch the pictures."""
    gains, losses = find_extremes(results)
    thumbnails = Thumbnails(images)
    step = dict(best_expansion(results)["qe"])
    method, k = create(step.pop("method"), **{name: value for name, value in step.items() if name != "k"}), step["k"]
    cards: dict[Extreme, Card] = {}
    for dataset in datasets:
        mine = [each for each in (*gains, *losses) if each.dataset == dataset.name]
        if mine:
            cards |= _cards(OpenedDataset.open(dataset), mine, method, k, thumbnails)
    groups = tuple(
        (title, tuple((each.dataset, cards[each]) for each in found))
        for title, found in (("Largest gains", gains), ("Largest losses", losses))
        if found
    )
    return Examples(groups, tuple(thumbnails.encoded(PICTURE_BYTES) or ()))


def _cards(
    inputs: OpenedDataset, found: Sequence[Extreme], method: Any, k: int, thumbnails: Thumbnails
) -> dict[Extreme, Card]:
    place = {name: number for number, name in enumerate(inputs.queries.ids())}
    numbers = np.array([place[each.id] for each in found])
    index, xq = StoredIndex([inputs.database]), inputs.queries.gather(numbers).astype(np.float32)
    exclude = None if inputs.exclude is None else inputs.exclude[numbers]
    shown = min(RESULTS, index.rows - (exclude is not None))
    expanded = expand_queries(index, xq, method, k, exclude=exclude)
    weights = [
        {row: weight for row, weight in zip(rows, given) if row >= 0}
        for rows, given in zip(expanded.rows[:, 1 : 1 + k].tolist(), expanded.weights[:, 1 : 1 + k].tolist())
    ]
    lists: list[tuple[str, Found]] = [
        ("before", nearest(index, xq, shown, exclude)),
        ("after", nearest(index, expanded.vectors, shown, exclude)),
    ]
    shown_rows = np.unique(np.concatenate([ids[ids >= 0] for _, (_, ids) in lists]))
    names = dict(zip(shown_rows.tolist(), inputs.database.gather_ids(shown_rows)))
    cards = {}
    for at, each in enumerate(found):
        setup = next(one for one in inputs.truth.setups if one.name == each.setup)
        sides = tuple(
            (title, _tiles(inputs, int(numbers[at]), ids[at], scores[at], names, weights[at], setup, thumbnails))
            for title, (scores, ids) in lists
        )
        cards[each] = Card(
            int(numbers[at]), each.id, thumbnails.get(each.id), each.positives, each.after, each.before, sides
        )
    return cards


def _tiles(
    inputs: OpenedDataset,
    query: int,
    rows: np.ndarray,
    scores: np.ndarray,
    names: Mapping[int, str],
    weights: Mapping[int, float],
    setup: Setup,
    thumbnails: Thumbnails,
) -> tuple[Tile, ...]:
    marks = marks_of(inputs.truth, query, rows.astype(np.int64), setup)
    return tuple(
        Tile(rank, names[row], thumbnails.get(names[row]), score, weights.get(row), mark)
        for rank, (row, score, mark) in enumerate(zip(rows.tolist(), scores.tolist(), marks), start=1)
        if row >= 0
    )


def _group_name(group: Mapping[str, Any]) -> str:
    return str(group["relevant"] or "all")


FIGURES = {"no": "", "yes": "-distractors", "cut alike": "-cut-alike"}  # how the figure of a block is called
AMONG = {"no": "no distractors", "yes": "among distractors", "cut alike": "among distractors cut to as few images"}


def blocks(results: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The groups of one width and one kind of distractors, under one title."""
    found: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for group in results["groups"]:
        found.setdefault((group["columns"], group["distractors"]), []).append(group)
    return [
        (
            f"{columns} columns, {AMONG[distractors]} ({groups[0]['sets']} set{'s' if groups[0]['sets'] > 1 else ''})",
            groups,
        )
        for (columns, distractors), groups in found.items()
    ]


def verdict(groups: Sequence[Mapping[str, Any]]) -> str:
    """What a user should read from one block, in a sentence for each learned row."""
    labels = [line["label"] for line in groups[0]["lines"] if is_learned(line["method"])]
    sentences = []
    for label in labels:
        sure = {
            _group_name(group): next(
                one for one in group["intervals"] if one["after"] == label and one["before"] == "no expansion"
            )
            for group in groups
        }
        harmed = [name for name, one in sure.items() if one["difference"] < -HARMLESS]
        helped = [name for name, one in sure.items() if one["low"] > 0]
        text = f"helps with {', '.join(helped)} relevant images" if helped else "does not clearly help anywhere"
        sentences.append(
            f"{label} {text}" + (f"; it harms with {', '.join(harmed)}." if harmed else "; it does no harm.")
        )
    return " ".join(sentences)


def density_text(results: Mapping[str, Any]) -> list[tuple[str, list[list[str]], str]]:
    """For each block a title, rows of texts with the headings first, and the verdict."""
    tables = []
    for title, groups in blocks(results):
        rows = [["mAP", *(f"{_group_name(group)} relevant" for group in groups)]]
        for number, line in enumerate(groups[0]["lines"]):
            rows.append([line["label"], *(_value(group["lines"][number]) for group in groups)])
        tables.append((f"{title}; one setting, in brackets tuned for each set", rows, verdict(groups)))
    return tables


def _value(line: Mapping[str, Any]) -> str:
    if line["one"] is None:
        return UNMEASURED
    one, tuned = f"{line['one']:.1f}", f"{line['tuned']:.1f}"
    return one if one == tuned else f"{one} ({tuned})"


def density_csv(results: Mapping[str, Any]) -> str:
    """One line for each cell of the grid and each method."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["set", "columns", "relevant", "distractors", "label", "mAP"])
    for cell in results["cells"]:
        for label, value in cell["map"].items():
            writer.writerow(
                [
                    plain_cell(cell["set"]),
                    cell["columns"],
                    cell["relevant"] or "all",
                    cell["distractors"],
                    plain_cell(label),
                    UNMEASURED if value is None else f"{value:.6f}",
                ]
            )
    return out.getvalue()


def density_illustrations(results: Mapping[str, Any]) -> list[Illustration]:
    """The figure of each block: gain over density."""
    return [
        Illustration(
            f"gain-{groups[0]['columns']}{FIGURES[groups[0]['distractors']]}",
            title,
            verdict(groups),
            (density_gains(title, groups),),
        )
        for title, groups in blocks(results)
    ]


def render_density(results: Mapping[str, Any], figures: Sequence[Illustration] | None = None) -> str:
    """Make the page of a density benchmark; figures: what `density_illustrations` gave."""
    shown = [
        {
            "title": title,
            "groups": groups,
            "verdict": figure.note,
            "figure": figure.panels[0],
            "names": [_group_name(group) for group in groups],
            "intervals": max((group["intervals"] for group in groups), key=len),
        }
        for (title, groups), figure in zip(blocks(results), figures or density_illustrations(results), strict=True)
    ]
    return PAGES.from_string(DENSITY_TEMPLATE.read_text(encoding="utf-8")).render(results=results, blocks=shown)
