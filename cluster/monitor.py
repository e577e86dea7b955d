"""Looking at a cluster: what its work is counted by, what its nodes have room for, what each says of itself.

What runs is counted for the Ray dashboard and Prometheus, and written to the log file. Metrics carry the Ray job's id
(`job`), the kind of work (`kind`) and the number of the actor that did it (`shard`); Ray puts `ray_` before their
names, and `_total` after those of counters. One count costs some microseconds and is made once for a block, which takes
seconds.

A node reports its versions, devices, memory, disk and clock, and whether storage can be written from there.
"""

import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lattqe.cost import Machines
from lattqe.errors import LattqeError, event
from lattqe.store.place import traffic

RATE_SECONDS = 60.0  # rows/s are those of the last minute
BLOCK_SECONDS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
TAGS = ("job", "kind", "shard")
PACKAGES = ("ray", "torch", "numpy", "pyarrow", "boto3", "safetensors", "faiss-cpu", "faiss-cuda", "lattqe")
LEAST_SHARED_MEMORY = 1 << 30  # Ray falls back to slow files on disk below what its object store needs
LEAST_DISK = 10 << 30  # a cached million rows of 2048 halves, and room for parts in the making
# The oldest driver for each CUDA that a torch wheel may be built with (NVIDIA, minor version compatibility).
DRIVER_FLOOR = {11: 450, 12: 525, 13: 580}
LARGEST_SKEW = 5.0  # seconds; S3 refuses signatures that are minutes off, tokens expire


@dataclass(frozen=True)
class Tally:
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
        self.rate = Gauge("lattqe_rows_per_second", "Rows finished per second, over the last minute.", ("job", "kind"))
        self.blocks = Counter("lattqe_blocks_done", "Units of work finished.", TAGS)
        self.seconds = Histogram(
            "lattqe_block_seconds", "Seconds from sending a unit of work to its result.", BLOCK_SECONDS, TAGS
        )
        self.retries = Counter("lattqe_retries", "Units of work retried after a failure.", TAGS)
        self.lost = Counter("lattqe_actors_lost", "Actors that died and were replaced.", TAGS)
        self.copies = Counter("lattqe_spare_copies", "Stragglers that were started a second time elsewhere.", TAGS)
        self.read = Counter("lattqe_bytes_read", "Bytes read from storage.", ("job", "kind"))
        self.written = Counter("lattqe_bytes_written", "Bytes written to storage.", ("job", "kind"))


@lru_cache(maxsize=1)
def _metrics(cluster: str, job: str) -> Metrics:
    return Metrics(job)


def metrics() -> Metrics:
    """Those of this process, made again when it joins another Ray."""
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
        """Count bytes that a worker has moved; it returns them with its result, as its own counts may die with it."""
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
    import torch  # every job counts its work here, few look at devices

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
    from lattqe.store.local import LocalPlace

    name, content = f"doctor-{uuid.uuid4().hex}", b"lattqe doctor"
    try:
        place = open_place(uri)
        new = isinstance(place, LocalPlace) and not place.path.exists()
        place.create(name, content)
        came_back = place.read(name)
        place.delete(name)
    except LattqeError as error:
        return str(error)
    if new:
        with suppress(OSError):  # another node may be writing there
            Path(uri).expanduser().rmdir()
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


def driver_to_fix(name: str) -> list[str]:
    """What keeps torch from using the GPUs of the machine this runs on, each as one line that says what to do."""
    gpus, cuda = _gpus()
    return _driver_to_fix(NodeReport(name, gpus=gpus, driver=_driver(), cuda=cuda))


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
            lines.append(
                f"{name} differs between nodes ({', '.join(sorted(versions))}): install the same version everywhere"
            )
    return lines


def connected_machines(workers: int | None = None) -> Machines:
    """The connected cluster, its nodes taken as equal; `workers`: as many as will share the work."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    count = max(len(nodes), 1)
    cpus, gpus, memory = (sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU", "memory"))
    return Machines(count, max(int(cpus // count), 1), int(gpus // count), memory / count, asked=workers)


def room_for(per_worker: Mapping[str, float]) -> int:
    """How many workers that need so much each the nodes have room for: a worker is never spread over two nodes."""
    nodes, needs = (node["Resources"] for node in ray.nodes() if node["Alive"]), per_worker.items()
    return sum(min(int((node.get(name, 0) + 1e-9) // amount) for name, amount in needs if amount) for node in nodes)


def fitting_threads(workers: int, beside: Mapping[str, float]) -> int:
    """The CPUs of each worker: its share of all, but no more than leave room for all, with what each takes `beside`."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    share = min(sum(cpus) // workers, max(cpus, default=1))
    return next((each for each in range(share, 1, -1) if room_for({"CPU": each, **beside}) >= workers), 1)


def require_resources(per_worker: Mapping[str, float], workers: int, timeout: float = 60.0) -> None:
    """Wait until the nodes have room for that many workers, or say plainly what is missing.

    An autoscaling cluster grows while we wait; a fixed one that is too small is reported after `timeout` seconds
    instead of leaving actors pending forever.
    """
    deadline = time.monotonic() + timeout
    while (room := room_for(per_worker)) < workers:
        if time.monotonic() >= deadline:
            owned, needs = ray.cluster_resources(), [(name, amount) for name, amount in per_worker.items() if amount]
            short = [(name, amount) for name, amount in needs if amount * workers > owned.get(name, 0) + 1e-9]
            told = [f"{amount * workers:g} {name} (the cluster has {owned.get(name, 0):g})" for name, amount in short]
            if not short:
                each = " and ".join(f"{amount:g} {name}" for name, amount in needs)
                told = [f"{each} each on one node (there is room for {room} of them)"]
            raise LattqeError(f"{workers} workers need {', '.join(told)}: ask for fewer or smaller ones, or add nodes")
        time.sleep(min(1.0, timeout))
