"""From cells to the paper's tables and figures: one JSON document that the report, the CSV and the screen all read.

With what lies behind the table: confidence, trends over nQE, regimes, weights by rank, single queries.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lattqe import __version__
from lattqe.benchmark.cells import Cell, Measured
from lattqe.benchmark.choosing import (
    Lookup,
    Row,
    choose_rows,
    column_name,
    mean_map,
    mean_of,
    regime_setting,
    reported,
    sweep,
    sweep_lines,
    tried_on,
)
from lattqe.benchmark.spec import Dataset, Pipeline, Run, Setting, describe_steps, is_learned
from lattqe.datasets.revisited import published_scores
from lattqe.evaluation import Scores
from lattqe.evaluation.analysis import paired_bootstrap, regimes

WEIGHTS_K = 64  # neighbors whose weights are shown, the paper's nQE, where the methods can take that many
FORMAT = 1


def differences(run: Run, rows: Sequence[Row], lookup: Lookup) -> list[dict[str, Any]]:
    """Paired bootstrap intervals: every method against no expansion, what is learned against its rivals."""
    pairs = [(rows[0], row) for row in rows[1:]]
    ours = [row for row in rows if is_learned(row.method)]
    pairs += [
        (rival, our) for our in ours for rival in rows if _rivals(rival.kind, our.kind) and not is_learned(rival.method)
    ]
    found = []
    for before, after in pairs:
        both = [each for each in run.columns() if all(lookup(row.cell(*each)).scores for row in (before, after))]
        if not both:
            continue
        sides = [_by_queries(both, row, lookup) for row in (before, after)]
        content = paired_bootstrap(sides[0], sides[1], samples=run.bootstrap).to_dict()
        percent = {name: 100 * content[name] for name in ("difference", "low", "high")}
        found.append({"before": before.label, "after": after.label, "kind": after.kind, **content, **percent})
    return found


def _rivals(kind: str, ours: str) -> bool:
    """Whether a row is compared with ours: of its own kind, and for augmented databases those on the whole graph."""
    return kind == ours or (kind == "graph" and ours == "dba+qe")


def _by_queries(columns: Sequence[tuple[Dataset, str | None]], row: Row, lookup: Lookup) -> list[list[Scores]]:
    """The scores of a row, those over the same queries together, so that they are resampled alike."""
    together: dict[str, list[Scores]] = {}
    for dataset, distractors in columns:
        together.setdefault(dataset.name, []).extend(reported(lookup(row.cell(dataset, distractors)).scores))
    return list(together.values())


def figure3(run: Run, rows: Sequence[Row], lookup: Lookup) -> dict[str, Any]:
    """Mean mAP on the tested sets, without distractors, over nQE; the other parameters as chosen."""
    tested = run.datasets_of("test")
    series = [
        {
            "label": label,
            "method": method,
            "nqe": [setting.k for setting in settings],
            "map": [mean_map(lookup, tested, Pipeline(qe=setting)) for setting in settings],
        }
        for label, method, settings in sweep_lines(run, rows)
    ]
    return {"no_qe": mean_map(lookup, tested, Pipeline()), "series": series}


def figure4(run: Run, rows: Sequence[Row], lookup: Lookup) -> dict[str, Any]:
    """Relative gain in three groups of queries, by number of positives and by AP before expansion.

    In a run beside the paper, `published` has the paper's bars by method.
    """
    tested = run.datasets_of("test")
    result: dict[str, Any] = {"by_positives": {}, "by_ap_before": {}}
    if not any(row.kind == "qe" for row in rows):
        return result
    before = _pooled(lookup, tested, None)
    after = {row.label: _pooled(lookup, tested, regime_setting(run, row)) for row in rows if row.kind == "qe"}
    for setup, (ap, positives) in before.items():
        for name, by, unit in (("by_positives", positives, 1), ("by_ap_before", ap, 100)):
            groups = {row.label: regimes(ap, after[row.label][setup][0], by) for row in rows if row.kind == "qe"}
            some = next(iter(groups.values()))
            series = [
                {
                    "label": row.label,
                    "method": row.method,
                    "relative": [100 * group.relative for group in groups[row.label]],
                }
                for row in rows
                if row.kind == "qe"
            ]
            result[name][setup] = {
                "level": [unit * group.level for group in some],
                "queries": [group.queries for group in some],
                "series": series,
                "published": _published_bars(name, setup) if run.published else {},
            }
    return result


def _published_bars(name: str, setup: str) -> dict[str, list[float]]:
    """The paper's relative gains by method, in percent."""
    return published_scores()["figure4"][name].get(setup, {}).get("relative", {})


