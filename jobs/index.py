"""Making an augmented index, for the verbs that do: the options that name a method, the plan, the work, what it took.

The options are derived from what the methods say of themselves.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import APPROXIMATE_GRAPH, ProgressBar, human_bytes, print_json, progress_bar, show_table
from lattqe.errors import LattqeError
from lattqe.expansion import METHODS
from lattqe.expansion.base import Parameter
from lattqe.store.artifacts import model_address

if TYPE_CHECKING:
    from lattqe.augmentation import Augmentation, AugmentSummary
    from lattqe.expansion import Method
    from lattqe.store import Manifest, Pending

NAMES = ", ".join(METHODS)


def owners() -> dict[str, dict[str, Parameter]]:
    """Every parameter of every method: {parameter: {method: Parameter}}."""
    found: dict[str, dict[str, Parameter]] = {}
    for name, method in METHODS.items():
        for parameter in method.parameters().values():
            found.setdefault(parameter.name, {})[name] = parameter
    return found


def method_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a job one option for each parameter of the methods, in place of its argument `params`.

    The job gets those that were given, by name.
    """
    options = {name: _option(of) for name, of in owners().items()}

    @functools.wraps(function)
    def job(**arguments: Any) -> Any:
        given = {name: arguments.pop(name, None) for name in options}
        return function(**arguments, params={name: value for name, value in given.items() if value is not None})

    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    for each in signature.parameters.values():
        parameters += (
            [each]
            if each.name != "params"
            else [
                inspect.Parameter(name, each.kind, default=None, annotation=option) for name, option in options.items()
            ]
        )
    job.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    job.__annotations__ = {name: kind for name, kind in function.__annotations__.items() if name != "params"} | options
    return job


def _option(of: Mapping[str, Parameter]) -> Any:
    """The option of a parameter; its help says what it means to each method that has it."""
    meanings: dict[str, list[str]] = {}
    for method, parameter in of.items():
        default = parameter.default
        default = "" if default is None else f": {default}" if isinstance(default, str) else f": {default:g}"
        meanings.setdefault(parameter.help, []).append(f"{method}{default}")
    text = "; ".join(f"{help} ({', '.join(methods)})" for help, methods in meanings.items())
    first = next(iter(of.values()))
    return Annotated[first.kind | None, typer.Option(first.option, help=f"{text}.")]


def method_params(name: str, given: Mapping[str, Any], dba: bool = False) -> dict[str, Any]:
    """The parameters of a method, for queries or for database rows; one that it does not have is refused by name."""
    if name not in METHODS:
        raise LattqeError(f"unknown method {name!r}: use one of {NAMES}")
    method, known = METHODS[name], owners()
    for key in given:
        if name not in known[key]:
            raise LattqeError(
                f"{next(iter(known[key].values())).option} belongs to {', '.join(known[key])}, not to "
                f"{name}: leave it out"
            )
    model = {"model": model_address(given.get("model"))} if method.learned else {}
    return {**given, **model, **(method.row_params if dba else {})}


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


HERE = {"where": "in this process (--workers or --address use Ray)"}


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
    begin = workers or hop_workers(task.device)  # nodes that join later get more, unless so many were asked for
    memory = predict_hop_memory(task.hop_task(), process or resident_bytes())
    show_hops(task, begin, {"workers": begin, "memory of a worker": human_bytes(memory)})
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
            "hops": f"{task.hops}, each taking a share of {task.hop_alpha:g} from the neighbors",
            "edges": f"{original.rows:,} × {edges.k}, {human_bytes(edges.manifest.total_bytes)} in {task.edges}",
            **work.facts,
            "kept meanwhile": f"{human_bytes(work.scratch)} in {task.to}/_work",
        }
        | where,
    )


def _augment(task: "Augmentation", workers: int | None, reach: str, process: int | None) -> Made:
    from cluster.augmentation import build_index, choose_reach, default_workers, predict_memory
    from cluster.blocks import check_parts
    from lattqe.augmentation import begin_index
    from lattqe.device import resident_bytes
    from lattqe.expansion import create
    from lattqe.store import FeatureSet, NeighborGraph

    pending = begin_index(task)
    check_parts(pending)
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
            "workers": workers or default_workers(),
            "access to vectors": f"{chosen.how}{shards}: {chosen.reason}",
            "memory of a worker": human_bytes(memory.total),
            "of which": ", ".join(f"{name} {human_bytes(size)}" for name, size in memory.parts().items()),
        },
    )
    with _bar(pending) as bar:
        summary = build_index(task, bar.advance, workers=workers, reach=chosen, pending=pending)
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
        f"{flops / 1e9:,.1f} GFLOP saved; the tables took "
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
    readable = {name: _readable(value) for name, value in facts.items()}
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


def _readable(value: Any) -> Any:
    """A fact on one line: numbers with commas, facts of an earlier stage one after the other."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_readable(each)}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) else value
