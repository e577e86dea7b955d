"""Extraction on Ray: each worker holds the network, decodes ahead of it, and publishes its blocks itself."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import ray

from cluster.blocks import BlockPolicy, BlockSummary, run_blocks
from cluster.graph_worker import places
from cluster.monitor import Tally, require_resources
from cluster.session import gpus_available, worker_device
from lattqe.errors import LattqeError
from lattqe.extraction.encoder import EncoderSpec, open_encoder
from lattqe.extraction.image import Framing, ImageList
from lattqe.extraction.stage import LIST_NAME, Describer, block_table
from lattqe.store import Pending, open_place
from lattqe.store.place import traffic

# A worker has one block at the network and the next one decoding its first images.
BLOCKS_AT_ONCE = 2
POLICY = BlockPolicy(window=BLOCKS_AT_ONCE, start_timeout=600.0)  # a worker reads the whole network first
WORKERS_PER_NODE = 8  # on CPUs: more networks side by side would need more memory than machines have
DECODING_THREADS = {"cpu": 2, "cuda": 4}


@dataclass(frozen=True)
class ExtractionTask:
    """What a worker needs to know: addresses and settings, never arrays."""

    stage_uri: str
    root: str
    encoder: EncoderSpec
    framing: Framing
    scales: tuple[float, ...]
    batch: int
    dim: int
    dtype: str


@dataclass(frozen=True)
class WorkerPlan:
    """How many workers, and what each has."""

    count: int
    cpus: int
    gpus: int
    grows: bool = False  # whether nodes that join later get some, too

    @property
    def device(self) -> str:
        """Where the networks run."""
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True)
class BlockReport:
    """What became of a block: for the progress bar and for --max-bad."""

    images: int
    bad: list[tuple[str, str]]  # id and reason
    traffic: tuple[int, int] = (0, 0)  # bytes read and written meanwhile


def plan_workers(wanted: int | None, device: str = "auto") -> WorkerPlan:
    """One worker for each GPU of the cluster, or workers of one CPU each (of more on machines with more than eight).

    device: "cpu", "cuda", or "auto" for what LATTQE_DEVICE says, and where it says nothing GPUs if there are any.
    A network on one thread beside another beats one on two threads: nothing is waited for at the end of each layer.
    """
    if wanted is not None and wanted < 1:
        raise LattqeError(f"--workers {wanted} must be at least 1")
    if device not in ("auto", "cpu", "cuda"):
        raise LattqeError(f"device {device!r} is not auto, cpu or cuda")
    device = worker_device() if device == "auto" else device
    gpus = gpus_available() if device == "cuda" else 0
    if device == "cuda" and not gpus:
        raise LattqeError("device 'cuda' requested, but the cluster has no GPU: use --device cpu")
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    smallest = min((cpus for cpus in nodes if cpus), default=1)  # a worker must fit on any node
    if gpus:
        return WorkerPlan(wanted or gpus, min(DECODING_THREADS["cuda"], smallest), gpus=1, grows=wanted is None)
    if wanted is not None:
        return WorkerPlan(wanted, max(1, min(sum(nodes) // wanted, smallest)), gpus=0)
    each = max(1, smallest // WORKERS_PER_NODE)
    return WorkerPlan(max(1, sum(cpus // each for cpus in nodes)), each, gpus=0, grows=True)


class ExtractionWorker:
    """Describes blocks of images; may be started again anywhere at any time."""

    def __init__(self, task: ExtractionTask, device: str, cpus: int) -> None:
        import torch

        torch.set_num_threads(cpus)
        self.task = task
        self.pending = Pending.attach(task.stage_uri)
        self.starts = np.cumsum([0, *self.pending.part_rows])
        self.images = ImageList.load(task.root, open_place(task.stage_uri), LIST_NAME)
        self.describer = Describer(
            open_encoder(task.encoder, torch.device(device)),
            task.dim,
            open_place(task.root),
            task.framing,
            task.scales,
            task.batch,
            threads=DECODING_THREADS[device],
        )

    def run(self, block: int) -> BlockReport:
        """Describe and publish one block."""
        entries = list(self.images.entries(int(self.starts[block]), int(self.starts[block + 1])))
        described = self.describer.describe(entries)
        self.pending.publish(block, block_table(entries, described, self.task.dtype))
        bad = [(entry.id, reason) for entry, reason in zip(entries, described.reasons) if reason]
        return BlockReport(len(entries), bad, traffic.take())


def extract_blocks(
    task: ExtractionTask, workers: WorkerPlan, blocks: list[int], on_done: Callable[[BlockReport], None]
) -> BlockSummary:
    """Describe the given blocks; `on_done` is called for each as it is published."""
    count = min(workers.count, len(blocks))
    part_rows = Pending.attach(task.stage_uri).part_rows
    require_resources({"CPU": workers.cpus, "GPU": workers.gpus}, count)

    actor = ray.remote(num_cpus=workers.cpus, num_gpus=workers.gpus, max_concurrency=BLOCKS_AT_ONCE)(ExtractionWorker)

    def make_worker(number: int) -> Any:
        return actor.remote(task, workers.device, workers.cpus)

    return run_blocks(
        make_worker,
        count,
        blocks,
        on_done=lambda _, report: on_done(report),
        policy=POLICY,
        work=Tally("extract", lambda block: part_rows[block], traffic=attrgetter("traffic")),
        room=(lambda left: min(places(workers.cpus), left)) if workers.grows else None,
    )
