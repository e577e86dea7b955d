"""Memory of this process, as the system counts it."""

from pathlib import Path


def resident_bytes() -> int:
    """Memory of this process now, mapped files included."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most memory this process ever had, mapped files included."""
    return _status("VmHWM")


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
