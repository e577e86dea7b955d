"""Find near-duplicates within a set, or between two."""

import csv
import io
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import command, note_approximate, print_json, progress_bar, run, screen, show_table
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    import pyarrow as pa


def main(
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


app = command(main)
if __name__ == "__main__":
    run(app)
