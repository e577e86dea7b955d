"""The `lattqe` command: its verbs in the order of the pipeline, each loaded only when it is called."""

import difflib
import gc
import importlib
import io
import os
import sys
from dataclasses import dataclass

import typer
from rich.console import Console

from jobs.console import EXIT_BAD_INPUT, guarded, run, screen, shown
from lattqe import __version__

# Half of the settings that a submitted job runs with; see jobs.submit.
SEALED = "SEALED_LATTQE_SETTINGS"


@dataclass(frozen=True)
class Verb:
    """One verb: the module that holds its typer `app`, one line, one example."""

    name: str
    module: str
    line: str
    example: str
    app: str = "app"  # what it is called in its module, which may hold several verbs

    def load(self) -> typer.Typer:
        """Import the module, which takes time, and return the application.

        The collector of garbage would look through a million new objects, none of them garbage, a dozen times.
        """
        gc.disable()
        app: typer.Typer = getattr(importlib.import_module(self.module), self.app)
        gc.freeze()
        gc.enable()
        return app


VERBS = (
    Verb(
        "extract", "jobs.extract", "images → a feature set", "lattqe extract photos --checkpoint net.pth --to features"
    ),
    Verb(
        "dataset",
        "jobs.import_",
        "published files of a data set → checked feature sets",
        "lattqe dataset revisited published --to data",
        "dataset_app",
    ),
    Verb("import", "jobs.import_", "foreign files → a feature set", "lattqe import vectors.npy --to features"),
    Verb(
        "whiten",
        "jobs.train",
        "learn a whitening, apply it to features",
        "lattqe whiten learn features --to whitening",
        "whiten_app",
    ),
    Verb(
        "neighbors",
        "jobs.neighbors",
        "a feature set → its exact kNN graph",
        "lattqe neighbors features -k 64 --to graph",
    ),
    Verb(
        "duplicates",
        "jobs.lists",
        "near-duplicates within a set, or between two",
        "lattqe duplicates features --graph graph --threshold 0.95 --to duplicates",
        "duplicates_app",
    ),
    Verb(
        "train",
        "jobs.train",
        "labelled feature sets → a model",
        "lattqe train features --val held-out --preset photos --to model",
    ),
    Verb(
        "augment",
        "jobs.augment",
        "a feature set → its augmented index",
        "lattqe augment features --model model --to index",
    ),
    Verb(
        "append",
        "jobs.augment",
        "add rows to an augmented index, or remove them",
        "lattqe append index new-rows --to index2",
        "append_app",
    ),
    Verb(
        "search",
        "jobs.search",
        "queries → their best rows, optionally expanded",
        "lattqe search index queries -k 100 --expand lattqe --model model --to ranks",
    ),
    Verb(
        "gallery",
        "jobs.lists",
        "ranks → a page of pictures, before and after",
        "lattqe gallery ranks --against plain-ranks --images photos --to gallery.html",
        "gallery_app",
    ),
    Verb(
        "evaluate",
        "jobs.lists",
        "ranks → mAP and mP@k, overall and per query",
        "lattqe evaluate ranks --truth gnd_roxford5k.pkl",
        "evaluate_app",
    ),
    Verb(
        "ablate",
        "jobs.train",
        "how much each part of a model contributes",
        "lattqe ablate features --val held-out --preset photos --to ablations",
        "ablate_app",
    ),
    Verb(
        "benchmark",
        "jobs.benchmark",
        "all methods on all data sets → tables, figures, report",
        "lattqe benchmark run.toml --to results",
    ),
    Verb(
        "plan",
        "jobs.plan",
        "time, memory and cost for any data on any cluster",
        'lattqe plan 100000000x512 -k 64 --assume "nodes=16,gpus=1,price=0.5"',
    ),
    Verb("demo", "jobs.demo", "all of this on a synthetic world, in minutes", "lattqe demo --to demo"),
    Verb(
        "info", "jobs.artifacts", "what a stored artifact is, and how it was made", "lattqe info features", "info_app"
    ),
    Verb(
        "verify", "jobs.artifacts", "check every checksum and every invariant", "lattqe verify features", "verify_app"
    ),
    Verb(
        "export",
        "jobs.artifacts",
        "features, ranks or a graph → files for other tools",
        "lattqe export features --to index.faiss",
        "export_app",
    ),
    Verb(
        "doctor",
        "jobs.submit",
        "check every node of a cluster, and the storage",
        "lattqe doctor s3://bucket/prefix",
        "doctor_app",
    ),
    Verb(
        "submit",
        "jobs.submit",
        "run any of these on a cluster",
        "lattqe submit -- augment s3://b/features --model s3://b/model --to s3://b/index",
    ),
)


def show_help() -> None:
    """Print the verbs with one line and one example each."""
    out = Console(highlight=False, soft_wrap=True)
    out.print("Usage: lattqe VERB ...   (lattqe VERB --help for its options; lattqe --version)\n")
    out.print("Learned query expansion and database-side augmentation for image retrieval, at cluster scale.\n")
    for verb in VERBS:
        out.print(f"  [bold]{verb.name:<10}[/bold] {verb.line}\n             [dim]{verb.example}[/dim]")


def main() -> None:
    """Dispatch to one verb; the console script `lattqe`."""
    if SEALED in os.environ:
        from jobs.submit import restore_settings

        restore_settings()
    if isinstance(sys.stdout, io.TextIOWrapper):  # None where it is closed
        # Help has arrows, and messages have ids: an encoding without them must not end in a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        show_help()
        return
    if arguments[0] in ("--version", "-V"):
        print(f"lattqe {__version__}")
        return
    by_name = {verb.name: verb for verb in VERBS}
    verb = by_name.get(arguments[0])
    if verb is None:
        close = difflib.get_close_matches(arguments[0], by_name, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see lattqe --help"
        screen.print(f"[red]error:[/red] there is no verb {shown(repr(arguments[0]))}: {hint}", soft_wrap=True)
        raise SystemExit(EXIT_BAD_INPUT)
    run(guarded(verb.load), arguments[1:], f"lattqe {verb.name}")


if __name__ == "__main__":
    main()
