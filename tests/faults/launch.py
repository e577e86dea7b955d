"""One lattqe verb, run as its users run it but for two things that a fault campaign needs.

    python tests/faults/launch.py VERB ...

Parts, blocks and checkpoints are so small that a set of some hundred rows has several of each. And the clock can be
moved: by as many seconds as the file says that LATTQE_CAMPAIGN_CLOCK names. It is the clock that Python code of this
process sees (`time.time`, and what boto3 signs requests with), for the machine's own belongs to others too.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import botocore.auth

from jobs import cli, search
from lattqe.store import FeatureWriter, part_row_counts
from lattqe.store.tables import DEFAULT_PART_BYTES

PART_BYTES, BLOCK_ROWS, PART_QUERIES = 12_000, 64, 32


def shrink() -> None:
    """Many small parts instead of few large ones."""
    for function in (FeatureWriter.__init__, part_row_counts):
        replace_default(function, DEFAULT_PART_BYTES, PART_BYTES)
    search.PART_QUERIES = PART_QUERIES
    if sys.argv[1] in ("augment", "append"):
        from lattqe import augmentation  # takes a second, with torch

        for module in (augmentation, augmentation.growth):
            module.Augmentation = functools.partial(augmentation.Augmentation, block_rows=BLOCK_ROWS)


def replace_default(function: Callable[..., Any], old: int, new: int) -> None:
    """Change the default of an argument for all callers."""
    if old not in function.__defaults__:
        raise RuntimeError(f"{function} has no default {old} any more")
    function.__defaults__ = tuple(new if value == old else value for value in function.__defaults__)


def move_clock(path: Path) -> None:
    """Let Python's clock follow the file."""
    true_time, true_date = time.time, botocore.auth.get_current_datetime

    def offset() -> float:
        try:
            return float(path.read_text() or 0)
        except OSError:
            return 0.0

    time.time = lambda: true_time() + offset()
    time.time_ns = lambda: int(time.time() * 1e9)
    botocore.auth.get_current_datetime = lambda *args: true_date(*args) + timedelta(seconds=offset())


if __name__ == "__main__":
    shrink()
    if "LATTQE_CAMPAIGN_CLOCK" in os.environ:
        move_clock(Path(os.environ["LATTQE_CAMPAIGN_CLOCK"]))
    cli.main()
