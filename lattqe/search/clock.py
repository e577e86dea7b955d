"""Where the seconds go (loading, products, selection, scoring, merging), and how many products there were."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by name, summed over threads; `with clock("products"): ...` adds to one.

    `counts`: "products" of two vectors in float32, and pairs "scored" exactly, in float64.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:
                self.seconds[name] += spent

    def count(self, name: str, amount: int) -> None:
        """Add to a count."""
        with self._lock:
            self.counts[name] += amount
