"""What stored lists tell: evaluate (mAP and mP@k of ranks), gallery (ranks as a page of pictures, before and after)
and duplicates (near-duplicates, from a graph).
"""

import csv
import io
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import (
    APPROXIMATE_GRAPH,
    Json,
    answers,
    command,
    human_bytes,
    note_approximate,
    print_json,
    progress_bar,
    screen,
    show_table,
)
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    import pyarrow as pa

    from lattqe.evaluation import Scores
    from lattqe.evaluation.analysis import JudgedRanks
    from lattqe.report.gallery import Card, Gallery


def evaluate(
    ranks: Annotated[str, typer.Argument(help="Ranks written by `lattqe search`: a folder or s3://bucket/prefix.")],
    truth: Annotated[
        str,
        typer.Option(
            help="A ground-truth file, gnd_*.pkl or .json; or 'labels': rows with the query's label are relevant."
        ),
    ] = "labels",
    at: Annotated[str, typer.Option(help="Comma-separated k for precision at k.")] = "1,5,10",
    csv: Annotated[Path | None, typer.Option(help="Write each query's results to this file.")] = None,
    database: Annotated[str | None, typer.Option(help="The searched set, if it has moved.")] = None,
    queries: Annotated[str | None, typer.Option(help="The queries, if they have moved.")] = None,
    distractors: Annotated[str | None, typer.Option(help="The distractors, if they have moved.")] = None,
    json: Json = False,
) -> None:
    """Score stored ranks against a ground truth or labels: mAP and mP@k, in percent.

    Example: lattqe evaluate ranks --truth gnd_roxford5k.json --csv queries.csv
    """
    from lattqe.evaluation import score_ranking
    from lattqe.evaluation.analysis import JudgedRanks

    ks = numbers(at)
    if csv is not None and (csv.suffix != ".csv" or csv.is_dir()):
        raise LattqeError(f"cannot write {str(csv)!r}: give the name of a CSV file, such as queries.csv")
    judged = JudgedRanks.open(ranks, None if truth == "labels" else truth, database, queries, distractors)
    rows = sum(each.rows for each in judged.searched)
    show_table(
        "plan",
        {
            "queries": f"{judged.ranks.rows:,}, {judged.ranks.k} results each of {rows:,} rows",
            "truth": truth if judged.gnd is not None else f"labels{left_out(judged)}",
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
        show_table(f"{name}: {ranks}", readable(one), to=screen if json else answers)
    if csv is not None:
        screen.print(f"per-query results: {csv}", markup=False)


def left_out(judged: "JudgedRanks") -> str:
    """How many queries never count as answers to themselves, for the plan."""
    if judged.own_rows is None:
        return ""
    count = (judged.own_rows >= 0).sum()
    return f"; {count:,} of the queries are rows of the database and never count as answers to themselves"


def numbers(text: str) -> tuple[int, ...]:
    """'1,5,10' -> (1, 5, 10)."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise LattqeError(f"--at is {text!r}: give whole numbers from 1, separated by commas, such as 1,5,10")
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
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text.getvalue(), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise LattqeError(f"cannot write {path}: {error}") from error


evaluate_app = command(evaluate)

# Options of the gallery alone.
Truth = Annotated[str | None, typer.Option(help="Ground truth, gnd_*.pkl or .json; default: labels, if there are any.")]
Setup = Annotated[str | None, typer.Option(help="easy, medium or hard of a revisited ground truth; default medium.")]
Order = Annotated[
    str | None,
    typer.Option(help="change, gain, loss, worst, best or order; default: change with --against, else worst."),
]


def gallery(
    ranks: Annotated[str, typer.Argument(help="Ranks written by `lattqe search`: a folder or s3://bucket/prefix.")],
    images: Annotated[
        list[str],
        typer.Option("--images", help="Folder or s3:// prefix with the images, named by their ids; may be repeated."),
    ],
    to: Annotated[str, typer.Option("--to", help="The page: a file or s3://bucket/name.html.")] = "gallery.html",
    against: Annotated[str | None, typer.Option(help="Other ranks of the same queries, shown above these.")] = None,
    truth: Truth = None,
    setup: Setup = None,
    sort: Order = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries to show.")] = 200,
    results: Annotated[int, typer.Option(min=1, help="Results to show per list.")] = 10,
    database: Annotated[str | None, typer.Option(help="The searched features, if they have moved.")] = None,
    query_features: Annotated[
        str | None, typer.Option("--query-features", help="The queries' features, if they have moved.")
    ] = None,
    distractors: Annotated[str | None, typer.Option(help="The distractors, if they have moved.")] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page; default: the name of the ranks.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Show queries with their first results, right and wrong ones framed; largest gains and losses first.

    Example: lattqe gallery ranks --against plain-ranks --images photos --to gallery.html
    """
    from lattqe.evaluation.analysis import JudgedRanks
    from lattqe.report.gallery import Gallery, Thumbnails, choose, fill, neighbor_weights, render_gallery

    place, name = _page(to)
    mine = JudgedRanks.open(ranks, truth, database, query_features, distractors)
    other = None if against is None else JudgedRanks.open(against, truth, None, query_features, distractors)
    note_approximate(*(each.ranks for each in (other, mine) if each is not None))
    gallery = Gallery(mine, other, setup)
    order = sort or gallery.default_order()
    _check_order(order, gallery)
    cards = choose(gallery.cards(), order, queries)
    numbers = [card.number for card in cards]
    show_table(
        "plan",
        {
            "queries": f"{len(cards)} of {mine.ranks.rows:,}, {order} first",
            "results of each": f"{results} of {mine.ranks.k}",
            "page": to,
        },
    )
    weights, note = neighbor_weights(mine, other, numbers)
    if note:
        screen.print(f"note: {note}", markup=False, soft_wrap=True)
    gallery = Gallery(mine, other, setup, weights)
    thumbnails = Thumbnails(images)
    with progress_bar("queries", len(cards)) as bar:
        cards = fill(gallery, cards, thumbnails, results, bar.advance)
    facts = {"after" if other else "ranks": _describe(mine)} | ({"before": _describe(other)} if other else {})
    page = render_gallery(gallery, cards, thumbnails, title or PurePosixPath(ranks.rstrip("/")).name, order, facts)
    place.write(name, page.encode())
    summary = _summary(to, page, cards, thumbnails.missing, gallery)
    show_table("gallery", summary | {"bytes": human_bytes(summary["bytes"])})
    if json:
        print_json(summary)


def _page(to: str) -> tuple[Any, str]:
    """The place and the name of the page."""
    from lattqe.store import open_place

    whole = open_place(to).uri
    folder, _, name = whole.rpartition("/")
    if not name.endswith((".html", ".htm")):
        raise LattqeError(f"--to {to}: give the name of an HTML file, such as gallery.html")
    return open_place(folder or "/"), name


def _check_order(order: str, gallery: "Gallery") -> None:
    from lattqe.report.gallery import NEEDS_TRUTH

    if order in NEEDS_TRUTH and gallery.judged_by is None:
        raise LattqeError(f"--sort {order} needs to know what is relevant: give --truth, or labels with the features")
    if order in ("gain", "loss", "change") and gallery.against is None:
        raise LattqeError(f"--sort {order} needs --against: ranks to compare with")


def _describe(ranks: "JudgedRanks") -> str:
    expand = ranks.ranks.manifest.config.get("expand")
    how = "no expansion" if not expand else f"{expand['method']}, {expand['k']} neighbors"
    lacks = ranks.ranks.manifest.approximation
    return f"{ranks.ranks.uri} ({how})" + ("" if lacks is None else f", based on {APPROXIMATE_GRAPH}: {lacks}")


def _summary(to: str, page: str, cards: "list[Card]", missing: list[str], gallery: "Gallery") -> dict[str, Any]:
    summary: dict[str, Any] = {
        "page": to,
        "bytes": len(page.encode()),
        "queries": len(cards),
        "images_missing": len(missing),
    }
    if missing:
        summary["first_missing"] = missing[0]
    if gallery.against is not None and gallery.judged_by is not None:
        everything = gallery.cards()
        summary |= {
            "gained": sum(card.gain > 0 for card in everything),
            "lost": sum(card.gain < 0 for card in everything),
        }
    return summary


gallery_app = command(gallery)


def duplicates(
    features: Annotated[str, typer.Argument(help="The feature set: a folder or s3://bucket/prefix.")],
    graph: Annotated[
        str | None,
        typer.Option(
            help="Its graph, from `lattqe neighbors`; with --against: ranks of the other set in this one (optional)."
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Rows with at least this cosine are near-duplicates.")] = 0.95,
    against: Annotated[str | None, typer.Option(help="Another set: find its rows that are also in this one.")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Folder or s3:// prefix for the tables.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Find groups of near-duplicates in seconds, without a new search.

    Example: lattqe duplicates features --graph graph --threshold 0.95 --to duplicates
    """
    from lattqe.store import FeatureSet

    opened = FeatureSet.open(features)
    if against is not None:
        summary = _leakage(opened, against, graph, threshold, to)
    elif graph is None:
        raise LattqeError(f"give --graph: make it with `lattqe neighbors {features} -k 64 --to graph`")
    else:
        summary = _groups(opened, graph, threshold, to)
    show_table(
        "near-duplicates",
        {
            name.replace("_", " "): f"{100 * value:.2f} %" if name.startswith("share") else value
            for name, value in summary.items()
        },
    )
    if json:
        print_json(summary)


def _groups(features: Any, graph_uri: str, threshold: float, to: str | None) -> dict[str, Any]:
    """Groups within one set; with `to` their table and the ids that could go, one representative of each kept."""
    from lattqe.duplicates import find_groups, groups_table, ids_of
    from lattqe.store import NeighborGraph

    graph = NeighborGraph.open(graph_uri)
    note_approximate(graph)
    with progress_bar("rows", graph.rows) as bar:
        groups = find_groups(features, graph, threshold, bar.advance)
    if groups.full:
        screen.print(
            f"note: {groups.full:,} rows have {graph.k} near-duplicates or more: a graph with a larger -k may "
            "join groups that are separate here",
            soft_wrap=True,
        )
    summary = groups.summary()
    if to is not None:
        redundant = ids_of(features, groups.redundant)
        _write(to, groups_table(features, groups), {"redundant.txt": "".join(f"{name}\n" for name in redundant)})
        summary |= {"written": f"{to.rstrip('/')}/duplicates.csv, duplicates.arrow, redundant.txt"}
    return summary


def _leakage(features: Any, other_uri: str, ranks_uri: str | None, threshold: float, to: str | None) -> dict[str, Any]:
    """Rows of another set that are also in this one; with `to` their table."""
    from lattqe.duplicates import find_leakage, leakage_table
    from lattqe.store import FeatureSet, Ranks

    other = FeatureSet.open(other_uri)
    ranks = None if ranks_uri is None else Ranks.open(ranks_uri)
    if ranks is not None:
        made_from = {role: entry["digest"] for role, entry in ranks.manifest.inputs.items()}
        if (
            (made_from.get("database"), made_from.get("queries")) != (features.digest, other.digest)
            or ranks.manifest.config.get("expand")
            or "distractors" in made_from
        ):
            raise LattqeError(
                f"{ranks_uri} is not a plain search of {other_uri} in {features.uri}: make one with "
                f"`lattqe search {features.uri} {other_uri} -k 1 --to RANKS`, or leave --graph out"
            )
    with progress_bar("rows", other.rows) as bar:
        leakage = find_leakage(features, other, threshold, ranks, on_done=bar.advance)
    summary = leakage.summary()
    if to is not None:
        _write(to, leakage_table(features, other, leakage), {})
        summary |= {"written": f"{to.rstrip('/')}/duplicates.csv, duplicates.arrow"}
    return summary


def _write(to: str, table: "pa.Table", beside: dict[str, str]) -> None:
    """The table as CSV and as an Arrow file, and texts beside them."""
    import pyarrow as pa

    from lattqe.duplicates import table_csv
    from lattqe.store import find_manifest, open_place

    place = open_place(to)
    if find_manifest(place) is not None:
        raise LattqeError(f"{to} holds a stored artifact: choose another folder for the table")
    text, sink = io.StringIO(), pa.BufferOutputStream()
    csv.writer(text, lineterminator="\n").writerows(table_csv(table))
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for name, content in beside.items():
        place.write(name, content.encode())
    place.write("duplicates.csv", text.getvalue().encode())
    place.write("duplicates.arrow", sink.getvalue())


duplicates_app = command(duplicates)
