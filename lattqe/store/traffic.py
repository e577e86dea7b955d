"""How many bytes this process has read from and written to storage: files, objects and caches alike.

A file on disk counts as read, wholly, when it is mapped.
"""

import threading


class Traffic:
    """Two numbers that only grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = self._written = 0
        self._taken = (0, 0)

    def add(self, *, read: int = 0, written: int = 0) -> None:
        """Count bytes."""
        with self._lock:
            self._read += read
            self._written += written

    def take(self) -> tuple[int, int]:
        """Bytes read and bytes written since the last call: what a worker sends along with its result."""
        with self._lock:
            before, self._taken = self._taken, (self._read, self._written)
            return self._taken[0] - before[0], self._taken[1] - before[1]


traffic = Traffic()
