"""The neighbor graph of stored feature sets: the task, what does not fit together, and computing it in this process.

`build_graph` does it here, `cluster.graph.build_graph` on Ray: the same bytes. `build_approximate` makes an approximate
one, `cluster.graph.build_approximate` on Ray: clusters are found once, then each part is made by itself. A
finished graph says something of its collection: hubs, rows that are alone, how near the nearest are.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from lattqe.device import peak_bytes, pick_device
from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.search.approximate import SEED, Approximation, Membership, Recall, approximate, lists_of
from lattqe.search.graph import faiss_graph, fastest_kind, knn_graph, sample_size
from lattqe.search.lanes import lanes_on
from lattqe.search.products import Block
from lattqe.search.rows import Clock, Rows, in_one
from lattqe.store import FeatureSet, NeighborGraph, Pending, neighbors_table, part_row_counts, row_bytes
from lattqe.store.manifest import WORK, canonical_json, parse_json, seal_bytes, unseal_bytes
from lattqe.store.place import absolute, node_folder, traffic

BLOCK_ROWS = 65_536
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
MAX_ROWS = 2**31 - 1
SAMPLE_PARTS = 16  # from which they are taken: every part that is read is checked as a whole
# Which clusters a row searches. Graphs of earlier versions do not say: their rows were in several clusters instead, and
# parts of both must not come together in one graph.
SEARCHES = "clusters within a margin"
CLUSTERS = f"{WORK}nearest"  # of an approximate graph: every process that makes a part of it needs the same
HEADER_BYTES = 4096  # at most, of that file: one line of JSON before the numbers


@dataclass(frozen=True)
class GraphStatistics:
    """Numbers of a graph of n rows and k neighbors.

    in_degrees (n,): in how many lists each row is. first (m,) float32: similarity of the first neighbor of the m rows
    that have one. rows: n.
    """

    in_degrees: np.ndarray = field(repr=False)
    first: np.ndarray = field(repr=False)
    rows: int

    @property
    def gini(self) -> float:
        """How unequal in-degrees are: 0 where all are equal, near 1 where a few rows are in all lists."""
        return gini(self.in_degrees)

    @property
    def skewness(self) -> float:
        """Of the in-degrees, the usual measure of hubness: 0 where they are symmetric, large where there are hubs."""
        centred = self.in_degrees - self.in_degrees.mean()
        spread = float(np.sqrt(np.mean(centred**2)))
        return float(np.mean(centred**3)) / spread**3 if spread > 0 else 0.0

    @property
    def orphans(self) -> int:
        """Rows that are in no list."""
        return int((self.in_degrees == 0).sum())

    @property
    def alone(self) -> int:
        """Rows without a neighbor."""
        return self.rows - len(self.first)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        top = np.sort(self.in_degrees)[::-1][: max(1, self.rows // 100)]
        quantiles = np.quantile(self.first, QUANTILES) if len(self.first) else []
        return {
            "in_degree": {
                "gini": round(self.gini, 4),
                "skewness": round(self.skewness, 4),
                "largest": int(self.in_degrees.max()),
                "largest_row": int(self.in_degrees.argmax()),
                "share_of_top_percent": round(float(top.sum()) / max(1, int(self.in_degrees.sum())), 4),
            },
            "rows_in_no_list": self.orphans,
            "rows_without_neighbors": self.alone,
            "first_similarity": {f"{100 * q:g}%": round(float(value), 4) for q, value in zip(QUANTILES, quantiles)},
        }


def graph_statistics(graph: NeighborGraph) -> GraphStatistics:
    """Read the graph once; 4 bytes for each row and 8 for its in-degree are held."""
    rows = graph.database_rows or graph.rows
    degrees, first = np.zeros(rows, np.int64), []
    for _, I, D in graph.blocks(BLOCK_ROWS):
        degrees += np.bincount(I[I >= 0], minlength=rows)
        first.append(D[I[:, 0] >= 0, 0])
    return GraphStatistics(degrees, np.concatenate(first), graph.rows)


def gini(values: np.ndarray) -> float:
    """The Gini coefficient of numbers (n,) from 0 on: half the mean difference of two of them over their mean."""
    total = float(values.sum())
    if not total:
        return 0.0
    ordered, ranks = np.sort(values).astype(np.float64), np.arange(1, len(values) + 1)
    return float((2 * ranks - len(values) - 1) @ ordered / (len(values) * total))


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
    kind: str | None = None  # of products (`lattqe.search.lanes.kinds_for`); the result does not depend on it
    recall: float | None = None  # of an approximate graph; None: exact

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
            "--against and --into go together: --into is the graph of the other set (make it once "
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
            f"{task.known} has {known.k} neighbors per row, but {task.k} were requested: use -k {known.k}"
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
        config={"job": "neighbors", "k": task.k}
        | ({} if task.recall is None else {"exact": False, "recall": task.recall, "seed": SEED, "searches": SEARCHES}),
        inputs=inputs,
    )


def measure_products(task: GraphTask) -> tuple[str, float]:
    """Measure on a sample of the rows: the fastest kind of products for them here, and how many it makes in a second
    with their selection.
    """
    features = open_sets(task)[0]
    wanted = sample_size(features.dim)
    return fastest_kind(
        features.gather(sample_rows(features, wanted)),
        task.k,
        features.rows,
        pick_device(),
        task.engine,
        seconds=0.5 if features.rows > wanted else 0.0,
    )


@dataclass
class Approximated:
    """What making an approximate graph took, over all workers; `measured` is what its manifest says of it."""

    measured: dict[str, Any]
    planning: float  # seconds for clusters, margin and recall
    took: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    predicted_bytes: int = 0  # of a worker on Ray, mapped files included

    def add(self, result: dict[str, Any]) -> None:
        """Count one part."""
        for name, spent in result["seconds"].items():
            self.seconds[name] += spent
        self.counts.update(result["counts"])
        self.peak_bytes = max(self.peak_bytes, result["peak_bytes"])


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


class ClusterWorker:
    """Makes the parts of an approximate graph, one after the other; built from addresses only.

    `threads`: how many torch has, and so how many share the rows of a part; by default as many as it has here.
    """

    def __init__(self, task: GraphTask, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.task, self.pending = task, Pending.attach(task.to)
        self.rows = in_one([piece for each in open_sets(task) for piece in each.pieces()])
        self.plan = agree_on_clusters(self.pending, self.rows, task)
        with lanes_on() as lanes:
            self.whole = Block.load(self.rows, lanes[0], task.k)
        self.membership = Membership(self.plan.nearest, self.plan.clusters, self.whole.surplus)

    def run(self, part: int, on_rows: Callable[[int], None] = lambda rows: None) -> dict[str, Any]:
        """Make one part; returns what it took."""
        clock = Clock()
        start = sum(self.pending.part_rows[:part])
        stop = start + self.pending.part_rows[part]
        with lanes_on() as lanes:
            D, I = lists_of(self.whole, self.membership, start, stop, self.task.k, lanes, clock, on_rows)
        with clock("writing"):
            self.pending.publish(part, neighbors_table(I, D))
        return {
            "seconds": dict(clock.seconds),
            "counts": dict(clock.counts),
            "peak_bytes": peak_bytes(),
            "traffic": traffic.take(),
        }


def agree_on_clusters(pending: Pending, rows: Rows, task: GraphTask) -> Approximation:
    """The clusters of an earlier run or of another process that makes the same graph, or else new ones, for all."""
    place = pending.place
    if not place.exists(CLUSTERS):
        with lanes_on() as lanes:
            found = approximate(Block.load(rows, lanes[0], task.k), task.k, task.recall or 0.0, lanes)
        facts = {"wanted": found.wanted, "clusters": found.clusters, "planned": found.planned, **asdict(found.recall)}
        header = canonical_json(facts)
        header += b" " * (-(len(header) + 1) % found.nearest.itemsize) + b"\n"  # so that numbers are read in place
        with suppress(AlreadyExistsError):
            place.create(CLUSTERS, seal_bytes(header + found.nearest.tobytes()))
    try:
        body = unseal_bytes(place.read(CLUSTERS), f"{pending.uri}/{CLUSTERS}")
    except CorruptDataError:
        place.delete(CLUSTERS)  # the same command again finds the same clusters again
        raise
    header, _, _ = bytes(body[:HEADER_BYTES]).partition(b"\n")
    facts = parse_json(header, f"{pending.uri}/{CLUSTERS}")
    wanted, clusters, planned = (facts.pop(name) for name in ("wanted", "clusters", "planned"))
    nearest = np.frombuffer(body, dtype=np.int32, offset=len(header) + 1).reshape(len(rows), -1)
    return Approximation(nearest, clusters, planned, wanted, Recall(**facts))


def build_approximate(task: GraphTask, on_rows: Callable[[int], None] = lambda rows: None) -> Approximated:
    """Make and publish all missing parts of an approximate graph in this process; the manifest is the caller's."""
    started = time.perf_counter()
    worker = ClusterWorker(task)
    made = Approximated(worker.plan.facts(), planning=time.perf_counter() - started)
    for part in worker.pending.missing():
        made.add(worker.run(part, on_rows))
    made.took = time.perf_counter() - started
    return made


def publish_graph(features: FeatureSet, k: int, to: str) -> NeighborGraph:
    """The exact graph of a feature set, computed here and published, unless it is there already."""
    task = GraphTask(features.uri, to, k)
    pending = begin_graph(task)
    build_graph(task)
    pending.finish()
    return NeighborGraph.open(to)
