"""The neighbor graph of stored feature sets: the task, what does not fit together, and computing it in this process.

`build_graph` does it here, `cluster.graph.build_graph` on Ray: the same bytes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lattqe.device import pick_device
from lattqe.errors import LattqeError
from lattqe.search.graph import fastest_kind, knn_graph
from lattqe.search.pairing import Clock
from lattqe.search.rows import in_one
from lattqe.search.second import faiss_graph
from lattqe.store import FeatureSet, NeighborGraph, Pending, neighbors_table, part_row_counts, row_bytes
from lattqe.store.place import absolute, node_folder

MAX_ROWS = 2**31 - 1
SAMPLE_FLOPS = 4e9  # for each thread, of the graph of the sample that is measured: about a twentieth of a second
SAMPLE_ROWS = 1024, 8192
SAMPLE_PARTS = 16  # from which they are taken: every part that is read is checked as a whole


@dataclass(frozen=True)
class GraphTask:
    """What to compute: all that decides the result, and how a worker goes about it."""

    features: str
    to: str  # where a Pending has been begun
    k: int
    against: str | None = None  # a second set, its rows numbered after those of `features`
    known: str | None = None  # the second set's own graph
    cache: str | None = None  # node-local folder that keeps remote rows
    threads: int = 1
    engine: str = "lattqe"  # or "faiss": the second engine, for the same result
    kind: str | None = None  # of products (`lattqe.search.products.kinds_for`); the result does not depend on it

    def __post_init__(self) -> None:
        """Make addresses absolute, for the workers."""
        for name in ("features", "to", "against", "known"):
            value = getattr(self, name)
            object.__setattr__(self, name, value and absolute(value))
        object.__setattr__(self, "cache", node_folder(self.cache))


def open_sets(task: GraphTask) -> list[FeatureSet]:
    """The feature sets whose rows count through."""
    return [FeatureSet.open(uri, task.cache) for uri in (task.features, task.against) if uri is not None]


def check_sets(task: GraphTask) -> None:
    """Refuse sets and graphs that do not belong together."""
    sets = open_sets(task)
    rows = sum(each.rows for each in sets)
    if rows > MAX_ROWS:
        raise LattqeError(f"{rows} rows are more than a graph can number ({MAX_ROWS})")
    if (task.against is None) != (task.known is None):
        raise LattqeError(
            "--against and --into belong together: --into is the graph of the other set (make it once "
            "with `lattqe neighbors OTHER`); only to find rows of OTHER: `lattqe search OTHER FEATURES`"
        )
    if task.known is None:
        return
    if sets[1].dim != sets[0].dim:
        raise LattqeError(
            f"{sets[1].uri} has {sets[1].dim} dimensions and {sets[0].uri} {sets[0].dim}: use features of one extractor"
        )
    known = NeighborGraph.open(task.known)
    made_of = known.manifest.inputs.get("features", {}).get("digest", "nothing known")
    if made_of != sets[1].digest:
        raise LattqeError(
            f"{task.known} is not the graph of {task.against} (it was made of {made_of[:12]}, these have "
            f"{sets[1].digest[:12]}): compute theirs with `lattqe neighbors {task.against}`"
        )
    if known.k < task.k:
        raise LattqeError(
            f"{task.known} has {known.k} neighbors for each row, {task.k} are asked for: use -k {known.k}"
        )


def begin_graph(task: GraphTask) -> Pending:
    """Claim the destination of a graph, or join an earlier run of the same job."""
    sets = open_sets(task)
    rows = sum(each.rows for each in sets)
    fields = {"k": task.k}
    inputs = {"features": sets[0].as_input()}
    if task.against is not None and task.known is not None:
        inputs |= {"against": sets[1].as_input(), "known": NeighborGraph.open(task.known).as_input()}
    return Pending.begin(
        task.to,
        "neighbors",
        fields,
        part_row_counts(rows, row_bytes("neighbors", fields)),
        config={"job": "neighbors", "k": task.k},
        inputs=inputs,
    )


def measure_products(task: GraphTask) -> tuple[str, float]:
    """Measure on a sample of the rows: the fastest kind of products for them here, and how many it makes in a second
    with their selection.
    """
    features = open_sets(task)[0]
    wanted = int(np.clip(np.sqrt(SAMPLE_FLOPS * torch.get_num_threads() / max(features.dim, 1)), *SAMPLE_ROWS))
    return fastest_kind(
        features.gather(sample_rows(features, wanted)),
        task.k,
        features.rows,
        pick_device(),
        task.engine,
        seconds=0.5 if features.rows > wanted else 0.0,
    )


def sample_rows(features: FeatureSet, wanted: int) -> np.ndarray:
    """About `wanted` row numbers (m,), ascending, evenly from parts that lie evenly; of a remote set from its
    beginning, which spares fetching several parts.
    """
    if not features.place.is_local:
        return np.arange(min(wanted, features.rows))
    starts = features.parts.starts
    parts = np.unique(np.linspace(0, len(starts) - 2, SAMPLE_PARTS).astype(np.int64))
    shares = np.diff(np.linspace(0, wanted, len(parts) + 1).astype(np.int64))
    return np.concatenate(
        [
            np.unique(np.linspace(starts[part], starts[part + 1] - 1, share).astype(np.int64))
            for part, share in zip(parts, shares)
        ]
    )


class ProductClock(Clock):
    """A clock that tells of each product that is done."""

    def __init__(self, on_products: Callable[[int], None]) -> None:
        super().__init__()
        self._on_products = on_products

    def count(self, name: str, amount: int) -> None:
        """See Clock."""
        super().count(name, amount)
        if name == "products":
            self._on_products(amount)


def build_graph(task: GraphTask, on_products: Callable[[int], None] = lambda products: None) -> dict[str, float]:
    """Compute and publish all missing parts of `task.to` in this process; the seconds by what was done.

    `on_products(n)` is called after each n products (of two vectors). The manifest is the caller's.
    """
    pending, clock, started = Pending.attach(task.to), ProductClock(on_products), time.perf_counter()
    missing = pending.missing()
    if missing:
        rows = in_one([piece for each in open_sets(task) for piece in each.pieces()])
        device = pick_device()
        if task.engine == "faiss":
            I, D = faiss_graph(rows, task.k, device=device, clock=clock)
        else:
            I, D = knn_graph(rows, task.k, device=None if device.type == "cpu" else device, clock=clock, kind=task.kind)
        for part in missing:
            start = sum(pending.part_rows[:part])
            lists = slice(start, start + pending.part_rows[part])
            with clock("writing"):
                pending.publish(part, neighbors_table(I[lists], D[lists]))
    return dict(clock.seconds) | {"all": time.perf_counter() - started}


def publish_graph(features: FeatureSet, k: int, to: str) -> NeighborGraph:
    """The exact graph of a feature set, computed here and published, unless it is there already."""
    task = GraphTask(features.uri, to, k)
    pending = begin_graph(task)
    build_graph(task)
    pending.finish()
    return NeighborGraph.open(to)
