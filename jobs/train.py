"""What is learned from feature sets: the verbs train (LAttQE), ablate (what its parts contribute) and whiten."""

import json as json_module
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import (
    command,
    group,
    human_bytes,
    note_approximate,
    print_json,
    progress_bar,
    run,
    screen,
    show_facts,
    show_table,
)
from jobs.plan import Assume, Plan, on_ray, setting, tell
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from cluster.training import Standing
    from lattqe.store import Place

# Of `lattqe.training.PRESETS`, which would import torch for a page of help; a test compares the two.
PRESET_NAMES = "paper, photos, universal or demo"


def main(
    features: list[str] = typer.Argument(help="labelled feature sets; neighbors come from within each set"),
    to: str = typer.Option(..., "--to", help="where the model goes: a folder or s3://bucket/prefix"),
    val: list[str] = typer.Option(..., "--val", help="labelled database to validate on; may be repeated"),
    queries: list[str] = typer.Option(
        [],
        "--queries",
        help="labelled queries, one set per --val in the same order; without any, the rows of each --val query "
        "each other, each leaving itself out (as do queries whose ids are in the database)",
    ),
    neighbors: list[str] = typer.Option([], "--neighbors", help="graph of each feature set; default: computed"),
    preset: str = typer.Option("paper", "--preset", help=f"{PRESET_NAMES}: see docs/training.md"),
    settings: list[str] = typer.Option([], "--set", help="change a setting: steps=1000, network.heads=8, ..."),
    workers: int = typer.Option(
        0, "--workers", min=0, help="processes on Ray that share each batch; 0: one per GPU, or this process alone"
    ),
    threads: int = typer.Option(0, "--threads", min=0, help="CPU threads per worker; 0: an equal share"),
    cache: str | None = typer.Option(None, "--cache", help="node-local cache folder for features stored on S3"),
    address: str | None = typer.Option(None, "--address", help="a running Ray cluster; default: this machine"),
    plan_only: Plan = False,
    assume: Assume = None,
    json: bool = typer.Option(False, "--json", help="print the result as JSON on stdout"),
) -> None:
    """Train a LAttQE model on labelled feature sets.

    The best weights on the validation sets are kept; then the temperature for database rows is trained, and the
    numbers of neighbors for queries (nQE) and for the database (nDBA) are chosen. A killed training continues from its
    last checkpoint when the same command is run again, with any number of workers.

    Example: lattqe train sfm-train --val sfm-val --queries sfm-val-queries --preset paper --to model
    """
    from lattqe.cost import plans
    from lattqe.store import FeatureSet, NeighborGraph, open_place
    from lattqe.training import make
    from lattqe.training import preset as configuration

    if queries and len(queries) != len(val):
        raise LattqeError(f"{len(queries)} --queries for {len(val)} --val: give one for each, or none")
    config = configuration(preset, FeatureSet.open(features[0]).dim, settings)
    pairs = [(database, queries[number] if queries else None) for number, database in enumerate(val)]
    plan = make(to, config, features, pairs, neighbors, cache)
    if (where := setting(plan_only, assume, 0, workers or None, address, cache)) is not None:
        # By default one process for each GPU, or one with all cores.
        machines = where.machines
        team = workers or machines.nodes * machines.gpus or 1
        where = replace(where, machines=replace(machines, asked=team))
        tell([plans.train(plan, where.machines)], where, not open_place(features[0]).is_local, json)
        return
    note_approximate(*map(NeighborGraph.open, neighbors))
    if plan.claim() is None:
        warn_of_leakage(features, [uri for pair in pairs for uri in pair if uri is not None])
        here = trains_here(workers, address)
        with nullcontext() if here else on_ray(address):
            train_with_progress(plan, workers, threads, here)
    else:
        screen.print(f"{to} already holds this model", markup=False, soft_wrap=True)
    result = _result(to)
    _show_result(result)
    if json:
        print_json(result)


def warn_of_leakage(features: list[str], held_out: list[str]) -> None:
    """Say where validation images are in training too, under other names."""
    from lattqe.duplicates import leakage_warnings
    from lattqe.store import FeatureSet

    trained, others = ([FeatureSet.open(uri) for uri in uris] for uris in (features, held_out))
    for line in leakage_warnings(trained, others):
        screen.print(f"warning: {line}", markup=False, soft_wrap=True)