def _pooled(
    lookup: Lookup, datasets: Sequence[Dataset], qe: Setting | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """AP and number of positives of all queries that have any, over some data sets, by setup."""
    parts: dict[str, list[Scores]] = {}
    for dataset in datasets:
        for one in reported(lookup(Cell(dataset.name, None, None, qe)).scores):
            if one.evaluated.any():
                parts.setdefault(one.setup, []).append(one)
    return {
        setup: (
            np.concatenate([one.ap[one.evaluated] for one in found]),
            np.concatenate([one.positives[one.evaluated] for one in found]),
        )
        for setup, found in parts.items()
    }


def weight_profiles(run: Run, rows: Sequence[Row], lookup: Lookup) -> dict[str, Any]:
    """Weights by rank of all methods, for one number of neighbors, on the data set that shows most about them.

    That is the one whose lists hold relevant and irrelevant neighbors most evenly; elsewhere one of the two lines would
    be made of a handful of images.
    """
    expanding = [row for row in rows if sweep(run, row)]
    takes = [{setting.k for setting in sweep(run, row)} for row in expanding]
    common = set.intersection(*takes) if takes else set()
    if not common:
        return {"dataset": "", "k": 0, "profiles": []}
    k = min(common, key=lambda each: (abs(each - WEIGHTS_K), each))

    def profile(row: Row, dataset: Dataset) -> dict[str, Any]:
        setting = next(setting for setting in sweep(run, row) if setting.k == k)
        return lookup(Cell(dataset.name, None, None, setting)).weights or {}

    def imbalance(dataset: Dataset) -> float:
        counts = {kind: sum(found["count"]) for kind, found in profile(expanding[0], dataset).items()}
        return abs(0.5 - counts["relevant"] / max(sum(counts.values()), 1))

    best = min(run.datasets_of("test"), key=imbalance)
    return {
        "dataset": best.name,
        "k": k,
        "profiles": [{"label": row.label, "method": row.method, **profile(row, best)} for row in expanding],
    }


def per_query(run: Run, rows: Sequence[Row], lookup: Lookup, ids: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    """AP of every query that has positives before and after, for each tested data set and setup, no distractors."""
    tables = []
    for dataset in run.datasets_of("test"):
        names = ids(dataset.name)
        for number, one in enumerate(reported(lookup(rows[0].cell(dataset)).scores)):
            kept = np.flatnonzero(one.evaluated)
            measured = {row.label: reported(lookup(row.cell(dataset)).scores) for row in rows[1:]}
            after = {label: scores[number].ap[kept] for label, scores in measured.items() if scores}
            tables.append(
                {
                    "dataset": dataset.name,
                    "setup": one.setup,
                    "ids": [names[query] for query in kept],
                    "positives": one.positives[kept].tolist(),
                    "before": (100 * one.ap[kept]).tolist(),
                    "after": {label: (100 * ap).tolist() for label, ap in after.items()},
                }
            )
    return tables


class ResultSource(Protocol):
    """Where results come from: `cluster.benchmark.Bench` is one."""

    def lookup(self, cell: Cell) -> Measured:
        """The result of a cell."""

    def key(self, cell: Cell) -> str:
        """The name of the file that holds it."""

    def index_seconds(self, cell: Cell) -> dict[str, float] | None:
        """What graph and augmentation of the cell's database took, where it has any and that was written down."""

    def query_ids(self, dataset: str) -> list[str]:
        """The names of a data set's queries."""

    def sizes(self, dataset: str) -> tuple[int, int]:
        """Rows and queries of a data set."""


def _percent(scores: Sequence[Scores]) -> dict[str, float]:
    return {one.setup: 100 * one.mean_ap for one in scores}


def _mean(values: Mapping[str, Mapping[str, float]]) -> float | None:
    return mean_of([value for setups in values.values() for value in setups.values() or (None,)])


def table3(run: Run, rows: Sequence[Row], source: ResultSource) -> list[dict[str, Any]]:
    """Each row's mAP and mP@k for each column and setup, with their mean and the cells they come from.

    A column that has too many rows for the row's method has no setups.
    """
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
                **_described(row),
                "map": values,
                "precision": precision,
                "mean": _mean(values),
                "cells": {name: source.key(cell) for name, cell in cells.items()},
            }
        )
    return lines


def _described(row: Row) -> dict[str, Any]:
    """What every table says of a row beside its numbers."""
    named = {"kind": row.kind, "method": row.method, "label": row.label, "choose": row.choose}
    return {**named, **describe_steps(row.pipeline)}


def table2(run: Run, lookup: Lookup) -> list[dict[str, Any]]:
    """What each component contributes: trained variants on the tested sets, without distractors, and no expansion."""
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


