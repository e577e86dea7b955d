"""Find the exact k nearest neighbors of every row of a feature set among all its other rows."""

from collections.abc import Callable
from enum import StrEnum
from threading import Lock
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
    screen,
    show_table,
)

if TYPE_CHECKING:
    from cluster.graph import GraphSummary
    from cluster.graph_plan import GraphPlan
    from lattqe.search.stored import GraphTask
    from lattqe.store import Manifest


class Engine(StrEnum):
    """Who finds the candidates."""

    lattqe = "lattqe"
    faiss = "faiss"


class Schedule(StrEnum):
    """Who compares what, on Ray."""

    auto = "auto"
    pairs = "pairs"
    rows = "rows"


PROGRESS_UNIT = 1_000_000  # products of two vectors


def main(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    to: Annotated[str, typer.Option("--to", help="Where the graph goes.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbors for each row, never the row itself.")] = 64,
    against: Annotated[
        str | None,
        typer.Option(
            help="A second set (distractors), its rows numbered after the first's: the graph of both together."
        ),
    ] = None,
    into: Annotated[str | None, typer.Option(help="The second set's own graph, made before and shared.")] = None,
    workers: Workers = None,
    address: Address = None,
    cache: Cache = None,
    block_rows: Annotated[int | None, typer.Option(min=1, help="Rows of a block; by default as fit.")] = None,
    schedule: Annotated[
        Schedule,
        typer.Option(
            help="pairs: two blocks are compared once, for both; rows: each block has one worker, which reads all "
            "others and writes its lists once; auto: what takes less time. The same graph."
        ),
    ] = Schedule.auto,
    engine: Annotated[
        Engine, typer.Option(help="faiss: it finds the candidates, each list is certified; the same graph.")
    ] = Engine.lattqe,
    json: Json = False,
) -> None:
    """Find the exact k nearest neighbors of every row among all other rows.

    Killed at any time, the same command goes on where it stopped. Example: lattqe neighbors features -k 64 --to graph
    """
    from cluster import runs_here
    from lattqe.search.stored import GraphTask, begin_graph, check_sets, open_sets
    from lattqe.store import find_manifest, open_place

    # Workers may run elsewhere: addresses are made absolute here.
    task = GraphTask(
        open_place(features).uri,
        open_place(to).uri,
        k,
        against and open_place(against).uri,
        into and open_place(into).uri,
        cache,
        engine=engine.value,
    )
    facts: dict[str, Any]
    check_sets(task)
    rows = sum(each.rows for each in open_sets(task))
    if k >= rows:
        screen.print(f"note: {rows:,} rows have {rows - 1:,} neighbors each, fewer than k = {k}: lists are padded")
    if find_manifest(open_place(to)) is not None:
        manifest, facts = begin_graph(task).finish(), {}
        screen.print(f"{to} is already up to date", markup=False)
    elif block_rows is None and schedule is Schedule.auto and runs_here(rows, workers, address):
        manifest, facts = neighbors_here(task)
    else:
        with on_ray(address):
            manifest, facts = neighbors(task, workers, block_rows, schedule.value)
    facts = {"graph": to, "digest": manifest.digest, "rows": manifest.rows, "k": k} | facts
    if json:
        print_json(facts)
    show_table(f"neighbors in {to}", {name: _readable(name, value) for name, value in facts.items()})


