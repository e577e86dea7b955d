"""Read pickles of plain data without unpickling: `load(path)` imports nothing and calls nothing that a file names.

A pickle is a program for a small stack machine. `pickle_machine` is that machine with everything but data taken out:
containers, strings, numbers and numpy arrays of them. A name outside `pickle_names.MEANINGS` is refused by that name.

No declared size is trusted: strings and arrays are slices of the file, and what has to be copied is charged to a budget
in proportion to the file's size. Byte strings of 64 KiB and more, and arrays, are views of the memory-mapped file.
"""

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lattqe.errors import LattqeError
from lattqe.formats.pickle_machine import Machine
from lattqe.formats.pickle_names import MEANINGS, Malformed, Name


def load(path: str | os.PathLike[str]) -> Any:
    """Read a pickle file: dicts, lists, tuples, sets, strings, bytes, numbers, numpy arrays; anything else is refused.

    Strings of Python 2 are decoded as latin-1.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise LattqeError(f"{path} is empty: a pickle was expected")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LattqeError(f"cannot read {path}: {error.strerror or error}") from error
    return loads(data, str(path))


def loads(
    data: bytes | mmap.mmap,
    name: str = "pickle",
    *,
    meanings: Mapping[Name, Callable[..., Any]] = MEANINGS,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle held in memory; `name` stands in error messages.

    `meanings` are the names the pickle may mention; `persistent` resolves its persistent ids (torch files have them).
    """
    machine = Machine(memoryview(data), meanings, persistent)
    try:
        return machine.run()
    except Malformed as error:
        raise LattqeError(f"{name} is refused: {error}") from error
    except LattqeError:
        raise
    except Exception as error:  # the program of a damaged file can fail in any way; none of them is a bug of ours
        raise LattqeError(f"{name} is not a readable pickle: damaged near byte {machine.position}") from error
