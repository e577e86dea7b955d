"""A clock that a file moves: by as many seconds as it says, for the Python code of one process.

The machine's own clock belongs to others too. What follows the file is `time.time`, and what boto3 signs requests with.
A node's processes import this by their `sitecustomize`, the driver by `launch.py`.
"""

import importlib.abc
import importlib.util
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any


class _Signing(importlib.abc.MetaPathFinder):
    """Moves the clock of `botocore.auth` when it is imported: importing it here would slow down every process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module as it is found without us, its clock moved once it is loaded."""
        if name != "botocore.auth":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_move(module: Any) -> None:
            load(module)
            _move_signing(module, self.path)

        spec.loader.exec_module = load_and_move  # type: ignore[method-assign]
        return spec


def _move_signing(module: Any, path: Path) -> None:
    true_date = module.get_current_datetime
    module.get_current_datetime = lambda *args: true_date(*args) + timedelta(seconds=offset(path))


def offset(path: Path) -> float:
    """What the file says now; 0 while it is not there."""
    try:
        return float(path.read_text() or 0)
    except OSError:
        return 0.0


def follow(path: Path) -> None:
    """Let this process's clock follow the file."""
    true_time = time.time
    time.time = lambda: true_time() + offset(path)
    time.time_ns = lambda: int(time.time() * 1e9)
    if "botocore.auth" in sys.modules:
        _move_signing(sys.modules["botocore.auth"], path)
    else:
        sys.meta_path.insert(0, _Signing(path))
