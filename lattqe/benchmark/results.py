"""From cells to the paper's tables and figures: one JSON document that the report, the CSV and the screen all read."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lattqe import __version__
from lattqe.benchmark.analysis import differences, figure3, figure4, per_query, weight_profiles
from lattqe.benchmark.cells import Cell, Measured
from lattqe.benchmark.choosing import Lookup, Row, choose_rows, reported
from lattqe.benchmark.findings import findings
from lattqe.benchmark.spec import Dataset, Run, Setting
from lattqe.evaluation import Scores

FORMAT = 1


class Source(Protocol):
    """Where results come from: `cluster.benchmarking.Bench` is one."""

    def lookup(self, cell: Cell) -> Measured:
        """The result of a cell."""

    def key(self, cell: Cell) -> str:
        """The name of the file that holds it."""

    def index_seconds(self, cell: Cell) -> dict[str, float] | None:
        """What graph and augmentation of the cell's database took, where it has any and somebody wrote it down."""

    def query_ids(self, dataset: str) -> list[str]:
        """The names of a data set's queries."""


def column_name(dataset: Dataset, distractors: str | None) -> str:
    """'roxford5k' or 'roxford5k+r1m'."""
    return dataset.name if distractors is None else f"{dataset.name}+{distractors}"


def _percent(scores: Sequence[Scores]) -> dict[str, float]:
    return {one.setup: 100 * one.mean_ap for one in scores}


def _mean(values: Mapping[str, Mapping[str, float]]) -> float:
    return float(np.mean([value for setups in values.values() for value in setups.values()]))


def table3(run: Run, rows: Sequence[Row], source: Source) -> list[dict[str, Any]]:
    """Each row's mAP and mP@k for each column and setup, with their mean and the cells they come from."""
    lines = []
    for row in rows:
        cells = {column_name(*column): row.cell(*column) for column in run.columns()}
        scores = {name: reported(source.lookup(cell).scores) for name, cell in cells.items()}
        values = {name: _percent(found) for name, found in scores.items()}
        precision = {name: {one.setup: {str(k): 100 * float(value) for k, value in zip(one.ks, one.mean_precision)}
                            for one in found} for name, found in scores.items()}
        lines.append({"kind": row.kind, "method": row.method, "label": row.label, "choose": row.choose,
                      "dba": row.dba.to_dict() if row.dba else None, "qe": row.qe.to_dict() if row.qe else None,
                      "map": values, "precision": precision, "mean": _mean(values),
                      "cells": {name: source.key(cell) for name, cell in cells.items()}})
    return lines


def table2(run: Run, lookup: Lookup) -> list[dict[str, Any]]:
    """What each component is worth: trained variants on the tested sets, without distractors, and no expansion."""
    variants: list[tuple[str, Setting | None]] = [("no expansion", None)]
    variants += [(each.label, each.setting) for each in run.ablations]
    lines = []
    for label, setting in variants if run.ablations else ():
        values = {dataset.name: _percent(reported(lookup(Cell(dataset.name, None, None, setting)).scores))
                  for dataset in run.datasets_of("test")}
        lines.append({"label": label, "nqe": setting.k if setting else None, "map": values, "mean": _mean(values)})
    return lines


def cost(run: Run, rows: Sequence[Row], source: Source) -> list[dict[str, Any]]:
    """Seconds and the driver's peak memory of each cell of Table 3: of the machine that ran it, not of the method."""
    lines = []
    for row in rows:
        for column in run.columns():
            cell = row.cell(*column)
            measured = source.lookup(cell)
            lines.append({"label": row.label, "column": column_name(*column), "seconds": measured.seconds,
                          "index_seconds": source.index_seconds(cell), "peak_bytes": measured.peak_bytes})
    return lines


def assemble(run: Run, source: Source, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result of a run; `facts` are what the job knows of its inputs."""
    rows = choose_rows(run, source.lookup)
    table = table3(run, rows, source)
    return {"format": FORMAT, "title": run.title, "version": __version__, **facts,
            "table3": table, "findings": findings(table), "table2": table2(run, source.lookup),
            "differences": differences(run, rows, source.lookup), "cost": cost(run, rows, source),
            "figure3": figure3(run, rows, source.lookup), "figure4": figure4(run, rows, source.lookup),
            "weights": weight_profiles(run, rows, source.lookup),
            "per_query": per_query(run, rows, source.lookup, source.query_ids)}
