"""Which rows of an index stay as they are when its database grows or shrinks, and what the others cost.

The graph is updated in this process, or on Ray (`cluster.growth`), with the same bytes. Either way it is said beside
each of its parts which rows of the old index can be taken over.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lattqe.augmentation.recipe import (
    ADAPTATION,
    ARRIVALS,
    GRAPH,
    Augmentation,
    Recipe,
    adaptation_for,
    find_input,
    read_reusable,
    write_reusable,
)
from lattqe.errors import CorruptDataError
from lattqe.expansion import create
from lattqe.search.graph import update_graph
from lattqe.search.rows import Clock
from lattqe.store import (
    FeatureSet,
    MissingFileError,
    NeighborGraph,
    Pending,
    find_manifest,
    load_model,
    neighbors_table,
    part_row_counts,
    row_bytes,
    save_model,
)
from lattqe.store.features import Kept
from lattqe.store.place import open_place
from lattqe.whitening import whiten_features


@dataclass(frozen=True)
class GrowthCost:
    """What growing an index took, counted, beside what making it from scratch takes."""

    rows: int  # of the grown index
    joined: int  # of them new
    searched: int  # old rows whose list lost a member, searched again
    touched: int  # rows that go through the method, the new ones included
    products: int  # of two vectors
    scored: int  # pairs scored again in float64

    @classmethod
    def of(cls, rows: int, joined: int, searched: int, touched: int, counts: Counter[str]) -> "GrowthCost":
        """Put together what a `Clock` counted."""
        return cls(rows, joined, searched, touched, counts["products"], counts["scored"])

    @property
    def products_from_scratch(self) -> int:
        """Each pair of rows once."""
        return self.rows * (self.rows - 1) // 2

    @property
    def products_allowed(self) -> float:
        """In proportion to what changed: 1.1 times the touched share, and a search for each row that needs one."""
        share = self.touched / max(self.rows, 1)
        return 1.1 * share * self.products_from_scratch + (self.joined + self.searched) * self.rows

    def facts(self) -> dict[str, Any]:
        """For the summary, and for scripts."""
        return {
            "rows_joined": self.joined,
            "rows_touched": self.touched,
            "rows_searched_again": self.searched,
            "products": self.products,
            "products_from_scratch": self.products_from_scratch,
            "pairs_scored_again": self.scored,
        }


@dataclass(frozen=True)
class Growth:
    """A graph that follows its rows: all that decides the new one. It goes to every worker, but for `kept`."""

    features: str  # the rows of now: those that stayed, then those that joined
    before: str  # the graph of the rows of before
    to: str  # where a Pending has been begun
    kept: Kept
    depth: int  # neighbors that decide the vector of a row
    index: str | None  # where it is said which rows can be taken over; None: nowhere, none can
    cache: str | None = None  # node-local folder that keeps remote rows


def reusable_rows(before: np.ndarray, after: np.ndarray, old: np.ndarray) -> np.ndarray:
    """For each row of a part of the new graph the old row whose vector is the same, or -1: (n,) int64.

    before (m, k), after (n, k): the first k neighbors (the method's depth) of its rows then, in the new numbering, and
    now; the m first were there before, under the numbers old (m,). A row's vector depends on itself and on these
    neighbors, all of them original vectors that never change; so it stays where they are the same in the same order.
    """
    same = (before == after[: len(before)]).all(axis=1)
    return np.concatenate([np.where(same, old, -1), np.full(len(after) - len(before), -1)]).astype(np.int64)


def adapted_newcomers(old_index: FeatureSet, new: FeatureSet | None, to: str) -> FeatureSet | None:
    """Rows that join, in the space of the index that they join, which the new index in `to` keeps.

    Rows of another space are refused before anything is written.
    """
    needed = None if new is None else adaptation_for(old_index, new)
    if ADAPTATION not in old_index.manifest.inputs:
        return new
    space = f"{to.rstrip('/')}/{ADAPTATION}"
    tensors, config, metrics, manifest = load_model(find_input(old_index, ADAPTATION, ADAPTATION))
    save_model(space, tensors, config, metrics, manifest.inputs)
    if new is None or needed is None:
        return new
    arrivals = f"{to.rstrip('/')}/{ARRIVALS}"
    whiten_features(new, space, arrivals)
    return FeatureSet.open(arrivals)


def plan_growth(
    old_index: FeatureSet,
    recipe: Recipe,
    joined: FeatureSet,
    kept: Kept,
    to: str,
    cache: str | None = None,
    grow: Callable[[Growth, Pending], Counter[str]] | None = None,
) -> tuple[Augmentation, NeighborGraph, GrowthCost]:
    """Update the graph and find the rows that can be taken over: what is left to do, and what it cost so far.

    `grow` publishes the missing parts of the graph; by default `grow_here` does.
    """
    method = create(recipe.method, **recipe.params)
    # Negatives are the lowest of all rows, which any newcomer may be: nothing can be taken over.
    reuse = not method.negatives
    # After several hops every row depends on many: only edges can be taken over, and the hops are made again.
    old = old_index.uri if recipe.edges is None else recipe.edges.uri
    task = Augmentation(
        joined.uri,
        f"{to.rstrip('/')}/{GRAPH}",
        to,
        recipe.method,
        recipe.k,
        recipe.params,
        cache,
        previous=old if reuse else None,
        hops=recipe.hops,
        hop_alpha=recipe.hop_alpha,
        adapt=recipe.adapt,
    )
    index = task.stages()[0].to if reuse else None
    growth = Growth(joined.uri, recipe.graph.uri, task.graph, kept, method.depth(recipe.k), index, cache)
    pending = _begin(recipe, joined, task.graph)
    counts = (grow or grow_here)(growth, pending) if pending.finished is None else Counter[str]()
    pending.finish()
    graph = NeighborGraph.open(task.graph)
    touched = joined.rows if index is None else _touched(growth, recipe.graph, graph)
    return task, graph, GrowthCost.of(joined.rows, joined.rows - len(kept), counts["searched"], touched, counts)


def _begin(recipe: Recipe, joined: FeatureSet, to: str) -> Pending:
    fields = {"k": recipe.graph.k}
    return Pending.begin(
        to,
        "neighbors",
        fields,
        part_row_counts(joined.rows, row_bytes("neighbors", fields)),
        config={"job": "append"},
        inputs={"features": joined.as_input(), "before": recipe.graph.as_input()},
    )


def grow_here(growth: Growth, pending: Pending) -> Counter[str]:
    """Update the graph in this process and publish its missing parts.

    The counts of "products", pairs "scored" and old rows "searched" again; none where an earlier run did it.
    """
    clock, kept = Clock(), growth.kept
    missing = pending.missing()
    if not missing:
        return clock.counts
    I, D = NeighborGraph.open(growth.before, growth.cache).gather(kept.old())
    known = kept.new(I)
    stale = np.any(known == Kept.LEFT, axis=1)
    clock.count("searched", int(stale.sum()))
    I, D = update_graph(FeatureSet.open(growth.features, growth.cache).read(), known, D, stale, clock=clock)
    stops = np.cumsum(pending.part_rows)
    for part in missing:
        start, stop = int(stops[part]) - pending.part_rows[part], int(stops[part])
        if growth.index is not None:
            old, first = kept.old(start, max(min(stop, len(kept)), start)), slice(None, growth.depth)
            taken = reusable_rows(known[start:stop, first], I[start:stop, first], old)
            write_reusable(open_place(growth.index), part, taken)
        pending.publish(part, neighbors_table(I[start:stop], D[start:stop]))
    return clock.counts


def _touched(growth: Growth, before: NeighborGraph, after: NeighborGraph) -> int:
    """How many rows cannot be taken over. What says so is made again where it is gone, as after a finished run."""
    place, kept, touched = open_place(growth.index or ""), growth.kept, 0
    for part, (start, stop) in enumerate(zip(after.parts.starts[:-1].tolist(), after.parts.starts[1:].tolist())):
        try:
            taken = read_reusable(place, part)
        except (MissingFileError, CorruptDataError):
            old = kept.old(start, max(min(stop, len(kept)), start))
            known = kept.new(before.gather(old)[0][:, : growth.depth])
            taken = reusable_rows(known, after.read(start, stop)[0][:, : growth.depth], old)
            if find_manifest(place) is None:
                write_reusable(place, part, taken)
        touched += int((taken < 0).sum())
    return touched
