"""Which rows of an index stay as they are when its database grows or shrinks, and what the others cost."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from lattqe.augmentation.recipe import GRAPH, Augmentation, Recipe, write_reusable
from lattqe.expansion import create
from lattqe.search.pairing import Clock
from lattqe.search.update import update_graph
from lattqe.store import FeatureSet, NeighborGraph, Pending, neighbors_table, part_row_counts, row_bytes
from lattqe.store.place import open_place

BLOCK = 65536
LEFT = -2  # in renumbered lists: a neighbor that is no longer there


@dataclass(frozen=True)
class GrowthCost:
    """What growing an index took, counted, beside what making it anew takes."""

    rows: int  # of the grown index
    joined: int  # of them new
    searched: int  # old rows whose list lost a member, searched anew
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


def renumbered(I: np.ndarray, kept: np.ndarray, old_rows: int) -> np.ndarray:
    """Lists I (n, k) of old row numbers in the new numbering: `LEFT` for rows that went, -1 stays."""
    number = np.full(old_rows, LEFT, dtype=np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    return np.where(I < 0, -1, number[np.maximum(I, 0)]).astype(np.int32)


def reusable_rows(old: NeighborGraph, new: NeighborGraph, kept: np.ndarray, k: int) -> np.ndarray:
    """For each row of the new graph the old row whose vector is the same, or -1: (new.rows,) int64.

    A row's vector depends on itself and on its first k neighbors (the method's depth), all of them original vectors
    that never change; so it stays where the list of those is the same rows in the same order.
    """
    reusable = np.full(new.rows, -1, dtype=np.int64)
    for start in range(0, len(kept), BLOCK):
        rows = kept[start : start + BLOCK]
        before = renumbered(old.gather(rows)[0][:, :k], kept, old.rows)
        after = new.read(start, start + len(rows))[0][:, :k]
        same = (before == after).all(axis=1)
        reusable[start : start + len(rows)] = np.where(same, rows, -1)
    return reusable


def plan_growth(
    old_index: FeatureSet, recipe: Recipe, joined: FeatureSet, kept: np.ndarray, to: str, cache: str | None = None
) -> tuple[Augmentation, NeighborGraph, GrowthCost]:
    """Update the graph and find the rows that can be taken over: what is left to do, and what it cost so far."""
    graph, counts = grown_graph(recipe, joined, kept, to.rstrip("/"))
    method = create(recipe.method, **recipe.params)
    # Negatives are the lowest of all rows, which any newcomer may be: nothing can be taken over.
    reuse = not method.negatives
    # After several hops every row depends on many: only edges can be taken over, and the hops are made again.
    old = old_index.uri if recipe.edges is None else recipe.edges.uri
    task = Augmentation(
        joined.uri,
        graph.uri,
        to,
        recipe.method,
        recipe.k,
        recipe.params,
        cache,
        previous=old if reuse else None,
        hops=recipe.hops,
        hop_alpha=recipe.hop_alpha,
    )
    touched = joined.rows
    if reuse:
        depth = method.depth(recipe.k)
        reusable = reusable_rows(recipe.graph, graph, kept, depth)
        write_reusable(open_place(task.stages()[0].to), reusable)
        touched = int((reusable < 0).sum())
    cost = GrowthCost.of(joined.rows, joined.rows - len(kept), counts["searched"], touched, counts)
    return task, graph, cost


def grown_graph(recipe: Recipe, joined: FeatureSet, kept: np.ndarray, base: str) -> tuple[NeighborGraph, Counter[str]]:
    """The exact graph of the joined rows, updated from the old one and published in the new index.

    With it the counts of "products", pairs "scored" and old rows "searched" anew; none where an earlier run did it.
    """
    fields = {"k": recipe.graph.k}
    part_rows = part_row_counts(joined.rows, row_bytes("neighbors", fields))
    pending = Pending.begin(
        f"{base}/{GRAPH}",
        "neighbors",
        fields,
        part_rows,
        config={"job": "append"},
        inputs={"features": joined.as_input(), "before": recipe.graph.as_input()},
    )
    clock = Clock()
    if pending.missing():
        I, D = recipe.graph.gather(kept)
        I = renumbered(I, kept, recipe.features.rows)
        stale = np.any(I < -1, axis=1)
        clock.count("searched", int(stale.sum()))
        I, D = update_graph(joined.read(), I, D, stale, clock=clock)
        stops = np.cumsum(part_rows)
        for part in pending.missing():
            rows = slice(int(stops[part]) - part_rows[part], int(stops[part]))
            pending.publish(part, neighbors_table(I[rows], D[rows]))
    pending.finish()
    return NeighborGraph.open(pending.uri), clock.counts
