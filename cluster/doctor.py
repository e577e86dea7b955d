"""Looking at every node of a cluster: versions, devices, memory, disk, clock, and whether storage can be written.

`accept` is the run for a device: every part that was only tested on torch's CPU device, on the real one. Bounds of all
kinds of products are attacked, the graph must be the CPU's to the last bit, faiss must agree, augmented rows must be
the CPU's within a tolerance; and the rates that the plans depend on are measured.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lattqe.errors import LattqeError
from lattqe.search.exact import exact_scores
from lattqe.search.graph import Lists as GraphLists
from lattqe.search.graph import compare_within, knn_graph
from lattqe.search.pairing import Clock
from lattqe.search.products import GPU_KINDS, Block, CoarseTorchProducts, Products, TorchProducts
from lattqe.search.second import faiss_graph

PACKAGES = ("ray", "torch", "numpy", "pyarrow", "boto3", "safetensors", "faiss-cpu", "faiss-gpu", "lattqe")
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
    import torch

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
        if "faiss-cpu" in report.packages and "faiss-gpu" in report.packages:
            lines.append(f"{report.node}: faiss-cpu hides faiss-gpu: pip uninstall faiss-cpu")
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


ROWS, DIM, K = 3000, 256, 20
SIDE = {"cpu": 1024, "cuda": 8192}  # rows of a tile that is timed
SECONDS = 0.3  # of each timing
TOLERANCE = 1e-3  # between augmented unit vectors of two devices


def accept(device: torch.device, rows: int = ROWS) -> dict[str, Any]:
    """Run everything; `passed` is whether all checks held, `checks` says which, `rates` what was measured."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, DIM))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16)
    x[rows // 2 :: 5] = x[1]  # ties
    checks: dict[str, dict[str, Any]] = {}
    for kind, products in kinds_on(device).items():
        worst = max(attack(products, make(rng)) for make in ATTACKS.values())
        checks[f"bound of {kind}"] = {"passed": worst <= 1, "largest error, of its bound": round(worst, 4)}
    expected = knn_graph(x, K)
    for kind, products in kinds_on(device).items():
        block = Block.load(x, products, K, widen=True)
        lists = compare_within(block, GraphLists.empty(rows, K), 0, [products], Clock())
        same = bool((lists.ids == expected[0]).all() and (lists.scores.astype(np.float32) == expected[1]).all())
        checks[f"graph by {kind}"] = {"passed": same, "rows": rows}
    clock = Clock()
    second = faiss_graph(x, K, clock=clock)
    checks["faiss agrees"] = {"passed": bool((second[0] == expected[0]).all()), "uncertain": clock.counts["uncertain"]}
    checks["augmentation"] = augmentation(x[:400], device)
    return {
        "device": str(device),
        "name": name_of(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "passed": all(check["passed"] for check in checks.values()),
        "checks": checks,
        "rates": rates(device),
    }


def kinds_on(device: torch.device) -> dict[str, Products]:
    """All kinds of products that a torch device has; on the CPU those that serve GPUs elsewhere."""
    return {
        kind: TorchProducts(device) if kind == "float32" else CoarseTorchProducts(device, kind) for kind in GPU_KINDS
    }


ATTACKS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "random": lambda rng: rng.standard_normal((200, 500)),
    "near ties": lambda rng: rng.standard_normal((1, 500)) + 1e-5 * rng.standard_normal((200, 500)),
    "norm ratios": lambda rng: rng.standard_normal((200, 64)) * 10.0 ** rng.uniform(-30, 15, (200, 1)),
    "column ratios": lambda rng: rng.standard_normal((200, 500)) * 10.0 ** rng.uniform(-12, 3, (1, 500)),
    "subnormals": lambda rng: rng.standard_normal((200, 64)) * 10.0 ** rng.uniform(-9, -4, (200, 1)),
    "one sign": lambda rng: np.full((50, 2048), 0.1) * rng.integers(1, 4, (50, 1)),
}


def attack(products: Products, x: np.ndarray) -> float:
    """The largest error of all products of x (n, D) with itself, as a share of the bound that was stated for it."""
    x = x.astype(np.float32)
    block = Block.load(x, products, widen=True)
    tile = torch.as_tensor(products.multiply(block.held, block.held)).cpu().numpy().astype(np.float64)
    i, j = np.divmod(np.arange(len(x) ** 2), len(x))
    exact = exact_scores(x, x, i, j).reshape(tile.shape)
    bound = products.error(block, block)[:, None] + 1e-15 * np.abs(exact)
    return float((np.abs(tile - exact) / bound).max())


def augmentation(x: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Rows augmented by the model that ships, there and on the CPU."""
    from lattqe.expansion.attention import AttentionExpansion
    from lattqe.expansion.rows import augment_rows
    from lattqe.search import FlatIndex

    ids, scores = knn_graph(x, min(256, len(x) - 1))
    index, rows = FlatIndex(x), np.arange(len(x))
    there, here = (
        augment_rows(index, rows, scores, ids, AttentionExpansion(dba=True, device=name), 32).vectors
        for name in (str(device), "cpu")
    )
    worst = float(np.abs(there - here).max())
    return {"passed": worst <= TOLERANCE, "largest difference": worst}


def rates(device: torch.device) -> dict[str, float]:
    """Products in GFLOP/s of each kind, selection in millions of entries and copies in GB/s, each in a second."""
    side = SIDE.get(device.type, SIDE["cuda"])
    x = np.random.default_rng(1).standard_normal((side, 512), dtype=np.float32)
    found = {}
    for kind, products in kinds_on(device).items():
        block = Block.load(x, products, widen=True)
        seconds = _seconds(partial(products.multiply, block.held, block.held), device)
        found[f"{kind}, GFLOP/s"] = 2 * side**2 * 512 / seconds / 1e9
    products = TorchProducts(device)
    tile = products.multiply(products.hold(x), products.hold(x))
    threshold = products.kth(tile, 20)
    found["selection, million entries/s"] = side**2 / _seconds(lambda: products.passing(tile, threshold), device) / 1e6
    found["copies to the device, GB/s"] = x.nbytes / _seconds(lambda: products.hold(x), device) / 1e9
    return {name: round(rate, 2) for name, rate in found.items()}


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, the fastest of as many as fit."""
    best, deadline = np.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < deadline or np.isinf(best):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return float(best)


def name_of(device: torch.device) -> str:
    """What the device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
