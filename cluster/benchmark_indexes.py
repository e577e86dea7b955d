"""The indexes that the cells of a benchmark search: rows as they are, adapted or augmented, while they are needed.

Graphs stay in the run's folder, because all methods share them, and the graph of the distractors alone is computed once
for all data sets; an adaptation or augmentation is removed when its cells are measured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np

from cluster import ROWS_HERE, runs_here
from cluster.graph import build_graph, prepare_graph
from cluster.indexes import Stage, Workplace, adapted_rows, make_index
from cluster.shards import ShardedIndex
from lattqe.augmentation.recipe import Augmentation
from lattqe.benchmark.cells import ADAPTED, method_of
from lattqe.benchmark.choosing import rows_key
from lattqe.benchmark.spec import GRAPH_METHODS, Setting, graph_method
from lattqe.device import resident_bytes
from lattqe.errors import CorruptDataError
from lattqe.expansion import METHODS
from lattqe.expansion.diffusion import GraphRows
from lattqe.search import FlatIndex, Index
from lattqe.search.index import SmallIndex
from lattqe.search.rows import Clock
from lattqe.search.stored import GraphTask, begin_graph, check_sets, publish_graph
from lattqe.store import FeatureSet, MissingFileError, NeighborGraph, open_place
from lattqe.store.manifest import seal_json, unseal_json
from lattqe.store.writer import stack_features


class Indexes:
    """Opens the index of some rows for as long as its cells are being measured.

    known: finished graphs, as `finished_graphs` calls them.
    """

    def __init__(
        self,
        folder: str,
        models: dict[str, str],
        workers: int | None,
        shards: int | None,
        known: dict[tuple[str, ...], NeighborGraph],
    ) -> None:
        self.folder, self.models, self.workers, self.shards, self.known = folder, models, workers, shards, known
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
            _task(features, dba, to),
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
        if len(sets) == 1:
            return sets[0]
        return stack_features(sets, f"{self.folder}/joined/{'-'.join(each.digest[:16] for each in sets)}")

    def _where(self, rows: int) -> Workplace:
        """Where so many rows are worked on."""
        return Workplace(runs_here(rows, self.workers), self.workers, process=self.process)

    @contextmanager
    def adapting(self, original: FeatureSet, to: str) -> Iterator[Callable[[int], None]]:
        """See `cluster.indexes.Follower`."""
        self.tell(f"{original.rows:,} rows are adapted to their collection")
        yield lambda rows: None

    @contextmanager
    def building(self, stage: Stage) -> Iterator[Callable[[int], None]]:
        """See `cluster.indexes.Follower`."""
        task = stage.task
        what = f"{task.hops} hops of {task.method}" if task.hopping else f"{task.method} augments"
        done, every = 0, sum(stage.pending.part_rows) * (task.hops if task.hopping else 1)

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            self.tell(f"{what} {done:,} of {every:,} rows")

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
        theirs = self.known.get((distractors.digest,))
        if theirs is None:
            theirs = self._graph_on_ray(
                GraphTask(distractors.uri, f"{self.folder}/graphs/{distractors.digest[:16]}-{k}", k)
            )
        return self._graph_on_ray(GraphTask(database.uri, to, k, distractors.uri, theirs.uri))

    def _graph_on_ray(self, task: GraphTask) -> NeighborGraph:
        check_sets(task)
        pending = begin_graph(task)
        if pending.finished is None:
            task, plan, pending = prepare_graph(task, self.workers)
            done = 0

            def advance(products: int) -> None:
                nonlocal done
                done += products
                self.tell(f"graph of {plan.rows:,} rows, {100 * done / plan.products:.0f} %")

            peak = build_graph(task, advance, plan=plan, pending=pending).peak_bytes
            predicted = plan.work.worker_bytes + plan.work.mapped
            self.note_memory("graph", {"predicted_worker_bytes": predicted, "peak_worker_bytes": peak})
        pending.finish()
        return NeighborGraph.open(task.to)


def _task(features: FeatureSet, dba: Setting, to: str) -> Augmentation:
    """What a setting makes of some rows; their graph is yet to be named."""
    params = dict(dba.params) | METHODS[dba.method].row_params
    hops, alpha, adapted = params.pop("hops", 1), params.pop("hop_alpha", None), params.pop("adapt", False)
    alpha = method_of(dba, dba=True).hop_alpha(features.rows) if alpha is None else alpha
    return Augmentation(features.uri, "", to, dba.method, dba.k, params, hops=hops, hop_alpha=alpha, adapt=adapted)
