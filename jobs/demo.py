"""The whole pipeline on a synthetic landmark world: features, graph, training, augmentation, benchmark, report."""

from typing import TYPE_CHECKING, Annotated

import typer

from jobs.console import command, run, screen
from lattqe.errors import LattqeError, event

if TYPE_CHECKING:
    from lattqe.benchmark.spec import Run
    from lattqe.datasets.synthetic import SyntheticWorld

DISTRACTORS = 5_000  # at scale 1: enough to hurt, few enough for a demonstration
NEXT = """What to try next, with your own images or descriptors:
  lattqe extract photos --checkpoint net.pth --to features     (or: lattqe import vectors.npy --to features)
  lattqe train labelled --val held-out --preset photos --to model
  lattqe augment features --method lattqe --model model --to index
  lattqe benchmark run.toml --to results                       (start from docs/examples/run.toml)
Inspect the results:  lattqe info {to}/model  ·  lattqe verify {to}/index"""


def main(
    to: Annotated[str, typer.Option("--to", help="Where everything goes: a local folder.")] = "demo",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the world and of the network.")] = 0,
    scale: Annotated[
        float, typer.Option(min=0.01, help="Scale the number of landmarks, background images and distractors.")
    ] = 1.0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change a training setting: steps=1000, network.layers=3, ...")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster. [default: $RAY_ADDRESS, or this machine]")
    ] = None,
) -> None:
    """Make a world of landmarks, train on one part of it, and measure all methods on another: about five minutes.

    After a kill, the same command continues where it stopped. Example: lattqe demo --to demo
    """
    from cluster.session import ray_session
    from jobs.benchmark import measure_run, print_results, publish
    from lattqe.datasets.synthetic import SyntheticWorld

    if "://" in to:
        raise LattqeError(f"the demo needs a local folder, not {to!r}")
    to = to.rstrip("/")
    world = SyntheticWorld(seed, scale=scale, distractors=round(DISTRACTORS * scale))
    with ray_session(address):
        step(1, "a world of landmarks, with none shared by training, validation and test")
        chosen = make_world(world, to)
        step(2, "the exact neighbor graph of the database that will be searched")
        graph = find_neighbors(chosen.datasets[0].database, to)
        step(3, "training LAttQE, then the temperature of LAttDBA")
        model = train_model(to, [f"seed={seed}", *(settings or [])])
        step(4, "augmenting that database with LAttDBA")
        augment_database(chosen.datasets[0].database, graph, model, to)
        step(5, "all methods, with and without augmentation and distractors")
        results = measure_run(with_methods(chosen, model), f"{to}/benchmark")
    report = publish(results, f"{to}/benchmark")
    screen.print()
    print_results(results)
    if not all(finding["holds"] for finding in results["findings"]):
        screen.print("Not all of the paper's ordering appears in this world: see the lines marked no.")
    screen.print(f"\nThe report, with figures: {report}\n", markup=False, soft_wrap=True)
    screen.print(NEXT.format(to=to), markup=False, soft_wrap=True)


def step(number: int, text: str) -> None:
    """Say what comes."""
    event("phase", phase=text, number=number)
    screen.print(f"\n[bold]{number}/5[/bold] {text}")


def make_world(world: "SyntheticWorld", to: str) -> "Run":
    """Store all parts as feature sets; a run over the test part, without methods, but with validation to choose on."""
    from dataclasses import replace

    from lattqe.benchmark.presets import synthetic_run
    from lattqe.benchmark.spec import Dataset
    from lattqe.datasets.prepare import Report, store_synthetic

    chosen, base = synthetic_run(to, (), world), f"{to}/features"
    for name in ("train", "val"):
        store_synthetic(world.split(name), base, Report())
    validation = Dataset("val", f"{base}/val", f"{base}/val-queries", role="validation")
    screen.print(
        f"features in {base}: train, "
        f"{', '.join(dataset.name for dataset in (validation, *chosen.datasets))}, distractors",
        markup=False,
        soft_wrap=True,
    )
    return replace(
        chosen, datasets=(*chosen.datasets, validation), nqe_sweep=(1, 2, 4, 8, 16, 32, 48, 64), bootstrap=2_000
    )


def find_neighbors(features: str, to: str) -> str:
    """The graph of a feature set, long enough for any network of the demo."""
    from jobs.neighbors import neighbors_here
    from lattqe.search.stored import GraphTask
    from lattqe.store import FeatureSet

    neighbors_here(GraphTask(features, f"{to}/graph", min(256, FeatureSet.open(features).rows - 1)))
    return f"{to}/graph"


def train_model(to: str, settings: list[str]) -> str:
    """Both stages of training on Ray; the finished model where it is there already."""
    from jobs.train import train_with_progress
    from lattqe.store import FeatureSet
    from lattqe.training import make, preset

    features = f"{to}/features/train"
    config = preset("demo", FeatureSet.open(features).dim, settings)
    plan = make(f"{to}/model", config, [features], [(f"{to}/features/val", f"{to}/features/val-queries")])
    if plan.claim() is None:
        train_with_progress(plan, workers=1, threads=0)
    else:
        screen.print(f"{to}/model is already there", markup=False, soft_wrap=True)
    return f"{to}/model"


def augment_database(features: str, graph: str, model: str, to: str) -> None:
    """LAttDBA of a feature set with the numbers of neighbors and hops that training chose."""
    from cluster.indexes import Workplace, build_stages, placed
    from jobs.index import OnScreen
    from lattqe.augmentation.recipe import Augmentation
    from lattqe.benchmark.spec import chosen_neighbors
    from lattqe.expansion import create
    from lattqe.store import FeatureSet

    params = {"model": model, "dba": True}
    method = create("lattqe", **params)
    task = Augmentation(
        features,
        graph,
        f"{to}/index",
        "lattqe",
        chosen_neighbors(model)["ndba"],
        params,
        hops=method.default_hops,
        hop_alpha=method.hop_alpha(FeatureSet.open(features).rows),
    )
    build_stages(placed(task, here=True), Workplace(here=True), OnScreen())


def with_methods(chosen: "Run", model: str) -> "Run":
    """The run with all five methods; grids are small, and the validation part alone chooses from them."""
    from dataclasses import replace

    from lattqe.benchmark.spec import Candidate, as_trained

    competitors: tuple[Candidate, ...] = (
        Candidate("aqe", "AQE", "validation", (2, 4, 8, 16), (2, 4, 8), (2, 4, 8)),
        Candidate("aqewd", "AQEwD", "validation", (4, 8, 16, 24), (4, 8, 12), (4, 8, 16)),
        Candidate("dqe", "DQE", "validation", (2, 4, 8), (2, 4), (2, 4), {"C": (0.1,), "negatives": (5, 20)}),
        Candidate("alphaqe", "αQE", "validation", (8, 16, 36, 72), (8, 16, 36), (4, 10), {"alpha": (1.0, 3.0)}),
    )
    return replace(chosen, methods=(*competitors, as_trained(model)))


app = command(main)

if __name__ == "__main__":
    run(app)
