"""A benchmark run, in this process or on Ray: the cells that are missing, and the databases that they search.

Everything is in the run's folder. `cells/` holds one JSON for each measured cell, named by its settings and by the
content of its inputs: a run that was killed, or that shares data with an earlier one in the same folder, computes only
what is missing. `joined/` holds rows with their distractors, `graphs/` their neighbors and `indexes/` their
augmentations, each named by what it depends on. Graphs stay, because all methods share them, and the graph of the
distractors alone is computed once for all data sets; an adaptation or augmentation is removed when its cells are
measured.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np

from cluster import ROWS_HERE, runs_here
from cluster.graph import build_graph, prepare_graph
from cluster.indexes import IndexStage, Workplace, adapted_rows, make_index
from cluster.shards import ShardedIndex
from lattqe.augmentation.recipe import adaptation_for
from lattqe.benchmark.cells import (
    ADAPTED,
    NOT_MEASURED,
    Cell,
    Measured,
    OpenedDataset,
    augmentation_of,
    deepest,
    finished_graphs,
    measure,
    method_of,
)
from lattqe.benchmark.choosing import missing_cells, rows_key, unplanned
from lattqe.benchmark.spec import GRAPH_METHODS, Pipeline, Run, Setting, graph_method
from lattqe.cost import Work, plans
from lattqe.cost.augment import weighing_of
from lattqe.cost.plans import Placement
from lattqe.cost.work import Stored, summed
from lattqe.device import resident_bytes
from lattqe.errors import CorruptDataError, LattqeError, counted
from lattqe.expansion.diffusion import MOST_ROWS, GraphRows
from lattqe.search import FlatIndex, Index
from lattqe.search.index import SmallIndex
from lattqe.search.rows import Clock
from lattqe.search.stored import GraphTask, begin_graph, check_sets, publish_graph
from lattqe.store import FeatureSet, MissingFileError, NeighborGraph, open_place, read_manifest
from lattqe.store.manifest import seal_json, unseal_json
from lattqe.store.writer import check_same_vectors, stack_features

FinishedGraphs = dict[tuple[str, ...], NeighborGraph]


class Bench:
    """A run and its folder: `cells_to_do` and `fill` are its two steps, `lookup` reads what is there.

    `workers` and `shards` force the work onto that many Ray actors, where it would otherwise stay in this process while
    there are few rows. `indexes.tell` may be set to be notified of what else is being made.
    """

    def __init__(self, run: Run, folder: str, workers: int | None = None, shards: int | None = None) -> None:
        self.run, self.folder = run, folder.rstrip("/")
        self.place = open_place(f"{self.folder}/cells")
        self.place.sweep()  # of what a killed run was writing
        self.inputs = {dataset.name: OpenedDataset.open(dataset) for dataset in run.datasets}
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
        self.indexes = Indexes(self.folder, workers, shards, known)
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


def plan_cells(bench: Bench, where: Placement) -> list[Work]:
    """What the cells take that are needed next; which ones come after them is chosen by what they measure."""
    made, searches, known, cells = [], [], set(), bench.cells_to_do()
    for (dataset, distractors, dba, _), group in bench.groups(cells).items():
        sets, queries = bench.sets_of(dataset, distractors), bench.inputs[dataset].queries
        rows, asked = sum(each.rows for each in sets), plans.PlannedRows.of(queries)
        searched = where.at(bench.indexes.shards is None and runs_here(rows))
        found, depth = [plans.PlannedRows.of(each) for each in sets], deepest(cell.pipeline for cell in group)
        searches.append(plans.cells(found, asked, len(group), searched, depth))
        if dba is None or dba.method in GRAPH_METHODS:
            continue
        joined = replace(plans.PlannedRows.sized(rows, asked.dim, queries.dtype), remote=not bench.place.is_local)
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


class Indexes:
    """Opens the index of some rows for as long as its cells are being measured.

    known: finished graphs, as `finished_graphs` calls them.
    """

    def __init__(self, folder: str, workers: int | None, shards: int | None, known: FinishedGraphs) -> None:
        self.folder, self.workers, self.shards, self.known = folder, workers, shards, known
        self.process = resident_bytes()  # as a worker is that holds no data
        self.tell: Callable[[str], None] = lambda note: None
        self.memory: dict[str, dict[str, int]] = {}  # of the largest worker of each stage that ran on Ray
        self.costs = open_place(f"{folder}/costs")

    @contextmanager
    def original(self, sets: list[FeatureSet]) -> Iterator[tuple[Index, FeatureSet]]:
        """The rows as they are."""
        with self._open([each.uri for each in sets]) as index:
            yield index, sets[0]

    @contextmanager
    def adapted(self, key: str, sets: list[FeatureSet]) -> Iterator[tuple[Index, FeatureSet]]:
        """The rows in the space that is adapted to them; `key` names the result."""
        to = f"{self.folder}/indexes/{key}-{ADAPTED}"
        features = self._joined(sets)
        with self.adapting(features, to) as on_rows:
            rows, memory = adapted_rows(features, to, on_rows, self._where(features.rows))
        self.note_memory("adaptation", memory)
        with self._open([rows.uri]) as index:
            yield index, rows
        open_place(to).delete_tree()

    @contextmanager
    def augmented(
        self, key: str, sets: list[FeatureSet], dba: Setting, graph_k: int
    ) -> Iterator[tuple[Index, FeatureSet]]:
        """The rows expanded from their neighbors; `key` names the result, `graph_k` is how long the graph is to be."""
        in_space = bool(dict(dba.params).get("adapt"))
        if dba.method in GRAPH_METHODS:
            with self.adapted(key, sets) if in_space else nullcontext((None, sets[0])) as (_, rows):
                yield self._propagated(key, [rows] if in_space else sets, dba), rows
            return
        clock = Clock()
        k = max(min(graph_k, sum(each.rows for each in sets) - 1), 1)  # a single row has none, a list needs an entry
        to = f"{self.folder}/indexes/{key}-{k}"
        known = self.known.get(rows_key(sets, dba))
        if known is not None and in_space:
            features = FeatureSet.open(known.manifest.inputs["features"]["uri"])
        else:
            with clock("graph"):
                features = self._joined(sets)
        made = make_index(
            augmentation_of(features, dba, to),
            features,
            lambda rows: known or self._graph([rows] if in_space else sets, rows, k),
            self._where(features.rows),
            adapting=in_space and known is None,
            follower=self,
            clock=clock,
        )
        self.note_memory("adaptation", made.adaptation)
        for each in made.stages:
            self.note_memory("hops" if each.stage.task.hopping else "augmentation", each.memory)
        self._note_seconds(key, clock)
        with self._open([to]) as index:
            yield index, FeatureSet.open(to)
        open_place(to).delete_tree()

    def _joined(self, sets: list[FeatureSet]) -> FeatureSet:
        """The rows of all as one set."""
        to = f"{self.folder}/joined/{'-'.join(each.digest[:16] for each in sets)}"
        return sets[0] if len(sets) == 1 else stack_features(sets, to)

    def _where(self, rows: int) -> Workplace:
        """Where so many rows are worked on."""
        return Workplace(runs_here(rows, self.workers), self.workers, process=self.process)

    @contextmanager
    def adapting(self, original: FeatureSet, to: str) -> Iterator[Callable[[int], None]]:
        """See `cluster.indexes.Follower`."""
        self.tell(f"{original.rows:,} rows are adapted to their collection")
        yield lambda rows: None

    @contextmanager
    def building(self, stage: IndexStage) -> Iterator[Callable[[int], None]]:
        """See `cluster.indexes.Follower`."""
        task = stage.task
        what = f"{task.hops} hops of {task.method}" if task.hopping else f"{task.method} augments"
        every = sum(stage.pending.part_rows) * (task.hops if task.hopping else 1)
        advance = counted(every, lambda done, total: self.tell(f"{what} {done:,} of {total:,} rows"))
        advance(0)
        yield advance

    def _propagated(self, key: str, sets: list[FeatureSet], dba: Setting) -> Index:
        """The rows after a method that needs the whole graph at once, in this process."""
        self.tell(f"{dba.method} over {sum(each.rows for each in sets):,} rows")
        clock = Clock()
        with clock("graph"):
            rows = GraphRows(np.concatenate([each.read() for each in sets]))
            rows.lists(dba.k)
        with clock("augment"):
            xb = graph_method(dba).augment(rows)
        self._note_seconds(key, clock)
        return SmallIndex(xb) if len(xb) <= ROWS_HERE else FlatIndex(xb)

    def _note_seconds(self, key: str, clock: Clock) -> None:
        """Keep what an index took, unless an earlier run did."""
        if self.seconds(key) is None:
            self.costs.write(f"{key}.json", seal_json({"key": key, "seconds": {"graph": 0.0, **clock.seconds}}))

    def seconds(self, key: str) -> dict[str, float] | None:
        """What graph, augmentation and any adaptation took; the graph counts for the cell that needed it first."""
        try:
            kept = unseal_json(self.costs.read(f"{key}.json"), key)
        except (MissingFileError, CorruptDataError):  # a damaged one is as good as none
            return None
        return kept["seconds"] if kept.get("key") == key else None

    @contextmanager
    def _open(self, uris: list[str]) -> Iterator[Index]:
        """An exact index of some rows: in shards, or here where starting them would cost more than searching."""
        sets = [FeatureSet.open(uri) for uri in uris]
        if self.shards is None and runs_here(sum(each.rows for each in sets)):
            yield SmallIndex(np.concatenate([each.read() for each in sets]))
            return
        with ShardedIndex(uris, self.shards) as index:
            yield index

    def note_memory(self, stage: str, found: dict[str, int]) -> None:
        """Keep the predicted and the real bytes of a stage's workers where it had any, the largest so far."""
        known = self.memory.get(stage, {})
        if found:
            self.memory[stage] = {name: max(size, known.get(name, 0)) for name, size in found.items()}

    def _graph(self, sets: list[FeatureSet], features: FeatureSet, k: int) -> NeighborGraph:
        """Compute the graph of all rows; on Ray that of the distractors once, unless it is there, and the database is
        merged into it.
        """
        database, distractors = sets[0], sets[1] if len(sets) > 1 else None
        to = f"{self.folder}/graphs/{features.digest[:16]}-{k}"
        self.tell(f"graph of {features.rows:,} rows")
        if runs_here(features.rows, self.workers):
            return publish_graph(features, k, to)
        if distractors is None or distractors.rows <= k:
            return self._graph_on_ray(GraphTask(features.uri, to, k))
        apart = f"{self.folder}/graphs/{distractors.digest[:16]}-{k}"
        known = self.known.get((distractors.digest,))
        theirs = known or self._graph_on_ray(GraphTask(distractors.uri, apart, k))
        return self._graph_on_ray(GraphTask(database.uri, to, k, distractors.uri, theirs.uri))

    def _graph_on_ray(self, task: GraphTask) -> NeighborGraph:
        check_sets(task)
        pending = begin_graph(task)
        if pending.finished is None:
            task, plan, pending = prepare_graph(task, self.workers)
            note = f"graph of {plan.rows:,} rows"
            advance = counted(plan.products, lambda done, total: self.tell(f"{note}, {100 * done / total:.0f} %"))
            peak = build_graph(task, advance, plan=plan, pending=pending).peak_bytes
            predicted = plan.work.worker_bytes + plan.work.mapped
            self.note_memory("graph", {"predicted_worker_bytes": predicted, "peak_worker_bytes": peak})
        pending.finish()
        return NeighborGraph.open(task.to)
