"""Looking at stored artifacts and taking them elsewhere: the verbs info, verify and export."""

import json as json_text
import time
from collections.abc import Sequence
from math import isfinite, prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import (
    APPROXIMATE_GRAPH,
    answers,
    command,
    human_bytes,
    note_approximate,
    print_json,
    progress_bar,
    screen,
    show_table,
)
from lattqe.errors import CorruptDataError, LattqeError

if TYPE_CHECKING:
    from lattqe.store import FeatureSet, NeighborGraph, Ranks
    from lattqe.store.export import Exported

SAMPLE_ROWS = 3
SHOWN_VALUES = 4


def info(
    uri: Annotated[str, typer.Argument(help="A feature set, neighbor graph, edges, ranks or a model.")],
    figure: Annotated[str | None, typer.Option(help="For a graph: draw its similarities and hubs to FILE.svg.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show what a stored artifact is, what is in it, and how it was made."""
    from lattqe.store import NeighborGraph, Ranks, open_artifact
    from lattqe.store.export import write_file
    from lattqe.store.manifest import describe_kind

    artifact = open_artifact(uri)
    if figure is not None and not figure.endswith(".svg"):
        raise LattqeError(f"--figure {figure!r}: give the name of an SVG file, such as graph.svg")
    facts = describe(artifact)
    if isinstance(artifact, NeighborGraph) and not isinstance(artifact, Ranks):
        from lattqe.search.stored import graph_statistics

        statistics = graph_statistics(artifact)
        facts["graph"] = statistics.to_dict()
        if figure is not None:
            from lattqe.report.views import graph_figure

            write_file(figure, graph_figure(statistics).encode())
    elif figure is not None:
        raise LattqeError(f"--figure is only for neighbor graphs, but {uri} is {describe_kind(artifact.manifest.kind)}")
    if json:
        print_json(facts)
        return
    show_table(facts["uri"], _lines(facts), to=answers)
    if figure is not None:
        screen.print(f"wrote {figure}", markup=False, soft_wrap=True)


def describe(artifact: Any) -> dict[str, Any]:
    """Everything that `info` shows, ready for JSON."""
    manifest = artifact.manifest
    return {
        "uri": artifact.place.uri,
        "kind": manifest.kind,
        "rows": manifest.rows,
        "bytes": manifest.total_bytes,
        "parts": len(manifest.parts),
        "fields": manifest.fields,
        "digest": manifest.digest,
        "format_version": manifest.format_version,
        "code_version": manifest.code_version,
        "config": manifest.config,
        "inputs": manifest.inputs,
        "approximate": manifest.approximation,
        "sample": sample(artifact),
    }


def sample(artifact: Any) -> list[dict[str, Any]]:
    """The first few rows; of a model its metrics."""
    from lattqe.store import FeatureSet, Ranks, load_model
    from lattqe.store.parts import StoredRows

    if isinstance(artifact, StoredRows):
        rows = artifact.table(0, min(SAMPLE_ROWS, artifact.rows)).to_pylist()
        if isinstance(artifact, FeatureSet) and artifact.label_names is not None:
            names = dict(enumerate(artifact.label_names))
            rows = [{**row, "label": names.get(row["label"], row["label"])} for row in rows]
        if isinstance(artifact, Ranks):
            rows = [{**row, "neighbors": found} for row, found in zip(rows, _found_ids(artifact, rows))]
        return [{name: _shortened(value) for name, value in row.items()} for row in rows]
    if artifact.manifest.kind == "model":
        return [load_model(artifact.place.uri)[2]]
    return []


def _found_ids(ranks: Any, rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Ids of the first results of some queries; their row numbers where the set that was searched is out of reach."""
    import numpy as np

    lists = [row["neighbors"][:SHOWN_VALUES] for row in rows]
    try:
        sets = ranks.searched()
        starts = np.cumsum([0, *(one.rows for one in sets)])

        def name(row: int) -> str | None:
            if row < 0:
                return None
            number = int(np.searchsorted(starts, row, side="right")) - 1
            return sets[number].gather_ids(np.array([row - starts[number]]))[0]

        return [[name(row) for row in found] for found in lists]
    except (LattqeError, IndexError):
        return lists


def _shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [round(item, 5) if isinstance(item, float) else item for item in value[:SHOWN_VALUES]]
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # JSON has no such numbers
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _lines(facts: dict[str, Any]) -> dict[str, str]:
    """The facts as lines for people."""
    from lattqe.store.manifest import describe_kind

    fields = facts["fields"]
    lines = {"what": describe_kind(facts["kind"])}
    if facts["kind"] == "features":
        lines["rows × dimensions"] = f"{facts['rows']:,} × {fields['dim']} {fields['dtype']}"
    elif "k" in fields:
        lines["rows × neighbors"] = f"{facts['rows']:,} × {fields['k']}"
    elif facts["rows"]:
        lines["rows"] = f"{facts['rows']:,}"
    if "tensors" in fields:
        lines["tensors"] = f"{len(fields['tensors'])}, {_parameters(fields['tensors']):,} parameters"
    if "columns" in fields:
        lines["columns"] = ", ".join(f"{column['name']}: {column['type']}" for column in fields["columns"])
    lines |= {
        "bytes": f"{human_bytes(facts['bytes'])} in {facts['parts']} part{'s' * (facts['parts'] != 1)}",
        "digest": facts["digest"],
        "made by": f"lattqe {facts['code_version']}",
    }
    if facts["approximate"] is not None:
        lines["not exact"] = f"{APPROXIMATE_GRAPH}: {facts['approximate']}"
    if "graph" in facts:
        lines |= _graph_lines(facts["graph"], facts["rows"])
    lines |= {f"with {name}": _compact(value) for name, value in facts["config"].items()}
    lines |= {
        f"from {name}": f"{entry.get('uri')} ({entry.get('kind')}, digest {entry.get('digest')})"
        for name, entry in facts["inputs"].items()
    }
    what = "metrics" if facts["kind"] == "model" else "row"
    lines |= {
        f"{what} {number}" if what == "row" else what: _compact(row) for number, row in enumerate(facts["sample"])
    }
    return lines


def _graph_lines(graph: dict[str, Any], rows: int) -> dict[str, str]:
    """What a graph says of its collection."""
    named, orphans = graph["in_degree"], graph["rows_in_no_list"]
    return {
        "hubs": f"Gini {named['gini']:.2f}, skewness {named['skewness']:.1f} of in-degrees; the top 1 % of the rows "
        f"are {100 * named['share_of_top_percent']:.1f} % of all entries; row {named['largest_row']} is in "
        f"{named['largest']:,} lists",
        "isolated": f"{orphans:,} rows ({100 * orphans / rows:.1f} %) are in no list, "
        f"{graph['rows_without_neighbors']:,} have no neighbor",
        "first similarity": ", ".join(f"{value:.3f} at {name}" for name, value in graph["first_similarity"].items()),
    }


def _parameters(tensors: dict[str, Any]) -> int:
    return sum(prod(tensor["shape"]) for tensor in tensors.values())


def _compact(value: Any) -> str:
    text = value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:297]}..."


info_app = command(info)


EXIT_WRONG = 1


def verify(
    uri: Annotated[str, typer.Argument(help="A feature set, neighbor graph, edges, ranks or a model.")],
    recompute: Annotated[
        int,
        typer.Option(
            min=0, help="For an augmented index: recompute this many random rows from the recorded inputs and compare."
        ),
    ] = 0,
) -> None:
    """Check every checksum and every invariant of a stored artifact: exit code 0, or 1 and the first fault."""
    from lattqe.store.artifacts import open_artifact, verify_artifact
    from lattqe.store.manifest import describe_kind
    from lattqe.store.models import model_address

    started, uri = time.monotonic(), model_address(uri)
    try:
        total = open_artifact(uri).manifest.total_bytes
        with progress_bar("verifying", total) as bar:
            manifest = verify_artifact(uri, bar.advance)
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
            f"not exact: it matches its manifest, but is based on {APPROXIMATE_GRAPH}: {manifest.approximation}",
            markup=False,
            soft_wrap=True,
        )


def recompute_rows(uri: str, count: int) -> None:
    """Recompute random rows of an augmented index and print how far they are off."""
    from lattqe.augmentation.recipe import hops_again, recompute
    from lattqe.store import FeatureSet

    index = FeatureSet.open(uri)
    count = min(count, index.rows)
    off, hops = recompute(index, count), index.manifest.config.get("hops", 1)
    what = "rows" if hops == 1 else f"rows' edges, and all {hops} hops," if hops_again(index) else "rows' edges"
    screen.print(f"{count:,} {what} recomputed: off by at most {off:.2g}", markup=False)
    if hops > 1 and not hops_again(index):
        screen.print(
            f"its {hops} hops were not recomputed: {index.rows:,} rows are too many for one process", markup=False
        )


verify_app = command(verify)


def export(
    uri: Annotated[str, typer.Argument(help="A feature set, ranks or a neighbor graph.")],
    to: Annotated[
        str,
        typer.Option(
            help="Features: FILE.npy, .fvecs, .faiss (.index), with FILE.ids.txt and "
            "FILE.labels.txt. Ranks: FILE.csv or .json. Graph: FILE.npz."
        ),
    ],
    factory: Annotated[
        str | None, typer.Option(help='faiss factory string, such as "IVF256,PQ16"; default: a flat index.')
    ] = None,
    database: Annotated[
        list[str] | None, typer.Option(help="Ranks: the searched set (then the distractors), if it has moved.")
    ] = None,
    similarities: Annotated[bool, typer.Option("--similarities", help="Graph: scores instead of distances.")] = False,
    with_self: Annotated[bool, typer.Option("--with-self", help="Graph: each row before its neighbors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Write an artifact for other tools: features as a matrix or a faiss index, ranks as a table, a graph as scipy CSR.

    Example: lattqe export ranks --to ranks.csv
    """
    from lattqe.store import FeatureSet, NeighborGraph, Ranks, open_artifact

    artifact = open_artifact(uri)
    for option, given, kind in (
        ("--factory", factory, FeatureSet),
        ("--database", database, Ranks),
        ("--similarities", similarities, NeighborGraph),
        ("--with-self", with_self, NeighborGraph),
    ):
        if given and type(artifact) is not kind:
            raise LattqeError(f"{option} does not apply to {uri}, {_words(artifact)}")
    note_approximate(artifact)
    note_adapted(artifact)
    started = time.monotonic()
    if isinstance(artifact, FeatureSet):
        done = _export_features(artifact, to, factory)
    elif isinstance(artifact, Ranks):
        done = _export_ranks(artifact, to, database or ())
    elif isinstance(artifact, NeighborGraph):
        done = _export_graph(artifact, to, similarities, with_self)
    else:
        raise LattqeError(f"{uri} is {_words(artifact)}: only feature sets, ranks and neighbor graphs can be exported")
    words = "already up to date" if done.reused else f"written in {time.monotonic() - started:.1f} s"
    screen.print(f"{', '.join(done.names)}: {words}", markup=False, soft_wrap=True)
    if json:
        print_json({"files": done.names, "reused": done.reused})


def note_adapted(artifact: Any) -> None:
    """Say of rows that were adapted to their collection what queries need before another tool compares them."""
    space = artifact.manifest.inputs.get("adaptation")
    if artifact.manifest.kind == "features" and space is not None:
        from lattqe.augmentation.recipe import ADAPTATION, find_input

        try:
            uri = find_input(artifact, ADAPTATION, ADAPTATION)
        except LattqeError:
            uri = space["uri"]
        screen.print(
            "note: these rows are adapted to their collection, and queries must be too: `lattqe whiten apply QUERIES "
            f"--whitening {uri} --to …`",
            markup=False,
            soft_wrap=True,
        )


def _export_features(features: "FeatureSet", to: str, factory: str | None) -> "Exported":
    from lattqe.store.export import export_features

    index = (factory or "Flat") if to.endswith((".faiss", ".index")) else None
    memory = "a few parts" if index is None else f"about {human_bytes(features.rows * features.dim * 4)} if flat"
    show_table(
        "export",
        {
            "rows × dimensions": f"{features.rows:,} × {features.dim}",
            "to": to,
            "index": index or "none",
            "memory": memory,
        },
        plan=True,
    )
    return export_features(features, to, factory)


def _export_ranks(ranks: "Ranks", to: str, database: Sequence[str]) -> "Exported":
    from lattqe.store.export import check_suffix, export_ranks

    check_suffix("ranks", to)
    show_table("export", {"queries × results": f"{ranks.rows:,} × {ranks.k}", "to": to}, plan=True)
    return export_ranks(ranks, to, database)


def _export_graph(graph: "NeighborGraph", to: str, similarities: bool, with_self: bool) -> "Exported":
    from lattqe.store.export import check_suffix, export_graph

    check_suffix("neighbors", to)
    show_table(
        "export",
        {
            "rows × neighbors": f"{graph.rows:,} × {graph.k}",
            "to": to,
            "memory": f"about {human_bytes(graph.rows * graph.k * 20)}",
        },
        plan=True,
    )
    return export_graph(graph, to, similarities, with_self)


def _words(artifact: Any) -> str:
    from lattqe.store.manifest import describe_kind

    return describe_kind(artifact.manifest.kind)


export_app = command(export)
