"""Write a feature set for other tools: a .npy or .fvecs matrix, or a faiss index file, with its ids beside it."""

import time
from typing import Annotated

import typer

from jobs.console import command, human_bytes, run, screen, show_table


def main(
    uri: Annotated[str, typer.Argument(help="The feature set.")],
    to: Annotated[str, typer.Option(help="FILE.npy, FILE.fvecs, or FILE.faiss (FILE.index); ids go to FILE.ids.txt.")],
    factory: Annotated[
        str | None, typer.Option(help='faiss factory string, such as "IVF256,PQ16"; a flat index without it.')
    ] = None,
) -> None:
    """Write a feature set for other tools: a .npy or .fvecs matrix, or a faiss index file, with its ids beside it."""
    from lattqe.store import FeatureSet
    from lattqe.store.export import export_features

    features = FeatureSet.open(uri)
    indexed = to.endswith((".faiss", ".index"))
    show_table("export", {
        "rows × dimensions": f"{features.rows:,} × {features.dim}",
        "to": to,
        "index": (factory or "Flat") if indexed else "none",
        "memory": f"about {human_bytes(features.rows * features.dim * 4)} if flat" if indexed else "a few parts",
    }, plan=True)
    started = time.monotonic()
    names = export_features(features, to, factory)
    screen.print(f"wrote {', '.join(names)} in {time.monotonic() - started:.1f} s", markup=False, soft_wrap=True)


app = command(main)

if __name__ == "__main__":
    run(app)
