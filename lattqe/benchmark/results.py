"""From cells to the paper's tables and figures: one JSON document that the report, the CSV and the screen all read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lattqe import __version__
from lattqe.benchmark.cells import Cell, Measured
from lattqe.benchmark.spec import Dataset, Method, Run, Setting
from lattqe.evaluation import Scores, paired_bootstrap, regimes

FORMAT = 1
# The paper reports Medium and Hard, because Easy is saturated; the label protocol has one setup.
LEFT_OUT = ("easy",)

Lookup = Callable[[Cell], Measured]


@dataclass(frozen=True)
class Row:
    """One line of Table 3: a method with the setting that was chosen for it."""

    kind: str  # "none", "qe" or "dba+qe"
    method: str
    label: str
    dba: Setting | None
    qe: Setting | None
    choose: str


def reported(scores: Sequence[Scores]) -> list[Scores]:
    """The setups that tables show and means are taken over."""
    return [one for one in scores if one.setup not in LEFT_OUT]


def mean_map(lookup: Lookup, datasets: Sequence[Dataset], distractors: str | None, dba: Setting | None,
             qe: Setting | None) -> float:
    """Mean mAP in percent over all reported setups of some data sets."""
    values = [one.mean_ap for dataset in datasets
              for one in reported(lookup(Cell(dataset.name, distractors, dba, qe)).scores)]
    return 100 * float(np.mean(values))


def choose_rows(run: Run, lookup: Lookup) -> list[Row]:
    """Settle each method's setting: fixed, or the best of its grid on validation or on test without distractors."""
    rows = [Row("none", "none", "no expansion", None, None, "fixed")]
    for method in run.methods:
        pairs: list[tuple[Setting | None, Setting]] = [(None, setting) for setting in method.qe_settings()]
        rows.append(_best(run, lookup, method, "qe", method.label, pairs))
    for method in run.methods:
        if method.ndba:
            rows.append(_best(run, lookup, method, "dba+qe", method.dba_label, list(method.dba_settings())))
    return rows


def _best(run: Run, lookup: Lookup, method: Method, kind: str, label: str,
          pairs: Sequence[tuple[Setting | None, Setting]]) -> Row:
    if len(pairs) == 1:
        return Row(kind, method.method, label, *pairs[0], method.choose if method.choose == "fixed" else "fixed")
    datasets = run.datasets_of("validation" if method.choose == "validation" else "test")
    # The first of equals: a function of the grid's order, not of rounding in some sort.
    best = max(pairs, key=lambda pair: mean_map(lookup, datasets, None, *pair))
    return Row(kind, method.method, label, *best, method.choose)


def columns_of(run: Run) -> list[tuple[Dataset, str | None]]:
    """The columns of Table 3: each tested data set alone and with each set of distractors."""
    return [(dataset, distractors) for dataset in run.datasets_of("test")
            for distractors in (None, *(each.name for each in run.distractors_of(dataset.name)))]


def column_name(dataset: Dataset, distractors: str | None) -> str:
    """'roxford5k' or 'roxford5k+r1m'."""
    return dataset.name if distractors is None else f"{dataset.name}+{distractors}"


def table3(run: Run, rows: Sequence[Row], lookup: Lookup, key: Callable[[Cell], str]) -> list[dict[str, Any]]:
    """Each row's mAP and mP@k for each column and setup, with their mean and the cells they come from."""
    lines = []
    for row in rows:
        values: dict[str, dict[str, float]] = {}
        precision: dict[str, dict[str, dict[str, float]]] = {}
        cells = {}
        for dataset, distractors in columns_of(run):
            cell, name = Cell(dataset.name, distractors, row.dba, row.qe), column_name(dataset, distractors)
            scores = reported(lookup(cell).scores)
            values[name] = {one.setup: 100 * one.mean_ap for one in scores}
            precision[name] = {one.setup: {str(k): 100 * float(value) for k, value in zip(one.ks, one.mean_precision)}
                               for one in scores}
            cells[name] = key(cell)
        mean = float(np.mean([value for setups in values.values() for value in setups.values()]))
        lines.append({"kind": row.kind, "method": row.method, "label": row.label, "choose": row.choose,
                      "dba": row.dba.to_dict() if row.dba else None, "qe": row.qe.to_dict() if row.qe else None,
                      "map": values, "precision": precision, "mean": mean, "cells": cells})
    return lines


def table2(run: Run, lookup: Lookup) -> list[dict[str, Any]]:
    """What each component is worth: trained variants on the tested sets, without distractors, and no expansion."""
    variants = [("no expansion", None), *((each.label, each.setting) for each in run.ablations)]
    lines = []
    for label, setting in variants if run.ablations else ():
        values = {dataset.name: {one.setup: 100 * one.mean_ap for one in reported(
            lookup(Cell(dataset.name, None, None, setting)).scores)} for dataset in run.datasets_of("test")}
        mean = float(np.mean([value for setups in values.values() for value in setups.values()]))
        lines.append({"label": label, "map": values, "mean": mean})
    return lines