def trains_here(workers: int, address: str | None) -> bool:
    """Whether a training is one worker in this process: not if workers, a cluster or several GPUs are there for it."""
    import torch

    from cluster import runs_here
    from lattqe.device import pick_device

    return runs_here(0, workers or None, address) and (pick_device().type == "cpu" or torch.cuda.device_count() == 1)


def train_with_progress(plan: Any, workers: int, threads: int, here: bool = False) -> None:
    """Show the plan, train in this process or on the connected Ray, and show how far it is."""
    import torch

    from lattqe.store import open_place
    from lattqe.training.checkpoint import Checkpoints

    done = Checkpoints(open_place(plan.destination)).load().step
    if here:
        from cluster.training import train_here

        workers, threads = 1, threads or torch.get_num_threads()
        fit = partial(train_here, plan, threads)
    else:
        from cluster.session import gpus_available, worker_device
        from cluster.training import threads_for, train_on_cluster

        workers = workers or (max(1, gpus_available()) if worker_device() == "cuda" else 1)
        threads = threads or threads_for(workers)
        fit = partial(train_on_cluster, plan, workers, threads)
    resumed = {"continuing at update": f"{done:,}"} if done else {}
    show_table("train", _plan_rows(plan) | {"workers × threads": f"{workers} × {threads}", **resumed}, plan=True)
    with shown_updates(done) as show:
        try:
            fit(show)
        except KeyboardInterrupt as interrupt:
            kept = Checkpoints(open_place(plan.destination)).load().step
            interrupt.add_note(f"checkpoint of update {kept:,}" if kept else "before the first checkpoint")
            raise


@contextmanager
def shown_updates(done: int) -> "Iterator[Callable[[Standing], None]]":
    """What shows how far a training is that continues after `done` updates: a bar, opened by the first update of this
    run, or where all are done and the numbers of neighbors are being chosen.
    """
    with ExitStack() as stack:
        bar, told = None, done

        def show(standing: "Standing") -> None:
            nonlocal bar, told
            if standing.step == 0 or (bar is None and standing.step == told < standing.total):
                return
            if bar is None:  # only now: the time that workers take to start says nothing about the updates
                bar = stack.enter_context(progress_bar("train", standing.total, told))
            bar.advance(standing.step - told, standing.note)
            told = standing.step

        yield show


def _plan_rows(plan: Any) -> dict[str, Any]:
    """What is shown before the work."""
    import numpy as np

    from lattqe.model import LAttQE
    from lattqe.store import FeatureSet

    config, images, classes, single = plan.config, 0, 0, 0
    for uri in plan.features:
        counts = np.unique(FeatureSet.open(uri).labels(), return_counts=True)[1]
        images, classes, single = images + counts.sum(), classes + len(counts), single + (counts == 1).sum()
    parameters = sum(tensor.numel() for tensor in LAttQE(config.network).parameters())
    skipped = f", {single} with a single image: never queries" if single else ""
    return {
        "training": _names(plan.features),
        "images": f"{images:,} × {config.network.dim}, {classes:,} classes{skipped}",
        "validation": _names([database for database, _ in plan.validation]),
        "network": f"{config.network.layers} encoders, width {config.network.token_width}, {parameters:,} parameters",
        "updates": f"{config.steps:,} of {config.batch} queries, then {config.temperature_steps:,} for the temperature",
        "destination": plan.destination,
    }


def _names(sets: list[str]) -> str:
    return ", ".join(uri.rstrip("/").rsplit("/", 1)[-1] for uri in sets)


def _result(to: str) -> dict[str, Any]:
    """What the model says of itself."""
    from lattqe.store import load_model

    metrics = load_model(to)[2]
    return {"model": to, **{key: value for key, value in metrics.items() if key != "history"}}


def _show_result(result: dict[str, Any]) -> None:
    from lattqe.training.validation import setting_name

    found = result["validation"]
    none = sum(found["none"].values()) / len(found["none"])
    hops = result.get("hops", 1)
    with_dba = found["dba"][setting_name(result["ndba"], hops)][str(result["nqe_with_dba"])]
    over = f" over {hops} hops" if hops > 1 else ""
    show_table(
        "model",
        {
            "validation mAP": f"{none:.2f} without expansion",
            f"LAttQE, nQE {result['nqe']}": f"{found['qe'][str(result['nqe'])]['mean']:.2f}",
            f"LAttDBA + LAttQE, nDBA {result['ndba']}{over}, nQE {result['nqe_with_dba']}": f"{with_dba:.2f}",
            "best update": f"{result['best']['step']:,}",
            "seconds": f"{result['seconds']:.0f}",
            "model": result["model"],
        },
    )


