"""One update's material: queries with their neighbors, and what the losses compare the expanded queries with.

Batches are made ahead of the step that uses them, by one thread.
"""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Batch:
    """The part of the global batch that one worker holds: b queries.

    items (b, 1 + k, D) float32: the query, then its neighbors by rank; valid (b, 1 + k) bool: not dropped, not padding;
    relevant (b, k) bool: the neighbor is of the query's class; positives (b, p, D): images of the query's class;
    candidates (m, D): the pool or world the query searches; same (b, m) bool: of the query's class;
    usable (b, m) bool: False for the query itself; queries: size of the global batch, what losses are divided by;
    k: how many of the neighbors are weighed one by one (a background may make the list longer);
    positive_rows (b, p): where the positives stand among the candidates, if they do;
    classes (m,): the candidates' classes, where negatives are to be of distinct ones.
    hops: above 0, the candidates are augmented by so many hops over the graph of their row_k nearest before the
    queries, which are no rows of theirs, search them; labels (m,) are the candidates'; hopping (r,): which of the
    candidates are augmented, the others stay what they are.
    """

    items: torch.Tensor
    valid: torch.Tensor
    relevant: torch.Tensor
    positives: torch.Tensor
    candidates: torch.Tensor
    same: torch.Tensor
    usable: torch.Tensor
    queries: int
    k: int
    positive_rows: torch.Tensor | None = None
    classes: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    hops: int = 0
    row_k: int = 0
    hopping: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return dataclasses.replace(self, **moved)


class Sampler(Protocol):
    """Makes batches; a batch is a pure function of (seed, step), a part of it of the queries asked for."""

    def batch(self, step: int, part: slice) -> Batch:
        """The queries `part` of the global batch of this step."""
        ...


AHEAD = 2


@contextmanager
def prefetched(sampler: Sampler, steps: range, part: slice) -> Iterator[Iterator[Batch]]:
    """An iterator over the batches of `steps`; what it yields depends on (seed, step) alone, not on the thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="sampler") as thread:

        def batches() -> Iterator[Batch]:
            waiting: list[Future[Batch]] = [thread.submit(sampler.batch, step, part) for step in steps[:AHEAD]]
            for step in steps:
                ready = waiting.pop(0).result()
                if step + AHEAD < steps.stop:
                    waiting.append(thread.submit(sampler.batch, step + AHEAD, part))
                yield ready

        try:
            yield batches()
        finally:
            thread.shutdown(cancel_futures=True)
