"""Commands that are killed in the middle, whatever the load: one that was faster than the kill begins anew."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TRIES = 10


def session_of(process: subprocess.Popen[str]) -> Iterator[int]:
    """Process ids of everything that a command of its own session has started and not ended, itself included."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == process.pid:
                yield int(entry.name)
        except OSError:  # it has ended meanwhile
            continue


def end_session(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a command's session, its Ray for one."""
    for pid in session_of(process):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    process.wait()  # its pipes may have been read to their end and closed before


def killed_midway(start: Callable[[Path], subprocess.Popen[str]], folder: Path, ready: Callable[[Path], bool]) -> Path:
    """Start a command on a destination of its own and kill it, and its session, once `ready`: the destination.

    A command that ended before the kill came proves nothing and is started on another destination.
    """
    for attempt in range(TRIES):
        to = folder / f"killed{attempt}"
        process = start(to)
        while process.poll() is None and not ready(to):
            time.sleep(0.01)
        process.kill()
        _, shown = process.communicate()
        end_session(process)
        if not (to / "manifest.json").exists():
            assert process.returncode == -signal.SIGKILL, shown
            return to
    raise AssertionError(f"{TRIES} commands ended before they could be killed")
