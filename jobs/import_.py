"""Files of others become feature sets: the verbs import (vectors) and dataset (published data sets, checked)."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import ProgressBar, command, group, human_bytes, print_json, progress_bar, run, screen, show_table
from jobs.plan import Assume, Plan, setting, tell
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.cost import Work
    from lattqe.datasets.prepare import Report, SetProgress
    from lattqe.formats.source import ImportSource


BLOCK_ROWS = 8192


def main(
    sources: list[str] = typer.Argument(help="files, joined in this order; s3:// works too"),
    to: str = typer.Option(..., "--to", help="where the feature set goes: a folder or s3://bucket/prefix"),
    ids: str | None = typer.Option(None, help="ids of all rows: .npy, .txt, .csv, or gnd_*.pkl (imlist or qimlist)"),
    labels: str | None = typer.Option(None, help="labels of all rows: .npy, .txt or .csv; numbers or text"),
    key: str | None = typer.Option(None, help="array or column to read, e.g. X or Q of a .mat file"),
    ids_key: str | None = typer.Option(None, help="column or array of the files themselves with the ids"),
    labels_key: str | None = typer.Option(None, help="column or array of the files themselves with the labels"),
    transposed: bool | None = typer.Option(
        None,
        "--transposed/--no-transposed",
        help="images are columns, or rows; default: depends on the format, see docs/import.md",
    ),
    dtype: str = typer.Option("float16", help="float16 or float32"),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="leave out zero and non-finite vectors, and count them"),
    columns: int | None = typer.Option(None, help="keep only this many columns, the first ones"),
    rows: str | None = typer.Option(None, help="keep only rows A:B"),
    select: list[str] = typer.Option([], help="keep rows by FILE.npy (flags, row numbers) or FILE.npy=VALUE"),
    allow_expansion: bool = typer.Option(
        False, "--allow-expansion", help="read files that expand to more than 100 times their size"
    ),
    plan: Plan = False,
    assume: Assume = None,
    json: bool = typer.Option(False, "--json", help="print the result as JSON on stdout"),
) -> None:
    """Import files of vectors as a feature set.

    Vectors are L2-normalised. A killed import continues when the same command is run again.

    Example: lattqe import vectors.npy --ids names.txt --labels classes.txt --to features
    """
    from lattqe.formats import open_source
    from lattqe.formats.source import local_files
    from lattqe.store import open_place

    for option, file, name in (("ids", ids, ids_key), ("labels", labels, labels_key)):
        if file is not None and name is not None:
            raise LattqeError(f"--{option} and --{option}-key both name the {option}: give one of them")
    conditions = [_split_condition(condition) for condition in select]
    files = _files(sources, ids, labels, [name for name, _ in conditions])
    with local_files(files) as local:
        source = open_source(
            [local[f"source-{number}"] for number in range(len(sources))],
            ids=local.get("ids"), labels=local.get("labels"), key=key, ids_key=ids_key, labels_key=labels_key,
            transposed=transposed, columns=columns, rows=rows,
            select=[local[f"select-{number}"] + value for number, (_, value) in enumerate(conditions)],
            allow_expansion=allow_expansion,
        )  # fmt: skip
        for note in source.notes:
            screen.print(f"note: {note}", markup=False, soft_wrap=True)
        if (where := setting(plan, assume, 0, None, None)) is not None:
            tell([_planned(source, local, dtype)], where, not open_place(to).is_local, json)
            return
        config = {
            "job": "import", "key": key, "transposed": transposed, "columns": columns, "rows": rows,
            "select": [Path(name).name + value for name, value in conditions], "skip_bad": skip_bad,
        }  # fmt: skip
        config |= {name: value for name, value in (("ids_key", ids_key), ("labels_key", labels_key)) if value}
        result = _write(source, to, dtype, skip_bad, config, _inputs(files, local))
    if json:
        print_json({**result, "notes": source.notes})


def _files(sources: list[str], ids: str | None, labels: str | None, selections: list[str]) -> dict[str, str]:
    """Every file that is read, by its role."""
    files = {f"source-{number}": name for number, name in enumerate(sources)}
    files |= {role: name for role, name in (("ids", ids), ("labels", labels)) if name is not None}
    return files | {f"select-{number}": name for number, name in enumerate(selections)}


def _planned(source: "ImportSource", local: dict[str, str], dtype: str) -> "Work":
    """What the import takes."""
    from lattqe.cost.stages import importing
    from lattqe.store.manifest import check_dtype

    size = sum(Path(file).stat().st_size for file in local.values())
    return importing(source.rows, source.dim, size, check_dtype(dtype), source.has_labels)


def _write(source: Any, to: str, dtype: str, skip_bad: bool, config: dict[str, Any], inputs: Any) -> dict[str, Any]:
    """Show the plan, write the feature set, show and return the summary."""
    from lattqe.store import FeatureWriter

    started = time.monotonic()
    width = {"float16": 2, "float32": 4}.get(dtype)
    if width is None:
        raise LattqeError(f"--dtype {dtype}: float16 and float32 can be stored")
    show_table(
        "import",
        {
            "rows × dimensions": f"{source.rows:,} × {source.dim}",
            "labels": "none" if not source.has_labels else "numbers" if source.label_names is None
            else f"text, {len(source.label_names):,} distinct",
            "stored as": f"{dtype}, about {human_bytes(source.rows * source.dim * width)}",
            "destination": to,
        },
        plan=True,
    )  # fmt: skip
    with FeatureWriter(
        to,
        source.dim,
        dtype,
        labels=source.has_labels,
        config=config,
        inputs=inputs,
        skip_bad=skip_bad,
        label_names=source.label_names,
    ) as writer:
        reused = writer.finished is not None
        if not reused:
            with progress_bar("importing", source.rows) as bar:
                for block in source.blocks(BLOCK_ROWS):
                    writer.append(block.vectors, block.ids, block.labels)
                    bar.advance(len(block.vectors))
    features = writer.close()
    seconds = time.monotonic() - started
    skipped = None if reused else writer.skipped
    summary = {
        "uri": features.uri, "rows": features.rows, "dim": features.dim, "dtype": features.dtype,
        "bytes": features.manifest.total_bytes, "digest": features.digest, "skipped": skipped, "reused": reused,
        "seconds": round(seconds, 3),
    }  # fmt: skip
    done = "already up to date" if reused else f"{features.rows:,} rows in {seconds:.1f} s"
    screen.print(
        f"{features.uri}: {done}" + (f", {skipped:,} bad rows left out" if skipped else ""),
        markup=False,
        soft_wrap=True,
    )
    return summary


def _split_condition(condition: str) -> tuple[str, str]:
    """Split FILE.npy=VALUE into FILE.npy and =VALUE."""
    name, ending, value = condition.partition(".npy=")
    return (f"{name}.npy", f"={value}") if ending else (condition, "")


def _inputs(files: dict[str, str], local: dict[str, str]) -> dict[str, dict[str, str]]:
    """Say where everything that was read came from, and what was in it."""
    from lattqe.formats.source import file_digest

    return {
        role: {
            "uri": uri if "://" in uri else str(Path(uri).absolute()),
            "digest": file_digest(local[role]),
            "kind": f"file{Path(uri).suffix.lower()}",
        }
        for role, uri in files.items()
    }


app = command(main)


To = Annotated[str, typer.Option("--to", help="folder or s3://bucket/prefix for the feature sets")]
Dtype = Annotated[str, typer.Option(help="float16 or float32")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout")]

dataset_app, dataset_command = group("dataset", "Turn the published files of a data set into checked feature sets.")


@dataset_command
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
    """Revisited Oxford and Paris; prints scores without expansion next to the paper's golden numbers.

    Example: lattqe dataset revisited published --to data
    """
    from lattqe.datasets.prepare import prepare_revisited

    _prepare(partial(prepare_revisited, source, to, dtype), to, json)


@dataset_command
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

    _prepare(partial(prepare_r1m, sources, to, ids, dtype), to, json)


@dataset_command
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

    _prepare(partial(prepare_sfm120k, source, to, dtype), to, json)


@dataset_command
def photos(
    source: Annotated[str, typer.Argument(help="folder or s3:// prefix with NAME_vectors.npy, NAME_labels.npy, ...")],
    to: To,
    columns: Annotated[int | None, typer.Option(min=1, help="keep only this many columns, the first ones")] = None,
    json: Json = False,
) -> None:
    """Labelled photographs: train, validation and test splits of every set that is there.

    Example: lattqe dataset photos photos --columns 128 --to data
    """
    from lattqe.datasets.labelled import prepare_photos

    _tell(prepare_photos(source, to, columns), to, json)


@dataset_command
def synthetic(
    to: To,
    seed: Annotated[int, typer.Option(min=0, help="random seed of the world")] = 0,
    dim: Annotated[int, typer.Option(min=2, help="dimensions of the descriptors")] = 128,
    scale: Annotated[float, typer.Option(min=0.01, help="scale the number of landmarks and background images")] = 1.0,
    distractors: Annotated[int, typer.Option(min=0, help="number of distractor rows")] = 20_000,
    json: Json = False,
) -> None:
    """A world of landmarks: training, validation, two test sets with graded ground truth, distractors.

    Example: lattqe dataset synthetic --to data
    """
    from lattqe.datasets.prepare import prepare_synthetic
    from lattqe.datasets.synthetic import SyntheticWorld

    _tell(prepare_synthetic(SyntheticWorld(seed, dim, scale=scale, distractors=distractors), to), to, json)


def _prepare(prepare: "Callable[[SetProgress], Report]", to: str, json: bool) -> None:
    """Make feature sets with a bar for each, then report what was made."""
    with _Bars() as bars:
        report = prepare(bars.advance)
    _tell(report, to, json)


class _Bars(ExitStack):
    """One progress bar after the other, each for one set."""

    def __enter__(self) -> "_Bars":
        self.name, self.bar = "", ProgressBar(None, None, "", 0)
        super().__enter__()
        return self

    def advance(self, name: str, rows: int, total: int) -> None:
        """Record that `rows` more rows of a set are written."""
        if name != self.name:
            self.close()
            self.name, self.bar = name, self.enter_context(progress_bar(name, total))
        self.bar.advance(rows)


def _tell(report: "Report", to: str, json: bool) -> None:
    """Show what was made, what was assumed, and how the plain scores compare with the published ones."""
    from lattqe.datasets.revisited import golden_differences, published_scores

    golden = published_scores()["golden"]["map"]
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
                "these are not the paper's features: its golden numbers are not reproduced"
                if found
                else "the paper's golden numbers are reproduced"
            ),
            markup=False,
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
