"""A benchmark run on Ray: sharded search and augmentation fill the cells that are missing, and nothing else.

Everything lies in the run's folder. `cells/` holds one JSON for each measured cell, named by its settings and by the
content of its inputs: a run that was killed, or that shares data with an earlier one in the same folder, computes only
what is missing.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import numpy as np

from cluster.benchmark_indexes import Indexes
from cluster.here import runs_here
from lattqe.benchmark.cells import Cell, Measured, measure, method_of
from lattqe.benchmark.choosing import missing_cells
from lattqe.benchmark.inputs import Inputs
from lattqe.benchmark.spec import GRAPH_METHODS, Pipeline, Run, Setting
from lattqe.errors import LattqeError
from lattqe.expansion.diffusion import MOST_ROWS
from lattqe.search import Index
from lattqe.store import FeatureSet, MissingFileError, open_place, read_manifest
from lattqe.store.writer import check_same_vectors


class Bench:
    """A run and its folder: `cells_to_do` and `fill` are its two steps, `lookup` reads what is there.

    `workers` and `shards` force the work onto so many Ray actors, where it would otherwise stay in this process while
    there are few rows. `indexes.tell` may be set to hear what is being made beside the cells.
    """

    def __init__(self, run: Run, folder: str, workers: int | None = None, shards: int | None = None) -> None:
        self.run, self.folder = run, folder.rstrip("/")
        self.place = open_place(f"{self.folder}/cells")
        self.place.sweep()  # of what a killed run was writing
        self.inputs = {dataset.name: Inputs.open(dataset) for dataset in run.datasets}
        self.distractors = {(dataset.name, each.name): FeatureSet.open(each.features)
                            for dataset in run.datasets_of("test") for each in run.distractors_of(dataset.name)}
        for (dataset, _), distractors in self.distractors.items():
            check_same_vectors(self.inputs[dataset].database, distractors)
        models = {value for method in run.methods for value in method.params.get("model", ())}
        models |= {each.model for each in run.ablations}
        models |= {dict(step.params)["model"] for method in run.graph_methods for each in method.pipelines
                   for step in (each.dba, each.qe) if step is not None and "model" in dict(step.params)}
        self.models = {uri: read_manifest(open_place(uri), "model").digest for uri in sorted(models)}
        self._check_plan()
        self.indexes = Indexes(self.folder, self.models, workers, shards)
        self._known: dict[str, Measured] = {}

    def _check_plan(self) -> None:
        """Refuse a model that does not fit a data set, or a set too large for a method, before anything is measured."""
        settings = [method.qe_settings()[0] for method in self.run.methods]
        settings += [one.setting for one in self.run.ablations]
        for name, opened in self.inputs.items():
            for setting in settings:
                method_of(setting).check_width(opened.database.dim, f"data set {name}")
        for dataset, distractors in self.run.columns() if self.run.graph_methods else ():
            rows = self.inputs[dataset.name].database.rows
            rows += self.distractors[dataset.name, distractors].rows if distractors is not None else 0
            if rows > MOST_ROWS:
                raise LattqeError(f"{dataset.name} has {rows:,} rows with its distractors, but "
                                  f"{self.run.graph_methods[0].label} works in one process, up to {MOST_ROWS:,} rows: "
                                  "leave it out of this run")

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
        return cell.key(digests, self.models)

    def lookup(self, cell: Cell) -> Measured:
        """The result of a cell that has been filled."""
        key = self.key(cell)
        if key not in self._known:
            self._known[key] = Measured.from_bytes(self.place.read(f"{key}.json"))
        return self._known[key]

    def index_seconds(self, cell: Cell) -> dict[str, float] | None:
        """What graph and augmentation of the cell's database took, if it has any."""
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
        groups: dict[tuple[str, str | None, Setting | None], list[Cell]] = {}
        for cell in dict.fromkeys(cells):
            groups.setdefault((cell.dataset, cell.distractors, cell.dba), []).append(cell)
        for group in groups.values():
            self._fill_group(group, on_done)

    def _fill_group(self, group: list[Cell], on_done: Callable[[Cell], None]) -> None:
        """Measure cells that differ in their queries' setting only."""
        opened = self.inputs[group[0].dataset]
        by_pipeline = {cell.pipeline: cell for cell in group}

        def publish(pipeline: Pipeline, measured: Measured) -> None:
            cell = by_pipeline[pipeline]
            self.place.write(f"{self.key(cell)}.json", measured.to_bytes(cell))
            on_done(cell)

        with self._index(group[0]) as index:
            xq = np.asarray(opened.queries.read(), dtype=np.float32)
            measure(index, xq, opened.truth, list(by_pipeline), publish, opened.exclude)

    def _index(self, cell: Cell) -> AbstractContextManager[Index]:
        """The index that a cell's queries search."""
        database = self.inputs[cell.dataset].database
        distractors = self.distractors[cell.dataset, cell.distractors] if cell.distractors is not None else None
        if cell.dba is None:
            return self.indexes.original(database, distractors)
        return self.indexes.augmented(self._index_key(cell), database, distractors, cell.dba, self._graph_k())

    def _index_key(self, cell: Cell) -> str:
        """An augmentation does not depend on the queries that search it."""
        return self.key(Cell(cell.dataset, cell.distractors, cell.dba, None))

    def _graph_k(self) -> int:
        """Neighbors enough for every database setting of the run, so that one graph of some rows serves them all."""
        settings = [pair[0] for method in self.run.methods for params in method.variants()
                    for pair in method.dba_settings(params)]
        settings += [each.dba for method in self.run.graph_methods for each in method.pipelines
                     if each.dba is not None and each.dba.method not in GRAPH_METHODS
                     and "hops" not in dict(each.dba.params)]
        return max((method_of(setting, dba=True).depth(setting.k) for setting in settings), default=1)
