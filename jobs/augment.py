"""Replace every row of a feature set by its expansion from its neighbors (database-side augmentation)."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import (
    APPROXIMATE_GRAPH,
    Address,
    Cache,
    Json,
    ProgressBar,
    Workers,
    command,
    human_bytes,
    on_ray,
    print_json,
    progress_bar,
    run,
    screen,
    show_table,
)
from jobs.methods import NAMES, method_options, method_params
from jobs.plan import Assume, Plan, setting, tell
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.augmentation import Augmentation, AugmentSummary
    from lattqe.expansion import Method
    from lattqe.store import FeatureSet, Manifest, NeighborGraph, Pending

REACHES = ("auto", "map", "shards")


@method_options
def main(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    to: Annotated[str, typer.Option("--to", help="Where the augmented index goes.")],
    method: Annotated[str, typer.Option(help=f"One of {NAMES}.")] = "lattqe",
    params: dict[str, Any] | None = None,
    k: Annotated[
        int | None,
        typer.Option(
            "-k", min=1, help="Neighbors for each row; by default the model's nDBA, or the paper's for the method."
        ),
    ] = None,
    hops: Annotated[
        int | None,
        typer.Option(
            help="1: each row from its own neighbors. Above, to 64: features flow so "
            "many times over the weighted edges of all rows; by default the "
            "model's number, or 1."
        ),
    ] = None,
    hop_alpha: Annotated[
        float | None,
        typer.Option(
            help="Share of a hop that comes from the neighbors, between 0 and "
            "1; by default what the model learned, or 0.9."
        ),
    ] = None,
    neighbors: Annotated[
        str | None, typer.Option(help="The features' neighbor graph; by default computed and kept in TO/neighbors.")
    ] = None,
    workers: Workers = None,
    address: Address = None,
    cache: Cache = None,
    reach: Annotated[
        str,
        typer.Option(
            help="How workers reach all vectors: map (a mapped copy on each node), shards "
            "(gathered from actors that share them), auto."
        ),
    ] = "auto",
    faiss: Annotated[str | None, typer.Option(help="Also write a faiss index to this file.")] = None,
    factory: Annotated[str | None, typer.Option(help="Its faiss factory string, such as 'IVF1024,PQ16'.")] = None,
    plan: Plan = False,
    assume: Assume = None,
    json: Json = False,
) -> None:
    """Replace every row of a feature set by its expansion from its neighbors.

    Example: lattqe augment features --method lattqe --model model -k 48 --to index
    """
    from cluster import runs_here
    from lattqe.augmentation import GRAPH, Augmentation, describe
    from lattqe.cost import plans
    from lattqe.expansion import create
    from lattqe.store import FeatureSet, find_manifest, open_place
    from lattqe.store.pending import refuse_unlike

    check_reach(reach)
    original = FeatureSet.open(features)
    params = method_params(method, params or {}, dba=True)
    theta = create(method, **params)
    theta.check_width(original.dim, f"features in {features}")
    k = k or theta.suggested_k(dba=True)
    hops, hop_alpha = chosen_hops(theta, hops, hop_alpha)
    given = given_graph(neighbors, original, theta.depth(k)) if neighbors is not None else None
    if (where := setting(plan, assume, original.rows, workers, address, cache)) is not None:
        shards = None if reach == "auto" else reach == "shards"
        works = plans.augment_by(original, theta, k, hops, where, graph=given, shards=shards)
        tell(works, where, not original.place.is_local, json)
        return
    known = {"kind": "features", "config": describe(method, k, params, hops, hop_alpha)}
    known["inputs"] = {"features": original.as_input()}
    refuse_unlike(open_place(to), known)  # before a graph or edges are put there
    if k >= original.rows:
        note = (
            f"note: {original.rows:,} rows have {original.rows - 1:,} neighbors each: all of them are weighed, not {k}"
        )
        screen.print(note, markup=False, soft_wrap=True)
    own_graph = f"{to.rstrip('/')}/{GRAPH}"
    done = find_manifest(open_place(to)) if given or find_manifest(open_place(own_graph)) else None
    here = done is not None or (reach == "auto" and runs_here(original.rows, workers, address))
    with nullcontext() if here else on_ray(address):
        if done is None:
            checked_device(theta, here)  # before a graph is computed for nothing
        graph = given or computed_graph(original, own_graph, theta.depth(k), workers, cache, here)
        task = Augmentation(original.uri, graph.uri, to, method, k, params, cache, hops=hops, hop_alpha=hop_alpha)
        made = augment_here(task, done) if here else augment(task, workers, reach)
    if done is not None:
        screen.print(f"{to} is already up to date", markup=False, soft_wrap=True)
    if faiss is not None:
        from lattqe.store.export import export_features

        export_features(FeatureSet.open(to), faiss, factory)
    report("augmented", made, json)


def chosen_hops(method: "Method", hops: int | None, alpha: float | None) -> tuple[int, float]:
    """The hops and the share that were asked for, or the method's own."""
    from lattqe.expansion.base import check_hops

    hops = method.default_hops if hops is None else hops
    if hops == 1 and alpha is not None:
        raise LattqeError("--hop-alpha belongs to several hops: add --hops 8, or leave it out")
    alpha = method.hop_alpha if alpha is None else alpha
    check_hops(hops, alpha)
    return hops, alpha


