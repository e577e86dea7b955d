"""The one seam between CPU and GPU: everything that allocates asks here where to, and how exactly to multiply.

And the memory of this process, as the system counts it.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lattqe.errors import LattqeError

if TYPE_CHECKING:  # a small search does not wait for scipy
    from scipy import sparse

STAGED_BYTES = 16 << 20  # of each pinned buffer that rows go through: a millisecond of the bus
SUM_BYTES = 128 << 20  # of the vectors that one block of sparse sums names
LEAST_SUM_BYTES = 1 << 16
Sent = list[Callable[[], torch.Tensor]]  # what a Sender gave: each gives its copy when it is called


def pick_device(name: str = "auto") -> torch.device:
    """Turn 'auto', 'cpu', 'cuda' or 'cuda:1' into a device.

    'auto' is what LATTQE_DEVICE says, on every worker of a job; where it says nothing, a GPU where there is one.
    """
    name = os.environ.get("LATTQE_DEVICE") or "auto" if name == "auto" else name
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LattqeError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LattqeError(f"device {name!r} requested, but torch sees no GPU: use cpu, or install torch with CUDA")
    return device


def gpu_or_none(name: str = "auto") -> torch.device | None:
    """The device for searches: a GPU, or None for the CPU and its own products."""
    device = pick_device(name)
    return None if device.type == "cpu" else device


def planned_device(kind: str) -> torch.device | None:
    """The device of a worker whose job was planned for that kind, None: the CPU and its own code. A planned GPU must be
    there, unless LATTQE_DEVICE names another device.
    """
    return None if kind == "cpu" else pick_device(os.environ.get("LATTQE_DEVICE") or kind)


def room_on(device: torch.device) -> int:
    """Bytes that may be put on a device to stay there: half of what a GPU has free. None on the CPU, where rows are
    read where they are.
    """
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 0


@contextmanager
def bringing(rows: int, dim: int) -> Iterator[None]:
    """Rows that cannot be cut further are brought to a device inside: one line where it has no memory for them."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LattqeError(
            f"{rows:,} rows of {dim} numbers do not fit in the device's memory: use more workers (--workers), so that "
            "each holds fewer rows, or set LATTQE_DEVICE=cpu"
        ) from error


