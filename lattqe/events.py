"""Events: what a job does, one record each, for log files and other listeners.

They go through Python's `logging`, to the logger `lattqe.events`, with their fields in `record.fields`; nothing is
printed anywhere unless a handler is added. `lattqe JOB --log-file FILE` does.
"""

import logging
from typing import Any

LOGGER = "lattqe.events"

_logger = logging.getLogger(LOGGER)
_logger.addHandler(logging.NullHandler())  # without any handler Python would print warnings to stderr


def event(name: str, /, level: int = logging.INFO, **fields: Any) -> None:
    """Tell that something happened: `event("block done", kind="augment", block=3, seconds=1.5)`."""
    _logger.log(level, name, extra={"fields": fields})
