"""Find the exact k nearest neighbors of every row of a feature set among all its other rows."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import command, human_bytes, print_json, progress_bar, run, show_table

if TYPE_CHECKING:
    from cluster.graph import GraphSummary
    from cluster.graph_plan import GraphPlan, GraphTask
    from lattqe.store import Manifest, Pending

PROGRESS_UNIT = 1_000_000  # products of two vectors


def main(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    to: Annotated[str, typer.Option("--to", help="Where the graph goes.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbors for each row, never the row itself.")] = 64,
    against: Annotated[str | None, typer.Option(help="A second set (distractors), its rows numbered after the first's: "
                                                     "the graph of both together.")] = None,
    into: Annotated[str | None, typer.Option(help="The second set's own graph, made before and shared.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ray workers. [default: one for each GPU, or CPU]")] = None,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster. [default: $RAY_ADDRESS, or here]")] = None,
    cache: Annotated[str | None, typer.Option(help="Node-local folder for rows that live on S3.")] = None,
    block_rows: Annotated[int | None, typer.Option(min=1, help="Rows of a block. [default: by memory, time]")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Find the exact k nearest neighbors of every row among all other rows.

    Killed at any time, the same command goes on where it stopped. Example: lattqe neighbors features -k 64 --to graph
    """
    from cluster.graph import begin_graph
    from cluster.graph_plan import GraphTask, check_sets
    from cluster.session import ray_session
    from lattqe.store import find_manifest, open_place

    # Workers may run elsewhere: addresses are made absolute here.
    task = GraphTask(open_place(features).uri, open_place(to).uri, k, against and open_place(against).uri,
                     into and open_place(into).uri, cache)
    facts: dict[str, Any]
    check_sets(task)
    if find_manifest(open_place(to)) is not None:
        manifest, facts = begin_graph(task).finish(), {}
    else:
        with ray_session(address):
            manifest, facts = neighbors(task, workers, block_rows)
    facts = {"graph": to, "digest": manifest.digest, "rows": manifest.rows, "k": k} | facts
    if json:
        print_json(facts)
    show_table(f"neighbors in {to}", {name: _readable(name, value) for name, value in facts.items()})


def neighbors(task: "GraphTask", workers: int | None = None,
              block_rows: int | None = None) -> "tuple[Manifest, dict[str, Any]]":
    """Plan, compute what is missing, publish, within a Ray session: the manifest, and what it took."""
    from dataclasses import replace

    from cluster.graph import begin_graph, run_graph
    from cluster.graph_plan import agree_on_cut, plan_graph

    plan = plan_graph(task, workers, block_rows)  # before anything is claimed: it may refuse
    pending = begin_graph(task)
    plan = replace(plan, cut=agree_on_cut(pending.place, plan.cut))
    task = replace(task, threads=plan.threads)
    left = _products_left(task, plan, pending)
    show_plan(task, plan, left)
    with progress_bar("products, millions", plan.products // PROGRESS_UNIT + 1,
                      (plan.products - left) // PROGRESS_UNIT) as bar:
        counted = plan.products - left

        def advance(products: int) -> None:
            nonlocal counted
            before, counted = counted, counted + products
            bar.advance(counted // PROGRESS_UNIT - before // PROGRESS_UNIT)

        summary = run_graph(task, plan.cut, plan.workers, advance, resources=plan.resources)
    return pending.finish(), facts_of(summary, plan, left)


def _products_left(task: "GraphTask", plan: "GraphPlan", pending: "Pending") -> int:
    """Products that no earlier run has done."""
    from cluster.graph import Progress

    return Progress(task, plan.cut, pending, plan.workers, lambda _: None).products_left()


def show_plan(task: "GraphTask", plan: "GraphPlan", left: int) -> None:
    """Print what is going to happen, before it does."""
    expected = plan.seconds * left / max(plan.products, 1)
    speed = plan.products_per_second * plan.dim * 2 / 1e9
    show_table("plan", {
        "rows": f"{plan.rows:,} × {plan.dim} {plan.dtype}, k = {task.k}",
        "workers": f"{plan.workers}, each with " + ", ".join(f"{v:g} {n[4:]}" for n, v in plan.resources.items()),
        "blocks": f"{plan.cut.blocks} of up to {plan.largest:,} rows, {len(plan.cut.pairs())} pairs",
        "memory of a worker": human_bytes(plan.worker_bytes),
        "unfinished lists": f"up to {human_bytes(plan.work_bytes)} in {task.to}/_work",
        "graph": human_bytes(8 * task.k * plan.rows),
        "products": f"{plan.flops / 1e12:.3g} TFLOP, {100 * (1 - left / max(plan.products, 1)):.0f} % of them done",
        "expected time": f"{human_time(expected)} at {speed:.0f} GFLOP/s a worker"})


def human_time(seconds: float) -> str:
    """95 -> '95 s', 3900 -> '1 h 05 min'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def facts_of(summary: "GraphSummary", plan: "GraphPlan", left: int) -> dict[str, Any]:
    """What it took, for scripts."""
    return {"seconds": round(summary.blocks.seconds, 2), "seconds_after_start": round(summary.working, 2),
            "gflops": round(2 * left * plan.dim / max(summary.working, 1e-9) / 1e9, 1),
            "worker_seconds": {name: round(spent, 2) for name, spent in sorted(summary.seconds.items())},
            "workers": plan.workers, "balance": round(summary.balance, 3), "peak_worker_bytes": summary.peak_bytes,
            "retries": summary.blocks.retries, "workers_lost": summary.blocks.actors_lost}


def _readable(name: str, value: Any) -> Any:
    if name == "peak_worker_bytes":
        return human_bytes(value)
    if name == "worker_seconds":
        return ", ".join(f"{what} {spent}" for what, spent in value.items())
    return f"{value:,}" if name == "rows" else value


app = command(main)

if __name__ == "__main__":
    run(app)
