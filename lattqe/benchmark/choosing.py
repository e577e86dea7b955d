"""Which cells a run needs, in which order, and which setting of each method its table shows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lattqe.benchmark.cells import ADAPTED, Cell, Measured, largest_k
from lattqe.benchmark.spec import GRAPH_METHODS, Candidate, Dataset, GraphCandidate, Pipeline, Run, Setting
from lattqe.evaluation import Scores
from lattqe.store import FeatureSet

# The paper reports Medium and Hard, because Easy is saturated; the label protocol has one setup.
LEFT_OUT = ("easy",)

Lookup = Callable[[Cell], Measured]


@dataclass(frozen=True)
class Row:
    """One line of Table 3: a method with the setting that was chosen for it, and how it was chosen."""

    kind: str  # "none", "qe", "dba+qe" or "graph"
    method: str
    label: str
    pipeline: Pipeline
    choose: str
    tried: tuple[Pipeline, ...]  # what it was chosen from, all of it measured on the sets that decided

    def with_pipeline(self, pipeline: Pipeline) -> "Row":
        """The same line with another setting."""
        return replace(self, pipeline=pipeline)

    def cell(self, dataset: Dataset, distractors: str | None = None) -> Cell:
        """The cell of this row for a data set."""
        return cell_of(dataset, self.pipeline, distractors)


def cell_of(dataset: Dataset, pipeline: Pipeline, distractors: str | None = None) -> Cell:
    """The cell of a data set under some pipeline."""
    return Cell(dataset.name, distractors, pipeline.dba, pipeline.qe, pipeline.rank)


def column_name(dataset: Dataset, distractors: str | None) -> str:
    """'roxford5k' or 'roxford5k+r1m'."""
    return dataset.name if distractors is None else f"{dataset.name}+{distractors}"


NO_EXPANSION = Row("none", "none", "no expansion", Pipeline(), "fixed", (Pipeline(),))


def reported(scores: Sequence[Scores]) -> list[Scores]:
    """The setups that tables show and means are taken over."""
    return [one for one in scores if one.setup not in LEFT_OUT]


def mean_map(lookup: Lookup, datasets: Sequence[Dataset], pipeline: Pipeline) -> float:
    """Mean mAP in percent over all reported setups of some data sets, without distractors, as far as measured."""
    values = [one.mean_ap for dataset in datasets for one in reported(lookup(cell_of(dataset, pipeline)).scores)]
    return 100 * float(np.mean(values)) if values else -np.inf


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of some values; None where one was not measured: the others' would stand beside means of all."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def tried_on(dataset: Dataset, pipelines: Sequence[Pipeline], lookup: Lookup) -> tuple[float | None, Pipeline]:
    """The best of some pipelines on one set, mean over its setups in percent; the first of equals.

    None: the set has too many rows for them.
    """
    found = [(mean_map(lookup, [dataset], each), each) for each in pipelines]
    best = max(found, key=lambda pair: pair[0])
    return (best[0] if np.isfinite(best[0]) else None), best[1]


def judges(run: Run, method: Candidate | GraphCandidate) -> list[Dataset]:
    """The data sets that decide the settings of a method."""
    return run.datasets_of("validation" if method.choose == "validation" else "test")


def qe_row(run: Run, lookup: Lookup, method: Candidate) -> Row:
    """The line of a method for queries against the original database."""
    pipelines = [Pipeline(qe=setting) for setting in method.qe_settings()]
    return _best(run, lookup, method, "qe", method.label, pipelines, grid=len(pipelines) > 1)


def dba_row(run: Run, lookup: Lookup, method: Candidate) -> Row:
    """The line of a method for queries and database, with the parameters that were settled for queries."""
    pipelines = dba_pipelines(run, lookup, method)
    grid = len(pipelines) > 1 or len(method.variants()) > 1
    return _best(run, lookup, method, "dba+qe", method.dba_label, pipelines, grid)


def graph_row(run: Run, lookup: Lookup, method: GraphCandidate) -> Row:
    """The line of a method on the whole graph."""
    return _best(run, lookup, method, "graph", method.label, method.pipelines, grid=len(method.pipelines) > 1)


def dba_pipelines(run: Run, lookup: Lookup, method: Candidate) -> list[Pipeline]:
    """The settings of database and queries to choose from."""
    if method.own_dba:
        return [Pipeline(*pair) for params in method.variants() for pair in method.dba_settings(params)]
    settled = qe_row(run, lookup, method).pipeline.qe if len(method.variants()) > 1 else method.qe_settings()[0]
    return [Pipeline(*pair) for pair in method.dba_settings(settled.params)] if settled is not None else []


def _best(
    run: Run,
    lookup: Lookup,
    method: Candidate | GraphCandidate,
    kind: str,
    label: str,
    pipelines: Sequence[Pipeline],
    grid: bool,
) -> Row:
    choose = method.choose if grid or method.choose == "model" else "fixed"
    best = pipelines[0]
    if len(pipelines) > 1:  # the first of equals: a function of the grid's order, not of rounding in some sort
        best = max(pipelines, key=lambda pipeline: mean_map(lookup, judges(run, method), pipeline))
    return Row(kind, method.method, label, best, choose, tuple(pipelines) if choose == "test" else (best,))


def choose_rows(run: Run, lookup: Lookup) -> list[Row]:
    """All lines of Table 3: no expansion, queries, database and queries, the whole graph."""
    return [
        NO_EXPANSION,
        *(qe_row(run, lookup, method) for method in run.methods),
        *(dba_row(run, lookup, method) for method in run.methods if method.ndba),
        *(graph_row(run, lookup, method) for method in run.graph_methods),
    ]


def sweep(run: Run, row: Row) -> list[Setting]:
    """The settings of figure 3 for one line: other numbers of neighbors, as far as the method can take them."""
    qe = row.pipeline.qe
    if row.kind != "qe" or qe is None:
        return []
    most = largest_k(qe)
    return [Setting(row.method, k, qe.params) for k in run.nqe_sweep if most is None or k <= most]


def sweep_lines(run: Run, rows: Sequence[Row]) -> list[tuple[str, str, list[Setting]]]:
    """The lines of figure 3: label, method and settings; those of the table, then further ones that the run names."""
    lines = [(row.label, row.method, sweep(run, row)) for row in rows]
    taken = {(settings[0].method, settings[0].params) for _, _, settings in lines if settings}
    lines += [
        (label, kept.method, [replace(kept, k=k) for k in run.nqe_sweep])
        for label, kept in run.more_sweeps
        if (kept.method, kept.params) not in taken
    ]
    return [line for line in lines if line[2]]


def regime_setting(run: Run, row: Row) -> Setting | None:
    """The setting of a line in figure 4: what the run names for its method, as far as the method can take it."""
    qe = row.pipeline.qe
    named = next((each for each in run.regime_settings if qe is not None and each.method == qe.method), None)
    if qe is None or named is None:
        return qe
    most = largest_k(qe)
    params = tuple(sorted((dict(qe.params) | dict(named.params)).items()))
    return Setting(qe.method, named.k if most is None else min(named.k, most), params)


def missing_cells(run: Run, lookup: Lookup, is_missing: Callable[[Cell], bool]) -> list[Cell]:
    """The cells to measure next, none at the end; each step may depend on the results of those before it.

    First no expansion, which tells whether the features are what they should be; then what settles the queries'
    parameters, then the database's; then everything that is shown.
    """
    for step in (_plain_cells, _qe_grid, _dba_grid, _graph_grid, _shown_cells):
        cells = [cell for cell in dict.fromkeys(step(run, lookup)) if is_missing(cell)]
        if cells:
            return cells
    return []


def _plain_cells(run: Run, lookup: Lookup) -> Iterable[Cell]:
    yield from (NO_EXPANSION.cell(dataset) for dataset in run.datasets_of("test"))


def _qe_grid(run: Run, lookup: Lookup) -> Iterable[Cell]:
    for method in run.methods:
        settings = method.qe_settings()
        if len(settings) > 1:
            yield from (
                Cell(dataset.name, None, None, setting) for dataset in judges(run, method) for setting in settings
            )


def _dba_grid(run: Run, lookup: Lookup) -> Iterable[Cell]:
    for method in run.methods:
        pipelines = dba_pipelines(run, lookup, method) if method.ndba else []
        if len(pipelines) > 1:
            yield from (cell_of(dataset, each) for dataset in judges(run, method) for each in pipelines)


def _graph_grid(run: Run, lookup: Lookup) -> Iterable[Cell]:
    for method in run.graph_methods:
        if len(method.pipelines) > 1:
            yield from (cell_of(dataset, each) for dataset in judges(run, method) for each in method.pipelines)


def _shown_cells(run: Run, lookup: Lookup) -> Iterable[Cell]:
    rows = choose_rows(run, lookup)
    tested = run.datasets_of("test")
    yield from (row.cell(dataset, distractors) for dataset, distractors in run.columns() for row in rows)
    yield from (
        Cell(dataset.name, None, None, setting)
        for dataset in tested
        for _, _, settings in sweep_lines(run, rows)
        for setting in settings
    )
    yield from (
        Cell(dataset.name, None, None, regime_setting(run, row))
        for dataset in tested
        for row in rows
        if row.kind == "qe"
    )
    yield from (Cell(dataset.name, None, None, each.setting) for dataset in tested for each in run.ablations)


def rows_key(sets: Sequence[FeatureSet], dba: Setting) -> tuple[str, ...]:
    """What `finished_graphs` calls the graph of some sets, one after the other, in the space of an augmentation."""
    return (ADAPTED,) * bool(dict(dba.params).get("adapt")) + tuple(each.digest for each in sets)


def unplanned(cells: Iterable[Cell]) -> dict[str, str]:
    """What a plan of some cells leaves out, in words: methods that work on the whole graph at once."""
    steps = [step for cell in cells for step in (cell.dba, cell.rank) if step is not None]
    rivals = sorted({step.method for step in steps if step.method in GRAPH_METHODS})
    return {"not planned": f"{', '.join(rivals)}: in one process, over the whole graph"} if rivals else {}
