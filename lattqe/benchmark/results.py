"""From cells to the paper's tables and figures: one JSON document that the report, the CSV and the screen all read."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lattqe import __version__
from lattqe.benchmark.analysis import differences, figure3, figure4, per_query, weight_profiles
from lattqe.benchmark.cells import Cell, Measured
from lattqe.benchmark.choosing import Lookup, Row, cell_of, choose_rows, reported
from lattqe.benchmark.spec import Dataset, Pipeline, Run, Setting, is_learned
from lattqe.evaluation import Scores

FORMAT = 1


class Source(Protocol):
    """Where results come from: `cluster.benchmark.Bench` is one."""

    def lookup(self, cell: Cell) -> Measured:
        """The result of a cell."""

    def key(self, cell: Cell) -> str:
        """The name of the file that holds it."""

    def index_seconds(self, cell: Cell) -> dict[str, float] | None:
        """What graph and augmentation of the cell's database took, where it has any and somebody wrote it down."""

    def query_ids(self, dataset: str) -> list[str]:
        """The names of a data set's queries."""

    def sizes(self, dataset: str) -> tuple[int, int]:
        """Rows and queries of a data set."""


def column_name(dataset: Dataset, distractors: str | None) -> str:
    """'roxford5k' or 'roxford5k+r1m'."""
    return dataset.name if distractors is None else f"{dataset.name}+{distractors}"


def _percent(scores: Sequence[Scores]) -> dict[str, float]:
    return {one.setup: 100 * one.mean_ap for one in scores}


def _mean(values: Mapping[str, Mapping[str, float]]) -> float:
    return float(np.mean([value for setups in values.values() for value in setups.values()]))


def describe_steps(pipeline: Pipeline) -> dict[str, Any]:
    """{"dba": ..., "qe": ..., "rank": ...}, None where there is nothing to do."""
    steps = {"dba": pipeline.dba, "qe": pipeline.qe, "rank": pipeline.rank}
    return {name: step.to_dict() if step else None for name, step in steps.items()}


def table3(run: Run, rows: Sequence[Row], source: Source) -> list[dict[str, Any]]:
    """Each row's mAP and mP@k for each column and setup, with their mean and the cells they come from."""
    lines = []
    for row in rows:
        cells = {column_name(*column): row.cell(*column) for column in run.columns()}
        scores = {name: reported(source.lookup(cell).scores) for name, cell in cells.items()}
        values = {name: _percent(found) for name, found in scores.items()}
        precision = {
            name: {
                one.setup: {str(k): 100 * float(value) for k, value in zip(one.ks, one.mean_precision)} for one in found
            }
            for name, found in scores.items()
        }
        lines.append(
            {
                "kind": row.kind,
                "method": row.method,
                "label": row.label,
                "choose": row.choose,
                **describe_steps(row.pipeline),
                "map": values,
                "precision": precision,
                "mean": _mean(values),
                "cells": {name: source.key(cell) for name, cell in cells.items()},
            }
        )
    return lines


def table2(run: Run, lookup: Lookup) -> list[dict[str, Any]]:
    """What each component is worth: trained variants on the tested sets, without distractors, and no expansion."""
    variants: list[tuple[str, Setting | None]] = [("no expansion", None)]
    variants += [(each.label, each.setting) for each in run.ablations]
    lines = []
    for label, setting in variants if run.ablations else ():
        values = {
            dataset.name: _percent(reported(lookup(Cell(dataset.name, None, None, setting)).scores))
            for dataset in run.datasets_of("test")
        }
        lines.append({"label": label, "nqe": setting.k if setting else None, "map": values, "mean": _mean(values)})
    return lines


def cost(run: Run, rows: Sequence[Row], source: Source) -> list[dict[str, Any]]:
    """Seconds and the driver's peak memory of each cell of Table 3: of the machine that ran it, not of the method."""
    lines = []
    for row in rows:
        for column in run.columns():
            cell = row.cell(*column)
            measured = source.lookup(cell)
            lines.append(
                {
                    "label": row.label,
                    "column": column_name(*column),
                    "seconds": measured.seconds,
                    "queries": source.sizes(column[0].name)[1],
                    "index_seconds": source.index_seconds(cell),
                    "peak_bytes": measured.peak_bytes,
                }
            )
    return lines


