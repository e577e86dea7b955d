"""What the library reports to its callers: errors that a user can fix, and events.

The message of an error is one line: what was wrong, the value, and the remedy. Events go through Python's `logging`, to
the logger `lattqe.events`, with their fields in `record.fields`; nothing is printed anywhere unless a handler is added.
`lattqe JOB --log-file FILE` does.
"""

import logging
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