def cost(run: Run, rows: Sequence[Row], lookup: Lookup) -> list[dict[str, Any]]:
    """Seconds and peak memory of the driver for each cell of Table 3; of the machine that ran it, not of the method."""
    return [{"label": row.label, "column": column_name(dataset, distractors), "seconds": measured.seconds,
             "peak_bytes": measured.peak_bytes}
            for row in rows for dataset, distractors in columns_of(run)
            for measured in [lookup(Cell(dataset.name, distractors, row.dba, row.qe))]]


def differences(run: Run, rows: Sequence[Row], lookup: Lookup) -> list[dict[str, Any]]:
    """Paired bootstrap intervals: every method against no expansion, and LAttQE against every rival of its kind."""
    pairs = [(rows[0], row) for row in rows[1:]]
    ours = [row for row in rows if row.method == "lattqe"]
    pairs += [(rival, our) for our in ours for rival in rows if rival.kind == our.kind and rival.method != "lattqe"]
    found = []
    for before, after in pairs:
        sides = [[reported(lookup(Cell(dataset.name, distractors, row.dba, row.qe)).scores)
                  for dataset, distractors in columns_of(run)] for row in (before, after)]
        interval = paired_bootstrap(sides[0], sides[1], samples=run.bootstrap)
        content = interval.to_dict()
        percent = {name: 100 * content[name] for name in ("difference", "low", "high")}
        found.append({"before": before.label, "after": after.label, "kind": after.kind, **content, **percent})
    return found


def figure3(run: Run, rows: Sequence[Row], lookup: Lookup) -> dict[str, Any]:
    """Mean mAP on the tested sets, without distractors, over nQE; the other parameters as chosen."""
    tested = run.datasets_of("test")
    series = []
    for row in rows:
        if row.kind == "qe" and row.qe is not None:
            values = [mean_map(lookup, tested, None, None, Setting(row.method, k, row.qe.params))
                      for k in run.nqe_sweep]
            series.append({"label": row.label, "method": row.method, "map": values})
    return {"nqe": list(run.nqe_sweep), "no_qe": mean_map(lookup, tested, None, None, None), "series": series}


def figure4(run: Run, rows: Sequence[Row], lookup: Lookup) -> dict[str, Any]:
    """Relative gain in three groups of queries, by number of positives and by AP before expansion."""
    tested = run.datasets_of("test")
    before = _pooled(lookup, tested, None)
    result: dict[str, Any] = {"by_positives": {}, "by_ap_before": {}}
    for setup, (ap, positives) in before.items():
        for name, by in (("by_positives", positives), ("by_ap_before", ap)):
            series, level = [], []
            for row in rows:
                if row.kind == "qe":
                    groups = regimes(ap, _pooled(lookup, tested, row.qe)[setup][0], by)
                    level = [group.level * (100 if name == "by_ap_before" else 1) for group in groups]
                    series.append({"label": row.label, "method": row.method,
                                   "relative": [100 * group.relative for group in groups]})
            result[name][setup] = {"level": level, "series": series}
    return result


def _pooled(lookup: Lookup, datasets: Sequence[Dataset],
            qe: Setting | None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """AP and number of positives of all queries that have any, over some data sets, by setup."""
    parts: dict[str, list[Scores]] = {}
    for dataset in datasets:
        for one in reported(lookup(Cell(dataset.name, None, None, qe)).scores):
            parts.setdefault(one.setup, []).append(one)
    return {setup: (np.concatenate([one.ap[one.evaluated] for one in found]),
                    np.concatenate([one.positives[one.evaluated] for one in found]))
            for setup, found in parts.items()}


def per_query(run: Run, rows: Sequence[Row], lookup: Lookup) -> list[dict[str, Any]]:
    """AP of every query before and after, for each tested data set and setup without distractors."""
    tables = []
    for dataset in run.datasets_of("test"):
        before = reported(lookup(Cell(dataset.name, None, None, None)).scores)
        for number, one in enumerate(before):
            after = {row.label: reported(lookup(Cell(dataset.name, None, row.dba, row.qe)).scores)[number].ap
                     for row in rows if row.kind != "none"}
            tables.append({"dataset": dataset.name, "setup": one.setup, "positives": one.positives.tolist(),
                           "before": (100 * one.ap).tolist(),
                           "after": {label: (100 * ap).tolist() for label, ap in after.items()}})
    return tables


def assemble(run: Run, lookup: Lookup, key: Callable[[Cell], str], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result of a run; `facts` are what the job knows of its inputs."""
    rows = choose_rows(run, lookup)
    first = run.datasets_of("test")[0].name
    weights = [{"label": row.label, "method": row.method, **(lookup(Cell(first, None, None, row.qe)).weights or {})}
               for row in rows if row.kind == "qe"]
    return {"format": FORMAT, "title": run.title, "version": __version__, **facts,
            "table3": table3(run, rows, lookup, key), "table2": table2(run, lookup),
            "differences": differences(run, rows, lookup), "cost": cost(run, rows, lookup),
            "figure3": figure3(run, rows, lookup), "figure4": figure4(run, rows, lookup),
            "weights": {"dataset": first, "profiles": weights}, "per_query": per_query(run, rows, lookup)}