def check_reach(wanted: str) -> None:
    """Refuse an unknown wish before anything starts."""
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
            f"{uri} has {graph.k} neighbors for each row, {k} are needed: compute a longer one with "
            f"`lattqe neighbors -k {k}`"
        )
    return graph


def computed_graph(
    original: "FeatureSet", to: str, k: int, workers: int | None, cache: str | None, here: bool
) -> "NeighborGraph":
    """Compute the features' graph, or finish what an earlier run left."""
    from jobs.neighbors import neighbors, neighbors_here
    from lattqe.search.stored import GraphTask, begin_graph
    from lattqe.store import NeighborGraph

    task = GraphTask(original.uri, to, k, None, None, cache)
    if begin_graph(task).finished is None:
        if here:
            neighbors_here(task)
        else:
            neighbors(task, workers)
    return NeighborGraph.open(to)


@dataclass(frozen=True)
class Made:
    """An index, and what it took to make it."""

    task: "Augmentation"
    manifest: "Manifest"
    summary: "AugmentSummary"
    sharing: str  # what sharing first products spared, or why it was not done
    more: dict[str, Any] = field(default_factory=dict)  # facts of a run on Ray

    def then(self, hops: "Made") -> "Made":
        """The index of several hops, whose edges are this."""
        number, rows = self.task.hops, hops.summary
        facts = {
            "hops": number,
            "hop_alpha": self.task.hop_alpha,
            "edges_digest": self.manifest.digest,
            "hop_seconds": round(rows.took, 2),
            "bytes_read_for_each_hop": rows.read["hop"] // number,
            "bytes_written_for_each_hop": rows.written["hop"] // number,
        }
        return Made(hops.task, hops.manifest, self.summary.then(rows), self.sharing, self.more | hops.more | facts)


def made_on(task: "Augmentation", here: bool) -> "Augmentation":
    """The task for the device of this process, or of the workers on Ray; one that cannot do it is refused."""
    from lattqe.expansion import create

    device = checked_device(create(task.method, **task.params), here)
    return replace(task, device=device)


def checked_device(method: "Method", here: bool) -> str:
    """The kind of device that rows are augmented on, where it can do what the method's parameters ask for."""
    import torch

    from lattqe.device import pick_device

    if here:
        device = pick_device()
    else:
        from cluster.session import worker_device

        device = torch.device(worker_device())
    method.check_device(device)
    return device.type


HERE = {"where": "in this process: --workers or --address ask for Ray"}


def augment_here(task: "Augmentation", done: "Manifest | None" = None) -> Made:
    """Print the plan, run what is missing in this process, publish; of several hops, first the edges.

    done: what an earlier run, on whatever device, has published: nothing is left to compute.
    """
    placed = made_on(task, here=True) if done is None else replace(task, device=done.config.get("device", "cpu"))
    return reduce(Made.then, [(_hop_here if stage.hopping else _augment_here)(stage) for stage in placed.stages()])


def augment(task: "Augmentation", workers: int | None, reach: str = "auto", process: int | None = None) -> Made:
    """The same on Ray. `process`: this process's bytes without data it holds."""
    return reduce(
        Made.then,
        [
            _hop(stage, workers, process) if stage.hopping else _augment(stage, workers, reach, process)
            for stage in made_on(task, here=False).stages()
        ],
    )


