"""Replace every row of a feature set by its expansion from its neighbors (database-side augmentation)."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import (
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
    show_table,
)
from jobs.methods import NAMES, method_options, method_params
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.augmentation import Augmentation, AugmentSummary
    from lattqe.store import FeatureSet, Manifest, NeighborGraph, Pending

REACHES = ("auto", "map", "shards")


@method_options
def main(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    to: Annotated[str, typer.Option("--to", help="Where the augmented index goes.")],
    method: Annotated[str, typer.Option(help=f"One of {NAMES}.")] = "lattqe",
    params: dict[str, Any] | None = None,
    k: Annotated[int | None, typer.Option("-k", min=1, help="Neighbors for each row; by default the model's nDBA, or "
                                                            "the paper's for the method.")] = None,
    neighbors: Annotated[str | None, typer.Option(help="The features' neighbor graph; by default computed and kept "
                                                       "in TO/neighbors.")] = None,
    workers: Workers = None,
    address: Address = None,
    cache: Cache = None,
    reach: Annotated[str, typer.Option(help="How workers reach all vectors: map (a mapped copy on each node), shards "
                                            "(gathered from actors that share them), auto.")] = "auto",
    faiss: Annotated[str | None, typer.Option(help="Also write a faiss index to this file.")] = None,
    factory: Annotated[str | None, typer.Option(help="Its faiss factory string, such as 'IVF1024,PQ16'.")] = None,
    json: Json = False,
) -> None:
    """Replace every row of a feature set by its expansion from its neighbors.

    Example: lattqe augment features --method lattqe --model model -k 48 --to index
    """
    from cluster.here import runs_here
    from lattqe.augmentation import GRAPH, Augmentation
    from lattqe.expansion import create
    from lattqe.store import FeatureSet

    check_reach(reach)
    original = FeatureSet.open(features)
    params = method_params(method, params or {}, dba=True)
    theta = create(method, **params)
    theta.check_width(original.dim, f"features in {features}")
    k = k or theta.suggested_k(dba=True)
    given = given_graph(neighbors, original, theta.depth(k)) if neighbors is not None else None
    here = reach == "auto" and runs_here(original.rows, workers, address)
    with nullcontext() if here else on_ray(address):
        graph = given or computed_graph(original, f"{to.rstrip('/')}/{GRAPH}", theta.depth(k), workers, cache, here)
        task = Augmentation(original.uri, graph.uri, to, method, k, params, cache)
        made = augment_here(task) if here else augment(task, workers, reach)
    if faiss is not None:
        from lattqe.store.export import export_features

        export_features(FeatureSet.open(to), faiss, factory)
    report("augmented", made, json)


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
        raise LattqeError(f"{uri} is the graph of other features (digest {made_of[:12]}, these have "
                          f"{original.digest[:12]}): compute theirs with `lattqe neighbors`")
    if graph.k < k:
        raise LattqeError(f"{uri} has {graph.k} neighbors for each row, {k} are needed: compute a longer one with "
                          f"`lattqe neighbors -k {k}`")
    return graph


def computed_graph(original: "FeatureSet", to: str, k: int, workers: int | None, cache: str | None,
                   here: bool) -> "NeighborGraph":
    """Compute the features' graph, or finish what an earlier run left."""
    from jobs.neighbors import neighbors, neighbors_here
    from lattqe.search.stored import GraphTask, begin_graph
    from lattqe.store import NeighborGraph

    task = GraphTask(original.uri, to, k, None, None, cache)
    if not begin_graph(task).missing():
        begin_graph(task).finish()
    elif here:
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


def augment_here(task: "Augmentation") -> Made:
    """Print the plan, run what is missing in this process, publish."""
    from lattqe.augmentation import begin_index, build_index

    pending = begin_index(task)
    told = show_plan(task, pending, {"where": "in this process: --workers or --address ask for Ray"})
    with _bar(pending) as bar:
        summary = build_index(task, bar.advance)
    return Made(task, pending.finish(), summary, spared_by(task, summary) or told)


