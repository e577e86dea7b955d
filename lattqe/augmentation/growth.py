"""Which rows of an index stay as they are when its database grows or shrinks, and what the others cost.

Originals that stay and those that join become one set; parts of which every row stays are copied by the storage.
The graph is updated in this process, or on Ray (`cluster.growth`), with the same bytes. Either way it is said beside
each of its parts which rows of the old index can be taken over.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

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
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.expansion import create
from lattqe.search.graph import update_graph
from lattqe.search.rows import Clock, tiles
from lattqe.store import (
    FeatureSet,
    FeatureWriter,
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
from lattqe.store.features import Kept, check_same_naming, joined_names, renumbered
from lattqe.store.manifest import DEFAULT_PART_BYTES
from lattqe.store.parts import column_matrix
from lattqe.store.place import open_place
from lattqe.store.writer import JOIN_ROWS, check_same_vectors
from lattqe.whitening import whiten_features

IDS_AT_ONCE = 1 << 21  # at least, that are looked up in one pass through a set


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


def kept_rows(old: FeatureSet, removed: Collection[str]) -> Kept:
    """The rows of `old` that stay when the ids `removed` go; ids that are not there are refused."""
    gone = sorted(set(removed))
    rows = old.find_ids(gone)
    unknown = np.flatnonzero(rows < 0)
    if len(unknown):
        raise LattqeError(f"{len(unknown)} ids to remove are not in {old.uri}, the first is {gone[unknown[0]]!r}")
    if len(gone) == old.rows:
        raise LattqeError(f"all {old.rows} rows of {old.uri} would be removed: nothing would be left")
    return Kept(old.rows, np.sort(rows))


def check_joinable(old: FeatureSet, new: FeatureSet) -> None:
    """Refuse sets whose rows cannot stand in one table."""
    check_same_vectors(old, new)
    if old.manifest.fields["columns"] != new.manifest.fields["columns"]:
        raise LattqeError(
            f"{new.uri} has columns {new.columns}, {old.uri} has {old.columns}: import the new rows like the old ones"
        )
    check_same_naming(old, new)


def join_features(
    old: FeatureSet, kept: Kept, new: FeatureSet | None, to: str, part_bytes: int = DEFAULT_PART_BYTES
) -> FeatureSet:
    """Put the rows of `old` that are kept, then all of `new`, to `to`; values are copied, never rounded again.

    Parts of `old` that stay whole are copied by the storage; other rows come through this process, some at a time.
    Labels with names are matched by name: new names follow those of `old`, whose numbers stay.
    """
    sets = [old] if new is None else [old, new]
    names = joined_names(*sets)
    schema = old.table(0, 1).schema
    extra = [column for column in schema if column.name not in ("id", "vector", "label")]
    inputs = {"old": old.as_input()} | ({"new": new.as_input()} if new is not None else {})
    if ADAPTATION in old.manifest.inputs:  # both went through it, and so must queries
        inputs[ADAPTATION] = dict(old.manifest.inputs[ADAPTATION])
    writer = FeatureWriter(
        to,
        old.dim,
        old.dtype,
        labels=old.has_labels,
        inputs=inputs,
        normalise=False,
        extra=extra,
        label_names=names,
        config={"job": "join", "kept": _digest(kept)},
        part_bytes=part_bytes,
        unique=True,
    )
    if writer.finished is not None:
        return writer.finished
    more = [column.name for column in extra]
    with writer:
        if new is not None:
            _refuse_repeated(old, kept, new)
        for whole, numbers in _runs(old, kept, part_bytes):
            if whole:
                writer.adopt(old, numbers)
            else:
                first, last = (row - int(np.searchsorted(kept.removed, row)) for row in _rows_of(old, numbers))
                for start, stop in tiles(last - first, JOIN_ROWS):
                    _copy(old, kept.old(first + start, first + stop), writer, more, names)
        for start, stop in tiles(0 if new is None else new.rows, JOIN_ROWS):
            _copy(sets[-1], np.arange(start, stop), writer, more, names)
    return FeatureSet.open(to)


def _runs(old: FeatureSet, kept: Kept, part_bytes: int) -> Iterator[tuple[bool, range]]:
    """The parts of a set in runs: those that are copied whole, and those whose rows are written again."""
    counts = np.diff(np.searchsorted(kept.removed, old.parts.starts))
    whole = counts == 0
    whole[len(whole) - small_parts([part.bytes for part in old.manifest.parts], part_bytes) :] = False
    for copied, run in groupby(range(len(whole)), lambda number: bool(whole[number])):
        numbers = list(run)
        yield copied, range(numbers[0], numbers[-1] + 1)


def small_parts(sizes: Sequence[int], part_bytes: int = DEFAULT_PART_BYTES) -> int:
    """How many of the last parts, of that many bytes each, are less than half a part together.

    Rows that join are put into one part with theirs: else each of many small growths would leave a part.
    """
    return int(np.searchsorted(np.cumsum(sizes[::-1]), part_bytes / 2))


def _rows_of(features: FeatureSet, parts: range) -> tuple[int, int]:
    """First and last+1 row of some parts."""
    return int(features.parts.starts[parts.start]), int(features.parts.starts[parts.stop])


def _refuse_repeated(old: FeatureSet, kept: Kept, new: FeatureSet) -> None:
    """Refuse rows that join with an id of a row that stays, or with one id for two of them."""
    for start, ids in new.id_runs(IDS_AT_ONCE):
        twice = new.find_ids(ids) != np.arange(start, start + len(ids))
        there = kept.new(old.find_ids(ids)) >= 0
        for wrong, where in ((twice, "twice in it"), (there, f"in {old.uri} already")):
            if wrong.any():
                first = ids[int(np.flatnonzero(wrong)[0])].as_py()
                raise LattqeError(
                    f"ids must be unique, but {int(wrong.sum())} ids of {new.uri} are {where}, the first is {first!r}: "
                    "leave these rows out, or remove the old ones in the same step"
                )


def _digest(kept: Kept) -> str:
    """Of the row numbers that stay."""
    digest = xxhash.xxh3_128()
    for start, stop in tiles(len(kept), JOIN_ROWS):
        digest.update(kept.old(start, stop).astype("<i8").tobytes())
    return digest.hexdigest()


def _copy(
    source: FeatureSet, rows: np.ndarray, writer: FeatureWriter, extra: list[str], names: list[str] | None
) -> None:
    """Append some rows (ascending) of one set to another."""
    first = int(rows[0])
    table = source.table(first, int(rows[-1]) + 1).take(pa.array(rows - first)).combine_chunks()
    labels = table.column("label").to_numpy() if source.has_labels else None
    if labels is not None and names is not None:
        labels = renumbered(labels, source, {name: number for number, name in enumerate(names)})
    vectors = column_matrix(table.column("vector").combine_chunks())
    writer.append(vectors, table.column("id").combine_chunks(), labels, {name: table.column(name) for name in extra})


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
