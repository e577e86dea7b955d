"""What the library tells its callers: errors that a user can fix, events, and how much of the work is done.

The message of an error is one line: what was wrong, the value, and the remedy. Events go through Python's `logging`, to
the logger `lattqe.events`, with their fields in `record.fields`; nothing is printed anywhere unless a handler is added.
`lattqe JOB --log-file FILE` does. Progress is `progress(done, total)`, from pieces that several threads finish.
"""

import logging
from collections.abc import Callable
from threading import Lock
from typing import Any


class LattqeError(Exception):
    """Bad input, a missing artifact, a refused overwrite: jobs print the message and exit with code 2."""


class CorruptDataError(LattqeError):
    """Stored bytes that are not what their manifest says; the message names the part."""


class AlreadyExistsError(LattqeError):
    """Another run published first, or the destination is taken by another configuration."""


LOGGER = "lattqe.events"

_logger = logging.getLogger(LOGGER)
_logger.addHandler(logging.NullHandler())  # without any handler Python would print warnings to stderr


def event(name: str, /, level: int = logging.INFO, **fields: Any) -> None:
    """Tell that something happened: `event("block done", kind="augment", block=3, seconds=1.5)`."""
    _logger.log(level, name, extra={"fields": fields})


Progress = Callable[[int, int], None]


def counted(total: int, progress: Progress | None) -> Callable[[int], None]:
    """What counts single pieces of work, from several threads, for `progress`."""
    done, lock = 0, Lock()

    def advance(amount: int) -> None:
        nonlocal done
        with lock:
            done = min(done + amount, total)
            if progress is not None:
                progress(done, total)

    return advance


def as_rows(pieces: int, rows: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """What counts pieces of work, and `advance`s by that many rows until all of them are done."""
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        before, told = told, done * rows // total
        advance(told - before)

    return counted(max(pieces, 1), tell)
