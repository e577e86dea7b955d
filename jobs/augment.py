"""Replace every row of a feature set by its expansion from its neighbors (database-side augmentation); let rows join or
leave such an index, where only rows whose neighborhoods changed are augmented again.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.artifacts import note_adapted
from jobs.console import Json, command, note_approximate, progress_bar, run, screen, show_table
from jobs.index import NAMES, OnScreen, method_options, method_params, report
from jobs.plan import Address, Assume, Cache, Plan, Workers, on_ray, setting, tell
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from collections import Counter

    from cluster.indexes import Built
    from lattqe.augmentation.growth import Growth, GrowthCost
    from lattqe.augmentation.recipe import Augmentation, Recipe
    from lattqe.cost import Work
    from lattqe.cost.plans import Placement
    from lattqe.expansion import Method
    from lattqe.store import FeatureSet, NeighborGraph, Pending

REACHES = ("auto", "map", "shards")


Neighbors = Annotated[
    int | None,
    typer.Option("-k", min=1, help="Neighbors per row; default: the model's nDBA, or the paper's for the method."),
]
Hops = Annotated[
    int | None,
    typer.Option(
        help="1: expand each row from its own neighbors. 2 to 64: let features flow this many times over the weighted "
        "edges of all rows. Default: the model's number, or 1."
    ),
]
HopAlpha = Annotated[
    float | None,
    typer.Option(
        help="Share of a hop that comes from the neighbors, between 0 and 1; default: what the model learned, or 0.9."
    ),
]
Adapt = Annotated[
    bool | None,
    typer.Option(
        "--adapt/--no-adapt",
        help="Adapt the space to the collection first, without labels; queries follow when they search the index. "
        "Default: what the model was trained for; off with --neighbors.",
    ),
]
Graph = Annotated[
    str | None, typer.Option(help="The features' neighbor graph; default: computed and kept in TO/neighbors.")
]
Reach = Annotated[
    str,
    typer.Option(
        help="How workers reach all vectors: map (a mapped copy on each node), shards "
        "(gathered from actors that share them), auto."
    ),
]


@method_options
def main(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    to: Annotated[str, typer.Option("--to", help="Where the augmented index goes.")],
    method: Annotated[str, typer.Option(help=f"One of {NAMES}.")] = "lattqe",
    params: dict[str, Any] | None = None,
    k: Neighbors = None,
    hops: Hops = None,
    hop_alpha: HopAlpha = None,
    adapt: Adapt = None,
    neighbors: Graph = None,
    workers: Workers = None,
    address: Address = None,
    cache: Cache = None,
    reach: Reach = "auto",
    faiss: Annotated[str | None, typer.Option(help="Also write a faiss index to this file.")] = None,
    factory: Annotated[str | None, typer.Option(help="Its faiss factory string, such as 'IVF1024,PQ16'.")] = None,
    plan: Plan = False,
    assume: Assume = None,
    json: Json = False,
) -> None:
    """Replace every row of a feature set by its expansion from its neighbors.

    Example: lattqe augment features --method lattqe --model model -k 48 --to index
    """
    from lattqe.augmentation.recipe import GRAPH, Augmentation
    from lattqe.cost import plans
    from lattqe.expansion import create
    from lattqe.search.rows import check_k
    from lattqe.store import FeatureSet
    from lattqe.store.export import check_faiss, export_features

    check_reach(reach)
    original = FeatureSet.open(features)
    check_faiss(original.dim, faiss, factory)
    params = method_params(method, params or {}, dba=True)
    theta = create(method, **params)
    theta.check_width(original.dim, f"features in {features}")
    k = check_k(k or theta.suggested_k(dba=True), original.rows)
    theta.check_k(k)
    hops, hop_alpha = chosen_hops(theta, hops, hop_alpha, original.rows)
    adapt = chosen_adapting(theta, adapt, neighbors, original)
    given = given_graph(neighbors, original, theta.depth(k)) if neighbors is not None else None
    if (where := setting(plan, assume, original.rows, workers, address, cache)) is not None:
        if given is not None:
            note_approximate(given)
        shards = None if reach == "auto" else reach == "shards"
        works = plans.augment_by(original, theta, k, hops, where, graph=given, shards=shards, adapt=adapt)
        tell(works, where, not original.place.is_local, json)
        return
    graph = given.uri if given is not None else f"{to.rstrip('/')}/{GRAPH}"
    task = Augmentation(original.uri, graph, to, method, k, params, cache, hops=hops, hop_alpha=hop_alpha, adapt=adapt)
    stages, before = made_index(task, original, theta.depth(k), given, workers, address, reach)
    if faiss is not None:
        export_features(FeatureSet.open(to), faiss, factory)
        note_adapted(FeatureSet.open(to))
    report("augmented", stages, json, before)


def made_index(
    task: "Augmentation",
    original: "FeatureSet",
    graph_k: int,
    given: "NeighborGraph | None",
    workers: int | None,
    address: str | None,
    reach: str,
) -> "tuple[list[Built], dict[str, Any]]":
    """The stages of the index, found finished, or made in this process or on Ray; and what adaptation and graph took,
    unless that is given.
    """
    from cluster import runs_here
    from cluster.indexes import Workplace, make_index
    from lattqe.augmentation.recipe import describe
    from lattqe.search.rows import Clock
    from lattqe.store import NeighborGraph, find_manifest, open_place
    from lattqe.store.pending import refuse_unlike

    place, rows = open_place(task.to), original.rows
    config = describe(task.method, task.k, task.params, task.hops, task.hop_alpha, adapt=task.adapt)
    inputs = {} if task.adapt else {"features": original.as_input()}  # adapted rows are not there yet
    refuse_unlike(place, {"kind": "features", "config": config, "inputs": inputs})  # before anything is put there
    if task.k >= rows:
        note = f"note: {rows:,} rows have only {rows - 1:,} neighbors each: all of them are used, not {task.k}"
        screen.print(note, markup=False, soft_wrap=True)
    done = find_manifest(place) if given is not None or find_manifest(open_place(task.graph)) else None
    here = done is not None or (reach == "auto" and runs_here(rows, workers, address))
    clock, took = Clock(), dict[str, Any]()

    def graph_of(features: "FeatureSet") -> NeighborGraph:
        if given is not None:
            return given
        took["graph"] = compute_graph(features, task.graph, graph_k, workers, task.cache, here)
        return NeighborGraph.open(task.graph)

    with nullcontext() if here else on_ray(address):
        where = Workplace(here, workers, reach)
        made = make_index(
            task, original, graph_of, where, adapting=task.adapt, follower=OnScreen(), clock=clock, done=done
        )
    if done is not None:
        screen.print(f"{task.to} is already up to date", markup=False, soft_wrap=True)
    if task.adapt:
        took = {"adaptation": {"seconds": round(clock.seconds["adapt"], 2), **made.adaptation}} | took
    return made.stages, {name: facts for name, facts in took.items() if facts}


def chosen_hops(method: "Method", hops: int | None, alpha: float | None, rows: int) -> tuple[int, float]:
    """The hops and the share that were requested, or the method's own."""
    from lattqe.expansion.base import check_hops

    hops = method.default_hops if hops is None else hops
    if hops == 1 and alpha is not None:
        raise LattqeError("--hop-alpha needs more than one hop: add --hops 8, or leave it out")
    alpha = method.hop_alpha(rows) if alpha is None else alpha
    check_hops(hops, alpha)
    return hops, alpha