def everything(run: Run, rows: Sequence[Row], source: Source) -> list[dict[str, Any]]:
    """Every row on every tested set without distractors: with its one setting, and with the best one for each set.

    `tuned` is what a row reaches where each set may choose among all settings that were tried on test; rows that were
    not tuned there have their one setting.
    """
    lines = []
    tested = run.datasets_of("test")
    for row in rows:
        values = {dataset.name: tried_on(dataset, (row.pipeline,), source)[0] for dataset in tested}
        best = {dataset.name: tried_on(dataset, row.tried, source) for dataset in tested}
        lines.append(
            {
                "kind": row.kind,
                "method": row.method,
                "label": row.label,
                "choose": row.choose,
                **describe_steps(row.pipeline),
                "map": values,
                "mean": float(np.mean(list(values.values()))),
                "tried": len(row.tried),
                "tuned": {name: found[0] for name, found in best.items()},
                "tuned_mean": float(np.mean([found[0] for found in best.values()])),
                "tuned_settings": {name: describe_steps(found[1]) for name, found in best.items()},
                **_per_million(row, tested, source),
            }
        )
    return lines


def tried_on(dataset: Dataset, pipelines: Sequence[Pipeline], source: Source) -> tuple[float, Pipeline]:
    """The best of some pipelines on one set, mean over its setups in percent; the first of equals."""
    found = [
        (100 * float(np.mean([one.mean_ap for one in reported(source.lookup(cell_of(dataset, each)).scores)])), each)
        for each in pipelines
    ]
    return max(found, key=lambda pair: pair[0])


def _per_million(row: Row, tested: Sequence[Dataset], source: Source) -> dict[str, float]:
    """Seconds for a million rows beside the neighbor graph, which all share, and milliseconds for a query."""
    rows, queries, making, asking = 0, 0, 0.0, 0.0
    for dataset in tested:
        cell = row.cell(dataset)
        seconds = source.lookup(cell).seconds
        sizes = source.sizes(dataset.name)
        rows, queries = rows + sizes[0], queries + sizes[1]
        making += (source.index_seconds(cell) or {}).get("augment", 0.0) + seconds.get("prepare", 0.0)
        asking += sum(seconds.get(name, 0.0) for name in ("search", "expand", "rank"))
    return {"seconds_per_million_rows": 1e6 * making / rows, "milliseconds_per_query": 1e3 * asking / queries}


def assemble(run: Run, source: Source, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result of a run; `facts` are what the job knows of its inputs."""
    rows = choose_rows(run, source.lookup)
    table = table3(run, rows, source)
    return {
        "format": FORMAT,
        "title": run.title,
        "version": __version__,
        **facts,
        "table3": table,
        "findings": findings(table),
        "table2": table2(run, source.lookup),
        "differences": differences(run, rows, source.lookup),
        "cost": cost(run, rows, source),
        "everything": everything(run, rows, source),
        "figure3": figure3(run, rows, source.lookup),
        "figure4": figure4(run, rows, source.lookup),
        "weights": weight_profiles(run, rows, source.lookup),
        "per_query": per_query(run, rows, source.lookup, source.query_ids),
    }


def findings(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The orderings of the paper's Table 3 as far as a run's rows can show them: `claim`, `holds`, `detail`.

    All are about the mean over the table's columns.
    """
    by_kind: dict[str, list[Mapping[str, Any]]] = {"none": [], "qe": [], "dba+qe": [], "graph": []}
    for row in table:
        by_kind[row["kind"]].append(row)
    plain, queries, both = by_kind["none"][0], by_kind["qe"], by_kind["dba+qe"]
    found = [_all("every query expansion is better than none", queries, lambda row: row["mean"] > plain["mean"])]
    found += _leads("LAttQE is the best query expansion", queries)
    alone = {row["method"]: row["mean"] for row in queries}
    if both:
        found.append(
            _all(
                "every method gains by augmenting the database too",
                both,
                lambda row: row["mean"] > alone[row["method"]],
            )
        )
        found += _leads("LAttDBA + LAttQE is the best of all", [*both, *queries])
    if by_kind["graph"]:
        found += _leads(
            "LAttDBA + LAttQE is better than diffusion and propagation",
            [*(row for row in both if is_learned(row["method"])), *by_kind["graph"]],
        )
    return found


def _all(claim: str, rows: Sequence[Mapping[str, Any]], test: Any) -> dict[str, Any]:
    failing = [row["label"] for row in rows if not test(row)]
    return {"claim": claim, "holds": not failing, "detail": f"not {', '.join(failing)}" if failing else ""}


def _leads(claim: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whether LAttQE's best row leads; nothing where there are no rivals, or it was not measured."""
    ours = [row for row in rows if is_learned(row["method"])]
    rivals = [row for row in rows if not is_learned(row["method"])]
    if not ours or not rivals:
        return []
    best, rival = ours[0], max(rivals, key=lambda row: row["mean"])
    detail = f"{best['label']} {best['mean']:.1f}, {rival['label']} {rival['mean']:.1f}"
    return [{"claim": claim, "holds": best["mean"] > rival["mean"], "detail": detail}]
