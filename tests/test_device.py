"""Settings of a process that a computation needs and must give back."""

import os
import threading
from pathlib import Path

import pytest
import torch

from lattqe.device import allowed_bytes, matmul_precision

ROOT = Path(__file__).resolve().parent.parent
GPU = torch.device("cuda")  # none is used: torch has the setting without one


@pytest.fixture
def setting():
    found = torch.backends.cuda.matmul
    before = found.fp32_precision
    yield found
    found.fp32_precision = before


@pytest.mark.parametrize("before", ["ieee", "tf32"])
def test_products_on_a_gpu_have_the_precision_asked_for_and_others_their_own(setting, before):
    setting.fp32_precision = before
    with matmul_precision(GPU):
        assert setting.fp32_precision == "ieee"
        with matmul_precision(GPU, "tf32"):
            assert setting.fp32_precision == "tf32"
        assert setting.fp32_precision == "ieee"
    assert setting.fp32_precision == before
    with pytest.raises(torch.OutOfMemoryError), matmul_precision(GPU, "tf32"):
        raise torch.OutOfMemoryError
    assert setting.fp32_precision == before, "also where a product found no memory"


def test_one_thread_at_a_time_has_the_precision_of_a_gpu(setting):
    """The setting is the process's: a thread that wants another one waits until this one has launched its product."""
    seen, begun = [], threading.Event()

    def launch():
        begun.set()
        with matmul_precision(GPU, "tf32"):
            seen.append(setting.fp32_precision)

    with matmul_precision(GPU):
        other = threading.Thread(target=launch)
        other.start()
        begun.wait()
        other.join(timeout=0.05)
        assert (setting.fp32_precision, seen) == ("ieee", [])
    other.join()
    assert seen == ["tf32"]


def test_products_on_a_cpu_leave_the_setting_of_gpus_alone(setting):
    setting.fp32_precision = "tf32"
    with matmul_precision(torch.device("cpu")):
        assert setting.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


def test_peaks_are_asked_for_in_one_way():
    """`lattqe.device.peak_bytes`: a new process inherits ru_maxrss from the one that started it."""
    files = [path for layer in ("lattqe", "cluster", "jobs") for path in sorted((ROOT / layer).rglob("*.py"))]
    assert [path.name for path in files if "ru_maxrss" in path.read_text()] == []


@pytest.mark.parametrize(
    ("named", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "1000"}, 1000),  # version 2, seen from inside a container
        ("0::/a/b\n", {"a/memory.max": "3000", "a/b/memory.max": "max"}, 3000),  # the group above counts too
        ("0::/a/b\n", {"memory.max": "2000", "a/b/memory.max": "max"}, 2000),
        ("4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "4000"}, 4000),  # version 1
        ("4:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "4000", "a/memory.max": "5000"}, None),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),  # version 1's "max"
        ("0::/../b\n", {}, None),
        (None, {"memory.max": "1000"}, None),  # no Linux
    ],
)
def test_the_memory_of_a_control_group(named, limits, expected, tmp_path):
    own = tmp_path / "cgroup"
    if named is not None:
        own.write_text(named)
    for name, text in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{text}\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert allowed_bytes(tmp_path / "groups", own) == (machine if expected is None else expected)
