"""What a campaign that was killed has left on this machine: its processes, network namespaces, mounts and folders.

All of them carry the process id of the campaign; those of one that runs are left alone.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = re.compile(r"lq-(\d+)-")
TOKEN = re.compile(r"lq([0-9a-f]{6})[0-9a-f]{2}")  # of `ray_nodes.Namespaces`


def prefix() -> str:
    """How the folder of a campaign of this process begins; it is short, for Ray has sockets in it."""
    return f"lq-{os.getpid()}-"


def remove() -> None:
    """Remove all that belongs to a campaign that is gone."""
    with suppress(OSError):  # without `ip` there are none
        for space in _ip("netns", "list"):
            if (match := TOKEN.match(space)) and not _runs(int(match[1], 16)):
                _kill(int(pid) for pid in _ip("netns", "pids", space))
                _ip("netns", "del", space)
        for link in os.listdir("/sys/class/net"):
            if (match := TOKEN.fullmatch(link)) and not _runs(int(match[1], 16)):
                _ip("link", "del", link)
    for folder in Path(tempfile.gettempdir()).glob("lq-*"):
        if (match := FOLDER.match(folder.name)) and not _runs(int(match[1])):
            _kill(_named_after(folder))
            for mount in folder.iterdir():
                if mount.is_mount():
                    subprocess.run(["umount", "-l", str(mount)], capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)


def _ip(*words: str) -> list[str]:
    """The first word of each line that it says."""
    told = subprocess.run(["ip", *words], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in told.splitlines() if line.strip()]


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _named_after(folder: Path) -> Iterator[int]:
    """Processes with a folder among their words."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and os.fsencode(f"{folder}/") in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def _kill(pids: Iterator[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