def _augment_here(task: "Augmentation") -> Made:
    from lattqe.augmentation import begin_index, build_index

    pending = begin_index(task)
    told = show_plan(task, pending, HERE)
    with _bar(pending) as bar:
        summary = build_index(task, bar.advance)
    return Made(task, pending.finish(), summary, spared_by(task, summary) or told)


def _hop_here(task: "Augmentation") -> Made:
    from lattqe.augmentation import begin_index, build_index

    pending = begin_index(task)
    show_hops(task, 1, HERE)
    with _hop_bar(task, pending) as bar:
        summary = build_index(task, bar.advance)
    return Made(task, pending.finish(), summary, "")


def _hop(task: "Augmentation", workers: int | None, process: int | None) -> Made:
    from cluster.augmentation import build_index, hop_workers, predict_hop_memory
    from cluster.blocks import check_parts
    from lattqe.augmentation import begin_index
    from lattqe.device import resident_bytes

    pending = begin_index(task)
    check_parts(pending)
    workers = workers or hop_workers()
    memory = predict_hop_memory(task.hop_task(), process or resident_bytes())
    show_hops(task, workers, {"workers": workers, "memory of a worker": human_bytes(memory)})
    with _hop_bar(task, pending) as bar:
        summary = build_index(task, bar.advance, workers=workers, pending=pending)
    return Made(
        task,
        pending.finish(),
        summary,
        "",
        {"predicted_hop_worker_bytes": memory, "peak_hop_worker_bytes": summary.peak_bytes},
    )


def _hop_bar(task: "Augmentation", pending: "Pending") -> AbstractContextManager[ProgressBar]:
    from lattqe.augmentation.bands import Schedule

    schedule = Schedule(task.hop_task(), pending)
    total = schedule.cut.rows * task.hops * len(schedule.cut.groups)
    return progress_bar("hops, rows", total, total - schedule.rows_left())


def show_hops(task: "Augmentation", workers: int, where: dict[str, Any]) -> None:
    """Print what the hops will be and move."""
    from lattqe.cost import augment as cost
    from lattqe.cost.work import Machines, Stored
    from lattqe.store import Edges, FeatureSet

    original, edges = FeatureSet.open(task.features), Edges.open(task.edges)
    cut = task.hop_task().cut(original.rows, original.dim)
    work = cost.hops(
        Stored.of(original.manifest),
        Stored.of(edges.manifest),
        original.dim,
        edges.k,
        task.hops,
        cut.band_sizes,
        cut.group_sizes,
        Machines(asked=workers),
        here=False,
    )
    show_table(
        "hops",
        {
            "hops": f"{task.hops}, each with a share of {task.hop_alpha:g} from the neighbors",
            "edges": f"{original.rows:,} × {edges.k}, {human_bytes(edges.manifest.total_bytes)} in {task.edges}",
            **work.facts,
            "kept meanwhile": f"{human_bytes(work.scratch)} in {task.to}/_work",
        }
        | where,
    )


def _augment(task: "Augmentation", workers: int | None, reach: str, process: int | None) -> Made:
    from cluster.augmentation import (
        ShardReader,
        build_index,
        choose_reach,
        default_workers,
        open_shards,
        predict_memory,
    )
    from cluster.blocks import check_parts
    from lattqe.augmentation import begin_index
    from lattqe.device import resident_bytes
    from lattqe.expansion import create
    from lattqe.store import FeatureSet, NeighborGraph

    pending = begin_index(task)
    check_parts(pending)
    workers = workers or default_workers()
    original, graph = FeatureSet.open(task.features), NeighborGraph.open(task.graph)
    chosen = choose_reach(reach, original, task.cache)
    memory = predict_memory(
        task, original, graph, create(task.method, **task.params), chosen, process or resident_bytes()
    )
    shards = f" ({chosen.shards} shards)" if chosen.shards else ""
    told = show_plan(
        task,
        pending,
        {
            "workers": workers,
            "reach of vectors": f"{chosen.how}{shards}: {chosen.reason}",
            "memory of a worker": human_bytes(memory.total),
            "of which": ", ".join(f"{name} {human_bytes(size)}" for name, size in memory.parts().items()),
        },
    )
    with open_shards(original, chosen) as index, _bar(pending) as bar:
        reader = ShardReader(index) if index is not None else None
        summary = build_index(task, bar.advance, workers=workers, shards=reader, pending=pending)
    return Made(
        task,
        pending.finish(),
        summary,
        spared_by(task, summary) or told,
        {"predicted_worker_bytes": memory.total, "reach": chosen.how},
    )


