"""Check every checksum and every invariant of a stored artifact: exit code 0, or 1 and the first fault."""

import time
from typing import Annotated

import typer

from jobs.console import APPROXIMATE_GRAPH, command, human_bytes, progress_bar, run, screen
from lattqe.errors import CorruptDataError, LattqeError

EXIT_WRONG = 1


def main(
    uri: Annotated[str, typer.Argument(help="A feature set, neighbor graph, list of ranks or model.")],
    recompute: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of an augmented index: compute that many random rows again from the recorded inputs and compare.",
        ),
    ] = 0,
) -> None:
    """Check every checksum and every invariant of a stored artifact: exit code 0, or 1 and the first fault."""
    from lattqe.store.artifacts import model_address, open_artifact, verify_artifact
    from lattqe.store.manifest import describe_kind

    started, uri = time.monotonic(), model_address(uri)
    try:
        total = open_artifact(uri).manifest.total_bytes
        with progress_bar("verifying", total) as bar:
            manifest = verify_artifact(uri, bar.advance)
        if manifest.kind == "model":
            check_model(uri)
        if recompute:
            recompute_rows(uri, recompute)
    except CorruptDataError as error:
        screen.print("[red]wrong:[/red] ", end="")
        screen.print(" ".join(str(error).split()), markup=False, soft_wrap=True)
        raise SystemExit(EXIT_WRONG) from None
    rows = f", {manifest.rows:,} rows" if manifest.rows else ""
    screen.print(
        f"sound: {describe_kind(manifest.kind)}{rows}, {human_bytes(total)} in {time.monotonic() - started:.1f} s",
        markup=False,
        soft_wrap=True,
    )
    if manifest.approximation is not None:
        screen.print(
            f"not exact: it is what its manifest says, but rests on {APPROXIMATE_GRAPH}: {manifest.approximation}",
            markup=False,
            soft_wrap=True,
        )


def check_model(uri: str) -> None:
    """A network's or a whitening's tensors must be those that its config.json describes."""
    from lattqe.store import load_model

    config = load_model(uri)[1]
    try:
        if "network" in config:
            from lattqe.model import LAttQE

            LAttQE.load(uri)
        elif config.get("kind") == "whitening":
            from lattqe.whitening import Whitening

            Whitening.load(uri)
    except LattqeError as error:
        raise CorruptDataError(str(error)) from error


def recompute_rows(uri: str, count: int) -> None:
    """Compute random rows of an augmented index again and say how far they are off."""
    from lattqe.augmentation.recipe import hops_again, recompute
    from lattqe.store import FeatureSet

    index = FeatureSet.open(uri)
    count = min(count, index.rows)
    off, hops = recompute(index, count), index.manifest.config.get("hops", 1)
    what = "rows" if hops == 1 else f"rows' edges, and all {hops} hops," if hops_again(index) else "rows' edges"
    screen.print(f"{count:,} {what} computed again: off by {off:.2g} at most", markup=False)
    if hops > 1 and not hops_again(index):
        screen.print(f"its {hops} hops were not: {index.rows:,} rows are too many for one process", markup=False)


app = command(main)

if __name__ == "__main__":
    run(app)
