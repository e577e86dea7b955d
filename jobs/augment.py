"""Replace every row of a feature set by its expansion from its neighbors (database-side augmentation)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import command, human_bytes, print_json, progress_bar, run, show_table
from jobs.methods import NAMES, method_options, method_params
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from cluster.augment_plan import WorkerMemory
    from cluster.augmentation import Augmentation, AugmentSummary
    from cluster.reach import Reach
    from lattqe.store import FeatureSet, Manifest, NeighborGraph, Pending


@method_options
def main(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    to: Annotated[str, typer.Option("--to", help="Where the augmented index goes.")],
    method: Annotated[str, typer.Option(help=f"One of {NAMES}.")] = "lattqe",
    params: dict[str, Any] | None = None,
    k: Annotated[int | None, typer.Option("-k", min=1, help="Neighbors for each row. [default: the model's nDBA, or "
                                                            "the paper's for the method]")] = None,
    neighbors: Annotated[str | None, typer.Option(help="The features' neighbor graph. [default: computed and kept "
                                                       "in TO/neighbors]")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ray workers. [default: one for each GPU, or CPU]")] = None,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster. [default: $RAY_ADDRESS, or here]")] = None,
    cache: Annotated[str | None, typer.Option(help="Node-local folder for rows that live on S3.")] = None,
    reach: Annotated[str, typer.Option(help="How workers reach all vectors: map (a mapped copy on each node), shards "
                                            "(gathered from actors that share them), auto.")] = "auto",
    faiss: Annotated[str | None, typer.Option(help="Also write a faiss index to this file.")] = None,
    factory: Annotated[str | None, typer.Option(help="Its faiss factory string, such as 'IVF1024,PQ16'.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Replace every row of a feature set by its expansion from its neighbors.

    Example: lattqe augment features --method lattqe --model model -k 48 --to index
    """
    from cluster.augmentation import Augmentation
    from cluster.reach import check_reach
    from cluster.session import ray_session
    from lattqe.augmentation import GRAPH
    from lattqe.expansion import create
    from lattqe.expansion.rows import shares
    from lattqe.store import FeatureSet

    check_reach(reach)
    original = FeatureSet.open(features)
    params = method_params(method, params or {}, dba=True)
    theta = create(method, **params)
    theta.check_width(original.dim, f"features in {features}")
    k = k or theta.suggested_k(dba=True)
    given = given_graph(neighbors, original, theta.depth(k)) if neighbors is not None else None
    with ray_session(address):
        graph = given or computed_graph(original, f"{to.rstrip('/')}/{GRAPH}", theta.depth(k), workers, cache)
        task = Augmentation(original.uri, graph.uri, to, method, k, params, cache, share=shares(theta, original.rows))
        made = augment(task, original, graph, workers, reach)
    if faiss is not None:
        from lattqe.store.export import export_features

        export_features(FeatureSet.open(to), faiss, factory)
    report("augmented", made, json)


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


def computed_graph(original: "FeatureSet", to: str, k: int, workers: int | None, cache: str | None) -> "NeighborGraph":
    """Compute the features' graph, or finish what an earlier run left."""
    from cluster.graph_plan import GraphTask
    from jobs.neighbors import neighbors
    from lattqe.store import NeighborGraph

    neighbors(GraphTask(original.uri, to, k, None, None, cache), workers)
    return NeighborGraph.open(to)


@dataclass(frozen=True)
class Made:
    """An index, and what it took to make it."""

    task: "Augmentation"
    manifest: "Manifest"
    summary: "AugmentSummary"
    memory: "WorkerMemory"
    reach: "Reach"
    sharing: str  # what sharing first products spared, or why it was not done


