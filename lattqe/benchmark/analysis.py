"""What lies behind the table: confidence, trends over nQE, regimes, weights by rank, single queries."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lattqe.benchmark.cells import Cell
from lattqe.benchmark.choosing import Lookup, Row, mean_map, regime_setting, reported, sweep, sweep_lines
from lattqe.benchmark.spec import Dataset, Pipeline, Run, Setting, is_learned
from lattqe.datasets.revisited import published
from lattqe.evaluation import Scores, paired_bootstrap, regimes

WEIGHTS_K = 64  # neighbors whose weights are shown, the paper's nQE, where the methods can take so many


def differences(run: Run, rows: Sequence[Row], lookup: Lookup) -> list[dict[str, Any]]:
    """Paired bootstrap intervals: every method against no expansion, what is learned against its rivals."""
    pairs = [(rows[0], row) for row in rows[1:]]
    ours = [row for row in rows if is_learned(row.method)]
    pairs += [
        (rival, our) for our in ours for rival in rows if _rivals(rival.kind, our.kind) and not is_learned(rival.method)
    ]
    found = []
    for before, after in pairs:
        sides = [_by_queries(run, row, lookup) for row in (before, after)]
        content = paired_bootstrap(sides[0], sides[1], samples=run.bootstrap).to_dict()
        percent = {name: 100 * content[name] for name in ("difference", "low", "high")}
        found.append({"before": before.label, "after": after.label, "kind": after.kind, **content, **percent})
    return found


def _rivals(kind: str, ours: str) -> bool:
    """Whether a row is compared with ours: of its own kind, and for augmented databases those on the whole graph."""
    return kind == ours or (kind == "graph" and ours == "dba+qe")


def _by_queries(run: Run, row: Row, lookup: Lookup) -> list[list[Scores]]:
    """All scores of a row, those over the same queries together, so that they are resampled alike."""
    together: dict[str, list[Scores]] = {}
    for dataset, distractors in run.columns():
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
    return published()["figure4"][name].get(setup, {}).get("relative", {})


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
    """Weights by rank of all methods, for one number of neighbors, on the data set that tells most about them.

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
            after = {row.label: reported(lookup(row.cell(dataset)).scores)[number].ap[kept] for row in rows[1:]}
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
