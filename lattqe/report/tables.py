"""Tables of a run's results: cells with the best value of each column marked, for the page, for CSV, for the screen."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lattqe.benchmark.spec import GRAPH_METHODS
from lattqe.expansion import METHODS
from lattqe.store.export import plain_cell

KINDS = {
    "none": "No expansion",
    "qe": "Query expansion",
    "dba+qe": "Database-side augmentation + query expansion",
    "graph": "The whole graph: diffusion and propagation",
}
CHOSEN = {
    "fixed": "fixed",
    "validation": "chosen on validation",
    "test": "tuned on test",
    "model": "chosen on validation, in training",
}
SHORT = {"fixed": "fixed", "validation": "on val.", "test": "on test", "model": "on val."}


@dataclass(frozen=True)
class Value:
    """A number of a table; `best` where it is the largest of its kind and column; `paper` is the published one."""

    number: float
    best: bool = False
    trace: str = ""  # where it comes from: the key of its cell
    paper: float | None = None


@dataclass(frozen=True)
class Line:
    """One row of Table 3."""

    kind: str
    label: str
    method: str
    setting: str
    chosen: str
    values: tuple[Value, ...]


def setting_parts(row: Mapping[str, Any]) -> dict[str, str]:
    """{'nDBA': '48', 'nQE': '64', 'α': '3'} of one row of Table 3; parameters by the symbols their methods give."""
    parts: dict[str, str] = {}
    for name, step in (("nDBA", row["dba"]), ("nQE", row["qe"]), ("", row["rank"])):
        if step is None:
            continue
        of = GRAPH_METHODS.get(step["method"]) or METHODS[step["method"]]
        known = of.parameters()
        first = next(iter(known.values())).symbol if step["method"] in GRAPH_METHODS else name
        parts[first] = str(step["k"])
        parts |= {"hops": str(step["hops"])} if "hops" in step else {}
        parts |= {
            known[key].symbol: value if isinstance(value, str) else f"{value:g}"
            for key, value in step.items()
            if key in known and not known[key].address and (name != "nDBA" or step["method"] in GRAPH_METHODS)
        }
    return parts


def describe_setting(row: Mapping[str, Any]) -> str:
    """'nDBA 48, nQE 64, α 3' of one row of Table 3."""
    return ", ".join(f"{name} {value}" for name, value in setting_parts(row).items())


def map_columns(table3: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(column, setup) in order, without the mean."""
    return [(column, setup) for column, setups in table3[0]["map"].items() for setup in setups]


def map_lines(table3: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]] = ()) -> list[Line]:
    """Table 3 with its mean as the last value; the best of each kind and column is marked, as printed."""
    columns = map_columns(table3)
    numbers = [[row["map"][column][setup] for column, setup in columns] + [row["mean"]] for row in table3]
    theirs = {(row["kind"], row["method"]): row for row in published}
    lines = []
    for row, own in zip(table3, numbers):
        rivals = [other for other, its in zip(numbers, table3) if its["kind"] == row["kind"]]
        best = [
            len(rivals) > 1 and round(number, 1) >= max(round(rival[i], 1) for rival in rivals)
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
        for column, setups in row["map"].items():
            for setup, value in setups.items():
                named, cell = plain_cell(column), row["cells"][column]
                writer.writerow([*start, named, setup, "mAP", f"{value:.6f}", cell])
                for k, precision in row["precision"][column][setup].items():
                    writer.writerow([*start, named, setup, f"mP@{k}", f"{precision:.6f}", cell])
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
            text.append(
                [
                    name,
                    f"{plain.values[number].number:.1f}",
                    *(f"{value.number:.1f}{'*' if value.best else ' '}" for value in values),
                ]
            )
        settings = [setting_parts(row) for row, _ in rows]
        for name in dict.fromkeys(name for parts in settings for name in parts):
            text.append([name, "", *(parts.get(name, "") for parts in settings)])
        text.append(["chosen", "", *(SHORT[row["choose"]] for row, _ in rows)])
        tables.append((f"{results['title']}: {title[0].lower()}{title[1:]}", text))
    return tables
