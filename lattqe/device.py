"""The one seam between CPU and GPU: everything that allocates asks here where to, and how exactly to multiply.

And the memory of this process, as the system counts it.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lattqe.errors import LattqeError


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


def room_on(device: torch.device) -> int:
    """Bytes that may be put on a device to stay there: half of what a GPU has free. None on the CPU, where rows are
    read where they are.
    """
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 0


class Sender:
    """Copies to a device; to a GPU from pinned memory and in its own stream, beside the device's other work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
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
    """Multiply float32 matrices in "ieee" (true float32) or, on a GPU, "tf32" while inside; nothing else sets this.

    The setting is the process's and is read when a product is launched: on a GPU one thread at a time launches. On the
    CPU nothing but true float32 is ever wanted, so that setting stays.
    """
    if device.type == "cpu":
        setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        if setting.fp32_precision != "ieee":
            setting.fp32_precision = "ieee"
        yield
        return
    with _launching:
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = precision
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = before


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


def _status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
