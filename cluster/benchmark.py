"""A benchmark run, in this process or on Ray: the cells that are missing, and the databases that they search.

Everything is in the run's folder. `cells/` holds one JSON for each measured cell, named by its settings and by the
content of its inputs: a run that was killed, or that shares data with an earlier one in the same folder, computes only
what is missing. `joined/` holds rows with their distractors, `graphs/` their neighbors and `indexes/` their
augmentations, each named by what it depends on. Graphs stay, because all methods share them, and the graph of the
distractors alone is computed once for all data sets; an augmentation is removed when its cells are measured.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from cluster import runs_here
from cluster.benchmark_indexes import Indexes
from cluster.shards import ShardedIndex
from lattqe.augmentation.recipe import adaptation_for
from lattqe.benchmark.cells import NOT_MEASURED, Cell, Inputs, Measured, deepest, finished_graphs, measure, method_of
from lattqe.benchmark.choosing import missing_cells, rows_key, unplanned
from lattqe.benchmark.spec import GRAPH_METHODS, Pipeline, Run, Setting
from lattqe.cost import Work, plans
from lattqe.cost.augment import weighing_of
from lattqe.cost.plans import Setting as Where
from lattqe.cost.work import Stored, summed
from lattqe.errors import LattqeError
from lattqe.expansion.diffusion import MOST_ROWS
from lattqe.search import Index
from lattqe.store import FeatureSet, MissingFileError, NeighborGraph, open_place, read_manifest
from lattqe.store.writer import check_same_vectors


class Bench:
    """A run and its folder: `cells_to_do` and `fill` are its two steps, `lookup` reads what is there.

    `workers` and `shards` force the work onto that many Ray actors, where it would otherwise stay in this process while
    there are few rows. `indexes.tell` may be set to be notified of what else is being made.
    """

    def __init__(self, run: Run, folder: str, workers: int | None = None, shards: int | None = None) -> None:
        self.run, self.folder = run, folder.rstrip("/")
        self.place = open_place(f"{self.folder}/cells")
        self.place.sweep()  # of what a killed run was writing
        self.inputs = {dataset.name: Inputs.open(dataset) for dataset in run.datasets}
        self.distractors = {
            (dataset.name, each.name): FeatureSet.open(each.features)
            for dataset in run.datasets_of("test")
            for each in run.distractors_of(dataset.name)
        }
        for (dataset, _), distractors in self.distractors.items():
            check_same_vectors(self.inputs[dataset].database, distractors)
        self.models = {uri: read_manifest(open_place(uri), "model").digest for uri in run.models()}
        self._check_plan()
        known = finished_graphs(run.graphs, self.inputs, self.distractors, self._graph_k())
        self.indexes = Indexes(self.folder, self.models, workers, shards, known)
        self._known: dict[str, Measured] = {}

    def _check_plan(self) -> None:
        """Refuse a model that does not fit a data set or a number of neighbors, and sets too large for a method."""
        for setting in dict.fromkeys([*self.run.expansions(), *self.run.augmentations()]):
            method_of(setting).check_k(setting.k)
        settings = [method.qe_settings()[0] for method in self.run.methods]
        settings += [one.setting for one in self.run.ablations]
        for name, opened in self.inputs.items():
            for setting in settings:
                method_of(setting).check_width(opened.database.dim, f"data set {name}")
        # Hops of weights run on Ray at any size; the rivals on the graph do not.
        rivals = [each for each in self.run.graph_methods if each.method in GRAPH_METHODS]
        fitting = {each.role for each in self.run.datasets if self.inputs[each.name].database.rows <= MOST_ROWS}
        for each in rivals:
            needed = {"validation"} if each.choose == "validation" else set()
            needed |= {"test"} if len(rivals) == len(self.run.entries) else set()
            for role in sorted(needed - fitting):
                raise LattqeError(
                    f"{each.label} works in one process, up to {MOST_ROWS:,} rows, and every {role} set has more: "
                    "leave it out of this run"
                )

    def too_large(self, cell: Cell) -> bool:
        """Whether a cell has more rows than its method can take: it is not measured, and the report says so."""
        whole = cell.rank is not None or (cell.dba is not None and cell.dba.method in GRAPH_METHODS)
        return whole and sum(each.rows for each in self.sets_of(cell.dataset, cell.distractors)) > MOST_ROWS

    def sets_of(self, dataset: str, distractors: str | None) -> list[FeatureSet]:
        """The sets whose rows are searched: a database, and its distractors."""
        more = [self.distractors[dataset, distractors]] if distractors is not None else []
        return [self.inputs[dataset].database, *more]

    def needs_ray(self) -> bool:
        """Whether anything of it is too large for this process, or was asked to run on workers or shards."""
        most = max(opened.database.rows for opened in self.inputs.values())
        most += max((each.rows for each in self.distractors.values()), default=0)
        return self.indexes.shards is not None or not runs_here(most, self.indexes.workers)

    def key(self, cell: Cell) -> str:
        """The name of a cell's result."""
        opened = self.inputs[cell.dataset]
        digests = {"database": opened.database.digest, "queries": opened.queries.digest, "truth": opened.truth_digest}
        if cell.distractors is not None:
            digests["distractors"] = self.distractors[cell.dataset, cell.distractors].digest
        graph = self.known_graph(cell.dataset, cell.distractors, cell.dba)
        if graph is not None and graph.manifest.approximation is not None:  # exact ones are all the same
            digests["graph"] = graph.digest
        return cell.key(digests, self.models)

    def known_graph(self, dataset: str, distractors: str | None, dba: Setting | None) -> NeighborGraph | None:
        """The finished graph that the run names for the rows of some cells; None: it is computed, or not needed."""
        if dba is None or dba.method in GRAPH_METHODS:
            return None
        return self.indexes.known.get(rows_key(self.sets_of(dataset, distractors), dba))

    def lookup(self, cell: Cell) -> Measured:
        """The result of a cell that has been filled, or that has too many rows."""
        if self.too_large(cell):
            return NOT_MEASURED
        key = self.key(cell)
        if key not in self._known:
            self._known[key] = Measured.from_bytes(self.place.read(f"{key}.json"), key)
        return self._known[key]

    def index_seconds(self, cell: Cell) -> dict[str, float] | None:
        """What adaptation, graph and augmentation of the cell's database took, as far as it has them."""
        return None if cell.dba is None else self.indexes.seconds(self._index_key(cell))

    def query_ids(self, dataset: str) -> list[str]:
        """The names of a data set's queries."""
        return self.inputs[dataset].queries.ids()

    def sizes(self, dataset: str) -> tuple[int, int]:
        """Rows and queries of a data set."""
        return self.inputs[dataset].database.rows, self.inputs[dataset].queries.rows

    def is_missing(self, cell: Cell) -> bool:
        """Whether a cell has still to be measured."""
        try:
            self.lookup(cell)
        except (MissingFileError, ValueError, KeyError, TypeError, RecursionError):  # a damaged cell is measured again
            return True
        return False

    def cells_to_do(self) -> list[Cell]:
        """The missing cells that are needed next; none when the run is complete."""
        return missing_cells(self.run, self.lookup, self.is_missing)

    def fill(self, cells: Iterable[Cell], on_done: Callable[[Cell], None]) -> None:
        """Measure cells; those over the same rows share one index and one first search."""
        for group in self.groups(cells).values():
            self._fill_group(group, on_done)

    @staticmethod
    def groups(cells: Iterable[Cell]) -> dict[tuple[str, str | None, Setting | None, bool], list[Cell]]:
        """Cells by the rows that they search: data set, distractors, augmentation, and whether they are adapted."""
        groups: dict[tuple[str, str | None, Setting | None, bool], list[Cell]] = {}
        for cell in dict.fromkeys(cells):
            groups.setdefault((cell.dataset, cell.distractors, cell.dba, cell.adapted), []).append(cell)
        return groups

    def _fill_group(self, group: list[Cell], on_done: Callable[[Cell], None]) -> None:
        """Measure cells that differ in their queries' setting only."""
        opened = self.inputs[group[0].dataset]
        by_pipeline = {cell.pipeline: cell for cell in group}

        def publish(pipeline: Pipeline, measured: Measured) -> None:
            cell = by_pipeline[pipeline]
            key = self.key(cell)
            self.place.write(f"{key}.json", measured.to_bytes(cell, key))
            on_done(cell)

        with self._index(group[0]) as (index, rows):
            xq = np.asarray(opened.queries.read(), dtype=np.float32)
            if (space := adaptation_for(rows, opened.queries)) is not None:
                xq = space.apply(xq)
            measure(index, xq, opened.truth, list(by_pipeline), publish, opened.exclude)
            if isinstance(index, ShardedIndex):
                self.indexes.note_memory("search", index.memory(len(xq), deepest(by_pipeline)))

    def _index(self, cell: Cell) -> AbstractContextManager[tuple[Index, FeatureSet]]:
        """The index that a cell's queries search, and a set of its rows, whose space they must be in."""
        sets = self.sets_of(cell.dataset, cell.distractors)
        if cell.dba is None:
            return self.indexes.adapted(self._index_key(cell), sets) if cell.adapted else self.indexes.original(sets)
        return self.indexes.augmented(self._index_key(cell), sets, cell.dba, self._graph_k())

    def _index_key(self, cell: Cell) -> str:
        """An augmentation does not depend on the queries that search it."""
        return self.key(Cell(cell.dataset, cell.distractors, cell.dba, None))

    def _graph_k(self) -> int:
        """Neighbors enough for every database setting of the run, so that one graph of some rows serves them all."""
        return max((method_of(each, dba=True).depth(each.k) for each in self.run.augmentations()), default=1)


