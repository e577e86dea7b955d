"""Measure every method on every data set of a run, with tables, figures and a page to look at."""

import json as json_format
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import (
    APPROXIMATE_GRAPH,
    command,
    human_bytes,
    print_json,
    print_table,
    printable,
    progress_bar,
    run,
    screen,
    show_memory,
    show_table,
    shown,
    warn,
)
from jobs.plan import Address, Assume, Plan, setting, tell, this_machine
from lattqe.benchmark.presets import PRESETS, PresetOptions, preset_run
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from cluster.benchmark import Bench
    from lattqe.benchmark.density import DensityCell
    from lattqe.benchmark.spec import Run
    from lattqe.report.gallery import Examples
    from lattqe.report.views import Illustration


# Options of presets.
Ablations = Annotated[str | None, typer.Option(help="Table 2 for a preset: the folder of a finished `lattqe ablate`.")]
Columns = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Columns of the photos (photos: 128; density: 128 and 512, may be repeated)."),
]
Features = Annotated[
    list[str] | None,
    typer.Option(
        help="Density: your own labelled feature set; may be repeated, each set serves as distractors for the others."
    ),
]
Queries = Annotated[
    list[str] | None,
    typer.Option(help="Density: labelled queries, one set per --features; default: some images are held out."),
]
Relevant = Annotated[
    list[int] | None,
    typer.Option(
        min=0, help="Density: relevant images per query, 0 for all; may be repeated; default 1, 2, 4, 8, 16 and 0."
    ),
]
# Options of every run.
Only = Annotated[list[str] | None, typer.Option(help="Measure only this method and no expansion; may be repeated.")]
Images = Annotated[
    list[str] | None,
    typer.Option(
        help="Folder or s3:// prefix of the images, named by id: "
        "the report then shows the ten largest gains and losses; may be repeated."
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Only compare mAP without expansion with the paper's golden numbers.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Ray workers; default: none for few rows, else one per GPU or CPU.")
]
Shards = Annotated[int | None, typer.Option(min=1, help="Shards of an index; default: depends on its rows.")]


def main(
    spec: Annotated[
        str,
        typer.Argument(metavar="RUN.toml", help=f"What to measure: a TOML file, or a preset: {', '.join(PRESETS)}."),
    ],
    to: Annotated[str, typer.Option("--to", help="The run's folder: cells, graphs, results and report.")],
    data: Annotated[str | None, typer.Option(help="Folder or s3:// prefix of a preset's data.")] = None,
    model: Annotated[str | None, typer.Option(help="The trained model for a preset; default: the shipped one.")] = None,
    ablations: Ablations = None,
    only: Only = None,
    columns: Columns = None,
    features: Features = None,
    queries: Queries = None,
    relevant: Relevant = None,
    images: Images = None,
    check: Check = False,
    workers: Workers = None,
    shards: Shards = None,
    address: Address = None,
    plan: Plan = False,
    assume: Assume = None,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON on stdout.")] = False,
) -> None:
    """Measure every method on every data set of a run; finished cells are not measured again.

    Example: lattqe benchmark run.toml --to results
    """
    from cluster.benchmark import Bench, plan_cells
    from cluster.session import ray_session
    from lattqe.benchmark.cells import refuse_foreign_results
    from lattqe.store import open_place
    from lattqe.store.local import scratch_folder

    refuse_foreign_results(open_place(to))
    # What a preset makes goes to the run's folder; of a plan nothing stays.
    with scratch_folder("plan") if plan else nullcontext(to.rstrip("/")) as folder:
        options = PresetOptions(str(folder), data, model, *map(several, (columns, features, queries, relevant)))
        chosen, cells = chosen_run(spec, options, ablations)
        if check:
            check_golden(chosen)
            return
        chosen = selected(chosen, only or [])
        if (where := setting(plan, assume, 0, workers, address)) is not None:
            tell(plan_cells(Bench(chosen, to, workers, shards), where), where, not open_place(to).is_local, json)
            return
    bench = measured(chosen, to, workers, shards, partial(ray_session, address))
    results, report = reported(chosen, cells, bench, to, images)
    if json:
        print_json(results | {"worker_memory": bench.indexes.memory})
    (print_results if cells is None else print_density)(results)
    show_memory(bench.indexes.memory)
    screen.print(f"report: {report}", markup=False, soft_wrap=True)


def several(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """The values of an option that may be repeated; None where it was not given."""
    return tuple(values) if values else None


def chosen_run(spec: str, options: PresetOptions, ablations: str | None) -> "tuple[Run, Sequence[DensityCell] | None]":
    """The run of a TOML file or of a preset; and for the preset density its cells, which have their own report."""
    from lattqe.benchmark.runfile import load_run
    from lattqe.benchmark.spec import trained_ablations

    if spec not in PRESETS:
        if ablations is not None or any(value is not None for value in astuple(options)[1:]):
            raise LattqeError(
                "--data, --model, --ablations, --columns, --features, --queries and --relevant are for "
                "presets: a TOML file names its own data and models"
            )
        return load_run(spec), None
    chosen, make_cells = preset_run(spec, options), PRESETS[spec].cells
    if ablations is not None:
        chosen = replace(chosen, ablations=trained_ablations(ablations))
    return chosen, None if make_cells is None else make_cells(options)


def reported(
    chosen: "Run", cells: "Sequence[DensityCell] | None", bench: "Bench", to: str, images: list[str] | None
) -> tuple[dict[str, Any], str]:
    """The results of a run whose cells are all there, and the address of their report."""
    from lattqe.benchmark.density import gains
    from lattqe.benchmark.results import assemble
    from lattqe.report import density_csv, density_illustrations, render_density, render_page

    if cells is None:
        results = assemble(chosen, bench, facts(chosen, bench))
        return results, publish(results, to, page=partial(render_page, examples=look(results, chosen, images)))
    results = {**gains(chosen, cells, bench), **facts(chosen, bench)}
    return results, publish(results, to, density_illustrations(results), render_density, density_csv)


def selected(chosen: "Run", only: list[str]) -> "Run":
    """The run with some of its methods."""
    known = [each.method for each in chosen.entries]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise LattqeError(
            f"--only {unknown[0]}: the run has no such method: use one of {', '.join(dict.fromkeys(known))}"
        )
    if not only:
        return chosen
    return replace(
        chosen,
        methods=tuple(each for each in chosen.methods if each.method in only),
        graph_methods=tuple(each for each in chosen.graph_methods if each.method in only),
    )


def measure_run(
    chosen: "Run",
    to: str,
    workers: int | None = None,
    shards: int | None = None,
    start_ray: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Fill the missing cells of a run and assemble its results."""
    from lattqe.benchmark.results import assemble

    bench = measured(chosen, to, workers, shards, start_ray)
    return assemble(chosen, bench, facts(chosen, bench))


def measured(
    chosen: "Run",
    to: str,
    workers: int | None,
    shards: int | None,
    start_ray: Callable[[], AbstractContextManager[Any]],
) -> "Bench":
    """Fill the missing cells of a run; Ray starts where something is too large for this process."""
    from cluster.benchmark import Bench

    bench = Bench(chosen, to, workers, shards)
    show_plan(chosen, bench)
    with start_ray() if bench.needs_ray() else nullcontext():
        fill(chosen, bench)
    return bench


def fill(chosen: "Run", bench: "Bench") -> None:
    """Measure what is missing, with a bar; warn early where the features are not what they should be."""
    warned = False
    while cells := bench.cells_to_do():
        with progress_bar("cells", len(cells)) as bar:
            bench.indexes.tell = partial(bar.advance, 0)
            bench.fill(cells, lambda cell, bar=bar: bar.advance(1, cell.dataset))  # type: ignore[misc]
        if not warned:  # after the first step, which measures no expansion: before hours go into the rest
            warned = True
            warn(golden_warnings(chosen, bench))


def show_plan(chosen: "Run", bench: "Bench") -> None:
    """Print what is going to be measured."""
    rows = {
        "data sets": ", ".join(
            f"{name} ({opened.queries.rows} queries, {opened.database.rows:,} rows)"
            for name, opened in bench.inputs.items()
        ),
        "distractors": ", ".join(
            f"{dataset}+{name} ({features.rows:,} rows)" for (dataset, name), features in bench.distractors.items()
        )
        or "none",
        "methods": ", ".join(method.label for method in chosen.entries),
    }
    if bench.needs_ray():
        rows["memory of a worker"] = planned_memory(bench)
    show_table("plan", {name: printable(text) for name, text in rows.items()})


def planned_memory(bench: "Bench") -> str:
    """What workers will hold and map for the cells that are measured first, on nodes like this one."""
    from cluster.benchmark import plan_cells
    from lattqe.cost.plans import Placement

    where = Placement(replace(this_machine(), asked=bench.indexes.workers or bench.indexes.shards))
    works = plan_cells(bench, where)
    return ", ".join(f"{work.stage} {human_bytes(work.worker_bytes + work.mapped)}" for work in works)


def golden_warnings(chosen: "Run", bench: "Bench") -> list[str]:
    """Say where features that should be the paper's do not give the paper's numbers without expansion."""
    from lattqe.benchmark.choosing import NO_EXPANSION
    from lattqe.datasets.revisited import golden_differences, published_scores

    warnings: list[str] = []
    for dataset in chosen.datasets_of("test") if chosen.published else ():
        if dataset.name in published_scores()["golden"]["map"]:
            plain = bench.lookup(NO_EXPANSION.cell(dataset)).scores
            warnings += golden_differences(dataset.name, {one.setup: 100 * one.mean_ap for one in plain})
    return warnings


def approximate_warnings(bench: "Bench") -> list[str]:
    """Say which sets were made of approximate graphs, and which rows of this run are augmented from one."""
    sets = {name: opened.database for name, opened in bench.inputs.items()}
    sets |= {f"{dataset}+{name}": features for (dataset, name), features in bench.distractors.items()}
    used = {f"the rows of {name} are based on": each.manifest.approximation for name, each in sets.items()}
    for graph in bench.indexes.known.values():
        used[f"rows are augmented from {graph.uri},"] = graph.manifest.approximation
    return [f"{what} {APPROXIMATE_GRAPH}: {lacks}" for what, lacks in used.items() if lacks is not None]


def facts(chosen: "Run", bench: "Bench") -> dict[str, Any]:
    """What the results carry of their inputs: digests, the resolved run, published numbers and warnings."""
    from lattqe.datasets.revisited import published_scores

    inputs: dict[str, Any] = {
        name: {
            "database": opened.database.as_input(),
            "queries": opened.queries.as_input(),
            "truth": opened.truth_digest,
        }
        for name, opened in bench.inputs.items()
    }
    inputs |= {
        f"{dataset}+{name}": {"distractors": features.as_input()}
        for (dataset, name), features in bench.distractors.items()
    }
    inputs |= {uri: {"model": digest} for uri, digest in bench.models.items()}
    paper = {name: published_scores()[name] for name in ("table2", "table3")} if chosen.published else {}
    return {
        "inputs": inputs,
        "run": json_format.loads(json_format.dumps(asdict(chosen))),
        "warnings": golden_warnings(chosen, bench) + approximate_warnings(bench),
        "published": paper,
    }


def check_golden(chosen: "Run") -> None:
    """Show mAP without expansion next to the paper's; features that do not give its numbers are refused."""
    from lattqe.benchmark.cells import OpenedDataset
    from lattqe.datasets.prepare import plain_scores
    from lattqe.datasets.revisited import golden_differences, published_scores

    golden, wrong = published_scores()["golden"]["map"], []
    tested = [dataset for dataset in chosen.datasets_of("test") if dataset.name in golden]
    if not tested:
        raise LattqeError(f"--check compares {', '.join(golden)} with the paper's numbers: this run has neither")
    for dataset in tested:
        opened = OpenedDataset.open(dataset)
        measured = {
            name: 100 * one.mean_ap for name, one in plain_scores(opened.database, opened.queries, opened.truth).items()
        }
        show_table(
            f"{dataset.name} without expansion, mAP",
            {
                setup: f"{value:.2f}"
                + (f"   paper {golden[dataset.name][setup]:.2f}" if setup in golden[dataset.name] else "")
                for setup, value in measured.items()
            },
        )
        wrong += golden_differences(dataset.name, measured)
    if wrong:
        raise LattqeError("these are not the paper's features: " + "; ".join(wrong))
    screen.print("the paper's golden numbers are reproduced")


def look(results: dict[str, Any], chosen: "Run", images: list[str] | None) -> "Examples | None":
    """Pictures of the queries that gain and lose most, where there are images and an expansion to look at."""
    from lattqe.report.page import best_expansion, make_examples

    if not images or best_expansion(results)["qe"] is None:
        return None
    return make_examples(results, chosen.datasets_of("test"), images)


def publish(
    results: dict[str, Any],
    to: str,
    figures: "Sequence[Illustration] | None" = None,
    page: Callable[..., str] | None = None,
    table: Callable[[Any], str] | None = None,
) -> str:
    """Write results.json (in the order of the tables), results.csv, the figures as separate files (for slides and
    papers) and report.html; the page last. Returns its address. By default all of it is what a run's file gives.
    """
    from lattqe.report import illustrations, render_page, to_csv
    from lattqe.store import open_place

    place = open_place(to)
    place.write("results.json", json_format.dumps(results, indent=1, allow_nan=False).encode())
    place.write("results.csv", (table or to_csv)(results).encode())
    figures = illustrations(results) if figures is None else figures
    place.child("figures").delete_tree()  # those of an earlier run may have other names
    for figure in figures:
        for name, text in figure.files().items():
            place.write(f"figures/{name}", text.encode())
    place.write("report.html", (page or render_page)(results, figures=figures).encode())
    return f"{to.rstrip('/')}/report.html"


def print_results(results: dict[str, Any]) -> None:
    """Show Table 3 on the screen, one narrow table for each kind; then what one should know about it."""
    from lattqe.report import to_text

    for title, rows in to_text(results):
        print_table(title, rows)
        screen.print()
    for finding in results["findings"]:
        mark = "[green]yes[/green]" if finding["holds"] else "[red]no[/red] "
        detail = f" ({finding['detail']})" if finding["detail"] else ""
        screen.print(f"{mark} {shown(finding['claim'] + detail)}")
    warn(results["warnings"])


def print_density(results: dict[str, Any]) -> None:
    """Show for each density what the model gains, beside the best rival tuned for it, and say what that means."""
    from lattqe.report import density_text

    for title, rows, verdict in density_text(results):
        print_table(title, rows)
        screen.print(shown(verdict) + "\n")


app = command(main)

if __name__ == "__main__":
    run(app)
