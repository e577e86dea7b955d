"""The databases that a benchmark searches: as they are, with distractors, augmented; made where they are missing.

In the run's folder, `joined/` holds rows with their distractors, `graphs/` their neighbors and `indexes/` their
augmentations, each named by what it depends on. Graphs stay, because all methods share them, and the graph of the
distractors alone is computed once for all data sets; an augmentation is removed when its cells are measured.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from cluster import augmentation as on_ray
from cluster.graph import build_graph, prepare_graph
from cluster.here import ROWS_HERE, runs_here
from cluster.shards import ShardedIndex
from lattqe.api import augment
from lattqe.augmentation import Augmentation, begin_index, build_index
from lattqe.benchmark.cells import method_of
from lattqe.benchmark.small import SmallIndex
from lattqe.benchmark.spec import GRAPH_METHODS, Setting, graph_method
from lattqe.expansion import METHODS
from lattqe.expansion.diffusion import GraphRows
from lattqe.search import FlatIndex, Index
from lattqe.search.stored import GraphTask, begin_graph, check_sets, publish_graph
from lattqe.store import FeatureSet, NeighborGraph, open_place
from lattqe.store.manifest import canonical_json
from lattqe.store.writer import stack_features


class Indexes:
    """Opens the index of some rows for as long as its cells are being measured."""

    def __init__(self, folder: str, models: dict[str, str], workers: int | None, shards: int | None) -> None:
        self.folder, self.models, self.workers, self.shards = folder, models, workers, shards
        self.tell: Callable[[str], None] = lambda note: None
        self.costs = open_place(f"{folder}/costs")

    @contextmanager
    def original(self, database: FeatureSet, distractors: FeatureSet | None) -> Iterator[Index]:
        """The rows as they are."""
        with self._open([each.uri for each in (database, distractors) if each is not None]) as index:
            yield index

    @contextmanager
    def augmented(self, key: str, database: FeatureSet, distractors: FeatureSet | None, dba: Setting,
                  graph_k: int) -> Iterator[Index]:
        """The rows expanded from their neighbors; `key` names the result, `graph_k` is how long the graph is to be."""
        if dba.method in GRAPH_METHODS or "hops" in dict(dba.params):
            yield self._propagated(key, [each for each in (database, distractors) if each is not None], dba)
            return
        features = database
        if distractors is not None:
            joined = f"{self.folder}/joined/{database.digest[:16]}-{distractors.digest[:16]}"
            features = stack_features([database, distractors], joined)
        started = time.perf_counter()
        graph = self._graph(database, distractors, features, min(graph_k, features.rows - 1))
        found = time.perf_counter()
        to = f"{self.folder}/indexes/{key}-{graph.k}"
        self._augment(features, graph, dba, to)
        if not self.costs.exists(f"{key}.json"):
            seconds = {"graph": found - started, "augment": time.perf_counter() - found}
            self.costs.write(f"{key}.json", canonical_json(seconds))
        with self._open([to]) as index:
            yield index
        open_place(to).delete_tree()

    def _propagated(self, key: str, sets: list[FeatureSet], dba: Setting) -> Index:
        """The rows after a method that needs the whole graph at once, in this process."""
        self.tell(f"{dba.method} over {sum(each.rows for each in sets):,} rows")
        started = time.perf_counter()
        rows = GraphRows(np.concatenate([each.read() for each in sets]))
        if dba.method in GRAPH_METHODS:
            rows.lists(dba.k)
        found = time.perf_counter()
        xb = graph_method(dba).augment(rows) if dba.method in GRAPH_METHODS else \
            augment(rows.xb, dba.method, dba.k, **dict(dba.params))
        if not self.costs.exists(f"{key}.json"):
            seconds = {"graph": found - started, "augment": time.perf_counter() - found}
            self.costs.write(f"{key}.json", canonical_json(seconds))
        return SmallIndex(xb) if len(xb) <= ROWS_HERE else FlatIndex(xb)

    def seconds(self, key: str) -> dict[str, float] | None:
        """What graph and augmentation took; the graph counts for whoever needed it first."""
        return json.loads(self.costs.read(f"{key}.json")) if self.costs.exists(f"{key}.json") else None

    @contextmanager
    def _open(self, uris: list[str]) -> Iterator[Index]:
        """An exact index of some rows: in shards, or here where starting them would cost more than searching."""
        sets = [FeatureSet.open(uri) for uri in uris]
        if self.shards is None and runs_here(sum(each.rows for each in sets)):
            yield SmallIndex(np.concatenate([each.read() for each in sets]))
            return
        with ShardedIndex(uris, self.shards) as index:
            yield index

    def _here(self, rows: int) -> bool:
        return runs_here(rows, self.workers)

    def _graph(self, database: FeatureSet, distractors: FeatureSet | None, features: FeatureSet,
               k: int) -> NeighborGraph:
        """The graph of all rows; on Ray that of the distractors is computed once and the database merged into it."""
        to = f"{self.folder}/graphs/{features.digest[:16]}-{k}"
        self.tell(f"graph of {features.rows:,} rows")
        if self._here(features.rows):
            return publish_graph(features, k, to)
        if distractors is None or distractors.rows <= k:
            return self._graph_on_ray(GraphTask(features.uri, to, k))
        known = f"{self.folder}/graphs/{distractors.digest[:16]}-{k}"
        self._graph_on_ray(GraphTask(distractors.uri, known, k))
        return self._graph_on_ray(GraphTask(database.uri, to, k, distractors.uri, known))

    def _graph_on_ray(self, task: GraphTask) -> NeighborGraph:
        check_sets(task)
        pending = begin_graph(task)
        if pending.missing():
            task, plan, pending = prepare_graph(task, self.workers)
            done = 0

            def advance(products: int) -> None:
                nonlocal done
                done += products
                self.tell(f"graph of {plan.rows:,} rows, {100 * done / plan.products:.0f} %")

            build_graph(task, advance, plan=plan)
        pending.finish()
        return NeighborGraph.open(task.to)

    def _augment(self, features: FeatureSet, graph: NeighborGraph, dba: Setting, to: str) -> None:
        """Expand all rows of a set, in this process or on Ray."""
        params = dict(dba.params) | METHODS[dba.method].row_params
        method = method_of(dba, dba=True)
        task = Augmentation(features.uri, graph.uri, to, dba.method, dba.k, params, hops=method.default_hops,
                            hop_alpha=method.hop_alpha)
        for stage in task.stages():
            self._build(stage, features.rows)

    def _build(self, task: Augmentation, total: int) -> None:
        pending = begin_index(task)
        what = f"{task.hops} hops of {task.method}" if task.hopping else f"{task.method} augments"
        done = 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            self.tell(f"{what} {done:,} of {total:,} rows")

        advance(0)
        if self._here(total):
            build_index(task, advance)
        else:
            on_ray.build_index(task, advance, workers=self.workers)
        pending.finish()
