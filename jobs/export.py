"""Write an artifact for other tools: features as a matrix or a faiss index, ranks as a table, a graph as scipy CSR."""

import time
from typing import Annotated, Any

import typer

from jobs.console import command, human_bytes, note_approximate, print_json, run, screen, show_table
from lattqe.errors import LattqeError


def main(
    uri: Annotated[str, typer.Argument(help="A feature set, ranks or a neighbor graph.")],
    to: Annotated[
        str,
        typer.Option(
            help="Features: FILE.npy, .fvecs, .faiss (.index), with FILE.ids.txt and "
            "FILE.labels.txt. Ranks: FILE.csv or .json. Graph: FILE.npz."
        ),
    ],
    factory: Annotated[
        str | None, typer.Option(help='faiss factory string, such as "IVF256,PQ16"; a flat index without it.')
    ] = None,
    database: Annotated[
        list[str] | None,
        typer.Option(
            help="Ranks: the set that was searched (then the distractors), where it is no longer where it was."
        ),
    ] = None,
    similarities: Annotated[bool, typer.Option("--similarities", help="Graph: scores instead of distances.")] = False,
    with_self: Annotated[bool, typer.Option("--with-self", help="Graph: each row before its neighbors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Write an artifact for other tools: features as a matrix or a faiss index, ranks as a table, a graph as scipy CSR.

    Example: lattqe export ranks --to ranks.csv
    """
    from lattqe.store import FeatureSet, NeighborGraph, Ranks, open_artifact
    from lattqe.store.export import check_suffix, export_features, export_graph, export_ranks

    artifact = open_artifact(uri)
    for option, given, kind in (
        ("--factory", factory, FeatureSet),
        ("--database", database, Ranks),
        ("--similarities", similarities, NeighborGraph),
        ("--with-self", with_self, NeighborGraph),
    ):
        if given and type(artifact) is not kind:
            raise LattqeError(f"{option} is of no use for {uri}, {_words(artifact)}")
    note_approximate(artifact)
    started = time.monotonic()
    if isinstance(artifact, FeatureSet):
        _show_plan(artifact, to, index=(factory or "Flat") if to.endswith((".faiss", ".index")) else None)
        done = export_features(artifact, to, factory)
    elif isinstance(artifact, Ranks):
        check_suffix("ranks", to)
        show_table("export", {"queries × results": f"{artifact.rows:,} × {artifact.k}", "to": to}, plan=True)
        done = export_ranks(artifact, to, database or ())
    elif isinstance(artifact, NeighborGraph):
        check_suffix("neighbors", to)
        show_table(
            "export",
            {
                "rows × neighbors": f"{artifact.rows:,} × {artifact.k}",
                "to": to,
                "memory": f"about {human_bytes(artifact.rows * artifact.k * 20)}",
            },
            plan=True,
        )
        done = export_graph(artifact, to, similarities, with_self)
    else:
        raise LattqeError(f"{uri} is {_words(artifact)}: feature sets, ranks and neighbor graphs are exported")
    words = "already up to date" if done.reused else f"written in {time.monotonic() - started:.1f} s"
    screen.print(f"{', '.join(done.names)}: {words}", markup=False, soft_wrap=True)
    if json:
        print_json({"files": done.names, "reused": done.reused})


def _show_plan(features: Any, to: str, index: str | None) -> None:
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


def _words(artifact: Any) -> str:
    from lattqe.store.manifest import describe_kind

    return describe_kind(artifact.manifest.kind)


app = command(main)

if __name__ == "__main__":
    run(app)
