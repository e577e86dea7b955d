"""What an augmentation will need before it starts: the memory of a worker, and whether first products are shared."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.reach import Reach, vector_bytes
from lattqe.expansion.rows import GATHER_BYTES, SHARED_BYTES, shares
from lattqe.store import FeatureSet, NeighborGraph
from lattqe.store.parts import RESIDENT_BYTES

if TYPE_CHECKING:
    from cluster.augmentation import Augmentation
    from lattqe.expansion import Method

# What the first products of a process bring in: pages of the mathematical libraries, and their buffers.
WARM_BYTES = 48 << 20


@dataclass(frozen=True)
class WorkerMemory:
    """Predicted memory of one worker, in bytes; `mapped` is shared by all workers of a node."""

    process: int  # Python, Ray, torch and the model
    mapped: int  # files: the vectors and the graph
    held: int  # what was fetched from S3, and vectors in one piece for DQE's search
    table: int  # shared first products
    buffers: int  # a batch of lists, or a part while it is put together

    @property
    def total(self) -> int:
        """All together."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """By name, for the plan."""
        return {"process and model": self.process, "mapped files (one copy for a node)": self.mapped,
                "held": self.held, "shared products": self.table, "buffers": self.buffers}


def resident_bytes() -> int:
    """Memory of this process now; a job's own process has imported and loaded what its workers will."""
    return memory_of_process("VmRSS")


def peak_bytes() -> int:
    """The most memory this process ever had, mapped files included."""
    return memory_of_process("VmHWM")


def memory_of_process(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def predict_memory(task: "Augmentation", features: FeatureSet, graph: NeighborGraph, method: "Method", reach: Reach,
                   process: int) -> WorkerMemory:
    """Predict from the sizes of everything; `process` is what `resident_bytes` says once the method is created."""
    mapped = held = 0
    for thing, all_of_it in ((features, reach.how == "map"), (graph, True)):
        size = thing.manifest.total_bytes
        if thing.place.is_local or (task.cache is not None and reach.how == "map"):
            mapped += size if all_of_it else 0
        else:
            held += min(size, RESIDENT_BYTES)
    if method.negatives and reach.how == "map" and len(features.manifest.parts) > 1:
        held += vector_bytes(features)
    itemsize = np.dtype(features.dtype).itemsize
    depth = method.depth(task.k)
    # In float32 in the method, and as stored: one batch in use, one being read, and what reading it takes.
    batch = max(GATHER_BYTES, (1 + depth) * features.dim * 4)
    block = min(task.block_rows, features.rows) * (features.dim * (8 + itemsize) + 2 * 8 * graph.k)
    # A part as an array, and as the bytes of its file.
    part = 2 * max(part.bytes for part in features.manifest.parts)
    table = 4 * features.rows * method.shared_width if task.share else 0
    return WorkerMemory(process + WARM_BYTES, mapped, held, table, max(batch + 3 * batch * itemsize // 4 + block, part))


def sharing(method: "Method", rows: int, again: bool = False) -> tuple[bool, str]:
    """Whether first products are shared, and why not; `again`: only a few rows are computed, for a grown index."""
    if not method.shared_width:
        return False, f"none: {method.name} has no first products that lists share" if method.name != "lattqe" else \
            "none: in this network the first products differ from list to list"
    if again:
        return False, "none: only the touched rows are computed"
    if not shares(method, rows):
        return False, (f"none: they would need {4 * rows * method.shared_width / 2**20:,.0f} MiB for each worker, more "
                       f"than {SHARED_BYTES >> 20} MiB")
    return True, f"{4 * rows * method.shared_width / 2**20:,.0f} MiB for each worker"


def spared(method: "Method", k: int, rows: int, expanded: int, tables: int) -> int:
    """Floating-point operations that sharing spared: in each list for each item, less the tables themselves."""
    return 2 * method.shared_products * (expanded * (1 + k) - tables * rows)
