"""Counting work for a progress bar: `progress(done, total)`, from pieces that several threads finish."""

from collections.abc import Callable
from threading import Lock

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