def plan_cells(bench: Bench, where: Where) -> list[Work]:
    """What the cells take that are needed next; which ones come after them is chosen by what they measure."""
    made, searches, known, cells = [], [], set(), bench.cells_to_do()
    for (dataset, distractors, dba, _), group in bench.groups(cells).items():
        sets, queries = bench.sets_of(dataset, distractors), bench.inputs[dataset].queries
        rows, asked = sum(each.rows for each in sets), plans.Rows.of(queries)
        searched = where.at(bench.indexes.shards is None and runs_here(rows))
        found, depth = [plans.Rows.of(each) for each in sets], deepest(cell.pipeline for cell in group)
        searches.append(plans.cells(found, asked, len(group), searched, depth))
        if dba is None or dba.method in GRAPH_METHODS:
            continue
        joined = replace(plans.Rows.sized(rows, asked.dim, queries.dtype), remote=not bench.place.is_local)
        weighs = weighing_of(method_of(dba, dba=True), dba.k, asked.dim, rows)
        adapted = bool(dict(dba.params).get("adapt"))
        given = bench.known_graph(dataset, distractors, dba) is not None
        given |= not adapted and (dataset, distractors) in known  # all methods share one graph, but for adapted rows
        graph = Stored.kind("neighbors", rows, k=weighs.depth) if given else None
        there, hops = where.at(runs_here(rows, bench.indexes.workers)), dict(dba.params).get("hops", 1)
        made += plans.augment(joined, weighs, hops, there, graph=graph, adapt=adapted and not given)
        known |= set() if adapted else {(dataset, distractors)}
    names = dict.fromkeys(work.stage for work in made)
    works = [summed(name, [work for work in made if work.stage == name]) for name in names]
    facts = {"cells": f"{len(cells):,} now; what they measure chooses more", **unplanned(cells)}
    return [*works, summed("cells", searches, **facts)]