def _bar(pending: "Pending") -> AbstractContextManager[ProgressBar]:
    rows = sum(pending.part_rows)
    return progress_bar("augment", rows, rows - sum(pending.part_rows[part] for part in pending.missing()))


def show_plan(task: "Augmentation", pending: "Pending", where: dict[str, Any]) -> str:
    """Print what is going to happen, before it does; returns what is said of sharing."""
    from lattqe.expansion import create
    from lattqe.expansion.rows import sharing
    from lattqe.store import FeatureSet, NeighborGraph, row_bytes

    original = FeatureSet.open(task.features)
    told = sharing(create(task.method, **task.params), original.rows, again=task.previous is not None)
    lacks = NeighborGraph.open(task.graph).manifest.approximation
    parts = len(pending.part_rows)
    what = "edges" if task.only_edges else "plan"
    size = (
        original.rows * row_bytes("edges", pending.plan["fields"]) if task.only_edges else original.manifest.total_bytes
    )
    show_table(
        what,
        {
            "rows": f"{original.rows:,} × {original.dim} {original.dtype}",
            "method": f"{task.method}, k = {task.k}",
            "parts": f"{parts}, {parts - len(pending.missing())} of them done",
            "output": human_bytes(size),
            "shared first products": told,
        }
        | ({} if lacks is None else {"neighbors": f"from {APPROXIMATE_GRAPH}: {lacks}"})
        | where,
    )
    return told


def spared_by(task: "Augmentation", summary: "AugmentSummary") -> str | None:
    """What sharing first products spared, where they were shared."""
    from lattqe.expansion import create
    from lattqe.expansion.rows import spared
    from lattqe.store import FeatureSet

    if not summary.tables:
        return None
    method, rows = create(task.method, **task.params), FeatureSet.open(task.features).rows
    flops = spared(method, task.k, rows, summary.expanded, summary.tables)
    return (
        f"{flops / 1e9:,.1f} GFLOP spared; the tables took "
        f"{summary.seconds['sharing']:.2f} s of {sum(summary.seconds.values()):.2f} s of work"
    )


def report(verb: str, made: Made, json: bool, more: dict[str, Any] | None = None) -> None:
    """Print what was made and what it took; `more` facts of the verb's own."""
    summary = made.summary
    spent = {name: round(seconds, 2) for name, seconds in summary.seconds.items()}
    facts: dict[str, Any] = {
        "index": made.task.to,
        "digest": made.manifest.digest,
        "rows": made.manifest.rows,
        "expanded_rows": summary.expanded,
        "seconds": round(summary.took, 2),
        "seconds_after_start": round(summary.working, 3),
        "worker_seconds": spent,
        "worker_cpu_seconds": round(summary.cpu, 2),
        "peak_worker_bytes": summary.peak_bytes,
        **made.more,
        "shared_products": made.sharing,
        "retries": summary.retries,
        "workers_lost": summary.workers_lost,
        "spare_copies": summary.spare_copies,
    } | (more or {})
    if made.manifest.approximation is not None:
        facts["approximate"] = made.manifest.approximation
    if json:
        print_json(facts)
    rate = summary.expanded / max(summary.working, 1e-9)
    readable = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
    predicted = made.more.get("predicted_worker_bytes")
    show_table(
        f"{verb} {made.task.to}",
        readable
        | {
            "seconds_after_start": f"{summary.working:.2f} ({rate:,.0f} rows/s)",
            "peak_worker_bytes": f"{human_bytes(summary.peak_bytes)}, mapped files included",
            "worker_seconds": ", ".join(f"{name} {seconds}" for name, seconds in spent.items()),
        }
        | ({"predicted_worker_bytes": human_bytes(predicted)} if predicted else {}),
    )


app = command(main)

if __name__ == "__main__":
    run(app)
