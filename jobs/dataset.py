"""Published files of a data set → feature sets with ids, labels, pairs and queries, checked against each other."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import ProgressBar, interruptible, print_json, progress_bar, run, screen, show_table
from jobs.log_file import logged

if TYPE_CHECKING:
    from lattqe.datasets.prepare import Report

To = Annotated[str, typer.Option("--to", help="folder or s3://bucket/prefix that the feature sets go below")]
Dtype = Annotated[str, typer.Option(help="float16 or float32")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")]

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", help=__doc__, no_args_is_help=True
)


@app.command()
@interruptible
@logged
def revisited(
    source: Annotated[
        str,
        typer.Argument(
            help="folder or s3:// prefix with gnd_roxford5k.pkl, gnd_rparis6k.pkl and "
            "the descriptors, as .mat (X and Q), .npy, .pkl, ..."
        ),
    ],
    to: To,
    dtype: Dtype = "float16",
    json: Json = False,
) -> None:
    """Revisited Oxford and Paris; scores without expansion stand beside the paper's golden numbers.

    Example: lattqe dataset revisited published --to data
    """
    from lattqe.datasets.prepare import prepare_revisited

    with _Bars() as bars:
        report = prepare_revisited(source, to, dtype, bars.advance)
    _tell(report, to, json)


@app.command()
@interruptible
@logged
def r1m(
    sources: Annotated[list[str], typer.Argument(help="files of the distractors' descriptors, in order")],
    to: To,
    ids: Annotated[str | None, typer.Option(help="names of all rows: .npy, .txt or .csv")] = None,
    dtype: Dtype = "float16",
    json: Json = False,
) -> None:
    """The million distractors of the revisited benchmarks.

    Example: lattqe dataset r1m r1m.npy --to data
    """
    from lattqe.datasets.prepare import prepare_r1m

    with _Bars() as bars:
        report = prepare_r1m(sources, to, ids, dtype, bars.advance)
    _tell(report, to, json)


@app.command()
@interruptible
@logged
def sfm120k(
    source: Annotated[
        str,
        typer.Argument(
            help="folder or s3:// prefix with retrieval-SfM-120k.pkl and the descriptors "
            "of its halves (files with 'train' and 'val' in their names)"
        ),
    ],
    to: To,
    dtype: Dtype = "float16",
    json: Json = False,
) -> None:
    """SfM-120k: training and validation halves labelled by cluster, with the published pairs and queries.

    Example: lattqe dataset sfm120k published --to data
    """
    from lattqe.datasets.labelled import prepare_sfm120k

    with _Bars() as bars:
        report = prepare_sfm120k(source, to, dtype, bars.advance)
    _tell(report, to, json)


@app.command()
@interruptible
@logged
def photos(
    source: Annotated[str, typer.Argument(help="folder or s3:// prefix with NAME_vectors.npy, NAME_labels.npy, ...")],
    to: To,
    columns: Annotated[int | None, typer.Option(min=1, help="keep the first so many columns")] = None,
    json: Json = False,
) -> None:
    """Labelled photographs: train, validation and test splits of every set that is there.

    Example: lattqe dataset photos photos --columns 128 --to data
    """
    from lattqe.datasets.labelled import prepare_photos

    _tell(prepare_photos(source, to, columns), to, json)


@app.command()
@interruptible
@logged
def synthetic(
    to: To,
    seed: Annotated[int, typer.Option(min=0, help="another seed is another world")] = 0,
    dim: Annotated[int, typer.Option(min=2, help="dimensions of the descriptors")] = 128,
    scale: Annotated[float, typer.Option(min=0.01, help="times as many landmarks and background images")] = 1.0,
    distractors: Annotated[int, typer.Option(min=0, help="unlabelled rows beside the test sets")] = 20_000,
    json: Json = False,
) -> None:
    """A world of landmarks: training, validation, two test sets with graded ground truth, distractors.

    Example: lattqe dataset synthetic --to data
    """
    from lattqe.datasets.prepare import prepare_synthetic
    from lattqe.datasets.synthetic import SyntheticWorld

    _tell(prepare_synthetic(SyntheticWorld(seed, dim, scale=scale, distractors=distractors), to), to, json)


class _Bars(ExitStack):
    """One progress bar after the other, each for one set."""

    def __enter__(self) -> "_Bars":
        self.name, self.bar = "", ProgressBar(None, None, "", 0)
        super().__enter__()
        return self

    def advance(self, name: str, rows: int, total: int) -> None:
        """Say that so many more rows of a set are written."""
        if name != self.name:
            self.close()
            self.name, self.bar = name, self.enter_context(progress_bar(name, total))
        self.bar.advance(rows)


def _tell(report: "Report", to: str, json: bool) -> None:
    """Show what was made, what was assumed, and how the plain scores stand to the published ones."""
    from lattqe.datasets.revisited import golden_differences, published

    golden = published()["golden"]["map"]
    differences: dict[str, list[str]] = {}
    for name, scores in report.scores.items():
        measured = {setup: 100 * one.mean_ap for setup, one in scores.items()}
        differences[name] = golden_differences(name, measured)
    show_table(
        f"data set in {to}",
        {name: f"{made.rows:,} × {made.dim}, {_columns(made)}" for name, made in report.made.items()},
    )
    for name, scores in report.scores.items():
        show_table(
            f"{name} without expansion, mAP",
            {
                setup: f"{100 * one.mean_ap:.2f}"
                + (f"   paper {golden[name][setup]:.2f}" if setup in golden[name] else "")
                for setup, one in scores.items()
            },
        )
    for note in report.notes:
        screen.print(f"note: {note}", markup=False, soft_wrap=True)
    for warning in report.warnings:
        screen.print(f"warning: {warning}", markup=False, soft_wrap=True)
    for name, found in differences.items():
        screen.print(
            f"{name}: "
            + (
                "these are not the paper's features: its golden numbers do not come out"
                if found
                else "the golden numbers of the paper's features come out"
            ),
            soft_wrap=True,
        )
    if json:
        print_json(
            {
                "sets": {
                    name: {"uri": made.uri, "rows": made.rows, "dim": made.dim, "digest": made.digest}
                    for name, made in report.made.items()
                },
                "scores": {
                    name: {setup: one.summary() for setup, one in scores.items()}
                    for name, scores in report.scores.items()
                },
                "golden": {name: not found for name, found in differences.items()},
                "notes": report.notes,
                "warnings": report.warnings,
            }
        )


def _columns(made: Any) -> str:
    described = {"label": "labels", "positives": "published positives", "id": "ids"}
    return ", ".join(described.get(name, name) for name in made.columns if name != "vector")


if __name__ == "__main__":
    run(app)
