"""Will it help my collection? The same sets cut to 1, 2, 4, 8, 16 and all relevant images, alone and among distractors.

What decides whether an expansion helps is how many of a query's nearest rows are right. Each labelled set is cut to m
images of every class (drawn by a fixed seed; queries are apart), alone, with the other sets' rows as distractors, and
with those of the others after they were cut alike (a collection without any large class), at several widths. Every
rival has its one best setting over all cells and is also tuned for each cell; the model has the one setting that ships
with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lattqe.benchmark.choosing import Row, choose_rows, mean_of, reported, tried_on
from lattqe.benchmark.results import ResultSource
from lattqe.benchmark.spec import (
    Candidate,
    Dataset,
    GraphCandidate,
    Params,
    Pipeline,
    Run,
    Setting,
    as_trained,
    describe_steps,
    graph_candidate,
    is_learned,
    with_hops,
)
from lattqe.datasets.labelled import PHOTO_SETS, load_photos, photos_in
from lattqe.datasets.prepare import store
from lattqe.duplicates import own_rows
from lattqe.errors import LattqeError
from lattqe.evaluation.analysis import paired_bootstrap
from lattqe.evaluation.truth import keep_of_each
from lattqe.expansion import METHODS
from lattqe.store import FeatureSet
from lattqe.store.features import comparable_labels

RELEVANT = (1, 2, 4, 8, 16, 0)  # images of each class in the database; 0: all
ALONE, WHOLE, ALIKE = "no", "yes", "cut alike"  # distractors: none, the other sets' rows, these cut to as few
SEED = 0
MOST_QUERIES = 500  # held out where a set comes without any


@dataclass(frozen=True)
class LabelledSet:
    """A database xb (n, D) with labels (n,) and ids, queries xq (nq, D) with labels and ids; labels from 0."""

    name: str
    xb: np.ndarray
    labels: np.ndarray
    ids: list[str]
    xq: np.ndarray
    query_labels: np.ndarray
    query_ids: list[str]


@dataclass(frozen=True)
class DensityCell:
    """One data set of the grid: which set, how many columns, how many relevant images (0: all), which distractors."""

    dataset: Dataset
    source: str
    columns: int
    relevant: int
    distractors: str

    @property
    def group(self) -> tuple[int, str, int]:
        """What its mean is taken over: the same cell of all sets."""
        return self.columns, self.distractors, self.relevant


def load_photo_sets(data: str | None, widths: Sequence[int]) -> list[LabelledSet]:
    """The test splits of the photographs, with so many of their columns each time."""
    with photos_in(data) as folder:
        splits = [load_photos(name, "test", folder, columns=columns) for columns in widths for name in PHOTO_SETS]
    return [
        LabelledSet(one.name, one.xb, one.labels, one.ids, one.xq, one.query_labels, one.query_ids) for one in splits
    ]


def load_own_set(features: str, queries: str | None) -> LabelledSet:
    """A user's labelled features; without queries, one image of each class that has two asks for the others."""
    stored = FeatureSet.open(features)
    asked = FeatureSet.open(queries) if queries is not None else None
    for one in (stored, asked):
        if one is not None and not one.has_labels:
            raise LattqeError(
                f"{one.uri} has no labels, so it is unknown which images are relevant: import it with --labels"
            )
    name = stored.uri.rstrip("/").rsplit("/", 1)[-1]
    xb, ids = stored.read().astype(np.float32), stored.ids()
    if asked is not None:
        if asked.dim != stored.dim:
            raise LattqeError(
                f"{asked.uri} has {asked.dim} columns, {stored.uri} has {stored.dim}: use one extractor for both"
            )
        labels, query_labels = comparable_labels(stored, asked)
        own = own_rows(stored, asked)
        kept = np.arange(stored.rows) if own is None else np.setdiff1d(np.arange(stored.rows), own)  # no queries
        if not np.isin(query_labels, labels[kept][labels[kept] >= 0]).any():
            raise LattqeError(
                f"no image of {stored.uri} that is not itself a query has the label of one in {asked.uri}: "
                "give queries of the same classes, or leave --queries out to hold some images out"
            )
        return LabelledSet(
            name,
            xb[kept],
            labels[kept],
            [ids[row] for row in kept],
            asked.read().astype(np.float32),
            query_labels,
            asked.ids(),
        )
    labels = stored.labels()
    order = np.random.default_rng(SEED).permutation(len(labels))
    classes, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    held = np.sort(order[first[(counts > 1) & (classes >= 0)]][:MOST_QUERIES])
    if not len(held):
        raise LattqeError(f"{stored.uri}: no two images have the same label: there is nothing to find")
    rest = np.setdiff1d(np.arange(len(labels)), held)
    return LabelledSet(
        name, xb[rest], labels[rest], [ids[row] for row in rest], xb[held], labels[held], [ids[row] for row in held]
    )


