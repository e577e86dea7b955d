"""Let rows join or leave an augmented index; only rows whose neighborhoods changed are augmented again."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.augment import augment, augment_here, check_reach, report
from jobs.console import Address, Cache, Json, Workers, command, note_approximate, on_ray, progress_bar, run, show_table
from jobs.plan import Assume, Plan, setting, tell
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from collections import Counter

    from lattqe.augmentation import GrowthCost, Recipe
    from lattqe.augmentation.growth import Growth
    from lattqe.cost import Work
    from lattqe.cost.plans import Setting
    from lattqe.store import Pending


def main(
    index: Annotated[str, typer.Argument(help="The augmented index, made by `lattqe augment`.")],
    new: Annotated[str | None, typer.Argument(help="The feature set whose rows join.")] = None,
    to: Annotated[str, typer.Option("--to", help="Where the grown index goes.")] = "",
    remove: Annotated[Path | None, typer.Option(help="A text file: ids of the rows that leave, one a line.")] = None,
    workers: Workers = None,
    address: Address = None,
    cache: Cache = None,
    reach: Annotated[
        str, typer.Option(help="How workers reach all vectors: map, shards or auto, as in augment.")
    ] = "auto",
    plan: Plan = False,
    assume: Assume = None,
    json: Json = False,
) -> None:
    """Let rows join or leave an augmented index; only rows whose neighborhoods changed are augmented again.

    Example: lattqe append index new-features --to index2
    """
    from cluster import runs_here
    from lattqe.augmentation import ORIGINALS, Recipe
    from lattqe.augmentation.growth import plan_growth
    from lattqe.device import resident_bytes
    from lattqe.store import FeatureSet
    from lattqe.store.writer import check_joinable, join_features, kept_rows

    check_reach(reach)
    if not to:
        raise LattqeError("nowhere to put the grown index: name a folder or s3:// address with --to")
    if new is None and remove is None:
        raise LattqeError("nothing joins and nothing leaves: name a feature set, or ids with --remove")
    old_index = FeatureSet.open(index, cache)
    recipe = Recipe.of(old_index, cache)
    note_approximate(recipe.graph)
    newcomers = FeatureSet.open(new) if new is not None else None
    if newcomers is not None:
        check_joinable(recipe.features, newcomers)
    leaving = _read_ids(remove)
    rows = recipe.features.rows + (0 if newcomers is None else newcomers.rows)
    if (where := setting(plan, assume, rows, workers, address, cache)) is not None:
        tell(
            [planned(recipe, rows - recipe.features.rows, len(leaving), where)],
            where,
            not old_index.place.is_local,
            json,
        )
        return
    process = resident_bytes()
    kept = kept_rows(recipe.features, leaving)
    joined = join_features(recipe.features, kept, newcomers, f"{to.rstrip('/')}/{ORIGINALS}")
    if reach == "auto" and runs_here(joined.rows, workers, address):
        task, _, cost = plan_growth(old_index, recipe, joined, kept, to, cache)
        show_growth(cost)
        made = augment_here(task)
    else:
        with on_ray(address):
            task, _, cost = plan_growth(old_index, recipe, joined, kept, to, cache, partial(grow_on_ray, workers))
            show_growth(cost)
            made = augment(task, workers, reach, process)
    report("grown index", made, json, cost.facts())


def grow_on_ray(workers: int | None, growth: "Growth", pending: "Pending") -> "Counter[str]":
    """Update the graph by Ray workers, with a bar."""
    from cluster.growth import grow_graph

    with progress_bar("graph", sum(pending.part_rows)) as bar:
        return grow_graph(growth, pending, workers=workers, on_rows=bar.advance)


def show_growth(cost: "GrowthCost") -> None:
    """Say what became of the graph, and what is left."""
    share = cost.products / max(cost.products_from_scratch, 1)
    show_table(
        "growth",
        {
            "rows that stay": f"{cost.rows - cost.joined:,}",
            "rows that join": f"{cost.joined:,}",
            "rows touched": f"{cost.touched:,} of {cost.rows:,} ({cost.touched / cost.rows:.1%})",
            "products": f"{cost.products:,}, {share:.1%} of {cost.products_from_scratch:,} from scratch",
        },
    )


def planned(recipe: "Recipe", joined: int, removed: int, where: "Setting") -> "Work":
    """What the growth takes, as far as it can be known without comparing anything."""
    from lattqe.cost import plans
    from lattqe.cost.work import Stored
    from lattqe.expansion import create

    method, graph = create(recipe.method, **recipe.params), recipe.graph
    rows = plans.Rows.of(recipe.features)
    return plans.append(rows, Stored.of(graph.manifest), graph.k, joined, removed, method, recipe.k, where)


def _read_ids(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise LattqeError(f"cannot read the ids to remove from {path}: {error}") from error


app = command(main)

if __name__ == "__main__":
    run(app)