def augment(task: "Augmentation", workers: int | None, reach: str = "auto", process: int | None = None) -> Made:
    """Print the plan, run what is missing on Ray, publish. `process`: this process's bytes without data it holds."""
    from cluster.augmentation import build_index, default_workers, predict_memory
    from cluster.reach import ShardReader, choose_reach, open_shards
    from lattqe.augmentation import begin_index
    from lattqe.expansion import create
    from lattqe.memory import resident_bytes
    from lattqe.store import FeatureSet, NeighborGraph

    pending = begin_index(task)
    workers = workers or default_workers()
    original, graph = FeatureSet.open(task.features), NeighborGraph.open(task.graph)
    chosen = choose_reach(reach, original, task.cache)
    memory = predict_memory(task, original, graph, create(task.method, **task.params), chosen,
                            process or resident_bytes())
    shards = f" ({chosen.shards} shards)" if chosen.shards else ""
    told = show_plan(task, pending, {
        "workers": workers, "reach of vectors": f"{chosen.how}{shards}: {chosen.reason}",
        "memory of a worker": human_bytes(memory.total),
        "of which": ", ".join(f"{name} {human_bytes(size)}" for name, size in memory.parts().items())})
    with open_shards(original, chosen) as index, _bar(pending) as bar:
        reader = ShardReader(index) if index is not None else None
        summary = build_index(task, bar.advance, workers=workers, shards=reader)
    return Made(task, pending.finish(), summary, spared_by(task, summary) or told,
                {"predicted_worker_bytes": memory.total, "reach": chosen.how})


def _bar(pending: "Pending") -> AbstractContextManager[ProgressBar]:
    rows = sum(pending.part_rows)
    return progress_bar("augment", rows, rows - sum(pending.part_rows[part] for part in pending.missing()))


def show_plan(task: "Augmentation", pending: "Pending", where: dict[str, Any]) -> str:
    """Print what is going to happen, before it does; returns what is said of sharing."""
    from lattqe.expansion import create
    from lattqe.expansion.rows import sharing
    from lattqe.store import FeatureSet

    original = FeatureSet.open(task.features)
    told = sharing(create(task.method, **task.params), original.rows, again=task.previous is not None)
    parts = len(pending.part_rows)
    show_table("plan", {
        "rows": f"{original.rows:,} × {original.dim} {original.dtype}", "method": f"{task.method}, k = {task.k}",
        "parts": f"{parts}, {parts - len(pending.missing())} of them done",
        "output": human_bytes(original.manifest.total_bytes), "shared first products": told} | where)
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
    return (f"{flops / 1e9:,.1f} GFLOP spared; the tables took "
            f"{summary.seconds['sharing']:.2f} s of {sum(summary.seconds.values()):.2f} s of work")


def report(verb: str, made: Made, json: bool, more: dict[str, Any] | None = None) -> None:
    """Print what was made and what it took; `more` facts of the verb's own."""
    summary = made.summary
    spent = {name: round(seconds, 2) for name, seconds in summary.seconds.items()}
    facts: dict[str, Any] = {
        "index": made.task.to, "digest": made.manifest.digest, "rows": made.manifest.rows,
        "expanded_rows": summary.expanded, "seconds": round(summary.took, 2),
        "seconds_after_start": round(summary.working, 3), "worker_seconds": spent,
        "worker_cpu_seconds": round(summary.cpu, 2), "peak_worker_bytes": summary.peak_bytes, **made.more,
        "shared_products": made.sharing, "retries": summary.retries,
        "workers_lost": summary.workers_lost, "spare_copies": summary.spare_copies} | (more or {})
    if json:
        print_json(facts)
    rate = summary.expanded / max(summary.working, 1e-9)
    readable = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
    predicted = made.more.get("predicted_worker_bytes")
    show_table(f"{verb} {made.task.to}", readable | {
        "seconds_after_start": f"{summary.working:.2f} ({rate:,.0f} rows/s)",
        "peak_worker_bytes": f"{human_bytes(summary.peak_bytes)}, mapped files included",
        "worker_seconds": ", ".join(f"{name} {seconds}" for name, seconds in spent.items())}
        | ({"predicted_worker_bytes": human_bytes(predicted)} if predicted else {}))


app = command(main)

if __name__ == "__main__":
    run(app)
