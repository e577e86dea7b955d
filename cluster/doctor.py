"""Looking at every node of a cluster: versions, devices, memory, disk, clock, and whether storage can be written."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lattqe.errors import LattqeError

PACKAGES = ("ray", "torch", "numpy", "pyarrow", "boto3", "safetensors", "faiss-cpu", "faiss-cuda", "lattqe")
LEAST_SHARED_MEMORY = 1 << 30  # Ray falls back to slow files on disk below what its object store wants
LEAST_DISK = 10 << 30  # a cached million rows of 2048 halves, and room for parts in the making
# The oldest driver for each CUDA that a torch wheel may be built with (NVIDIA, minor version compatibility).
DRIVER_FLOOR = {11: 450, 12: 525, 13: 580}
LARGEST_SKEW = 5.0  # seconds; S3 refuses signatures that are minutes off, tokens expire


@dataclass
class NodeReport:
    """What one node says of itself."""

    node: str
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)  # as torch sees them
    driver: str = ""  # NVIDIA's, "" where there is none
    cuda: str = ""  # that torch was built with, "" for a wheel without
    faiss: str = ""
    shared_memory: int = 0
    disk: int = 0
    clock_skew: float = 0.0
    storage: str = ""  # "" not asked, "ok", or what went wrong
    error: str = ""


def examine_node(name: str, place_uri: str | None) -> dict[str, Any]:
    """Report on the node this runs on; `place_uri` is written to, read back and cleaned."""
    report = NodeReport(name, python=platform.python_version())
    for package in PACKAGES:
        try:
            report.packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    report.gpus, report.cuda = _gpus()
    report.driver, report.faiss = _driver(), _faiss_build()
    report.shared_memory = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    report.disk = shutil.disk_usage(os.environ.get("TMPDIR", "/tmp")).free
    if place_uri is not None:
        report.storage = _try_storage(place_uri)
    return asdict(report)


def _gpus() -> tuple[list[str], str]:

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return names, torch.version.cuda or ""


def _driver() -> str:
    """The version of the NVIDIA driver, as its own tool says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = told.stdout.split()
    return lines[0] if told.returncode == 0 and lines else ""


def _faiss_build() -> str:
    try:
        import faiss
    except ImportError as error:
        return f"missing: {error}"
    return f"{faiss.__version__} {'GPU' if hasattr(faiss, 'StandardGpuResources') else 'CPU'}"


def _try_storage(uri: str) -> str:
    from lattqe.store import open_place

    name, content = f"doctor-{uuid.uuid4().hex}", b"lattqe doctor"
    try:
        place = open_place(uri)
        place.create(name, content)
        came_back = place.read(name)
        place.delete(name)
    except LattqeError as error:
        return str(error)
    return "ok" if came_back == content else "what was written came back different"


def examine(place_uri: str | None, timeout: float = 60.0) -> list[NodeReport]:
    """Examine every living node of the connected cluster, all at once."""
    nodes = {
        node["NodeID"]: f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})" for node in ray.nodes() if node["Alive"]
    }
    examining = {node: _there(examine_node, node).remote(name, place_uri) for node, name in nodes.items()}
    deadline = time.monotonic() + timeout
    reports = []
    for node, name in nodes.items():
        try:
            report = NodeReport(**ray.get(examining[node], timeout=max(deadline - time.monotonic(), 0.1)))
            report.clock_skew = _clock_skew(node, timeout)
        except ray.exceptions.RayError as error:
            report = NodeReport(name, error=str(error).strip().splitlines()[-1])
        reports.append(report)
    return reports


def _there(function: Callable[..., Any], node: str) -> Any:
    """A task that runs on this node or nowhere, and takes no CPU from others."""
    return ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))(function)


def _look_at_clock() -> float:
    return time.time()


def _clock_skew(node: str, timeout: float) -> float:
    """Seconds that a node's clock is off for certain: it was looked at somewhere between our own two looks."""
    sent = time.time()
    told = ray.get(_there(_look_at_clock, node).remote(), timeout=timeout)
    return max(0.0, told - time.time(), sent - told)


def to_fix(reports: list[NodeReport]) -> list[str]:
    """What is wrong, each as one line that says what to do."""
    lines = []
    for report in reports:
        if report.error:
            lines.append(f"{report.node}: does not answer ({report.error}): restart Ray there")
            continue
        if report.shared_memory < LEAST_SHARED_MEMORY:
            lines.append(
                f"{report.node}: {report.shared_memory >> 20} MiB of shared memory free: "
                "give the container a larger /dev/shm (--shm-size)"
            )
        if report.disk < LEAST_DISK:
            lines.append(f"{report.node}: {report.disk >> 30} GiB of disk free: clean up, or point TMPDIR elsewhere")
        if report.clock_skew > LARGEST_SKEW:
            lines.append(f"{report.node}: its clock is {report.clock_skew:.0f} s off: start a time service (chrony)")
        if report.storage not in ("", "ok"):
            lines.append(f"{report.node}: storage: {report.storage}")
        lines += _driver_to_fix(report)
        if "faiss-cpu" in report.packages and "faiss-cuda" in report.packages:
            lines.append(
                f"{report.node}: faiss-cpu and faiss-cuda overwrite each other: pip uninstall both, then pip install "
                "'lattqe[gpu]'"
            )
        if report.faiss.startswith("missing"):
            lines.append(f"{report.node}: faiss is {report.faiss}: pip install 'lattqe[cpu]' or 'lattqe[gpu]'")
        elif report.gpus and report.faiss.endswith("CPU"):
            lines.append(
                f"{report.node}: has {len(report.gpus)} GPUs but a faiss without them: "
                "pip uninstall faiss-cpu; pip install 'lattqe[gpu]'"
            )
    return lines + _differences(reports)


def _driver_to_fix(report: NodeReport) -> list[str]:
    """A GPU that torch cannot use, and why."""
    if not report.driver:
        return []
    if not report.cuda:
        return [
            f"{report.node}: has an NVIDIA driver ({report.driver}) but a torch without CUDA: build the image with "
            "Dockerfile, or pip install torch from PyPI"
        ]
    floor = DRIVER_FLOOR.get(int(report.cuda.split(".")[0]))
    if floor is not None and int(report.driver.split(".")[0]) < floor:
        return [
            f"{report.node}: driver {report.driver} is too old for torch's CUDA {report.cuda}: install {floor} or newer"
        ]
    if not report.gpus:
        return [
            f"{report.node}: driver {report.driver} is there, but torch sees no GPU: start the container with GPUs "
            "(--gpus all, or the NVIDIA runtime)"
        ]
    return []


def _differences(reports: list[NodeReport]) -> list[str]:
    """Versions that differ between nodes: results would depend on where a block runs."""
    answered = [report for report in reports if not report.error]
    lines = []
    for name in ("python", *PACKAGES):
        versions = {report.python if name == "python" else report.packages.get(name, "none") for report in answered}
        if len(versions) > 1 and not name.startswith("faiss"):
            lines.append(f"{name} differs between nodes ({', '.join(sorted(versions))}): install the same everywhere")
    return lines