def chosen_adapting(method: "Method", adapt: bool | None, neighbors: str | None, original: "FeatureSet") -> bool:
    """Whether rows are adapted: as requested, or as the method was trained where no graph of other rows is given.

    Never twice: queries would go through the second map alone.
    """
    from lattqe.augmentation.recipe import ADAPTATION

    already = ADAPTATION in original.manifest.inputs
    if adapt and neighbors is not None:
        raise LattqeError("--adapt needs the graph of the adapted rows, which it makes itself: leave --neighbors out")
    if adapt and already:
        raise LattqeError(f"{original.uri} is adapted to its collection already: leave --adapt out")
    return (method.adapts and neighbors is None and not already) if adapt is None else adapt


def check_reach(wanted: str) -> None:
    """Refuse an unknown value before anything starts."""
    if wanted not in REACHES:
        raise LattqeError(f"--reach is {wanted!r}: use one of {', '.join(REACHES)}")


def given_graph(uri: str, original: "FeatureSet", k: int) -> "NeighborGraph":
    """Open a graph that must belong to these features and be long enough."""
    from lattqe.store import NeighborGraph

    graph = NeighborGraph.open(uri)
    made_of = graph.manifest.inputs.get("features", {}).get("digest", "nothing known")
    if made_of != original.digest:
        raise LattqeError(
            f"{uri} is the graph of other features (digest {made_of[:12]}, these have "
            f"{original.digest[:12]}): compute theirs with `lattqe neighbors`"
        )
    if graph.k < k:
        raise LattqeError(
            f"{uri} has {graph.k} neighbors per row, but {k} are needed: compute a longer one with "
            f"`lattqe neighbors -k {k}`"
        )
    return graph


