"""Stored ranks as pictures: one HTML page with queries, their first results, before and after an expansion."""

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import command, human_bytes, print_json, progress_bar, run, screen, show_table
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.evaluation.stored import JudgedRanks
    from lattqe.report.gallery import Card, Gallery


def main(
    ranks: Annotated[str, typer.Argument(help="What lattqe search made: a folder or s3://bucket/prefix.")],
    images: Annotated[
        list[str],
        typer.Option("--images", help="Folder or s3:// prefix with the images, named by their ids; may be repeated."),
    ],
    to: Annotated[str, typer.Option("--to", help="The page: a file or s3://bucket/name.html.")] = "gallery.html",
    against: Annotated[str | None, typer.Option(help="Other ranks of the same queries, shown before these.")] = None,
    truth: Annotated[
        str | None, typer.Option(help="Ground truth gnd_*.pkl or .json; else labels, if there are any.")
    ] = None,
    setup: Annotated[
        str | None, typer.Option(help="easy, medium or hard of a revisited ground truth; default medium.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(help="change, gain, loss, worst, best or order; default: change with --against, else worst."),
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries to show.")] = 200,
    results: Annotated[int, typer.Option(min=1, help="Results of each list to show.")] = 10,
    database: Annotated[str | None, typer.Option(help="Where the searched features are now, if they moved.")] = None,
    query_features: Annotated[
        str | None, typer.Option("--query-features", help="Where the queries' features are now.")
    ] = None,
    distractors: Annotated[str | None, typer.Option(help="Where the distractors are now.")] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page; default: the name of the ranks.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Show queries with their first results; right and wrong framed, largest gains and losses first.

    Example: lattqe gallery ranks --against plain-ranks --images photos --to gallery.html
    """
    from lattqe.evaluation.stored import JudgedRanks
    from lattqe.report.gallery import Gallery, Thumbnails, choose, fill, neighbor_weights, render_gallery

    place, name = _page(to)
    mine = JudgedRanks.open(ranks, truth, database, query_features, distractors)
    other = None if against is None else JudgedRanks.open(against, truth, None, query_features, distractors)
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
        raise LattqeError(f"--to {to}: give the name of a page, as in gallery.html")
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
    return f"{ranks.ranks.uri} ({how})"


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


app = command(main)

if __name__ == "__main__":
    run(app)
