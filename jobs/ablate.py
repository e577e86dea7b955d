"""Train a model and its ablations (Table 2 of the paper), and print what each part is worth."""

import json as json_module
from typing import TYPE_CHECKING, Any

import typer

from jobs.console import command, print_json, run, screen, show_table
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.store import Place


def main(
    features: list[str] = typer.Argument(help="labelled feature sets, as for lattqe train"),
    to: str = typer.Option(..., "--to", help="folder or s3://bucket/prefix; each variant gets its own model in it"),
    val: list[str] = typer.Option(..., "--val", help="labelled database to validate on; may be repeated"),
    queries: list[str] = typer.Option([], "--queries", help="labelled queries, one for each --val; see lattqe train"),
    neighbors: list[str] = typer.Option([], "--neighbors", help="graph of each feature set; else computed"),
    preset: str = typer.Option("paper", "--preset", help="paper, photos or demo"),
    settings: list[str] = typer.Option([], "--set", help="change a setting in all variants: steps=1000, ..."),
    only: list[str] = typer.Option([], "--only", help="train this variant; may be repeated; else all of them"),
    workers: int = typer.Option(0, "--workers", help="processes that share each batch; 0: one for each GPU, or one"),
    threads: int = typer.Option(0, "--threads", help="CPU threads of each worker; 0: an equal share"),
    cache: str | None = typer.Option(None, "--cache", help="folder on each node that keeps features read from S3"),
    address: str | None = typer.Option(None, "--address", help="a running Ray cluster; else one starts here"),
    json: bool = typer.Option(False, "--json", help="print the result as JSON on stdout"),
) -> None:
    """Train a model and its ablations (Table 2 of the paper), and print what each part is worth.

    Every variant is chosen on validation as the full model is, nQE included. A killed run continues: finished variants
    are kept. The models can be named as ablations in a benchmark run.

    Example: lattqe ablate features --val held-out --preset photos --to ablations
    """
    from cluster.session import ray_session
    from lattqe.store import FeatureSet, open_place
    from lattqe.training import preset as configuration
    from lattqe.training.presets import variants

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
    with ray_session(address):
        for name in only or known:
            screen.print(f"[bold]{name}[/bold] {' '.join(known[name])}")
            config = configuration(preset, dim, [*settings, *known[name]])
            there = f"{to.rstrip('/')}/{name}"
            table[name] = _variant(there, config, features, pairs, neighbors, cache, workers, threads)
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


def _variant(
    to: str,
    config: Any,
    features: list[str],
    pairs: list[tuple[str, str | None]],
    neighbors: list[str],
    cache: str | None,
    workers: int,
    threads: int,
) -> dict[str, Any]:
    """Train one variant, unless it is there already; its best validation mAP and nQE."""
    from jobs.train import train_with_progress
    from lattqe.store import load_model
    from lattqe.training import make

    plan = make(to, config, features, pairs, neighbors, cache)
    if plan.claim() is None:
        train_with_progress(plan, workers, threads)
    metrics = load_model(to)[2]
    row = metrics["validation"]["qe"][str(metrics["nqe"])]
    return {"map": row["mean"], "nqe": metrics["nqe"], "sets": row, "model": to, "seconds": metrics["seconds"]}


app = command(main)

if __name__ == "__main__":
    run(app)