def compute_graph(
    original: "FeatureSet", to: str, k: int, workers: int | None, cache: str | None, here: bool
) -> dict[str, Any]:
    """Compute the features' graph, or finish what an earlier run left: what it took, nothing where it was there."""
    from jobs.neighbors import neighbors, neighbors_here
    from lattqe.search.stored import GraphTask, begin_graph

    task = GraphTask(original.uri, to, k, None, None, cache)
    if begin_graph(task).finished is not None:
        return {}
    return (neighbors_here(task) if here else neighbors(task, workers))[1]


app = command(main)


def append(
    index: Annotated[str, typer.Argument(help="The augmented index, made by `lattqe augment`.")],
    new: Annotated[str | None, typer.Argument(help="The feature set to add.")] = None,
    to: Annotated[str, typer.Option("--to", help="Where the new index goes.")] = "",
    remove: Annotated[
        Path | None, typer.Option(help="A text file with the ids of rows to remove, one per line.")
    ] = None,
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
    """Add rows to an augmented index or remove them; only rows whose neighborhoods changed are augmented again.

    Example: lattqe append index new-features --to index2
    """
    from cluster import runs_here
    from cluster.indexes import Workplace, build_stages, placed
    from lattqe.augmentation.growth import adapted_newcomers, check_joinable, join_features, kept_rows, plan_growth
    from lattqe.augmentation.recipe import ORIGINALS, Recipe
    from lattqe.device import resident_bytes
    from lattqe.expansion import create
    from lattqe.store import FeatureSet

    check_reach(reach)
    if not to:
        raise LattqeError("no destination for the new index: give a folder or s3:// address with --to")
    if new is None and remove is None:
        raise LattqeError("nothing to add or remove: give a feature set, or ids with --remove")
    old_index = FeatureSet.open(index, cache)
    recipe = Recipe.of(old_index, cache)
    create(recipe.method, **recipe.params).check_k(recipe.k, index)
    note_approximate(recipe.graph)
    newcomers = FeatureSet.open(new) if new is not None else None
    if newcomers is not None:
        check_joinable(recipe.features, newcomers)
    leaving = _read_ids(remove)
    rows = recipe.features.rows + (0 if newcomers is None else newcomers.rows)
    if (where := setting(plan, assume, rows, workers, address, cache)) is not None:
        works = planned(recipe, rows - recipe.features.rows, len(leaving), where)
        tell(works, where, not old_index.place.is_local, json)
        return
    process = resident_bytes()
    kept = kept_rows(recipe.features, leaving)
    newcomers = adapted_newcomers(old_index, newcomers, to)
    joined = join_features(recipe.features, kept, newcomers, f"{to.rstrip('/')}/{ORIGINALS}")
    here = reach == "auto" and runs_here(joined.rows, workers, address)
    with nullcontext() if here else on_ray(address):
        grow = None if here else partial(grow_on_ray, workers)
        task, _, cost = plan_growth(old_index, recipe, joined, kept, to, cache, grow)
        show_growth(cost)
        stages = build_stages(placed(task, here), Workplace(here, workers, reach, process), OnScreen())
    report("grown index", stages, json, more=cost.facts())


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


def planned(recipe: "Recipe", joined: int, removed: int, where: "Placement") -> "list[Work]":
    """What the growth takes, as far as it can be known without comparing anything."""
    from lattqe.cost import plans
    from lattqe.cost.work import Stored
    from lattqe.expansion import create

    method, graph = create(recipe.method, **recipe.params), recipe.graph
    rows = plans.PlannedRows.of(recipe.features)
    stored = Stored.of(graph.manifest)
    return plans.append(rows, stored, graph.k, joined, removed, method, recipe.k, where, recipe.hops)


def _read_ids(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line for line in path.read_text().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise LattqeError(f"cannot read the ids to remove from {path}: {why}") from error


append_app = command(append)

if __name__ == "__main__":
    run(app)
