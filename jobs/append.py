"""Let rows join or leave an augmented index; only rows whose neighborhoods changed are augmented again."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from jobs.augment import augment, report
from jobs.console import command, run, show_table
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from cluster.augmentation import Augmentation
    from lattqe.augmentation import GrowthCost, Recipe
    from lattqe.store import FeatureSet, NeighborGraph


def main(
    index: Annotated[str, typer.Argument(help="The augmented index, made by `lattqe augment`.")],
    new: Annotated[str | None, typer.Argument(help="The feature set whose rows join.")] = None,
    to: Annotated[str, typer.Option("--to", help="Where the grown index goes.")] = "",
    remove: Annotated[Path | None, typer.Option(help="A text file: ids of the rows that leave, one a line.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ray workers. [default: one for each GPU, or CPU]")] = None,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster. [default: $RAY_ADDRESS, or here]")] = None,
    cache: Annotated[str | None, typer.Option(help="Node-local folder for rows that live on S3.")] = None,
    reach: Annotated[str, typer.Option(help="How workers reach all vectors: map, shards or auto, as in augment.")] = \
        "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Let rows join or leave an augmented index; only rows whose neighborhoods changed are augmented again.

    Example: lattqe append index new-features --to index2
    """
    from cluster.augment_plan import resident_bytes
    from cluster.reach import check_reach
    from cluster.session import ray_session
    from lattqe.augmentation import ORIGINALS, Recipe
    from lattqe.store import FeatureSet
    from lattqe.store.writer import check_joinable, join_features, kept_rows

    check_reach(reach)
    if not to:
        raise LattqeError("nowhere to put the grown index: name a folder or s3:// address with --to")
    if new is None and remove is None:
        raise LattqeError("nothing joins and nothing leaves: name a feature set, or ids with --remove")
    old_index = FeatureSet.open(index, cache)
    recipe = Recipe.of(old_index, cache)
    newcomers = FeatureSet.open(new) if new is not None else None
    if newcomers is not None:
        check_joinable(recipe.features, newcomers)
    process = resident_bytes()  # before this process, unlike the workers, holds the graph
    kept = kept_rows(recipe.features, _read_ids(remove))
    joined = join_features(recipe.features, kept, newcomers, f"{to.rstrip('/')}/{ORIGINALS}")
    task, graph, cost = prepare(old_index, recipe, joined, kept, to, cache)
    share = cost.products / max(cost.products_from_scratch, 1)
    show_table("growth", {
        "rows that stay": f"{len(kept):,}", "rows that join": f"{cost.joined:,}",
        "rows touched": f"{cost.touched:,} of {cost.rows:,} ({cost.touched / cost.rows:.1%})",
        "products": f"{cost.products:,}, {share:.1%} of {cost.products_from_scratch:,} from scratch"})
    with ray_session(address):
        made = augment(task, joined, graph, workers, reach, process)
    report("grown index", made, json, cost.facts())


def _read_ids(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise LattqeError(f"cannot read the ids to remove from {path}: {error}") from error


def prepare(old_index: "FeatureSet", recipe: "Recipe", joined: "FeatureSet", kept: np.ndarray, to: str,
            cache: str | None = None) -> "tuple[Augmentation, NeighborGraph, GrowthCost]":
    """Update the graph and find the rows that can be taken over: what is left to do, and what it cost so far."""
    from cluster.augmentation import Augmentation, write_reusable
    from lattqe.augmentation import GrowthCost, reusable_rows
    from lattqe.expansion import create
    from lattqe.store.place import open_place

    graph, counts = grown_graph(recipe, joined, kept, to.rstrip("/"))
    method = create(recipe.method, **recipe.params)
    # Negatives are the lowest of all rows, which any newcomer may be: nothing can be taken over.
    reuse = not method.negatives
    touched = joined.rows
    if reuse:
        depth = method.depth(recipe.k)
        reusable = reusable_rows(recipe.graph, graph, kept, depth)
        write_reusable(open_place(to), reusable)
        touched = int((reusable < 0).sum())
    cost = GrowthCost.of(joined.rows, joined.rows - len(kept), counts["searched"], touched, counts)
    task = Augmentation(joined.uri, graph.uri, to, recipe.method, recipe.k, recipe.params, cache,
                        previous=old_index.uri if reuse else None)
    return task, graph, cost


def grown_graph(recipe: "Recipe", joined: "FeatureSet", kept: np.ndarray,
                base: str) -> "tuple[NeighborGraph, Counter[str]]":
    """The exact graph of the joined rows, updated from the old one and published in the new index.

    With it the counts of "products", pairs "scored" and old rows "searched" anew; none where an earlier run did it.
    """
    from lattqe.augmentation import GRAPH, renumbered
    from lattqe.search.pairing import Clock
    from lattqe.search.update import update_graph
    from lattqe.store import NeighborGraph, Pending, neighbors_table, part_row_counts, row_bytes

    fields = {"k": recipe.graph.k}
    part_rows = part_row_counts(joined.rows, row_bytes("neighbors", fields))
    pending = Pending.begin(f"{base}/{GRAPH}", "neighbors", fields, part_rows, config={"job": "append"},
                            inputs={"features": joined.as_input(), "before": recipe.graph.as_input()})
    clock = Clock()
    if pending.missing():
        I, D = recipe.graph.gather(kept)  # noqa: E741
        I = renumbered(I, kept, recipe.features.rows)  # noqa: E741
        stale = np.any(I < -1, axis=1)
        clock.count("searched", int(stale.sum()))
        I, D = update_graph(joined.read(), I, D, stale, clock=clock)  # noqa: E741
        stops = np.cumsum(part_rows)
        for part in pending.missing():
            rows = slice(int(stops[part]) - part_rows[part], int(stops[part]))
            pending.publish(part, neighbors_table(I[rows], D[rows]))
    pending.finish()
    return NeighborGraph.open(pending.uri), clock.counts


app = command(main)

if __name__ == "__main__":
    run(app)