app = command(main)


def ablate(
    features: list[str] = typer.Argument(help="labelled feature sets, as for lattqe train"),
    to: str = typer.Option(..., "--to", help="folder or s3://bucket/prefix; each variant gets its own model in it"),
    val: list[str] = typer.Option(..., "--val", help="labelled database to validate on; may be repeated"),
    queries: list[str] = typer.Option([], "--queries", help="labelled queries, one set per --val; see lattqe train"),
    neighbors: list[str] = typer.Option([], "--neighbors", help="graph of each feature set; default: computed"),
    preset: str = typer.Option("paper", "--preset", help=PRESET_NAMES),
    settings: list[str] = typer.Option([], "--set", help="change a setting in all variants: steps=1000, ..."),
    only: list[str] = typer.Option([], "--only", help="train only this variant; may be repeated; default: all"),
    workers: int = typer.Option(
        0, "--workers", min=0, help="processes on Ray that share each batch; 0: one per GPU, or this process alone"
    ),
    threads: int = typer.Option(0, "--threads", min=0, help="CPU threads per worker; 0: an equal share"),
    cache: str | None = typer.Option(None, "--cache", help="node-local cache folder for features stored on S3"),
    address: str | None = typer.Option(None, "--address", help="a running Ray cluster; default: this machine"),
    json: bool = typer.Option(False, "--json", help="print the result as JSON on stdout"),
) -> None:
    """Train a model and its ablations (Table 2 of the paper), and print how much each part contributes.

    Every variant is chosen on validation like the full model, nQE included. A killed run continues: finished variants
    are kept. The models can be named as ablations in a benchmark run.

    Example: lattqe ablate features --val held-out --preset photos --to ablations
    """
    from lattqe.store import FeatureSet, open_place
    from lattqe.training import make
    from lattqe.training import preset as configuration
    from lattqe.training.config import variants

    dim = FeatureSet.open(features[0]).dim
    known = variants(configuration(preset, dim, settings))
    unknown = [name for name in only if name not in known]
    if unknown:
        raise LattqeError(f"unknown variant {unknown[0]!r}: use one of {', '.join(known)}")
    if queries and len(queries) != len(val):
        raise LattqeError(f"{len(queries)} --queries for {len(val)} --val: give one for each, or none")
    pairs = [(database, queries[number] if queries else None) for number, database in enumerate(val)]
    place = open_place(to)
    table = finished(place)
    where = {name: f"{to.rstrip('/')}/{name}" for name in only or known}
    plans = {  # all of them before the first is trained: what does not fit shall not be found hours later
        name: make(there, configuration(preset, dim, [*settings, *known[name]]), features, pairs, neighbors, cache)
        for name, there in where.items()
    }
    here = trains_here(workers, address)
    with nullcontext() if here else on_ray(address):
        for name, plan in plans.items():
            screen.print(f"[bold]{name}[/bold] {' '.join(known[name])}")
            table[name] = _variant(plan, where[name], workers, threads, here)
            place.write("ablations.json", json_module.dumps(table, indent=1).encode())
    show_table("validation mAP", {name: f"{row['map']:.2f} with nQE {row['nqe']}" for name, row in table.items()})
    if json:
        print_json(table)


def finished(place: "Place") -> dict[str, Any]:
    """The variants that earlier runs of `ablate` have trained there: `--only` adds to them."""
    if not place.exists("ablations.json"):
        return {}
    try:
        table = json_module.loads(place.read("ablations.json"))
    except (ValueError, RecursionError) as error:
        raise LattqeError(
            f"{place.uri}/ablations.json is not valid JSON ({error}): remove it and run the same "
            "command again; finished models are kept"
        ) from error
    if not isinstance(table, dict) or not all(
        isinstance(row, dict) and {"map", "nqe"} <= set(row) for row in table.values()
    ):
        raise LattqeError(f"{place.uri}/ablations.json is not the table of lattqe ablate: remove it")
    return table


