"""What runs is counted for the Ray dashboard and Prometheus, and told to the log file.

Metrics carry the Ray job's id (`job`), the kind of work (`kind`) and the number of the actor that did it (`shard`);
Ray puts `ray_` before their names, and `_total` after those of counters. One count costs some microseconds and is made
once for a block, which takes seconds.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from lattqe.errors import event
from lattqe.store.place import traffic

RATE_SECONDS = 60.0  # rows/s are those of the last minute
BLOCK_SECONDS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
TAGS = ("job", "kind", "shard")


@dataclass(frozen=True)
class Work:
    """What the blocks of a map are: for counting and naming them."""

    kind: str = "blocks"
    rows: Callable[[Any], int] = lambda block: 0  # that are done with it
    label: Callable[[Any], Any] = lambda block: block  # its name in the log
    traffic: Callable[[Any], tuple[int, int]] = lambda result: (0, 0)  # bytes read and written, from its result


class Metrics:
    """The metrics of one process in one Ray job."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.rows = Counter(
            "lattqe_rows_done", "Rows augmented, published, described, answered or trained on.", ("job", "kind")
        )
        self.rate = Gauge("lattqe_rows_per_second", "Rows finished a second, over the last minute.", ("job", "kind"))
        self.blocks = Counter("lattqe_blocks_done", "Pieces of work finished.", TAGS)
        self.seconds = Histogram(
            "lattqe_block_seconds", "From sending a piece of work to its result.", BLOCK_SECONDS, TAGS
        )
        self.retries = Counter("lattqe_retries", "Pieces of work asked for again after a failure.", TAGS)
        self.lost = Counter("lattqe_actors_lost", "Actors that died and were replaced.", TAGS)
        self.copies = Counter("lattqe_spare_copies", "Stragglers that were started a second time elsewhere.", TAGS)
        self.read = Counter("lattqe_bytes_read", "Bytes read from storage.", ("job", "kind"))
        self.written = Counter("lattqe_bytes_written", "Bytes written to storage.", ("job", "kind"))


@lru_cache(maxsize=1)
def _metrics(cluster: str, job: str) -> Metrics:
    return Metrics(job)


def metrics() -> Metrics:
    """Those of this process, made anew when it joins another Ray."""
    context = ray.get_runtime_context()
    return _metrics(context.gcs_address, context.get_job_id())


class Watch:
    """Counts and logs one kind of work, in the driver."""

    def __init__(self, kind: str) -> None:
        self.kind, self.metrics = kind, metrics()
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._recent_rows = 0

    def _tags(self, shard: int) -> dict[str, str]:
        return {"job": self.metrics.job, "kind": self.kind, "shard": str(shard)}

    def count(self, shard: int, seconds: float | None = None, pieces: int = 1) -> None:
        """Count finished pieces of work without a line in the log: for those that take little time."""
        self.metrics.blocks.inc(pieces, self._tags(shard))
        if seconds is not None:
            self.metrics.seconds.observe(seconds, self._tags(shard))

    def count_rows(self, rows: int) -> None:
        """Count finished rows, and how many they are a second."""
        if rows <= 0:
            return
        self.metrics.rows.inc(rows, {"job": self.metrics.job, "kind": self.kind})
        now = time.monotonic()
        self._recent.append((now, rows))
        self._recent_rows += rows
        while len(self._recent) > 2 and self._recent[1][0] < now - RATE_SECONDS:
            self._recent.popleft()
            self._recent_rows -= self._recent[0][1]  # those were done before the moment that we now count from
        rate = self._recent_rows / max(now - self._recent[0][0], 1e-3)
        self.metrics.rate.set(rate, {"job": self.metrics.job, "kind": self.kind})

    def count_traffic(self, read: int, written: int) -> None:
        """Count bytes that a worker has moved; it tells them with its result, for its own counts may die with it."""
        for counter, number in ((self.metrics.read, read), (self.metrics.written, written)):
            if number:
                counter.inc(number, {"job": self.metrics.job, "kind": self.kind})

    def done(self, block: Any, shard: int, rows: int, seconds: float, moved: tuple[int, int] = (0, 0)) -> None:
        """A block came back."""
        self.count(shard, seconds)
        self.count_rows(rows)
        self.count_traffic(*moved)
        event(
            "block done",
            kind=self.kind,
            shard=shard,
            block=block,
            rows=rows,
            seconds=round(seconds, 3),
            bytes_read=moved[0],
            bytes_written=moved[1],
        )

    def failed(self, block: Any, shard: int, error: Exception) -> None:
        """A block did not come back."""
        event("block failed", logging.WARNING, kind=self.kind, shard=shard, block=block, error=type(error).__name__)

    def retried(self, block: Any, shard: int) -> None:
        """A block is asked for again."""
        self.metrics.retries.inc(1, self._tags(shard))
        event("block retried", logging.WARNING, kind=self.kind, shard=shard, block=block)

    def lost(self, shard: int, error: Exception) -> None:
        """An actor died."""
        self.metrics.lost.inc(1, self._tags(shard))
        event("actor lost", logging.WARNING, kind=self.kind, shard=shard, error=type(error).__name__)

    def started(self, shard: int) -> None:
        """An actor is up, for the first time or again."""
        event("actor started", kind=self.kind, shard=shard)

    def copied(self, block: Any, shard: int) -> None:
        """A straggler was started a second time, on this actor."""
        self.metrics.copies.inc(1, self._tags(shard))
        event("straggler copied", logging.WARNING, kind=self.kind, shard=shard, block=block)

    def close(self) -> None:
        """Nothing runs any more."""
        self.metrics.rate.set(0.0, {"job": self.metrics.job, "kind": self.kind})
        self.count_traffic(*traffic.take())  # the driver's own
