"""The page, the table and the figure of a density benchmark: what is gained for how many relevant images."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from lattqe.benchmark.spec import is_learned
from lattqe.report.figures import density_gains
from lattqe.report.tables import CHOSEN, describe_setting, plain_cell

TEMPLATE = Path(__file__).with_name("density.html")
HARMLESS = 0.3  # points of mAP that count as no loss


def _name(group: Mapping[str, Any]) -> str:
    return str(group["relevant"] or "all")


def blocks(results: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The groups of one width, with or without distractors, under one title."""
    found: dict[tuple[int, bool], list[Mapping[str, Any]]] = {}
    for group in results["groups"]:
        found.setdefault((group["columns"], group["crowded"]), []).append(group)
    return [
        (
            f"{columns} columns, {'among distractors' if crowded else 'no distractors'} "
            f"({groups[0]['sets']} set{'s' if groups[0]['sets'] > 1 else ''})",
            groups,
        )
        for (columns, crowded), groups in found.items()
    ]


def verdict(groups: Sequence[Mapping[str, Any]]) -> str:
    """What a user should read from one block, in a sentence for each learned row."""
    labels = [line["label"] for line in groups[0]["lines"] if is_learned(line["method"])]
    sentences = []
    for label in labels:
        sure = {
            _name(group): next(
                one for one in group["intervals"] if one["after"] == label and one["before"] == "no expansion"
            )
            for group in groups
        }
        harmed = [name for name, one in sure.items() if one["difference"] < -HARMLESS]
        helped = [name for name, one in sure.items() if one["low"] > 0]
        text = f"helps with {', '.join(helped)} relevant images" if helped else "helps nowhere for sure"
        sentences.append(
            f"{label} {text}" + (f"; it harms with {', '.join(harmed)}." if harmed else "; it harms nowhere.")
        )
    return " ".join(sentences)


def density_text(results: Mapping[str, Any]) -> list[tuple[str, list[list[str]], str]]:
    """For each block a title, rows of texts with the headings first, and the verdict."""
    tables = []
    for title, groups in blocks(results):
        rows = [["mAP", *(f"{_name(group)} relevant" for group in groups)]]
        for number, line in enumerate(groups[0]["lines"]):
            rows.append([line["label"], *(_value(group["lines"][number]) for group in groups)])
        tables.append((f"{title}; one setting, in brackets tuned for each set", rows, verdict(groups)))
    return tables


def _value(line: Mapping[str, Any]) -> str:
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
                    "yes" if cell["crowded"] else "no",
                    plain_cell(label),
                    f"{value:.6f}",
                ]
            )
    return out.getvalue()


def render_density(results: Mapping[str, Any]) -> str:
    """Make the page of a density benchmark."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    shown = [
        {
            "title": title,
            "groups": groups,
            "verdict": verdict(groups),
            "figure": density_gains(title, groups),
            "names": [_name(group) for group in groups],
        }
        for title, groups in blocks(results)
    ]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        results=results, blocks=shown, describe=describe_setting, chosen=CHOSEN, is_learned=is_learned
    )
