"""What a job takes before it runs: `--plan` of every job, and plans for sets and clusters that are not there.

And the options that say where it runs.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import command, human_bytes, print_json, run, screen, show_table
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.cost import Cost, Machines, Work
    from lattqe.cost.plans import Placement, PlannedRows

# Options that several jobs have.
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Ray workers; default: none (in this process) up to 50,000 rows, else one per GPU or CPU."
    ),
]
Address = Annotated[str | None, typer.Option(help="A running Ray cluster; default: $RAY_ADDRESS, or this machine.")]
Cache = Annotated[str | None, typer.Option(help="Node-local cache folder for rows stored on S3.")]
# Options of every job that can be large.
Plan = Annotated[
    bool,
    typer.Option(
        "--plan", help="Print rows, products, bytes, requests, memory, time and cost, and stop; nothing is written."
    ),
]
Assume = Annotated[
    str | None,
    typer.Option(
        help='With --plan: plan for this cluster instead, as in "nodes=16,gpus=1,cpus=8,tflops=120,network=1.2GB/s,'
        'price=0.5"; "measured=FILE" reads what `lattqe doctor --gpu --json` measured.'
    ),
]
DISK_SPEED = 1e9  # bytes a second of a local disk: assumed


@contextmanager
def on_ray(address: str | None = None) -> Iterator[None]:
    """A Ray session around the body; starting one is announced, because it takes seconds."""
    import ray

    from cluster.session import ray_session

    if not ray.is_initialized():
        where = address or os.environ.get("RAY_ADDRESS")
        screen.print(f"joining the Ray cluster at {where}…" if where else "starting Ray…", markup=False)
    with ray_session(address):
        yield


def setting(
    plan: bool,
    assume: str | None,
    rows: int,
    workers: int | None,
    address: str | None,
    cache: str | None = None,
    block_rows: int | None = None,
    *,
    always_on_ray: bool = False,
) -> "Placement | None":
    """Where the planned job would run; None if it is to be run, not planned."""
    if not plan:
        if assume is not None:
            raise LattqeError("--assume needs --plan: add it, or leave --assume out")
        return None
    from cluster import runs_here
    from lattqe.cost.plans import Placement, parse_assumption

    if assume is not None:
        machines, here = replace(parse_assumption(assume), asked=workers), False
    else:
        here = block_rows is None and not always_on_ray and runs_here(rows, workers, address)
        machines = this_machine() if here else replace(cluster_machines(address), asked=workers)
    return Placement(machines, here, cache is not None, block_rows=block_rows)


def this_machine() -> "Machines":
    """Describe this machine as one worker with all cores that torch uses, or a GPU."""
    import torch

    from lattqe.cost import Machines
    from lattqe.device import allowed_bytes

    cores, gpus = torch.get_num_threads(), torch.cuda.device_count()
    return Machines(1, cores, gpus, allowed_bytes(), network=DISK_SPEED, asked=1)


def cluster_machines(address: str | None) -> "Machines":
    """The nodes of the Ray that a job would join, or this machine with a worker for each core."""
    if address is None and not os.environ.get("RAY_ADDRESS"):
        return replace(this_machine(), asked=None)
    with on_ray(address):
        from cluster.monitor import connected_machines

        return connected_machines()


def tell(works: "Sequence[Work]", where: "Placement", remote: bool, json: bool) -> None:
    """Print a plan; LattqeError where a worker has too little memory for it."""
    from lattqe.cost import Cost

    cost = Cost(works, where.machines, remote)
    cost.check()
    if json:
        print_json(facts(cost))
    for work in works:
        show_table(f"plan: {work.stage}", stage_rows(cost, work), plan=True)
    show_table("plan: all", totals(cost), plan=True)


def facts(cost: "Cost") -> dict[str, Any]:
    """A plan for scripts."""
    machines = cost.machines
    stages = [
        {
            "stage": work.stage,
            "rows": work.rows,
            "products": work.products,
            "flops": work.flops,
            "bytes_read": work.read,
            "bytes_written": work.written,
            "bytes_gathered": work.gathered,
            "requests": vars(work.requests) if cost.remote else vars(type(work.requests)()),
            "worker_bytes": work.worker_bytes,
            "mapped_bytes": work.mapped,
            "scratch_bytes": work.scratch,
            "stored_bytes": work.stored,
            "seconds": cost.seconds_of(work),
            **work.facts,
        }
        for work in cost.stages
    ]
    return {
        "machines": {name: value for name, value in vars(machines).items() if name != "asked"},
        "workers": machines.workers,
        "stages": stages,
        "requests": vars(cost.requests),
        "worker_bytes": cost.worker_bytes,
        "seconds": cost.seconds,
        "dollars": cost.dollars if machines.price else None,
        "request_dollars": cost.requests.dollars,
    }


def stage_rows(cost: "Cost", work: "Work") -> dict[str, str]:
    """One stage, for people."""
    asked = work.requests
    rows = {
        "rows": f"{work.rows:,}",
        **work.facts,
        "products": f"{work.products:,} of two vectors" if work.products else "",
        "arithmetic": amount(work.flops, "FLOP") if work.flops else "",
        "read": human_bytes(work.read),
        "written": human_bytes(work.written),
        "gathered from other workers": human_bytes(work.gathered) if work.gathered else "",
        "requests": requests_text(asked) if cost.remote else "none (local disk)",
        "memory of a worker": memory_text(work),
        "in storage meanwhile": human_bytes(work.scratch) if work.scratch else "",
        "in storage afterwards": human_bytes(work.stored) if work.stored else "",
        "time": human_time(cost.seconds_of(work)),
    }
    return {name: text for name, text in rows.items() if text}


def memory_text(work: "Work") -> str:
    """What a worker holds, and maps beside it."""
    mapped = f", and mapped files: {human_bytes(work.mapped)}, one copy per node" if work.mapped else ""
    return human_bytes(work.worker_bytes) + mapped


def requests_text(asked: Any) -> str:
    """Requests by their price."""
    return f"{asked.puts:,} PUT or LIST, {asked.gets:,} GET or HEAD, {asked.deletes:,} DELETE"


def totals(cost: "Cost") -> dict[str, str]:
    """All stages together, for people."""
    machines = cost.machines
    return {
        "machines": f"{machines.size}: {machines.node}",
        "workers": f"{machines.workers} with {machines.threads} cores each",
        "memory of a worker": f"{human_bytes(cost.worker_bytes)} of {human_bytes(machines.budget)}",
        "time": human_time(cost.seconds),
        "cost": money(cost),
    }


def money(cost: "Cost") -> str:
    """Dollars, or how to have them computed."""
    asked = f", requests ${cost.requests.dollars:,.2f}" if cost.remote else ""
    if not cost.machines.price:
        return f'unknown: give --assume "price=0.5" (dollars per node and hour){asked}'
    return f"${cost.dollars:,.2f} including 10 minutes for the nodes to start{asked}"


def human_time(seconds: float) -> str:
    """95 -> '95 s', 3900 -> '1 h 05 min'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def amount(value: float, unit: str) -> str:
    """2.05e15 -> '2.05 PFLOP'."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def main(
    sizes: Annotated[
        list[str], typer.Argument(metavar="ROWSxCOLUMNS...", help="Sizes of the data, as in 100000000x512.")
    ],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbors of each row in the graph.")] = 64,
    method: Annotated[
        str | None,
        typer.Option(help="Also augment with this method; 'paper': the paper's network with as many columns, nDBA 48."),
    ] = None,
    hops: Annotated[int | None, typer.Option(min=1, max=64, help="Hops; default: the method's own.")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or float32.")] = "float16",
    cache: Annotated[bool, typer.Option("--cache", help="Nodes cache what they read from S3 on disk.")] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            help='A cluster, as in "nodes=16,gpus=1,tflops=120,network=1.2GB/s,price=0.5"; one per size. '
            '"measured=FILE" reads what `lattqe doctor --gpu --json` measured.'
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print one table in Markdown on stdout.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON on stdout.")] = False,
) -> None:
    """Plan a graph and an augmentation for data of any size on any cluster, with everything on S3.

    Example: lattqe plan 100000000x512 -k 64 --method paper --assume "nodes=16,gpus=1,tflops=10,price=0.5"
    """
    from lattqe.cost import Cost
    from lattqe.cost.plans import Placement, PlannedRows, parse_assumption
    from lattqe.store.manifest import check_dtype

    check_dtype(dtype)
    clusters = [parse_assumption(text) for text in assume or ["nodes=1"]]
    shapes = [read_size(text) for text in sizes]
    count = max(len(clusters), len(shapes))
    if {len(clusters), len(shapes)} - {1, count}:
        raise LattqeError(
            f"{len(shapes)} sizes and {len(clusters)} --assume: give the same number of both, or only one of either"
        )
    columns: list[tuple[PlannedRows, Cost]] = []
    for number in range(count):
        rows = PlannedRows.sized(*shapes[number % len(shapes)], dtype)
        where = Placement(clusters[number % len(clusters)], cached=cache)
        columns.append((rows, Cost(hypothetical(rows, k, method, hops, where), where.machines)))
        columns[-1][1].check()
    if json:
        print_json([facts(cost) for _, cost in columns])
    elif markdown:
        print("\n".join(markdown_table(columns)))
    else:
        for rows, cost in columns:
            for work in cost.stages:
                show_table(f"{rows.stored.rows:,} × {rows.dim}: {work.stage}", stage_rows(cost, work), plan=True)
            show_table("all", totals(cost), plan=True)


def hypothetical(rows: "PlannedRows", k: int, method: str | None, hops: int | None, where: "Placement") -> "list[Work]":
    """The stages of a graph, and of an augmentation where a method is named, of hypothetical rows."""
    from lattqe.cost import plans
    from lattqe.cost.augment import weighing, weighing_of
    from lattqe.cost.work import Stored
    from lattqe.expansion import create
    from lattqe.model.network import LAttQEConfig

    if method is None:
        if hops is not None:
            raise LattqeError("--hops needs --method: name the method whose weights are the edges")
        return [plans.neighbors([rows], k, where)]
    number, adapt = hops or 1, False
    if method == "paper":
        weighs = weighing(rows.dim, 48, 48, LAttQEConfig(dim=rows.dim, heads=1))
    else:
        theta = create(method)
        number, adapt = hops or theta.default_hops, theta.adapts
        weighs = weighing_of(theta, theta.suggested_k(dba=True), rows.dim, rows.stored.rows)
    k = max(k, weighs.depth)
    graph = plans.neighbors([rows], k, where)
    stored = Stored.kind("neighbors", rows.stored.rows, k=k)
    works = plans.augment(rows, weighs, number, where, graph=stored, adapt=adapt)
    return [*works[:adapt], graph, *works[adapt:]]  # the graph is that of adapted rows


def read_size(text: str) -> tuple[int, int]:
    """'100000000x512' -> (100000000, 512)."""
    match = re.fullmatch(r"([\d_,]+)[x×]([\d_]+)", text)
    rows, dim = (int(re.sub("[_,]", "", part) or 0) for part in match.groups()) if match else (0, 0)
    if not (1 <= rows < 2**31 and 1 <= dim <= 1 << 20):
        raise LattqeError(f"{text!r} is not a size: use ROWSxCOLUMNS, as in 100000000x512")
    return rows, dim


def markdown_table(columns: "Sequence[tuple[PlannedRows, Cost]]") -> list[str]:
    """Plans side by side, a column each; what no column has is left out."""
    lines: list[tuple[str, list[str]]] = [
        ("each node", [cost.machines.node for _, cost in columns]),
        ("vectors", [decimal(rows.vector_bytes) for rows, _ in columns]),
    ]
    each: list[tuple[str, Callable[[Cost, Work], str]]] = [
        ("arithmetic", lambda cost, work: amount(work.flops, "FLOP")),
        ("cut", lambda cost, work: work.facts.get("blocks") or work.facts.get("cut", "")),
        ("read, written", lambda cost, work: f"{decimal(work.read)}, {decimal(work.written)}"),
        ("gathered from shards", lambda cost, work: decimal(work.gathered) if work.gathered else ""),
        ("requests: PUT, GET", lambda cost, work: f"{work.requests.puts:,}, {work.requests.gets:,}"),
        ("in storage during, after", lambda cost, work: f"{decimal(work.scratch)}, {decimal(work.stored)}"),
        ("memory of a worker", lambda cost, work: decimal(work.worker_bytes)),
        ("compute time", lambda cost, work: human_time(work.worker_seconds / cost.machines.workers)),
        ("transfer time", lambda cost, work: human_time(cost.moving(work))),
    ]
    for number, work in enumerate(columns[0][1].stages):
        for name, text in each:
            texts = [text(cost, cost.stages[number]) for _, cost in columns]
            lines.append((f"{work.stage}: {name}", texts))
    lines += [
        ("all: time", [human_time(cost.seconds) for _, cost in columns]),
        (
            "nodes, including 10 min to start",
            [f"${cost.dollars - cost.requests.dollars:,.2f}" if cost.machines.price else "" for _, cost in columns],
        ),
        ("S3 requests", [f"${cost.requests.dollars:,.2f}" for _, cost in columns]),
        ("S3 storage, per month", [f"${monthly(rows, cost):,.2f}" for rows, cost in columns]),
    ]
    heads = [f"{count(rows.stored.rows)} × {rows.dim}, {cost.machines.size}" for rows, cost in columns]
    table = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(columns)) + "|"]
    return table + [f"| {name} | {' | '.join(texts)} |" for name, texts in lines if any(texts)]


def monthly(rows: "PlannedRows", cost: "Cost") -> float:
    """Dollars for keeping vectors, graph and index on S3 for a month."""
    from lattqe.cost.work import STORED_PRICE

    return STORED_PRICE * (rows.stored.bytes + cost.total("stored"))


def count(rows: int) -> str:
    """100000000 -> '100M'."""
    return f"{rows // 10**6}M" if rows >= 10**6 and rows % 10**6 == 0 else f"{rows:,}"


def decimal(size: float) -> str:
    """Bytes as networks and bills count them: 4.1 GB."""
    for unit, least in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= least:
            return f"{size / least:.3g} {unit}" if size / least < 1000 else f"{size / least:,.0f} {unit}"
    return f"{size:.0f} B"


app = command(main)
if __name__ == "__main__":
    run(app)
