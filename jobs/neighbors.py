"""Find the exact k nearest neighbors of every row of a feature set among all its other rows."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import (
    Json,
    ProgressBar,
    command,
    human_bytes,
    print_json,
    progress_bar,
    run,
    screen,
    show_facts,
    show_table,
)
from jobs.plan import (
    Address,
    Assume,
    Cache,
    Plan,
    Workers,
    human_time,
    memory_text,
    on_ray,
    setting,
    tell,
    this_machine,
)
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from cluster.graph import GraphPlan, GraphSummary
    from lattqe.cost import Work
    from lattqe.cost.plans import Placement
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
RECALL = 0.95

# Options of this verb alone.
Against = Annotated[
    str | None,
    typer.Option(help="A second set (distractors), numbered after the first: compute the graph of both together."),
]
ScheduleOption = Annotated[
    Schedule,
    typer.Option(
        help="pairs: compare two blocks once, for both; rows: one worker per block, which reads all other rows and "
        "writes its lists once; auto: the faster one. The graph is the same."
    ),
]
EngineOption = Annotated[
    Engine, typer.Option(help="faiss: let faiss find candidates, then certify each list; the graph is the same.")
]
Approximate = Annotated[
    bool, typer.Option("--approximate", help="Trade some neighbors for speed; the recall is measured and stored.")
]
Recall = Annotated[
    float | None, typer.Option(help=f"With --approximate: share of the true neighbors to find; default {RECALL}.")
]


def main(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    to: Annotated[str, typer.Option("--to", help="Where the graph goes.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbors per row, never the row itself.")] = 64,
    against: Against = None,
    into: Annotated[str | None, typer.Option(help="The existing graph of the second set.")] = None,
    workers: Workers = None,
    address: Address = None,
    cache: Cache = None,
    block_rows: Annotated[int | None, typer.Option(min=1, help="Rows per block; default: as many as fit.")] = None,
    schedule: ScheduleOption = Schedule.auto,
    engine: EngineOption = Engine.lattqe,
    approximate: Approximate = False,
    recall: Recall = None,
    plan: Plan = False,
    assume: Assume = None,
    json: Json = False,
) -> None:
    """Find the exact k nearest neighbors of every row among all other rows.

    After a kill, the same command continues where it stopped. Example: lattqe neighbors features -k 64 --to graph
    """
    from lattqe.search.rows import check_k
    from lattqe.search.stored import GraphTask, check_sets, open_sets
    from lattqe.store import open_place

    # Workers may run elsewhere: addresses are made absolute here.
    task = GraphTask(
        open_place(features).uri,
        open_place(to).uri,
        k,
        against and open_place(against).uri,
        into and open_place(into).uri,
        cache,
        engine=engine.value,
        recall=wanted_recall(recall, approximate, against, block_rows, schedule, engine),
    )
    check_sets(task)
    sets = open_sets(task)
    check_k(k, rows := sum(each.rows for each in sets))
    task = exact_where_better(task, rows)
    here = 0 if task.recall is not None else rows  # an approximate graph is made here whatever the rows
    if (where := setting(plan, assume, here, workers, address, cache, block_rows)) is not None:
        where = replace(where, schedule=schedule.value, here=where.here and schedule is Schedule.auto)
        if task.recall is not None:  # and on no GPU
            where = replace(where, machines=replace(where.machines, gpus=0))
        tell([planned(task, where)], where, not sets[0].place.is_local, json)
        return
    if k >= rows:
        note = f"note: {rows:,} rows have {rows - 1:,} neighbors each, fewer than k = {k}: lists are padded"
        screen.print(note, markup=False, soft_wrap=True)
    manifest, took = made(task, rows, workers, address, block_rows, schedule)
    if not took:
        screen.print(f"{to} is already up to date", markup=False)
    facts = {"graph": to, "digest": manifest.digest, "rows": manifest.rows, "k": k} | took | promise(manifest)
    if json:
        print_json(facts)
    show_facts(f"neighbors in {to}", facts)


def made(
    task: "GraphTask", rows: int, workers: int | None, address: str | None, block_rows: int | None, schedule: Schedule
) -> "tuple[Manifest, dict[str, Any]]":
    """The graph, made in this process or on Ray: its manifest, and what it took; nothing where it was there already."""
    from cluster import runs_here
    from lattqe.search.stored import begin_graph
    from lattqe.store import find_manifest, open_place

    if find_manifest(open_place(task.to)) is not None:
        return begin_graph(task).finish(), {}
    if task.recall is not None:
        here = runs_here(0, workers, address)
        with nullcontext() if here else on_ray(address):
            return approximate_neighbors(task, workers, here)
    if block_rows is None and schedule is Schedule.auto and runs_here(rows, workers, address):
        return neighbors_here(task)
    with on_ray(address):
        return neighbors(task, workers, block_rows, schedule.value)


def planned(task: "GraphTask", where: "Placement") -> "Work":
    """What the graph takes; where it is computed here from a local disk, this machine is measured."""
    from lattqe.cost import plans
    from lattqe.search.stored import measure_products, open_sets

    sets = open_sets(task)
    if task.recall is not None:
        return plans.neighbors([plans.PlannedRows.of(sets[0])], task.k, where, approximate=True)
    said = {}
    if where.here and sets[0].place.is_local:
        kind, rate = measure_products(task)
        where, said = replace(where, products_per_second=rate), {"kind of products": f"{kind}, the fastest here"}
    work = plans.neighbors([plans.PlannedRows.of(each) for each in sets], task.k, where)
    return replace(work, facts=work.facts | said)


def wanted_recall(
    recall: float | None,
    approximate: bool,
    against: str | None,
    block_rows: int | None,
    schedule: Schedule,
    engine: Engine,
) -> float | None:
    """The recall of an approximate graph, or None; options that do not go together are refused."""
    from lattqe.search.approximate import check_recall

    if not approximate:
        if recall is not None:
            raise LattqeError("--recall needs --approximate: an exact graph finds all neighbors")
        return None
    given = {"--against": against, "--block-rows": block_rows}
    given |= {"--engine faiss": engine is Engine.faiss or None, "--schedule": schedule is not Schedule.auto or None}
    for option, value in given.items():
        if value is not None:
            raise LattqeError(f"{option} applies to exact graphs only: leave out {option} or --approximate")
    recall = RECALL if recall is None else recall
    check_recall(recall)
    return recall


def exact_where_better(task: "GraphTask", rows: int) -> "GraphTask":
    """An exact task in place of an approximate one where that takes no longer; says so."""
    from lattqe.search.approximate import reason_for_exact

    reason = reason_for_exact(rows, task.k) if task.recall is not None else None
    if reason is None:
        return task
    screen.print(f"note: {reason}", markup=False, soft_wrap=True)
    return replace(task, recall=None)


def approximate_neighbors(task: "GraphTask", workers: int | None, here: bool) -> "tuple[Manifest, dict[str, Any]]":
    """Plan, make what is missing, publish an approximate graph, in this process or within a Ray session."""
    import numpy as np

    from lattqe.cost.rows import finding_bytes
    from lattqe.device import peak_bytes
    from lattqe.search.approximate import cluster_count
    from lattqe.search.stored import begin_graph, build_approximate, open_sets

    pending, features = begin_graph(task), open_sets(task)[0]
    if not here:
        from cluster.blocks import check_parts

        check_parts(pending)  # by workers, not by this process
    left = sum(pending.part_rows[part] for part in pending.missing())
    memory = finding_bytes(features.rows, features.dim, task.k, np.dtype(features.dtype).itemsize)
    show_table(
        "plan",
        {
            "rows": f"{features.rows:,} × {features.dim} {features.dtype}, k = {task.k}",
            "not exact": f"target recall {task.recall:g}; the recall reached is measured and stored",
            "clusters": f"{cluster_count(features.rows, task.k):,}, each row searches as many as the recall needs",
            "where": "in this process (--workers or --address use Ray)" if here else "clusters here, parts on Ray",
            "parts": f"{len(pending.part_rows)}, {len(pending.part_rows) - len(pending.missing())} of them done",
            "graph": human_bytes(8 * task.k * features.rows),
            "memory of this process": f"{human_bytes(memory)}, to find the clusters",
        },
    )
    with progress_bar("rows", features.rows, features.rows - left) as bar:
        if here:
            made = build_approximate(task, bar.advance)
            ran: dict[str, Any] = {"workers": 0}
        else:
            from cluster.graph import build_approximate as build_on_ray

            made, blocks = build_on_ray(task, bar.advance, workers=workers, pending=pending)
            used = len(blocks.blocks_by_worker)
            ran = {"workers": used, "retries": blocks.retries, "workers_lost": blocks.actors_lost}
            ran["predicted_worker_bytes"] = made.predicted_bytes
    return pending.finish(made.measured), {
        "seconds": round(made.took, 2),
        "seconds_planning": round(made.planning, 2),
        "worker_seconds": {name: round(spent, 2) for name, spent in sorted(made.seconds.items())},
        "products": made.counts["products"],
        "rows_searched_exactly": made.counts["short"],
        "peak_worker_bytes": made.peak_bytes,
        "predicted_bytes": memory,
        "peak_bytes": peak_bytes(),
        **ran,
    }


def promise(manifest: "Manifest") -> dict[str, Any]:
    """What became of the recall that was requested; nothing to say of an exact graph."""
    if manifest.approximation is None or "searched" not in manifest.config.get("measured", {}):
        return {}
    measured, wanted = manifest.config["measured"], manifest.config["recall"]
    expected, searched = measured["searched_planned"], measured["searched"]
    words = f"a row searches {searched:g} of {measured['clusters']} clusters on average"
    if searched > expected:
        words += f", raised from {expected:g}, which found too few neighbors"
    if not measured["kept"]:
        words += "; more would cost more than an exact graph: leave --approximate out"
    kept = "kept" if measured["kept"] else "MISSED"
    return {"exact": False, "recall": manifest.approximation, "promise": f"{wanted:g} {kept}: {words}"}


def neighbors_here(task: "GraphTask") -> "tuple[Manifest, dict[str, Any]]":
    """Plan, compute what is missing, publish, in this process: the manifest, and what it took."""
    from lattqe.cost import plans
    from lattqe.device import peak_bytes
    from lattqe.search.stored import begin_graph, build_graph, measure_products, open_sets

    sets, pending = open_sets(task), begin_graph(task)
    kind, rate = measure_products(task)
    task = replace(task, kind=kind)
    rows, dim = sum(each.rows for each in sets), sets[0].dim
    where = plans.Placement(this_machine(), here=True, products_per_second=rate)
    work = plans.neighbors([plans.PlannedRows.of(each) for each in sets], task.k, where)
    show_table(
        "plan",
        {
            "rows": f"{rows:,} × {dim} {sets[0].dtype}, k = {task.k}",
            "where": "in this process (--workers or --address use Ray)",
            "graph": human_bytes(work.stored),
            "products": f"{work.flops / 1e12:.3g} TFLOP in {kind}",
            "expected time": f"{human_time(work.worker_seconds)} at {2e-9 * rate * dim:.3g} GFLOP/s",
        },
    )
    with progress_bar("products, millions", work.products // PROGRESS_UNIT + 1) as bar:
        advance, made = _in_millions(bar, 0), Counter[str]()

        def count(products: int) -> None:
            made["products"] += products
            advance(products)

        seconds = build_graph(task, count)
    total = seconds.pop("all")
    return pending.finish(), {
        "seconds": round(total, 2),
        "gflops": round(work.flops / max(total, 1e-9) / 1e9, 1),
        "products": kind,
        "products_made": made["products"],
        "products_planned": work.products,
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
            "schedule": plan.work.facts["schedule"],
            "memory of a worker": memory_text(plan.work),
            "unfinished lists": f"up to {human_bytes(plan.work.scratch)} in {task.to}/_work",
            "graph": human_bytes(plan.work.stored),
            "products": f"{plan.work.flops / 1e12:.3g} TFLOP, {1 - left / max(plan.products, 1):.0%} of them done",
            "expected time": f"{human_time(expected)} at {speed:.0f} GFLOP/s a worker, products in {plan.kind}",
        },
    )


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
        "predicted_worker_bytes": plan.work.worker_bytes + plan.work.mapped,
        "peak_worker_bytes": summary.peak_bytes,
        "retries": summary.blocks.retries,
        "workers_lost": summary.blocks.actors_lost,
    }


app = command(main)

if __name__ == "__main__":
    run(app)
