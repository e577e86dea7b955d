"""Let rows join or leave an augmented index; only rows whose neighborhoods changed are augmented again."""

from pathlib import Path
from typing import Annotated

import typer

from jobs.augment import augment, augment_here, check_reach, report
from jobs.console import Address, Cache, Json, Workers, command, on_ray, run, show_table
from lattqe.errors import LattqeError


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
    newcomers = FeatureSet.open(new) if new is not None else None
    if newcomers is not None:
        check_joinable(recipe.features, newcomers)
    process = resident_bytes()  # before this process, unlike the workers, holds the graph
    kept = kept_rows(recipe.features, _read_ids(remove))
    joined = join_features(recipe.features, kept, newcomers, f"{to.rstrip('/')}/{ORIGINALS}")
    task, _, cost = plan_growth(old_index, recipe, joined, kept, to, cache)
    share = cost.products / max(cost.products_from_scratch, 1)
    show_table(
        "growth",
        {
            "rows that stay": f"{len(kept):,}",
            "rows that join": f"{cost.joined:,}",
            "rows touched": f"{cost.touched:,} of {cost.rows:,} ({cost.touched / cost.rows:.1%})",
            "products": f"{cost.products:,}, {share:.1%} of {cost.products_from_scratch:,} from scratch",
        },
    )
    if reach == "auto" and runs_here(joined.rows, workers, address):
        made = augment_here(task)
    else:
        with on_ray(address):
            made = augment(task, workers, reach, process)
    report("grown index", made, json, cost.facts())


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