def _variant(plan: Any, to: str, workers: int, threads: int, here: bool) -> dict[str, Any]:
    """Train one variant, unless it is there already; its best validation mAP and nQE."""
    from lattqe.store import load_model

    if plan.claim() is None:
        train_with_progress(plan, workers, threads, here)
    metrics = load_model(to)[2]
    row = metrics["validation"]["qe"][str(metrics["nqe"])]
    return {"map": row["mean"], "nqe": metrics["nqe"], "sets": row, "model": to, "seconds": metrics["seconds"]}


ablate_app = command(ablate)


Json = Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")]

whiten_app, whiten_command = group("whiten", "Learn a whitening from features, apply it to features.")


@whiten_command
def learn(
    features: Annotated[str, typer.Argument(help="feature set to learn from; method learned needs its labels")],
    to: Annotated[str, typer.Option(help="where to write the whitening: folder or s3://bucket/prefix")],
    method: Annotated[str, typer.Option(help="pca (rotate), half, full, or learned (supervised by labels)")] = "half",
    dim: Annotated[int | None, typer.Option(help="dimensions to keep; default: all that vary")] = None,
    json: Json = False,
) -> None:
    """Learn a whitening from a feature set, reading it block by block.

    Example: lattqe whiten learn features --method half --dim 512 --to whitening
    """
    from lattqe.store import FeatureSet
    from lattqe.whitening import learn as learn_whitening

    opened = FeatureSet.open(features)
    show_table(
        "whiten learn",
        {"features": f"{opened.rows} × {opened.dim}", "method": method, "covariance": human_bytes(8 * opened.dim**2)},
        plan=True,
    )
    whitening = learn_whitening(opened, method, dim)
    manifest = whitening.save(to, {"features": opened.as_input()})
    _tell({"uri": to, "digest": manifest.digest, "input_dim": whitening.input_dim, **whitening.config}, json)


@whiten_command
def apply(
    features: Annotated[str, typer.Argument(help="feature set to whiten")],
    whitening: Annotated[str, typer.Option(help="whitening made by `lattqe whiten learn`")],
    to: Annotated[str, typer.Option(help="where to write the whitened features: folder or s3://bucket/prefix")],
    dtype: Annotated[str | None, typer.Option(help="float16 or float32; default: like the source")] = None,
    json: Json = False,
) -> None:
    """Whiten a feature set into a new one, with ids, labels and other columns as they are; a killed run continues.

    Example: lattqe whiten apply features --whitening whitening --to whitened
    """
    from lattqe.store import FeatureSet
    from lattqe.store.manifest import check_dtype
    from lattqe.whitening import whiten_features

    opened = FeatureSet.open(features)
    with progress_bar("whiten", opened.rows) as bar:
        manifest = whiten_features(
            opened, whitening, to, check_dtype(dtype) if dtype else None, on_part=lambda rows, total: bar.advance(rows)
        )
    _tell({"uri": to, "rows": manifest.rows, "dim": manifest.fields["dim"], "digest": manifest.digest}, json)


@whiten_command
def from_checkpoint(
    checkpoint: Annotated[str, typer.Argument(help="network file in the published layout that contains a whitening")],
    to: Annotated[str, typer.Option(help="where to write the whitening: folder or s3://bucket/prefix")],
    training_set: Annotated[str | None, typer.Option(help="which one, if the file has several")] = None,
    single_scale: Annotated[
        bool, typer.Option("--single-scale", help="use the whitening for single-scale features")
    ] = False,
    json: Json = False,
) -> None:
    """Extract the whitening that some published network files contain (`meta['Lw']`).

    Example: lattqe whiten from-checkpoint retrievalSfM120k-resnet101-gem.pth --to whitening
    """
    from lattqe.extraction.resnet import published_whitening

    whitening, digest = published_whitening(checkpoint, training_set, "ss" if single_scale else "ms")
    manifest = whitening.save(to, {"checkpoint": {"uri": checkpoint, "digest": digest, "kind": "checkpoint"}})
    _tell({"uri": to, "digest": manifest.digest, "input_dim": whitening.input_dim, **whitening.config}, json)


def _tell(summary: dict[str, Any], json: bool) -> None:
    """Show the summary on the screen and, if requested, to scripts."""
    show_facts("whitening" if "input_dim" in summary else "whitened features", summary)
    if json:
        print_json(summary)


if __name__ == "__main__":
    run(app)
