"""A benchmark run on Ray: sharded search and augmentation fill the cells that are missing, and nothing else.

Everything lies in the run's folder: `cells/` (one JSON for each measured cell), `joined/`, `graphs/` and `indexes/`
(databases with distractors, their neighbors, their augmentations). Each is named by what it depends on, so a run that
was killed, or that shares data with an earlier one in the same folder, computes only what is missing.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from cluster.augmentation import (
    Augmentation,
    begin_index,
    default_workers,
    run_augmentation,
    run_augmentation_here,
    worker_resources,
)
from cluster.graph import compute_graph
from cluster.shards import ShardedIndex
from lattqe.benchmark.cells import Cell, Measured, measure
from lattqe.benchmark.results import choose_rows, columns_of
from lattqe.benchmark.spec import Dataset, Run, Setting
from lattqe.datasets.revisited import load_gnd
from lattqe.errors import LattqeError
from lattqe.evaluation import GroundTruth, LabelTruth
from lattqe.expansion import create
from lattqe.expansion.rows import shares
from lattqe.search import FlatIndex, Index
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, MissingFileError, NeighborGraph, open_place, read_manifest
from lattqe.store.join import check_same_vectors, stack_features
from lattqe.store.manifest import canonical_json

# Below this, one process is done before the workers of a cluster have started.
ROWS_HERE = 50_000


@dataclass(frozen=True)
class Inputs:
    """A data set opened and checked: its rows, queries, ground truth, and digests of all three."""

    database: FeatureSet
    queries: FeatureSet
    truth: GroundTruth
    truth_digest: str

    @classmethod
    def open(cls, dataset: Dataset) -> "Inputs":
        """Open a data set; queries or rows that do not fit the ground truth are refused by name."""
        database, queries = FeatureSet.open(dataset.database), FeatureSet.open(dataset.queries)
        if database.dim != queries.dim:
            raise LattqeError(f"{dataset.name}: the database has {database.dim} dimensions and the queries "
                              f"{queries.dim}: use one extractor for both")
        if dataset.truth == "labels":
            truth: GroundTruth = LabelTruth(database.labels(), query_labels=queries.labels())
            return cls(database, queries, truth, "labels")
        gnd = load_gnd(dataset.truth)
        if database.rows != gnd.database_rows:
            raise LattqeError(f"{dataset.name}: the database has {database.rows} rows, imlist of the ground truth "
                              f"{gnd.database_rows}: distractors belong into [[distractors]]")
        if queries.rows != gnd.queries:
            raise LattqeError(f"{dataset.name}: {queries.rows} queries, qimlist of the ground truth {gnd.queries}")
        gnd.check_database(database.ids(), dataset.database)
        gnd.check_queries(queries.ids(), dataset.queries)
        content = {"gnd": [{grade: list(map(int, rows)) for grade, rows in one.items()} for one in gnd.gnd]}
        return cls(database, queries, gnd.truth, xxhash.xxh3_128_hexdigest(canonical_json(content)))


class Bench:
    """One run in one folder; `cells_to_do` and `fill` are its two steps, `lookup` reads what is there."""

    def __init__(self, run: Run, folder: str, workers: int | None = None, shards: int | None = None) -> None:
        self.run, self.folder, self.workers, self.shards = run, folder.rstrip("/"), workers, shards
        self.place = open_place(f"{self.folder}/cells")
        self.inputs = {dataset.name: Inputs.open(dataset) for dataset in run.datasets}
        self.distractors = {(dataset.name, each.name): FeatureSet.open(each.features)
                            for dataset in run.datasets for each in run.distractors_of(dataset.name)}
        for (dataset, _), distractors in self.distractors.items():
            check_same_vectors(self.inputs[dataset].database, distractors)
        models = {value for method in run.methods for value in method.params.get("model", ())}
        models |= {each.model for each in run.ablations}
        self.models = {uri: read_manifest(open_place(uri), "model").digest for uri in models}
        self._known: dict[str, Measured] = {}

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
            self._known[key] = Measured.from_json(json.loads(self.place.read(f"{key}.json")))
        return self._known[key]

    def is_missing(self, cell: Cell) -> bool:
        """Whether a cell has still to be measured."""
        try:
            self.lookup(cell)
        except (MissingFileError, ValueError, KeyError):  # a damaged cell is measured again
            return True
        return False

    def cells_to_do(self) -> list[Cell]:
        """The missing cells that are needed next: first those that choose parameters, then those that use them."""
        choosing = [cell for cell in self._choosing_cells() if self.is_missing(cell)]
        return choosing or [cell for cell in self._final_cells() if self.is_missing(cell)]

    def _choosing_cells(self) -> Iterable[Cell]:
        for method in self.run.methods:
            role = "validation" if method.choose == "validation" else "test"
            grids: list[list[tuple[Setting | None, Setting]]] = [
                [(None, setting) for setting in method.qe_settings()], list(method.dba_settings())]
            for pairs in grids:
                if len(pairs) > 1:
                    yield from (Cell(dataset.name, None, *pair) for pair in pairs
                                for dataset in self.run.datasets_of(role))

    def _final_cells(self) -> Iterable[Cell]:
        rows = choose_rows(self.run, self.lookup)
        for dataset, distractors in columns_of(self.run):
            yield from (Cell(dataset.name, distractors, row.dba, row.qe) for row in rows)
        for row in rows:
            if row.kind == "qe" and row.qe is not None:
                sweep = [Setting(row.method, k, row.qe.params) for k in self.run.nqe_sweep]
                yield from (Cell(dataset.name, None, None, setting) for setting in sweep
                            for dataset in self.run.datasets_of("test"))
        yield from (Cell(dataset.name, None, None, each.setting) for each in self.run.ablations
                    for dataset in self.run.datasets_of("test"))

    def fill(self, cells: Iterable[Cell], on_done: Callable[[Cell], None]) -> None:
        """Measure cells; those over the same rows share one sharded index and one first search."""
        groups: dict[tuple[str, str | None, Setting | None], list[Cell]] = {}
        for cell in dict.fromkeys(cells):
            groups.setdefault((cell.dataset, cell.distractors, cell.dba), []).append(cell)
        for (dataset, distractors, dba), group in groups.items():
            opened = self.inputs[dataset]
            by_setting = {cell.qe: cell for cell in group}

            def publish(setting: Setting | None, measured: Measured,
                        by_setting: dict[Setting | None, Cell] = by_setting) -> None:
                cell = by_setting[setting]
                content = {"cell": {"dataset": cell.dataset, "distractors": cell.distractors,
                                    "dba": cell.dba.to_dict() if cell.dba else None,
                                    "qe": cell.qe.to_dict() if cell.qe else None}, **measured.to_json()}
                self.place.write(f"{self.key(cell)}.json", canonical_json(content))
                on_done(cell)

            with self._index(self._rows_of(dataset, distractors, dba)) as index:
                measure(index, np.asarray(opened.queries.read(), dtype=np.float32), opened.truth, list(by_setting),
                        publish)

    @contextmanager
    def _index(self, uris: list[str]) -> Iterator[Index]:
        """An exact index of some rows: in shards, or here where starting them would cost more than searching."""
        sets = [FeatureSet.open(uri) for uri in uris]
        if self.shards is None and sum(each.rows for each in sets) <= ROWS_HERE:
            yield FlatIndex(np.concatenate([each.read() for each in sets]))
            return
        with ShardedIndex(uris, self.shards) as index:
            yield index

    def _rows_of(self, dataset: str, distractors: str | None, dba: Setting | None) -> list[str]:
        """Addresses of the rows that a cell searches; an augmented database is made where it is not there yet."""
        originals = [self.inputs[dataset].database.uri]
        if distractors is not None:
            originals.append(self.distractors[dataset, distractors].uri)
        if dba is None:
            return originals
        method = create(dba.method, **dict(dba.params))
        features = self._joined(dataset, distractors)
        graph = self._graph(features)
        identity = Cell(dataset, distractors, dba, None)
        task = Augmentation(features.uri, graph.uri, f"{self.folder}/indexes/{self.key(identity)}", dba.method,
                            dba.k, dict(dba.params) | ({"dba": True} if dba.method == "lattqe" else {}),
                            threads=torch.get_num_threads(), share=shares(method, features.rows))
        inputs = {"features": features.as_input(), "neighbors": graph.as_input()}
        if "model" in task.params:
            model = task.params["model"]
            inputs["model"] = {"uri": model, "digest": self.models[model], "kind": "model"}
        pending = begin_index(task, inputs)
        if self.workers is None and features.rows <= ROWS_HERE:
            run_augmentation_here(task)
        else:
            run_augmentation(task, self.workers or default_workers(), lambda _: None, resources=worker_resources())
        pending.finish()
        return [task.to]

    def _joined(self, dataset: str, distractors: str | None) -> FeatureSet:
        database = self.inputs[dataset].database
        if distractors is None:
            return database
        more = self.distractors[dataset, distractors]
        to = f"{self.folder}/joined/{database.digest[:16]}-{more.digest[:16]}"
        return stack_features([database, more], to)

    def _graph(self, features: FeatureSet) -> NeighborGraph:
        """The graph of some rows, long enough for every database setting of the run."""
        longest = max(create(setting.method, **dict(setting.params)).depth(setting.k)
                      for method in self.run.methods for setting, _ in method.dba_settings())
        k = min(longest, features.rows - 1)
        to = f"{self.folder}/graphs/{features.digest[:16]}-{k}"
        if self.workers is None and features.rows <= ROWS_HERE:
            return publish_graph(features, k, to)
        compute_graph(features.uri, k, to, workers=self.workers)
        return NeighborGraph.open(to)