def cut(one: LabelledSet, relevant: int, seed: int = SEED) -> np.ndarray:
    """The rows that stay (n,), ascending: `relevant` of each class drawn by the seed, or all of a smaller class."""
    if relevant == 0:
        return np.arange(len(one.labels))
    return np.flatnonzero(keep_of_each(one.labels, relevant, seed))


SUFFIXES = {ALONE: "", WHOLE: "-crowded", ALIKE: "-alike"}  # of a cell's name


def _kinds(relevant: int) -> tuple[str, ...]:
    """The distractors that a cell of so many relevant images is measured with; whole sets cannot be cut alike."""
    return (ALONE, WHOLE, ALIKE) if relevant else (ALONE, WHOLE)


def _distractors(other: LabelledSet, relevant: int) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Rows of another set, or so many of each of its classes, with the label -1, of no class."""
    rows = cut(other, relevant)
    return other.xb[rows], [f"{other.name}/{other.ids[row]}" for row in rows], np.full(len(rows), -1, dtype=np.int32)


def make_cells(sets: Sequence[LabelledSet], folder: str, relevant: Sequence[int] = RELEVANT) -> list[DensityCell]:
    """Cut all sets and store them, each alone and with the other sets' rows as distractors."""
    cells = []
    for one in sets:
        columns = one.xb.shape[1]
        base = f"{folder.rstrip('/')}/features/{columns}"
        origin: dict[str, object] = {"density": one.name, "columns": columns, "seed": SEED}
        asked = [(one.xq, one.query_ids, one.query_labels)]
        queries = store(f"{base}/{one.name}-queries", asked, columns, origin)
        others = [other for other in sets if other is not one and other.xb.shape[1] == columns]
        for m in relevant:
            rows = cut(one, m)
            own = (one.xb[rows], [one.ids[row] for row in rows], one.labels[rows])
            for kind in _kinds(m) if others else (ALONE,):
                more = [] if kind == ALONE else [_distractors(other, m if kind == ALIKE else 0) for other in others]
                name = f"{one.name}-{columns}-{m or 'all'}{SUFFIXES[kind]}"
                database = store(
                    f"{base}/{name}", [own, *more], columns, {**origin, "relevant": m, "distractors": kind}
                )
                cells.append(DensityCell(Dataset(name, database.uri, queries.uri), one.name, columns, m, kind))
    return cells


def rivals() -> tuple[tuple[Candidate, ...], tuple[GraphCandidate, ...]]:
    """Every method without learning over a small grid that reaches from sparse to dense; and those on the graph."""
    grids: dict[str, tuple[int, ...]] = {
        "aqe": (1, 2, 4, 8),
        "aqewd": (2, 3, 5, 8, 16),
        "alphaqe": (4, 10, 36),
        "dqe": (2, 8),
    }
    pairs = {"aqewd": ((4, 12, 24), (4, 12))}
    plain = [
        Candidate(name, of.label, "test", grids.get(name, of.tries_k), *pairs.get(name, ((), ())))
        for name, of in METHODS.items()
        if not of.learned
    ]
    return tuple(plain), (*_on_graph(adapt=False), *_on_graph(adapt=True))


def _on_graph(adapt: bool) -> tuple[GraphCandidate, ...]:
    """The rivals on the whole graph, in the space of the rows or in that of the model's own index.

    The latter needs no labels either. The offline form, which takes longest by far, is measured in the former alone.
    """
    decay = METHODS["aqewd"]
    space: Params = (("adapt", True),) if adapt else ()
    suffix = ", adapted" if adapt else ""
    both = f"{decay.dba_label} + {decay.label}"
    before = Pipeline(Setting("aqewd", 12, space), Setting("aqewd", 8))
    alone: dict[str, Any] = {"kq": (2, 5), "gamma": (3.0,)}
    behind: dict[str, Any] = {"kq": (10,), "kd": (20,), "gamma": (6.0,), "alpha": (0.9,)}
    averages = tuple(
        Pipeline(Setting("aqewd", ndba, space), Setting("aqewd", nqe)) for ndba in (4, 24) for nqe in (4, 16)
    )
    expanding = Pipeline(qe=Setting("aqewd", 12))
    found = [
        graph_candidate("diffusion", "test", f"diffusion{suffix}", adapt=adapt, kd=(5, 20), alpha=(0.9, 0.99), **alone),
        graph_candidate("diffusion", "test", f"{both} + diffusion{suffix}", before, **behind),
        graph_candidate(
            "propagation", "test", f"propagation + {decay.label}{suffix}", expanding, adapt, k=(4, 10), hops=(1, 8)
        ),
    ]
    if adapt:
        return GraphCandidate("aqewd", f"{both}{suffix}", "test", averages), *found
    return (
        *found,
        graph_candidate("offline-diffusion", "test", kd=(20,), alpha=(0.99,), **alone),
        graph_candidate("offline-diffusion", "test", f"{both} + offline diffusion", before, **behind),
    )