def augment(task: "Augmentation", original: "FeatureSet", graph: "NeighborGraph", workers: int | None,
            reach: str = "auto", process: int | None = None) -> Made:
    """Print the plan, run what is missing, publish. `process`: bytes of this process without the data it holds."""
    from cluster.augment_plan import predict_memory, resident_bytes, sharing, spared
    from cluster.augmentation import begin_index, default_workers, run_augmentation, worker_resources
    from cluster.reach import ShardReader, choose_reach, open_shards
    from lattqe.expansion import create

    pending = begin_index(task, inputs_of(task, original, graph))
    workers = workers or default_workers()
    method = create(task.method, **task.params)
    chosen = choose_reach(reach, original, task.cache)
    memory = predict_memory(task, original, graph, method, chosen, process or resident_bytes())
    told = sharing(method, original.rows, again=task.previous is not None)[1]
    missing = pending.missing()
    show_plan(task, original, workers, pending, missing, chosen, memory, told)
    rows = original.rows
    with open_shards(original, chosen) as index, \
            progress_bar("augment", rows, rows - sum(pending.part_rows[part] for part in missing)) as bar:
        shards = ShardReader(index) if index is not None else None
        summary = run_augmentation(task, workers, bar.advance, resources=worker_resources(), shards=shards)
    if task.share and summary.expanded:
        flops = spared(method, task.k, rows, summary.expanded, summary.tables)
        told = (f"{flops / 1e9:,.1f} GFLOP spared; the tables took {summary.seconds['sharing']:.2f} s of "
                f"{sum(summary.seconds.values()):.2f} s of work")
    return Made(task, pending.finish(), summary, memory, chosen, told)


def inputs_of(task: "Augmentation", original: "FeatureSet", graph: "NeighborGraph") -> dict[str, dict[str, str]]:
    """What the index's manifest will name as its inputs."""
    from lattqe.store import read_manifest
    from lattqe.store.place import open_place

    inputs = {"features": original.as_input(), "neighbors": graph.as_input()}
    if "model" in task.params:
        model = open_place(task.params["model"])
        inputs["model"] = {"uri": model.uri, "digest": read_manifest(model, "model").digest, "kind": "model"}
    return inputs


def show_plan(task: "Augmentation", original: "FeatureSet", workers: int, pending: "Pending", missing: list[int],
              reach: "Reach", memory: "WorkerMemory", sharing: str) -> None:
    """Print what is going to happen, before it does."""
    parts = len(pending.part_rows)
    shards = f" ({reach.shards} shards)" if reach.shards else ""
    show_table("plan", {
        "rows": f"{original.rows:,} × {original.dim} {original.dtype}", "method": f"{task.method}, k = {task.k}",
        "workers": workers, "parts": f"{parts}, {parts - len(missing)} of them done",
        "output": human_bytes(original.manifest.total_bytes),
        "reach of vectors": f"{reach.how}{shards}: {reach.reason}",
        "shared first products": sharing,
        "memory of a worker": human_bytes(memory.total),
        "of which": ", ".join(f"{name} {human_bytes(size)}" for name, size in memory.parts().items())})


def report(verb: str, made: Made, json: bool, more: dict[str, Any] | None = None) -> None:
    """Print what was made and what it took; `more` facts of the verb's own."""
    summary = made.summary
    spent = {name: round(seconds, 2) for name, seconds in summary.seconds.items()}
    facts: dict[str, Any] = {
        "index": made.task.to, "digest": made.manifest.digest, "rows": made.manifest.rows,
        "expanded_rows": summary.expanded, "seconds": round(summary.blocks.seconds, 2),
        "seconds_after_start": round(summary.working, 3), "worker_seconds": spent,
        "worker_cpu_seconds": round(summary.cpu, 2),
        "peak_worker_bytes": summary.peak_bytes, "predicted_worker_bytes": made.memory.total,
        "reach": made.reach.how, "shared_products": made.sharing, "retries": summary.blocks.retries,
        "workers_lost": summary.blocks.actors_lost, "spare_copies": summary.blocks.spare_copies} | (more or {})
    if json:
        print_json(facts)
    rate = summary.expanded / max(summary.working, 1e-9)
    readable = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
    show_table(f"{verb} {made.task.to}", readable | {
        "seconds_after_start": f"{summary.working:.2f} ({rate:,.0f} rows/s)",
        "peak_worker_bytes": f"{human_bytes(summary.peak_bytes)}, mapped files included",
        "predicted_worker_bytes": human_bytes(made.memory.total),
        "worker_seconds": ", ".join(f"{name} {seconds}" for name, seconds in spent.items())})


app = command(main)

if __name__ == "__main__":
    run(app)
