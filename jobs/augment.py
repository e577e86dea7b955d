"""Replace every row of a feature set by its expansion from its neighbors (database-side augmentation)."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import command, human_bytes, print_json, progress_bar, run, show_table
from jobs.methods import method_params
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from cluster.augmentation import Augmentation, AugmentSummary
    from lattqe.store import FeatureSet, Manifest, NeighborGraph


def main(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    to: Annotated[str, typer.Option("--to", help="Where the augmented index goes.")],
    method: Annotated[str, typer.Option(help="aqe, aqewd, dqe, alphaqe or lattqe.")] = "lattqe",
    model: Annotated[str | None, typer.Option(help="The trained model (lattqe).")] = None,
    k: Annotated[int | None, typer.Option("-k", min=1, help="Neighbors for each row. [default: the model's nDBA, or "
                                                            "the paper's for the method]")] = None,
    neighbors: Annotated[str | None, typer.Option(help="The features' neighbor graph. [default: computed and kept "
                                                       "in TO/neighbors]")] = None,
    alpha: Annotated[float | None, typer.Option(help="Power of the similarity (alphaqe).")] = None,
    c: Annotated[float | None, typer.Option("--C", help="The SVM's C (dqe).")] = None,
    negatives: Annotated[int | None, typer.Option(help="Low-ranked negatives for each row (dqe).")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ray workers. [default: one for each GPU, or CPU]")] = None,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster. [default: $RAY_ADDRESS, or here]")] = None,
    cache: Annotated[str | None, typer.Option(help="Node-local folder for rows that live on S3.")] = None,
    faiss: Annotated[str | None, typer.Option(help="Also write a faiss index to this file.")] = None,
    factory: Annotated[str | None, typer.Option(help="Its faiss factory string, such as 'IVF1024,PQ16'.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Replace every row of a feature set by its expansion from its neighbors.

    Example: lattqe augment features --method lattqe --model model -k 48 --to index
    """
    from cluster.augmentation import Augmentation
    from cluster.session import ray_session
    from lattqe.augmentation import GRAPH
    from lattqe.expansion import create
    from lattqe.expansion.rows import shares
    from lattqe.store import FeatureSet

    original = FeatureSet.open(features)
    params = method_params(method, alpha=alpha, c=c, negatives=negatives, model=model, dba=True)
    theta = create(method, **params)
    k = k or theta.suggested_k(dba=True)
    given = given_graph(neighbors, original, theta.depth(k)) if neighbors is not None else None
    with ray_session(address):
        graph = given or computed_graph(original, f"{to.rstrip('/')}/{GRAPH}", theta.depth(k), workers, cache)
        task = Augmentation(original.uri, graph.uri, to, method, k, params, cache, share=shares(theta, original.rows))
        manifest, summary = augment(task, original, graph, workers)
    if faiss is not None:
        from lattqe.store.export import export_features

        export_features(FeatureSet.open(to), faiss, factory)
    report("augmented", manifest, summary, to, json)


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
    from cluster.graph_worker import GraphTask
    from jobs.neighbors import neighbors
    from lattqe.store import NeighborGraph

    neighbors(GraphTask(original.uri, to, k, None, None, cache), workers)
    return NeighborGraph.open(to)


def augment(task: "Augmentation", original: "FeatureSet", graph: "NeighborGraph",
            workers: int | None) -> "tuple[Manifest, AugmentSummary]":
    """Print the plan, run what is missing, publish."""
    from cluster.augmentation import begin_index, default_workers, run_augmentation, worker_resources
    from lattqe.store import read_manifest
    from lattqe.store.place import open_place

    inputs = {"features": original.as_input(), "neighbors": graph.as_input()}
    if "model" in task.params:
        model = open_place(task.params["model"])
        inputs["model"] = {"uri": model.uri, "digest": read_manifest(model, "model").digest, "kind": "model"}
    pending = begin_index(task, inputs)
    workers = workers or default_workers()
    missing = pending.missing()
    rows = sum(pending.part_rows)
    todo = sum(pending.part_rows[part] for part in missing)
    show_table("plan", {
        "rows": f"{rows:,} × {original.dim} {original.dtype}", "method": f"{task.method}, k = {task.k}",
        "workers": workers, "parts": f"{len(pending.part_rows)}, {len(pending.part_rows) - len(missing)} of them done",
        "output": human_bytes(original.manifest.total_bytes)})
    with progress_bar("augment", rows, rows - todo) as bar:
        summary = run_augmentation(task, workers, bar.advance, resources=worker_resources())
    return pending.finish(), summary


def report(verb: str, manifest: "Manifest", summary: "AugmentSummary", to: str, json: bool,
           more: dict[str, Any] | None = None) -> None:
    """Print what was made and what it took; `more` facts of the verb's own."""
    spent = {name: round(seconds, 2) for name, seconds in summary.seconds.items()}
    facts: dict[str, Any] = {
        "index": to, "digest": manifest.digest, "rows": manifest.rows, "expanded_rows": summary.expanded,
        "seconds": round(summary.blocks.seconds, 2), "worker_seconds": spent,
        "peak_worker_bytes": summary.peak_bytes, "retries": summary.blocks.retries,
        "workers_lost": summary.blocks.actors_lost, "spare_copies": summary.blocks.spare_copies} | (more or {})
    if json:
        print_json(facts)
    rate = summary.expanded / max(summary.blocks.seconds, 1e-9)
    readable = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items()}
    show_table(f"{verb} {to}", readable | {
        "seconds": f"{facts['seconds']} ({rate:,.0f} rows/s)", "peak_worker_bytes": human_bytes(summary.peak_bytes),
        "worker_seconds": ", ".join(f"{name} {seconds}" for name, seconds in spent.items())})


app = command(main)

if __name__ == "__main__":
    run(app)
