"""Lanes: one for each thread of a CPU, or for a GPU, and which kind of products they make."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from lattqe.device import torch_threads
from lattqe.errors import LattqeError
from lattqe.search.exact import int8_is_exact
from lattqe.search.products import (
    CoarseTorchProducts,
    Int8Products,
    MklProducts,
    NumpyProducts,
    Products,
    TorchProducts,
)

LARGE = 1e10  # multiplications from which on it is worth knowing which library is faster at them
TRIED = 2e8  # multiplications of a trial: some milliseconds
CLEARLY = 1.1  # times faster than the first kind: less is what two runs of one kind differ by
LEAST_TILE = 64
Result = TypeVar("Result")

CPU_KINDS: dict[str, type[NumpyProducts]] = {each.kind: each for each in (NumpyProducts, MklProducts, Int8Products)}
GPU_KINDS = ("float32", "float16", "tf32")


def kinds_for(device: torch.device | None = None) -> tuple[str, ...]:
    """The kinds of products that a device has; the first is what is used unless another is requested."""
    if device is not None and device.type != "cpu":
        return GPU_KINDS
    return tuple(kind for kind in CPU_KINDS if kind != Int8Products.kind or int8_is_exact())


@cache
def faster_float32(dim: int) -> str:
    """The kind of float32 products that one thread is faster at for rows of so many columns; found once, by trying.

    Libraries differ by up to two times, one way or the other with the processor and the columns.
    """
    rows = np.random.default_rng(0).standard_normal((int(np.clip(np.sqrt(TRIED / dim), 64, 2048)), dim), np.float32)
    others, best = rows.copy(), {}
    with _libraries().limit(limits=1, user_api="blas"), torch_threads(1):
        for kind in (NumpyProducts, MklProducts):
            products, took = kind(), []
            for _ in range(4):
                started = time.thread_time()  # other programs disturb it far less than the clock
                products.multiply(rows, others)
                took.append(time.thread_time() - started)
            best[kind.kind] = min(took)
    return MklProducts.kind if best[NumpyProducts.kind] > CLEARLY * best[MklProducts.kind] else NumpyProducts.kind


@contextmanager
def lanes_on(
    device: torch.device | None = None, kind: str | None = None, *, dim: int = 1, products: float = 0.0
) -> Iterator[list[Products]]:
    """Lanes for a device: on the CPU as many as torch has threads, each with single-threaded BLAS; one for a GPU.

    Without a `kind`: the first of the device; for at least LARGE work (`products` of vectors of `dim` columns), of the
    CPU's float32 kinds the faster one. Blocks that one of these has loaded are good for the other.
    """
    if kind is None:
        on_cpu = device is None or device.type == "cpu"
        kind = faster_float32(dim) if on_cpu and dim * products >= LARGE else kinds_for(device)[0]
    if kind not in kinds_for(device):
        raise LattqeError(
            f"products of kind {kind!r} are not made for {device or 'cpu'}: use one of {', '.join(kinds_for(device))}"
        )
    if device is not None and device.type != "cpu":
        yield [TorchProducts(device) if kind == "float32" else CoarseTorchProducts(device, kind)]
        return
    threads = torch.get_num_threads()
    with _libraries().limit(limits=1, user_api="blas"), torch_threads(1 if kind != NumpyProducts.kind else threads):
        yield [CPU_KINDS[kind](threads=threads) for _ in range(threads)]


def with_room(compute: Callable[[], Result], lanes: Sequence[Products]) -> Result:
    """compute(), again with tiles half as large for as long as the device has no memory for them."""
    while True:
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            if lanes[0].tile <= LEAST_TILE:
                raise LattqeError(
                    f"the device has no memory left, even for tiles of {lanes[0].tile} rows: use more "
                    "workers or smaller blocks (--block-rows)"
                ) from error
            for lane in lanes:
                lane.tile, lane.entries = max(lane.tile // 2, LEAST_TILE), lane.entries // 4
                lane.release()


@cache
def _libraries() -> ThreadpoolController:
    """The loaded BLAS libraries: looking for them takes longer than a small search, so once."""
    return ThreadpoolController()