def cost(run: Run, rows: Sequence[Row], source: ResultSource) -> list[dict[str, Any]]:
    """Seconds and the driver's peak memory of each cell of Table 3: of the machine that ran it, not of the method."""
    lines = []
    for row in rows:
        for column in run.columns():
            cell = row.cell(*column)
            measured = source.lookup(cell)
            if not measured.scores:
                continue
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


def everything(run: Run, rows: Sequence[Row], source: ResultSource) -> list[dict[str, Any]]:
    """Every row on every tested set without distractors: with its one setting, and with the best one for each set.

    `tuned` is what a row reaches where each set may choose among all settings that were tried on test; rows that were
    not tuned there have their one setting.
    """
    lines = []
    tested = run.datasets_of("test")
    for row in rows:
        values = {dataset.name: tried_on(dataset, (row.pipeline,), source.lookup)[0] for dataset in tested}
        best = {dataset.name: tried_on(dataset, row.tried, source.lookup) for dataset in tested}
        lines.append(
            {
                **_described(row),
                "map": values,
                "mean": mean_of(list(values.values())),
                "tried": len(row.tried),
                "tuned": {name: found[0] for name, found in best.items()},
                "tuned_mean": mean_of([found[0] for found in best.values()]),
                "tuned_settings": {name: describe_steps(found[1]) for name, found in best.items()},
                **_per_million(row, tested, source),
            }
        )
    return lines


def _per_million(row: Row, tested: Sequence[Dataset], source: ResultSource) -> dict[str, float]:
    """Seconds for a million rows beside the neighbor graph, and milliseconds for a query.

    The graph is shared by all that do not adapt the rows; an adaptation belongs to the row that uses it.
    """
    rows, queries, making, asking = 0, 0, 0.0, 0.0
    for dataset in tested:
        cell = row.cell(dataset)
        seconds = source.lookup(cell).seconds
        if not seconds:
            continue
        sizes = source.sizes(dataset.name)
        rows, queries = rows + sizes[0], queries + sizes[1]
        index = source.index_seconds(cell) or {}
        making += index.get("adapt", 0.0) + index.get("augment", 0.0) + seconds.get("prepare", 0.0)
        asking += sum(seconds.get(name, 0.0) for name in ("search", "expand", "rank"))
    per_query = 1e3 * asking / max(queries, 1)
    return {"seconds_per_million_rows": 1e6 * making / max(rows, 1), "milliseconds_per_query": per_query}


def assemble(run: Run, source: ResultSource, facts: Mapping[str, Any]) -> dict[str, Any]:
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

    All are about the mean over the table's columns, or over those that a rival was measured on.
    """
    by_kind: dict[str, list[Mapping[str, Any]]] = {"none": [], "qe": [], "dba+qe": [], "graph": []}
    for row in table:
        by_kind[row["kind"]].append(row)
    plain, queries, both, graph = by_kind["none"][0], by_kind["qe"], by_kind["dba+qe"], by_kind["graph"]
    found = [_all("every query expansion is better than none", queries, lambda row: row["mean"] > plain["mean"])]
    found += _leads("LAttQE is the best query expansion", queries)
    alone = {row["method"]: row["mean"] for row in queries}
    if both:
        gaining = "every method gains by augmenting the database too"
        found.append(_all(gaining, both, lambda row: row["mean"] > alone[row["method"]]))
        found += _leads("LAttDBA + LAttQE is the best of all", [*both, *queries, *graph])
    if graph:
        found += _leads(
            "LAttDBA + LAttQE is better than diffusion and propagation",
            [*(row for row in both if is_learned(row["method"])), *graph],
        )
    return found


def _all(claim: str, rows: Sequence[Mapping[str, Any]], test: Any) -> dict[str, Any]:
    failing = [row["label"] for row in rows if not test(row)]
    return {"claim": claim, "holds": not failing, "detail": f"not {', '.join(failing)}" if failing else ""}


def _leads(claim: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whether the best learned row, hops or none, leads; nothing where there are no rivals, or it was not measured."""
    ours = [row for row in rows if is_learned(row["method"])]
    rivals = [row for row in rows if not is_learned(row["method"]) and any(row["map"].values())]
    if not ours or not rivals:
        return []
    best = max(ours, key=lambda row: row["mean"])
    pairs = [(_mean_where(best, rival), _mean_where(rival, rival), rival) for rival in rivals]
    own, theirs, rival = max(pairs, key=lambda pair: pair[1] - pair[0])
    where = "" if all(rival["map"].values()) else ", on the columns that it was measured on"
    detail = f"{best['label']} {own:.1f}, {rival['label']} {theirs:.1f}{where}"
    return [{"claim": claim, "holds": own > theirs, "detail": detail}]


def _mean_where(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """A row's mean over the columns that another was measured on."""
    columns = [column for column, setups in other["map"].items() if setups]
    return float(np.mean([value for column in columns for value in row["map"][column].values()]))