def density_run(cells: Sequence[DensityCell], model: str) -> Run:
    """Everything on every cell; the model with the setting that it was trained for."""
    plain, graph = rivals()
    return Run(
        "Will it help? Gain over density",
        tuple(cell.dataset for cell in cells),
        (*plain, as_trained(model)),
        nqe_sweep=(),
        bootstrap=2_000,
        graph_methods=(*graph, *with_hops([as_trained(model)])),
    )


def gains(run: Run, cells: Sequence[DensityCell], source: ResultSource) -> dict[str, Any]:
    """For each group of cells the mean mAP of every row with one setting and tuned for each cell, and what is sure.

    `intervals`: the gain of what is learned over no expansion, and over the best rival tuned for these cells.
    """
    rows = choose_rows(run, source.lookup)
    return {
        "title": run.title,
        "groups": [
            _group(run, rows, [cell for cell in cells if cell.group == group], source)
            for group in dict.fromkeys(cell.group for cell in cells)
        ],
        "settings": [
            {
                "label": row.label,
                "kind": row.kind,
                "method": row.method,
                "choose": row.choose,
                **describe_steps(row.pipeline),
            }
            for row in rows
        ],
        "cells": [
            {
                "name": cell.dataset.name,
                "set": cell.source,
                "columns": cell.columns,
                "relevant": cell.relevant,
                "distractors": cell.distractors,
                "map": {row.label: tried_on(cell.dataset, (row.pipeline,), source.lookup)[0] for row in rows},
            }
            for cell in cells
        ],
    }


def _group(run: Run, rows: Sequence[Row], cells: Sequence[DensityCell], source: ResultSource) -> dict[str, Any]:
    """One group of cells: a line for each row, and the intervals of what is learned."""
    columns, distractors, relevant = cells[0].group
    lines = [_line(row, cells, source) for row in rows]
    rivals = [line for line in lines if not is_learned(line["method"]) and line["method"] != "none"]
    rivals = [line for line in rivals if line["tuned"] is not None]
    best = max(rivals, key=lambda line: line["tuned"], default=None)  # none where --only, or many rows, leave none
    against = [(rows[0], "no expansion", "one setting")]
    if best is not None:
        against.append((rows[lines.index(best)], best["label"], "tuned for each set"))
    intervals = [
        {
            "after": row.label,
            "before": label,
            "before_setting": setting,
            **_interval(run, cells, row, other, setting != "one setting", source),
        }
        for row in rows
        if is_learned(row.method)
        for other, label, setting in against
    ]
    return {
        "columns": columns,
        "distractors": distractors,
        "relevant": relevant,
        "sets": len(cells),
        "rows": int(np.mean([source.sizes(cell.dataset.name)[0] for cell in cells])),
        "lines": lines,
        "best_rival": None if best is None else best["label"],
        "intervals": intervals,
    }


def _line(row: Row, cells: Sequence[DensityCell], source: ResultSource) -> dict[str, Any]:
    one = [tried_on(cell.dataset, (row.pipeline,), source.lookup)[0] for cell in cells]
    tuned = [tried_on(cell.dataset, row.tried, source.lookup)[0] for cell in cells]
    return {"label": row.label, "kind": row.kind, "method": row.method, "one": mean_of(one), "tuned": mean_of(tuned)}


def _interval(
    run: Run, cells: Sequence[DensityCell], after: Row, before: Row, tuned: bool, source: ResultSource
) -> dict[str, Any]:
    """Paired bootstrap over the queries of all sets, in percent."""
    sides: list[list[Any]] = [[], []]
    for cell in cells:
        pipeline = tried_on(cell.dataset, before.tried, source.lookup)[1] if tuned else before.pipeline
        for side, row, chosen in ((0, before, pipeline), (1, after, after.pipeline)):
            found = source.lookup(row.with_pipeline(chosen).cell(cell.dataset))
            sides[side].append(reported(found.scores))
    content = paired_bootstrap(sides[0], sides[1], samples=run.bootstrap).to_dict()
    return {name: 100 * content[name] for name in ("difference", "low", "high")} | {
        "significant": content["significant"],
        "samples": content["samples"],
    }
