"""Score stored ranks against a ground truth: mean average precision and precision at k, overall and by query."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import Json, command, note_approximate, print_json, run, screen, show_table
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.evaluation import Scores
    from lattqe.evaluation.stored import JudgedRanks


def main(
    ranks: Annotated[str, typer.Argument(help="Ranks that `lattqe search` wrote: a folder or s3://bucket/prefix.")],
    truth: Annotated[
        str,
        typer.Option(
            help="A ground-truth file, gnd_*.pkl or .json; or 'labels': relevant is what "
            "has the query's label, by name where labels have names."
        ),
    ] = "labels",
    at: Annotated[str, typer.Option(help="Precision at these k, by commas.")] = "1,5,10",
    csv: Annotated[Path | None, typer.Option(help="Write each query's results to this file.")] = None,
    database: Annotated[str | None, typer.Option(help="The set that was searched, where it has moved.")] = None,
    queries: Annotated[str | None, typer.Option(help="The queries, where they have moved.")] = None,
    distractors: Annotated[str | None, typer.Option(help="The distractors, where they have moved.")] = None,
    json: Json = False,
) -> None:
    """Score stored ranks against a ground truth or labels: mAP and mP@k, in percent.

    Example: lattqe evaluate ranks --truth gnd_roxford5k.json --csv queries.csv
    """
    from lattqe.evaluation import score_ranking
    from lattqe.evaluation.stored import JudgedRanks

    ks = numbers(at)
    judged = JudgedRanks.open(ranks, None if truth == "labels" else truth, database, queries, distractors)
    rows = sum(each.rows for each in judged.searched)
    show_table(
        "plan",
        {
            "queries": f"{judged.ranks.rows:,}, {judged.ranks.k} results each of {rows:,} rows",
            "truth": truth,
            "precision at": at,
        },
    )
    note_approximate(judged.ranks)
    if judged.ranks.k < rows:
        screen.print(
            f"note: positives beyond the {judged.ranks.k} results of a list add nothing to its average "
            "precision; search with a larger -k for the whole ranking",
            markup=False,
            soft_wrap=True,
        )
    scores = score_ranking(judged.ranks, judged.truth, ks=ks)
    if not any(one.evaluated.any() for one in scores.values()):
        raise LattqeError(
            f"no query of {judged.queries.uri} has anything relevant in {judged.searched[0].uri}: do "
            "these labels, or this ground truth, belong to them?"
        )
    if csv is not None:
        write_csv(csv, judged, scores)
    if json:
        print_json({name: one.summary() for name, one in scores.items()})
    for name, one in scores.items():
        show_table(f"{name}: {ranks}", readable(one))
    if csv is not None:
        screen.print(f"each query in {csv}", markup=False)


def numbers(text: str) -> tuple[int, ...]:
    """'1,5,10' -> (1, 5, 10)."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise LattqeError(f"--at is {text!r}: give whole numbers from 1 by commas, such as 1,5,10")
    return found


def readable(scores: "Scores") -> dict[str, Any]:
    """The means in percent, and how many queries they are means of."""
    return {
        "mAP": f"{100 * scores.mean_ap:.2f}",
        **{f"mP@{k}": f"{100 * value:.2f}" for k, value in zip(scores.ks, scores.mean_precision.tolist())},
        "queries": int(scores.evaluated.sum()),
        "queries without positives": int((~scores.evaluated).sum()),
    }


def write_csv(path: Path, judged: "JudgedRanks", scores: "dict[str, Scores]") -> None:
    """One line for each query and setup: query, setup, positives, AP and P@k from 0 to 1; whole or not at all."""
    import csv
    import io

    from lattqe.store.export import plain_cell

    text = io.StringIO()
    writer = csv.writer(text)
    for number, (name, one) in enumerate(scores.items()):
        if not number:
            writer.writerow(("query", "setup", "positives", "ap", *(f"p@{k}" for k in one.ks)))
        for query, ap, positives, precision in zip(judged.queries.ids(), one.ap, one.positives, one.precision):
            writer.writerow((plain_cell(query), name, int(positives), float(ap), *map(float, precision)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        unfinished.write_text(text.getvalue())
        unfinished.replace(path)
    except OSError as error:
        raise LattqeError(f"cannot write {path}: {error}") from error


app = command(main)

if __name__ == "__main__":
    run(app)