class Sender:
    """Copies to a device; to a GPU from pinned memory and in its own stream, beside the device's other work."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.staged_bytes = device, STAGED_BYTES
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy; what is returned gives the copy, to be used by the thread that calls it."""
        if self._stream is None:
            there = rows.to(self.device)
            return lambda: there
        with torch.cuda.stream(self._stream):
            there = rows.pin_memory().to(self.device, non_blocking=True)
            done = self._stream.record_event()

        def take() -> torch.Tensor:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            there.record_stream(current)  # its memory is not given away before this stream is done with it
            return there

        return take

    def bring(self, pieces: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Copy pieces (n_i, D), at least one, to the device as one tensor (n, D), and wait until it is there.

        To a GPU through two pinned buffers: one is filled while the other is being copied, beside what other threads
        have the device do. Only the thread that calls waits.
        """
        dim, gpu = pieces[0].shape[1], self._stream is not None
        step = max(self.staged_bytes // max(dim * dtype.itemsize, 1), 1)
        with torch.cuda.stream(self._stream) if gpu else nullcontext():
            # Allocated within this stream: no kernel of another one still uses what was there before.
            there = torch.empty((sum(map(len, pieces)), dim), dtype=dtype, device=self.device)
            buffers = [torch.empty((min(step, len(there)), dim), dtype=dtype, pin_memory=gpu) for _ in range(2)]
            copied = [torch.cuda.Event() if gpu else None for _ in buffers]
            start = 0
            for turn, part in enumerate(part for piece in pieces for part in piece.split(step)):
                buffer, rows = buffers[turn % 2][: len(part)], slice(start, start + len(part))
                if (event := copied[turn % 2]) is not None:
                    event.synchronize()
                buffer.copy_(part)
                there[rows].copy_(buffer, non_blocking=True)
                if event is not None:
                    event.record()
                start = rows.stop
        if self._stream is not None:
            self._stream.synchronize()
            there.record_stream(torch.cuda.current_stream(self.device))
        return there


class SparseSums:
    """Sparse matrices times the same dense rows H (n, c) float32 on a device, block by block of the matrix's rows.

    H lies on the device where it fits in half of what is free. Otherwise each block's rows of it are sent; these, and
    the block's entries in any case, while the block before is computed. A row's sum takes its entries one by one in
    their order, so neither where H lies nor the size of blocks changes a bit.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.block_bytes = device, SUM_BYTES
        self._sender = Sender(device)
        self._here = np.empty((0, 0), np.float32)
        self._there: torch.Tensor | None = None

    def take(self, H: np.ndarray, stay: bool = True) -> None:
        """Use H (n, c) float32 from now on; it must not change before the next call. stay: on the device, if it can."""
        self._here = H
        if self._there is None or self._there.shape != H.shape:
            self._there = None  # what lies there goes before there is a question of room
            if stay and 0 < H.nbytes <= room_on(self.device):
                self._there = torch.empty(H.shape, device=self.device)
        if self._there is not None:
            self._there.copy_(torch.from_numpy(H))

    def multiply(self, S: "sparse.csr_array") -> np.ndarray:
        """S @ H for S (m, n) float32: (m, c) float32. Blocks are halved while the device has no memory for them."""
        out = np.empty((S.shape[0], self._here.shape[1]), np.float32)
        start, ahead = 0, None
        while start < len(out):
            try:
                stop, sums, ahead = self._sum(S, *(ahead or self._send(S, start)))
            except torch.OutOfMemoryError as error:
                if self.block_bytes <= LEAST_SUM_BYTES:
                    raise LattqeError(
                        f"{self.device} has no memory left, even for {self.block_bytes >> 10} KiB of vectors: end what "
                        "else uses it, or set LATTQE_DEVICE=cpu"
                    ) from error
                self.block_bytes, ahead = self.block_bytes // 2, None
            else:
                out[start:stop], start = sums, stop
        return out

    def _sum(self, S: "sparse.csr_array", stop: int, sent: Sent) -> tuple[int, np.ndarray, tuple[int, Sent] | None]:
        """What was sent summed up, rows up to `stop`; meanwhile the next block, if any, is sent."""
        table, columns, starts, values = (each() for each in sent)
        sums = torch.nn.functional.embedding_bag(columns, table, starts, mode="sum", per_sample_weights=values)
        ahead = self._send(S, stop) if stop < S.shape[0] else None
        return stop, sums.cpu().numpy(), ahead

    def _send(self, S: "sparse.csr_array", start: int) -> tuple[int, Sent]:
        """Begin to send the rows of S from `start`: where they stop, and vectors, columns, first entries and values."""
        entries = self.block_bytes // (4 * max(self._here.shape[1], 1))
        stop = max(int(np.searchsorted(S.indptr, int(S.indptr[start]) + entries, side="right")) - 1, start + 1)
        part, there = slice(S.indptr[start], S.indptr[stop]), self._there
        columns = S.indices[part]
        if there is None:
            named, columns = np.unique(columns, return_inverse=True)
        table = (lambda: there) if there is not None else self._sender.send(torch.from_numpy(self._here[named]))
        arrays = columns.astype(np.int32), (S.indptr[start:stop] - part.start).astype(np.int32), S.data[part].copy()
        return stop, [table, *(self._sender.send(torch.from_numpy(each)) for each in arrays)]


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Convolve in true float32, by the same algorithm each time: with TF32 a row would depend on the kind of GPU."""
    setting = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, deterministic = setting.fp32_precision, torch.backends.cudnn.deterministic
    setting.fp32_precision, torch.backends.cudnn.deterministic = "ieee", True
    try:
        yield
    finally:
        setting.fp32_precision, torch.backends.cudnn.deterministic = before, deterministic


_launching = threading.RLock()


@contextmanager
def matmul_precision(device: torch.device, precision: str = "ieee") -> Iterator[None]:
    """Multiply float32 matrices in "ieee" (true float32) or, on a GPU, "tf32" while inside, and sum products of float16
    in float32; nothing else sets this.

    The setting is the process's and is read when a product is launched: on a GPU one thread at a time launches. On the
    CPU only true float32 is ever used, so that setting stays.
    """
    if device.type == "cpu":
        setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        if setting.fp32_precision != "ieee":
            setting.fp32_precision = "ieee"
        yield
        return
    with _launching:
        setting = torch.backends.cuda.matmul
        before = setting.fp32_precision, setting.allow_fp16_reduced_precision_reduction
        setting.fp32_precision, setting.allow_fp16_reduced_precision_reduction = precision, False
        try:
            yield
        finally:
            setting.fp32_precision, setting.allow_fp16_reduced_precision_reduction = before


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch with `count` threads for each thread that begins inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resident_bytes() -> int:
    """Memory of this process now, mapped files included."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most memory this process ever had, mapped files included."""
    return _status("VmHWM")


def allowed_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The memory that this process may have: the machine's, or less where its control group, a container's, has less.

    groups: where control groups are mounted, of version 2 or 1; own: the file that names this process's.
    """
    allowed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        group = top / name.strip("/")
        for each in (group, *(above for above in group.parents if above.is_relative_to(top))):
            with suppress(OSError, ValueError):  # another mount, or "max"
                allowed = min(allowed, int((each / limit).read_text()))
    return allowed


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
