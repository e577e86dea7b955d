"""Making an augmented index, for the verbs that do: the options that name a method, the plan, the work, what it took.

The options are derived from what the methods say of themselves.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import APPROXIMATE_GRAPH, ProgressBar, human_bytes, print_json, progress_bar, show_facts, show_table
from lattqe.errors import LattqeError
from lattqe.expansion import METHODS
from lattqe.expansion.base import Parameter
from lattqe.store.models import model_address

if TYPE_CHECKING:
    from cluster.indexes import Built, IndexStage
    from lattqe.augmentation.recipe import Augmentation, AugmentSummary
    from lattqe.store import FeatureSet, Pending

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


HERE = {"where": "in this process (--workers or --address use Ray)"}


class OnScreen:
    """A `Follower`: prints what a stage is going to be, and shows how far it is."""

    @contextmanager
    def adapting(self, original: "FeatureSet", to: str) -> Iterator[Callable[[int], None]]:
        """See `cluster.indexes.Follower`."""
        from lattqe.adaptation import sample_rows
        from lattqe.augmentation.recipe import ADAPTED

        looked_at = f"{len(sample_rows(original.rows, original.dim)):,} of {original.rows:,} rows"
        learned = {"learned from": f"the nearest neighbors of {looked_at}, without labels"}
        show_table("adaptation", learned | {"to": f"{to.rstrip('/')}/{ADAPTED}"})
        with progress_bar("adapt", original.rows) as bar:
            yield bar.advance

    @contextmanager
    def building(self, stage: "IndexStage") -> Iterator[Callable[[int], None]]:
        """See `cluster.indexes.Follower`."""
        with (_show_hops if stage.task.hopping else _show_rows)(stage) as bar:
            yield bar.advance


def _show_rows(stage: "IndexStage") -> AbstractContextManager[ProgressBar]:
    """Print the plan of rows or edges; the bar that counts them."""
    where: dict[str, Any] = HERE
    if stage.reach is not None:
        shards = f" ({stage.reach.shards} shards)" if stage.reach.shards else ""
        where = {
            "workers": stage.workers,
            "access to vectors": f"{stage.reach.how}{shards}: {stage.reach.reason}",
            "memory of a worker": human_bytes(stage.predicted),
            "of which": ", ".join(f"{name} {human_bytes(size)}" for name, size in stage.parts.items()),
        }
    pending = stage.pending
    show_plan(stage.task, pending, where)
    rows = sum(pending.part_rows)
    return progress_bar("augment", rows, rows - sum(pending.part_rows[part] for part in pending.missing()))


def _show_hops(stage: "IndexStage") -> AbstractContextManager[ProgressBar]:
    """Print the plan of hops; the bar that counts their rows."""
    from lattqe.augmentation.bands import HopSchedule

    on_workers = {"workers": stage.workers, "memory of a worker": human_bytes(stage.predicted)}
    show_hops(stage.task, 1 if stage.here else stage.workers, HERE if stage.here else on_workers)
    schedule = HopSchedule(stage.task.hop_task(), stage.pending)
    total = schedule.cut.rows * stage.task.hops * len(schedule.cut.groups)
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


def show_plan(task: "Augmentation", pending: "Pending", where: dict[str, Any]) -> None:
    """Print what is going to happen, before it does."""
    from lattqe.store import FeatureSet, NeighborGraph, row_bytes

    original = FeatureSet.open(task.features)
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
            "shared first products": planned_sharing(task, original.rows),
        }
        | ({} if lacks is None else {"neighbors": f"from {APPROXIMATE_GRAPH}: {lacks}"})
        | where,
    )


def planned_sharing(task: "Augmentation", rows: int) -> str:
    """What first products are shared, or why none are."""
    from lattqe.expansion import create
    from lattqe.expansion.rows import sharing

    return sharing(create(task.method, **task.params), rows, again=task.previous is not None)


def spared_by(task: "Augmentation", summary: "AugmentSummary", rows: int) -> str:
    """What sharing first products spared, or why it was not done."""
    from lattqe.expansion import create
    from lattqe.expansion.rows import spared

    if not summary.tables:
        return planned_sharing(task, rows)
    flops = spared(create(task.method, **task.params), task.k, rows, summary.expanded, summary.tables)
    return (
        f"{flops / 1e9:,.1f} GFLOP saved; the tables took "
        f"{summary.seconds['sharing']:.2f} s of {sum(summary.seconds.values()):.2f} s of work"
    )


def _on_ray(stages: "Sequence[Built]") -> dict[str, Any]:
    """Facts of stages that ran on Ray, and of hops."""
    rows, *hops = stages
    facts: dict[str, Any] = {}
    if rows.stage.reach is not None:
        facts = {"predicted_worker_bytes": rows.stage.predicted, "reach": rows.stage.reach.how}
    for each in hops:
        task, memory = each.stage.task, each.memory
        facts |= {name.replace("_worker_", "_hop_worker_"): size for name, size in memory.items()} | {
            "hops": task.hops,
            "hop_alpha": task.hop_alpha,
            "edges_digest": rows.manifest.digest,
            "hop_seconds": round(each.summary.took, 2),
            "bytes_read_for_each_hop": each.summary.read["hop"] // task.hops,
            "bytes_written_for_each_hop": each.summary.written["hop"] // task.hops,
        }
    return facts


def report(
    verb: str,
    stages: "Sequence[Built]",
    json: bool,
    before: Mapping[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """Print what was made and what it took; `before`: facts of what came first, `more`: of the verb's own."""
    made, summary = stages[-1], reduce(lambda first, then: first.then(then), [each.summary for each in stages])
    to, ran = made.stage.task.to, _on_ray(stages)
    facts: dict[str, Any] = {
        "index": to,
        "digest": made.manifest.digest,
        "rows": made.manifest.rows,
        "expanded_rows": summary.expanded,
        "seconds": round(summary.took, 2),
        "seconds_after_start": round(summary.working, 3),
        "worker_seconds": {name: round(seconds, 2) for name, seconds in summary.seconds.items()},
        "worker_cpu_seconds": round(summary.cpu, 2),
        "peak_worker_bytes": summary.peak_bytes,
        **(before or {}),
        **ran,
        "shared_products": spared_by(stages[0].stage.task, stages[0].summary, stages[0].manifest.rows),
        "retries": summary.retries,
        "workers_lost": summary.workers_lost,
        "spare_copies": summary.spare_copies,
    } | (more or {})
    if made.manifest.approximation is not None:
        facts["approximate"] = made.manifest.approximation
    if json:
        print_json(facts)
    rate = summary.expanded / max(summary.working, 1e-9)
    show_facts(
        f"{verb} {to}",
        facts
        | {
            "seconds_after_start": f"{summary.working:.2f} ({rate:,.0f} rows/s)",
            "peak_worker_bytes": f"{human_bytes(summary.peak_bytes)}, mapped files included",
        },
    )
