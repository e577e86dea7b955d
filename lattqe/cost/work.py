"""The units of cost: what a stage of a job does (`Work`), on which machines (`Machines`), and what that takes (`Cost`).

Work is counted and does not depend on the machine. Seconds are work divided by speeds; each speed says where it comes
from. Measured means on two cores of an AMD EPYC with AVX2, shared with other programs, in processor time.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from lattqe.errors import LattqeError
from lattqe.store.manifest import Manifest, part_row_counts, row_bytes
from lattqe.store.parts import PARTS_AHEAD, RESIDENT_BYTES

GB = 10**9
PART_QUERIES = 8192  # of one part of the ranks, and the most that a death can cost
RANGE_BYTES = 8 << 20  # of one request of a large object: `lattqe.store.s3` reads by these
# Bytes beside the rows, of files written by this version: an Arrow part's own, a manifest's without and with a part.
ARROW_BYTES, MANIFEST_BYTES, PART_ENTRY, RECEIPT_BYTES, CLAIM_BYTES = 900, 900, 130, 170, 700

# Of one core in float32 products. Fitted with the constants of selection and scoring (graph.py) to graphs of 10,000
# to 30,000 rows, 64 to 2048 columns, k from 32 to 256, in one and four blocks: benchmarks/cost.py.
CORE_FLOPS = 74e9
# Of one GPU where nothing is assumed: an A10G in true float32 products. Its data sheet, not measured.
GPU_TFLOPS = 10.0
# Share of a GPU's speed that is left beside selection and waiting. Assumed: no GPU was there to measure.
GPU_SHARE = 0.8
# Rough list prices of us-east-1 at the end of 2025, in dollars.
PUT_PRICE, GET_PRICE = 0.005 / 1000, 0.0004 / 1000  # a PUT or LIST; a GET or HEAD; a DELETE is free
STORED_PRICE = 0.023 / GB  # for a byte and month
# Nodes up, image pulled, installed. Assumed.
START_SECONDS = 600.0


# What S3 calls its operations, by their price.
PUT_OPERATIONS = (
    "PutObject",
    "CopyObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
    "ListObjectsV2",
    "ListMultipartUploads",
    "AbortMultipartUpload",
)
GET_OPERATIONS = ("GetObject", "HeadObject")


@dataclass(frozen=True)
class Requests:
    """Requests to S3, by what they cost; a local disk has none."""

    puts: int = 0  # PUT, POST and LIST
    gets: int = 0  # GET and HEAD
    deletes: int = 0

    def __add__(self, other: "Requests") -> "Requests":
        return Requests(self.puts + other.puts, self.gets + other.gets, self.deletes + other.deletes)

    def __mul__(self, times: int) -> "Requests":
        return Requests(self.puts * times, self.gets * times, self.deletes * times)

    @property
    def total(self) -> int:
        """All of them."""
        return self.puts + self.gets + self.deletes

    @property
    def dollars(self) -> float:
        """What S3 takes for them."""
        return PUT_PRICE * self.puts + GET_PRICE * self.gets


def gets_of(size: int) -> int:
    """Requests that fetch one object of that many bytes: one, or for a large one a try, a HEAD and its ranges."""
    return 1 if size <= RANGE_BYTES else 2 + -(-size // RANGE_BYTES)


def lists_of(objects: int) -> int:
    """Requests for listing that many objects."""
    return max(-(-objects // 1000), 1)


# What `lattqe.store` asks for. A HEAD for what is not there is followed by a GET that tells why.
PUT, DELETE = Requests(puts=1), Requests(deletes=1)
MISSING = Requests(gets=2)
OPEN = Requests(gets=2)  # a finished artifact: size and content of its manifest
ATTACH = Requests(gets=1)  # the claim that a worker takes part in
LOOK = Requests(puts=1)  # at what is there: one list, where there are few objects
PUBLISH = PUT * 2 + MISSING  # a part: itself, its receipt, and a look whether another driver has finished


def load_part(size: int) -> Requests:
    """One part of an artifact: its size, then its bytes."""
    return Requests(gets=1 + gets_of(size))


def claim(objects: int = 0) -> Requests:
    """The claim on a destination that holds that many objects."""
    return MISSING + Requests(puts=lists_of(objects)) + PUT


def finish(parts: int, leftovers: int) -> Requests:
    """The manifest made from the receipts of that many parts, and files of `_work` (the plan included) removed."""
    looks = MISSING + Requests(puts=lists_of(parts + leftovers))
    return looks + Requests(gets=parts) + PUT + Requests(puts=lists_of(parts + leftovers) + 1) + DELETE * leftovers


@dataclass(frozen=True)
class Stored:
    """An artifact in storage, or one that will be there: rows and bytes of its parts, and bytes of its manifest."""

    part_rows: tuple[int, ...]
    part_bytes: tuple[int, ...]
    manifest: int

    @classmethod
    def of(cls, manifest: Manifest) -> "Stored":
        """One that is there."""
        parts = manifest.parts
        sizes = tuple(part.bytes for part in parts)
        return cls(tuple(part.rows for part in parts), sizes, len(manifest.to_json()))

    @classmethod
    def planned(cls, part_rows: Sequence[int], row_bytes: int) -> "Stored":
        """One that will be there, with that many bytes per row."""
        sizes = tuple(ARROW_BYTES + rows * row_bytes for rows in part_rows)
        return cls(tuple(part_rows), sizes, MANIFEST_BYTES + PART_ENTRY * len(sizes))

    @classmethod
    def kind(cls, kind: str, rows: int, **of: Any) -> "Stored":
        """An artifact of a kind with that many rows, cut as `lattqe.store` cuts it; `of`: its fields, as k=64."""
        size = row_bytes(kind, of)
        return cls.planned(part_row_counts(rows, size), size)

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(self.part_rows)

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(self.part_bytes)

    @property
    def parts(self) -> int:
        """How many."""
        return len(self.part_rows)

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(self.part_rows))

    def within(self, start: int, stop: int) -> list[int]:
        """Bytes of each part that has some of the rows start..stop."""
        first, last = bisect_right(self._stops, start), bisect_left(self._stops, stop)
        return list(self.part_bytes[first : last + 1])

    def loading(self) -> Requests:
        """Reading all parts once."""
        return sum(map(load_part, self.part_bytes), Requests())

    def publishing(self, leftovers: int = 0) -> Requests:
        """Claiming a destination, making all parts, finishing; `leftovers`: files of `_work` beside the receipts."""
        return claim() + PUBLISH * self.parts + finish(self.parts, self.parts + 1 + leftovers)

    @property
    def written(self) -> int:
        """Bytes that publishing it writes: parts, receipts, the claim, the manifest."""
        return self.bytes + self.parts * RECEIPT_BYTES + CLAIM_BYTES + self.manifest


def held_bytes(sets: Sequence[Stored]) -> int:
    """Memory of a process that reads sets from S3: the parts that it keeps, and those that are on their way."""
    kept = sum(min(each.bytes, RESIDENT_BYTES) for each in sets)
    return kept + max((min(each.parts, 1 + PARTS_AHEAD) * max(each.part_bytes) for each in sets), default=0)


@dataclass(frozen=True)
class Machines:
    """A cluster of equal nodes, there or assumed. Bytes, bytes a second, dollars for a node and hour."""

    nodes: int = 1
    cpus: int = 8
    gpus: int = 0
    memory: float = 32 * GB  # of a node
    gpu_memory: float = 24 * GB
    tflops: float = GPU_TFLOPS  # of a GPU, in the products that it makes
    network: float = 0.6 * GB  # of a node, from and to storage
    price: float = 0.0
    gflops: float = CORE_FLOPS / 1e9  # of a core, in float32 products
    asked: int | None = None  # workers, if a number was requested

    @property
    def workers(self) -> int:
        """One for each GPU, or for each core, or as many as are requested."""
        return self.asked or self.nodes * (self.gpus or self.cpus)

    @property
    def threads(self) -> int:
        """Cores of each worker."""
        return max(self.nodes * self.cpus // self.workers, 1)

    @property
    def flops(self) -> float:
        """Of one worker, in bare products."""
        return self.tflops * 1e12 * GPU_SHARE if self.gpus else self.gflops * 1e9 * self.threads

    @property
    def budget(self) -> int:
        """Memory that one worker may use: four fifths of its share of a node, and of its GPU."""
        share = 0.8 * min(self.memory * self.nodes / self.workers, self.memory)
        return int(min(share, 0.8 * self.gpu_memory) if self.gpus else share)

    @property
    def size(self) -> str:
        """In words: how many nodes."""
        return "1 node" if self.nodes == 1 else f"{self.nodes} nodes"

    @property
    def node(self) -> str:
        """In words: what each node has."""
        gpus = f", {self.gpus} GPU of {self.tflops:g} TFLOP/s" if self.gpus else ""
        price = f", ${self.price:g}/h" if self.price else ""
        return f"{self.cpus} cores{gpus}, {self.memory / GB:.3g} GB, {self.network / GB:.3g} GB/s{price}"


@dataclass(frozen=True)
class Work:
    """What one stage does, all workers together; `worker_seconds` is the time of one worker doing all of it alone."""

    stage: str
    rows: int
    products: int = 0  # of two vectors
    flops: float = 0.0  # of these products and of networks
    read: int = 0  # bytes from storage
    written: int = 0
    gathered: int = 0  # bytes of vectors from other workers
    requests: Requests = field(default_factory=Requests)
    worker_seconds: float = 0.0  # of arithmetic
    worker_bytes: int = 0  # memory of each worker
    mapped: int = 0  # bytes of files that each worker maps beside it: one copy per node, which the system may drop
    scratch: int = 0  # bytes in storage while it runs
    stored: int = 0  # bytes in storage afterwards
    facts: dict[str, str] = field(default_factory=dict)  # what else the plan says: blocks, pairs


def summed(stage: str, works: Sequence[Work], **facts: Any) -> Work:
    """Many like stages as one: everything is added, memory is the most that one needs."""
    sums = {
        name: sum(getattr(work, name) for work in works)
        for name in ("rows", "products", "flops", "read", "written", "gathered", "worker_seconds", "stored")
    }
    return Work(
        stage,
        requests=sum((work.requests for work in works), Requests()),
        worker_bytes=max((work.worker_bytes for work in works), default=0),
        mapped=max((work.mapped for work in works), default=0),
        scratch=max((work.scratch for work in works), default=0),
        facts=dict(facts),
        **sums,
    )


@dataclass(frozen=True)
class Cost:
    """What stages, one after the other, take on some machines; `remote`: storage is S3."""

    stages: Sequence[Work]
    machines: Machines
    remote: bool = True

    def seconds_of(self, work: Work) -> float:
        """Arithmetic, then moving bytes: a worker does one after the other, all workers at once."""
        return work.worker_seconds / self.machines.workers + self.moving(work)

    def moving(self, work: Work) -> float:
        """Seconds that bytes need between all nodes and the storage, and between nodes."""
        return (work.read + work.written + work.gathered) / (self.machines.network * self.machines.nodes)

    @property
    def seconds(self) -> float:
        """All stages."""
        return sum(map(self.seconds_of, self.stages))

    @property
    def requests(self) -> Requests:
        """All stages; none where nothing is on S3."""
        return sum((work.requests for work in self.stages), Requests()) if self.remote else Requests()

    @property
    def dollars(self) -> float:
        """Nodes for the time and for their start, and requests."""
        hours = (self.seconds + START_SECONDS) / 3600
        return self.machines.price * self.machines.nodes * hours + self.requests.dollars

    def total(self, name: str) -> float:
        """The sum of one number over all stages."""
        return sum(getattr(work, name) for work in self.stages)

    @property
    def worker_bytes(self) -> int:
        """Memory of the largest worker."""
        return max((work.worker_bytes for work in self.stages), default=0)

    def check(self) -> None:
        """Refuse what no worker has the memory for."""
        budget = self.machines.budget
        for work in self.stages:
            if work.worker_bytes > budget:
                raise LattqeError(
                    f"{work.stage} needs {_mib(work.worker_bytes)} for each of {self.machines.workers} workers, "
                    f"which have {_mib(budget)} each: use fewer workers, or nodes with more memory"
                )


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"