def neighbors_here(task: "GraphTask") -> "tuple[Manifest, dict[str, Any]]":
    """Plan, compute what is missing, publish, in this process: the manifest, and what it took."""
    from dataclasses import replace

    from lattqe.memory import peak_bytes
    from lattqe.search.stored import begin_graph, build_graph, measure_products, open_sets

    sets, pending = open_sets(task), begin_graph(task)
    kind, rate = measure_products(task)
    task = replace(task, kind=kind)
    rows, dim = sum(each.rows for each in sets), sets[0].dim
    products = rows * rows // 2
    show_table(
        "plan",
        {
            "rows": f"{rows:,} × {dim} {sets[0].dtype}, k = {task.k}",
            "where": "in this process: --workers or --address ask for Ray",
            "graph": human_bytes(8 * task.k * rows),
            "products": f"{2e-12 * products * dim:.3g} TFLOP in {kind}",
            "expected time": f"{human_time(products / rate)} at {2e-9 * rate * dim:.0f} GFLOP/s",
        },
    )
    with progress_bar("products, millions", products // PROGRESS_UNIT + 1) as bar:
        seconds = build_graph(task, _in_millions(bar, 0))
    total = seconds.pop("all")
    return pending.finish(), {
        "seconds": round(total, 2),
        "gflops": round(2 * products * dim / max(total, 1e-9) / 1e9, 1),
        "products": kind,
        "workers": 0,
        "worker_seconds": {name: round(spent, 2) for name, spent in sorted(seconds.items())},
        "peak_worker_bytes": peak_bytes(),
    }


def neighbors(
    task: "GraphTask", workers: int | None = None, block_rows: int | None = None, schedule: str = "auto"
) -> "tuple[Manifest, dict[str, Any]]":
    """Plan, compute what is missing, publish, within a Ray session: the manifest, and what it took."""
    from cluster.graph import build_graph, prepare_graph, products_left

    task, plan, pending = prepare_graph(task, workers, block_rows, schedule)
    left = products_left(task, plan, pending)
    show_plan(task, plan, left)
    done = plan.products - left
    with progress_bar("products, millions", plan.products // PROGRESS_UNIT + 1, done // PROGRESS_UNIT) as bar:
        summary = build_graph(task, _in_millions(bar, done), plan=plan, pending=pending)
    return pending.finish(), facts_of(summary, plan, left)


def _in_millions(bar: ProgressBar, counted: int) -> Callable[[int], None]:
    """What advances a bar of millions by single products; `counted` of them were done before."""
    lock = Lock()

    def advance(products: int) -> None:
        nonlocal counted
        with lock:
            before, counted = counted, counted + products
            bar.advance(counted // PROGRESS_UNIT - before // PROGRESS_UNIT)

    return advance


def show_plan(task: "GraphTask", plan: "GraphPlan", left: int) -> None:
    """Print what is going to happen, before it does."""
    expected = plan.seconds * left / max(plan.products, 1)
    speed = plan.products_per_second * plan.dim * 2 / 1e9
    show_table(
        "plan",
        {
            "rows": f"{plan.rows:,} × {plan.dim} {plan.dtype}, k = {task.k}",
            "workers": f"{plan.workers}, each with " + ", ".join(f"{v:g} {n[4:]}" for n, v in plan.resources.items()),
            "blocks": plan.work.facts["blocks"],
            "schedule": f"{plan.cut.schedule}: {plan.reason}",
            "memory of a worker": human_bytes(plan.work.worker_bytes),
            "unfinished lists": f"up to {human_bytes(plan.work.scratch)} in {task.to}/_work",
            "graph": human_bytes(plan.work.stored),
            "products": f"{plan.work.flops / 1e12:.3g} TFLOP, {1 - left / max(plan.products, 1):.0%} of them done",
            "expected time": f"{human_time(expected)} at {speed:.0f} GFLOP/s a worker, products in {plan.kind}",
        },
    )


def human_time(seconds: float) -> str:
    """95 -> '95 s', 3900 -> '1 h 05 min'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def facts_of(summary: "GraphSummary", plan: "GraphPlan", left: int) -> dict[str, Any]:
    """What it took, for scripts."""
    return {
        "seconds": round(summary.blocks.seconds, 2),
        "seconds_after_start": round(summary.working, 2),
        "gflops": round(2 * left * plan.dim / max(summary.working, 1e-9) / 1e9, 1),
        "worker_seconds": {name: round(spent, 2) for name, spent in sorted(summary.seconds.items())},
        "products": plan.kind,
        "schedule": plan.cut.schedule,
        "workers": plan.workers,
        "balance": round(summary.balance, 3),
        "peak_worker_bytes": summary.peak_bytes,
        "retries": summary.blocks.retries,
        "workers_lost": summary.blocks.actors_lost,
    }


def _readable(name: str, value: Any) -> Any:
    if name == "peak_worker_bytes":
        return human_bytes(value)
    if name == "worker_seconds":
        return ", ".join(f"{what} {spent}" for what, spent in value.items())
    return f"{value:,}" if name == "rows" else value


app = command(main)

if __name__ == "__main__":
    run(app)
