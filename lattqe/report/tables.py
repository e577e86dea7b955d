"""Tables of a run's results: cells with the best value of each column marked, for the page, for CSV, for the screen."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {"none": "No expansion", "qe": "Query expansion", "dba+qe": "Database-side augmentation + query expansion"}
CHOSEN = {"fixed": "fixed", "validation": "chosen on validation", "test": "tuned on test"}


@dataclass(frozen=True)
class Value:
    """A number of a table; `best` where it is the largest of its kind and column."""

    number: float
    best: bool = False
    trace: str = ""  # where it comes from: the key of its cell


@dataclass(frozen=True)
class Line:
    """One row of Table 3."""

    kind: str
    label: str
    setting: str
    chosen: str
    values: tuple[Value, ...]


def describe_setting(row: Mapping[str, Any]) -> str:
    """'nDBA 48, nQE 64, α 3' of one row of Table 3."""
    parts = []
    for name, part in (("nDBA", row["dba"]), ("nQE", row["qe"])):
        if part:
            parts.append(f"{name} {part['k']}")
    for name, value in (row["qe"] or {}).items():
        if name not in ("method", "k", "model"):
            parts.append(f"{'α' if name == 'alpha' else name} {value:g}")
    return ", ".join(parts)


def map_columns(table3: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(column, setup) in order, without the mean."""
    return [(column, setup) for column, setups in table3[0]["map"].items() for setup in setups]


def map_lines(table3: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Table 3 with its mean as the last value; the best of each kind and column is marked, as printed."""
    columns = map_columns(table3)
    numbers = [[row["map"][column][setup] for column, setup in columns] + [row["mean"]] for row in table3]
    lines = []
    for row, own in zip(table3, numbers):
        rivals = [other for other, its in zip(numbers, table3) if its["kind"] == row["kind"]]
        traces = [row["cells"][column] for column, _ in columns] + [""]
        values = tuple(Value(number, len(rivals) > 1 and round(number, 1) >= max(round(r[i], 1) for r in rivals), trace)
                       for i, (number, trace) in enumerate(zip(own, traces)))
        lines.append(Line(row["kind"], row["label"], describe_setting(row), CHOSEN[row["choose"]], values))
    return lines


def to_csv(results: Mapping[str, Any]) -> str:
    """One line for each number: kind, method, setting, how it was chosen, column, setup, measure, value, cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["kind", "label", "setting", "chosen", "dataset", "setup", "measure", "value", "cell"])
    for row in results["table3"]:
        start = [row["kind"], row["label"], describe_setting(row), CHOSEN[row["choose"]]]
        for column, setups in row["map"].items():
            for setup, value in setups.items():
                writer.writerow([*start, column, setup, "mAP", f"{value:.6f}", row["cells"][column]])
                for k, precision in row["precision"][column][setup].items():
                    writer.writerow([*start, column, setup, f"mP@{k}", f"{precision:.6f}", row["cells"][column]])
        writer.writerow([*start, "mean", "", "mAP", f"{row['mean']:.6f}", ""])
    return out.getvalue()


def to_text(results: Mapping[str, Any]) -> list[list[str]]:
    """Table 3 as rows of texts, headings first, for a terminal."""
    columns = map_columns(results["table3"])
    one_setup = len({setup for _, setup in columns}) == 1
    names = [column if one_setup else f"{column} {setup[0].upper()}" for column, setup in columns]
    rows = [["method", "setting", "chosen", *names, "mean"]]
    for line in map_lines(results["table3"]):
        rows.append([line.label, line.setting, line.chosen,
                     *(f"{value.number:.1f}{'*' if value.best else ''}" for value in line.values)])
    return rows
