"""One lattqe verb, run as its users run it but for two things that a fault campaign needs.

    python tests/faults/launch.py VERB ...
    python tests/faults/launch.py --serve     (one JSON list of words a line on stdin)

The second form has imported everything once and forks a process for each command: most of the time of a small command
is that of starting Python. The child is a session of its own and can be killed as any other driver; what became of it
is told on stdout.

Parts, blocks and checkpoints are so small that a set of some hundred rows has several of each. And the clock can be
moved: by as many seconds as the file says that LATTQE_CAMPAIGN_CLOCK names (`clock.py`). With LATTQE_CAMPAIGN_HURRY,
patience with workers is as short as their blocks, and code and settings are not shipped: the nodes have them.
"""

import atexit
import functools
import importlib
import json
import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clock

from jobs import cli, search
from lattqe.store import FeatureWriter, part_row_counts
from lattqe.store.manifest import DEFAULT_PART_BYTES

# What the verbs import when they are called.
WARM = (
    "ray",
    "ray.train.torch",
    "torch",
    "faiss",
    "scipy.sparse",
    "cluster.session",
    "cluster.graph",
    "cluster.training",
    "cluster.shards",
    "lattqe.training",
    "lattqe.search",
    "lattqe.expansion",
    "lattqe.augmentation",
    "cluster.benchmark",
    "cluster.extraction",
    "lattqe.report",
)
PART_BYTES, BLOCK_ROWS, PART_QUERIES = 12_000, 64, 32
PATIENCE = {20.0: 2.0, 5.0: 1.0, 120.0: 10.0}  # seconds by default and here: for stragglers, for room, for a late actor


def shrink() -> None:
    """Many small parts instead of few large ones."""
    for function in (FeatureWriter.__init__, part_row_counts):
        replace_default(function, DEFAULT_PART_BYTES, PART_BYTES)
    search.PART_QUERIES = PART_QUERIES
    if sys.argv[1] in ("augment", "append", "benchmark"):
        from lattqe.augmentation import growth, recipe  # takes a second, with torch

        for module in (recipe, growth):
            module.Augmentation = functools.partial(recipe.Augmentation, block_rows=BLOCK_ROWS)


def hurry() -> None:
    """Wait for seconds where users wait for minutes."""
    from cluster import session
    from cluster.blocks import BlockPolicy

    for usual, short in PATIENCE.items():
        replace_default(BlockPolicy.__init__, usual, short)
    session._runtime_env = dict


def replace_default(function: Callable[..., Any], old: float, new: float) -> None:
    """Change the default of an argument for all callers."""
    if old not in function.__defaults__:
        raise RuntimeError(f"{function} has no default {old} any more")
    function.__defaults__ = tuple(new if value == old else value for value in function.__defaults__)


def run() -> None:
    """One verb, as the command line has it."""
    shrink()
    if "LATTQE_CAMPAIGN_HURRY" in os.environ:
        hurry()
    if "LATTQE_CAMPAIGN_CLOCK" in os.environ:
        clock.follow(Path(os.environ["LATTQE_CAMPAIGN_CLOCK"]))
    cli.main()


def serve() -> None:
    """Fork a command for each line {"words", "log", "environment"}.

    Tell {"pid"} when it runs, {"pid", "code"} when it has ended.
    """
    for verb in cli.VERBS:
        importlib.import_module(verb.module)
    for module in WARM:
        importlib.import_module(module)
    children: set[int] = set()
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            asked = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become(**asked)
            children.add(pid)
            print(json.dumps({"pid": pid}), flush=True)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)


def _become(words: list[str], log: str, environment: dict[str, str]) -> None:
    """Be the process of one command, to its end."""
    os.setsid()
    target, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, nothing), (1, target), (2, target)):
        os.dup2(source, number)
    sys.argv = ["lattqe", *words]
    os.environ.update(environment)
    code = 0
    try:
        run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else run()
