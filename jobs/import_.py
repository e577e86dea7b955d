"""Import foreign files of vectors as a feature set: .npy .mat .pkl .fvecs .h5 .parquet .arrow .pt .safetensors."""

import time
from pathlib import Path
from typing import Any

import typer

from jobs.console import command, human_bytes, print_json, progress_bar, run, screen, show_table
from jobs.plan import Assume, Plan, setting, tell
from lattqe.errors import LattqeError

BLOCK_ROWS = 8192


def main(
    sources: list[str] = typer.Argument(help="files, joined in this order; s3:// works too"),
    to: str = typer.Option(..., "--to", help="where the feature set goes: a folder or s3://bucket/prefix"),
    ids: str | None = typer.Option(None, help="ids of all rows: .npy, .txt, .csv, or gnd_*.pkl (imlist or qimlist)"),
    labels: str | None = typer.Option(None, help="labels of all rows: .npy, .txt or .csv; numbers or text"),
    key: str | None = typer.Option(None, help="which array or column, e.g. X or Q of a .mat file"),
    ids_key: str | None = typer.Option(None, help="which column or array of the files themselves has the ids"),
    labels_key: str | None = typer.Option(None, help="which column or array of the files themselves has the labels"),
    transposed: bool | None = typer.Option(
        None, "--transposed/--no-transposed", help="columns are images, or rows; else as docs/import.md says"
    ),
    dtype: str = typer.Option("float16", help="float16 or float32"),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="leave out zero and non-finite vectors, and count them"),
    columns: int | None = typer.Option(None, help="keep the first so many columns"),
    rows: str | None = typer.Option(None, help="keep the rows A:B"),
    select: list[str] = typer.Option([], help="keep rows by FILE.npy (flags, row numbers) or FILE.npy=VALUE"),
    allow_expansion: bool = typer.Option(
        False, "--allow-expansion", help="read files that unfold to more than 100 times their size"
    ),
    plan: Plan = False,
    assume: Assume = None,
    json: bool = typer.Option(False, "--json", help="print the result as JSON on stdout"),
) -> None:
    """Import foreign files of vectors as a feature set.

    Vectors are L2-normalised. A killed import continues when the same command is given again.

    Example: lattqe import vectors.npy --ids names.txt --labels classes.txt --to features
    """
    from lattqe.cost.stages import importing
    from lattqe.formats import open_source
    from lattqe.formats.source import local_files
    from lattqe.store import open_place
    from lattqe.store.tables import check_dtype

    for option, file, name in (("ids", ids, ids_key), ("labels", labels, labels_key)):
        if file is not None and name is not None:
            raise LattqeError(f"--{option} and --{option}-key both name the {option}: give one of them")
    conditions = [_split_condition(condition) for condition in select]
    files = {f"source-{number}": name for number, name in enumerate(sources)}
    files |= {role: name for role, name in (("ids", ids), ("labels", labels)) if name is not None}
    files |= {f"select-{number}": name for number, (name, _) in enumerate(conditions)}
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
            size = sum(Path(file).stat().st_size for file in local.values())
            work = importing(source.rows, source.dim, size, check_dtype(dtype), source.has_labels)
            tell([work], where, not open_place(to).is_local, json)
            return
        config = {
            "job": "import", "key": key, "transposed": transposed, "columns": columns, "rows": rows,
            "select": [Path(name).name + value for name, value in conditions], "skip_bad": skip_bad,
        }  # fmt: skip
        config |= {name: value for name, value in (("ids_key", ids_key), ("labels_key", labels_key)) if value}
        result = _write(source, to, dtype, skip_bad, config, _inputs(files, local))
    if json:
        print_json({**result, "notes": source.notes})


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

if __name__ == "__main__":
    run(app)
