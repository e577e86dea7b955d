"""Learn a whitening of feature sets and apply it: PCA, half, full, or learned from labels."""

from typing import Annotated, Any

import typer

from jobs.console import PlainCommand, human_bytes, interruptible, print_json, progress_bar, run, show_table
from jobs.log_file import logged

Json = Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")]

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", help=__doc__, no_args_is_help=True
)


@app.command(cls=PlainCommand)
@interruptible
@logged
def learn(
    features: Annotated[str, typer.Argument(help="feature set to learn from; method learned needs its labels")],
    to: Annotated[str, typer.Option(help="where to write the whitening: folder or s3://bucket/prefix")],
    method: Annotated[str, typer.Option(help="pca (rotate), half, full, or learned (supervised by labels)")] = "half",
    dim: Annotated[int | None, typer.Option(help="dimensions to keep; default all that vary")] = None,
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


@app.command(cls=PlainCommand)
@interruptible
@logged
def apply(
    features: Annotated[str, typer.Argument(help="feature set to whiten")],
    whitening: Annotated[str, typer.Option(help="what `lattqe whiten learn` made")],
    to: Annotated[str, typer.Option(help="where to write the whitened features: folder or s3://bucket/prefix")],
    dtype: Annotated[str | None, typer.Option(help="float16 or float32; default as the source")] = None,
    json: Json = False,
) -> None:
    """Whiten a feature set into a new one, with ids, labels and other columns as they are; a killed run continues.

    Example: lattqe whiten apply features --whitening whitening --to whitened
    """
    from lattqe.store import FeatureSet
    from lattqe.store.tables import check_dtype
    from lattqe.whitening import whiten_features

    opened = FeatureSet.open(features)
    with progress_bar("whiten", opened.rows) as bar:
        manifest = whiten_features(
            opened, whitening, to, check_dtype(dtype) if dtype else None, on_part=lambda rows, total: bar.advance(rows)
        )
    _tell({"uri": to, "rows": manifest.rows, "dim": manifest.fields["dim"], "digest": manifest.digest}, json)


@app.command(cls=PlainCommand)
@interruptible
@logged
def from_checkpoint(
    checkpoint: Annotated[str, typer.Argument(help="network file of the published layout that carries a whitening")],
    to: Annotated[str, typer.Option(help="where to write the whitening: folder or s3://bucket/prefix")],
    training_set: Annotated[str | None, typer.Option(help="which one, where the file has several")] = None,
    single_scale: Annotated[bool, typer.Option("--single-scale", help="the one for features of one scale")] = False,
    json: Json = False,
) -> None:
    """Take the whitening that some published networks carry for their features (`meta['Lw']`).

    Example: lattqe whiten from-checkpoint retrievalSfM120k-resnet101-gem.pth --to whitening
    """
    from lattqe.extraction.resnet import published_whitening

    whitening, digest = published_whitening(checkpoint, training_set, "ss" if single_scale else "ms")
    manifest = whitening.save(to, {"checkpoint": {"uri": checkpoint, "digest": digest, "kind": "checkpoint"}})
    _tell({"uri": to, "digest": manifest.digest, "input_dim": whitening.input_dim, **whitening.config}, json)


def _tell(summary: dict[str, Any], json: bool) -> None:
    """Show the summary on the screen and, if asked for, to scripts."""
    show_table("whitening" if "input_dim" in summary else "whitened features", summary)
    if json:
        print_json(summary)


if __name__ == "__main__":
    run(app)
