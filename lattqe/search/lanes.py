"""One lane for each thread: its own product buffers, BLAS on one thread, so that selection runs in parallel too."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from lattqe.search.products import NumpyProducts, Products, TorchProducts

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def lanes_on(device: torch.device | None = None) -> Iterator[list[Products]]:
    """Lanes for a device: on the CPU as many as torch has threads, each with single-threaded BLAS; one for a GPU."""
    if device is not None and device.type != "cpu":
        yield [TorchProducts(device)]
        return
    with _libraries().limit(limits=1, user_api="blas"):
        yield [NumpyProducts() for _ in range(torch.get_num_threads())]


@cache
def _libraries() -> ThreadpoolController:
    """The loaded BLAS libraries: looking for them takes longer than a small search, so once."""
    return ThreadpoolController()


def in_threads(function: Callable[[int, int], Result], cuts: Sequence[tuple[int, int]]) -> list[Result]:
    """Call function(start, stop) for all cuts with torch's number of threads: CPU work, whatever the device."""
    threads = torch.get_num_threads()
    if threads == 1 or len(cuts) == 1:
        return [function(*cut) for cut in cuts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, *zip(*cuts)))


def in_lanes(function: Callable[[Products, Item], Result], items: Sequence[Item],
             lanes: Sequence[Products]) -> list[Result]:
    """Call function(lane, item) for all items, each lane in its own thread; results in the order of items."""
    if len(lanes) == 1 or len(items) == 1:
        return [function(lanes[0], item) for item in items]
    free = list(lanes)

    def call(item: Item) -> Result:
        lane = free.pop()  # there are as many threads as lanes
        try:
            return function(lane, item)
        finally:
            free.append(lane)

    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(call, items))
