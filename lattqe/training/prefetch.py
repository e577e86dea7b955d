"""Batches made ahead of the step that uses them, by one thread."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from lattqe.training.batch import Batch, Sampler

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
