"""One acceptance run for a device: every part that was only tested on torch's CPU device, on the real one.

Bounds of all kinds of products are attacked, graphs and a search must be the CPU's to the last bit, faiss must agree
(on the GPU, where its build has one), augmented rows and hops must be the CPU's within a tolerance, a run that was
killed must end in the bytes of one that was not; and the rates that the plans depend on are measured.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lattqe.device import SparseSums, allowed_bytes
from lattqe.expansion.diffusion import directed
from lattqe.search.compare import Lists as GraphLists
from lattqe.search.compare import compare_between, compare_within
from lattqe.search.exact import exact_scores, published
from lattqe.search.graph import faiss_graph, knn_graph
from lattqe.search.index import best_rows, topk
from lattqe.search.lanes import GPU_KINDS, lanes_on
from lattqe.search.products import Block, CoarseTorchProducts, NumpyProducts, Products, TorchProducts
from lattqe.search.rows import Clock

ROWS, DIM, K = 3000, 256, 20
TILE = 512  # rows of a tile of the graphs that are compared: several in each of two blocks
STAGED_BYTES = 1 << 16  # of each of the two buffers that their rows go through: many turns
SIDE = {"cpu": 1024, "cuda": 8192}  # rows of a tile that is timed
SECONDS = 0.3  # of each timing
TOLERANCE = 1e-3  # between augmented unit vectors of two devices
NETWORK_ROWS, NETWORK_K = 400, 32  # rows that are augmented, and neighbors weighed for each
KILL_BLOCK = 64  # rows between two chances to be killed
STORED_BYTES = 64 << 20  # written and read to time a storage
# TFLOP/s of GPUs in products of each kind, without sparsity, by what their names contain. Data sheets, not measured.
PEAKS: dict[str, dict[str, float]] = {
    "H100 PCIe": {"float32": 51, "tf32": 378, "float16": 756},
    "H100": {"float32": 67, "tf32": 494, "float16": 989},
    "A100": {"float32": 19.5, "tf32": 156, "float16": 312},
    "A10G": {"float32": 35, "tf32": 35, "float16": 70},
    "L40S": {"float32": 91.6, "tf32": 183, "float16": 362},
    "L4": {"float32": 30.3, "tf32": 60, "float16": 121},
    "V100": {"float32": 15.7, "float16": 125},
    "T4": {"float32": 8.1, "float16": 65},
}


def accept(device: torch.device, rows: int = ROWS, place: str | None = None) -> dict[str, Any]:
    """Run everything; `passed` is whether all checks held, `checks` says which, `rates` what was measured, `peaks`
    what the data sheet says of some of them, and `machine` what a plan assumes of nodes like this one.

    `place`: a folder or s3:// address, of which the rate is measured too.
    """
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((rows, DIM), dtype=np.float32)
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    wide[rows // 2 :: 5] = wide[1]  # ties
    x = wide.astype(np.float16)
    checks: dict[str, dict[str, Any]] = {}
    for kind, products in kinds_on(device).items():
        worst = max(attack(products, make(rng)) for make in ATTACKS.values())
        checks[f"bound of {kind}"] = {"passed": worst <= 1, "largest error, of its bound": round(worst, 4)}
    expected = knn_graph(x, K)
    for vectors, graph in ((x, expected), (wide, knn_graph(wide, K))):
        for kind, products in kinds_on(device, TILE).items():
            same = _equal(graph_in_blocks(vectors, products), graph)
            checks[f"graph of {vectors.dtype} rows by {kind}"] = {"passed": same, "rows": rows}
    checks["search"] = {"passed": search_agrees(x, device), "rows": rows}
    checks |= faiss_agrees(x, expected, device)
    checks["augmentation"] = augmentation(x[:NETWORK_ROWS], device)
    checks["hops"] = hop_sums(x, expected[0], device)
    checks["killed and resumed"] = kill_and_resume(x[:NETWORK_ROWS], device)
    measured = rates(device) | ({} if place is None else {STORAGE_RATE: _rounded(storage_rate(place) / 1e9)})
    return {
        "device": str(device),
        "name": name_of(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "passed": all(check["passed"] for check in checks.values()),
        "checks": checks,
        "rates": measured,
        "peaks": {f"{kind}, GFLOP/s": 1000 * peak for kind, peak in peaks_of(name_of(device)).items()},
        "machine": machine(device, measured),
    }


def kinds_on(device: torch.device, tile: int = 8192) -> dict[str, Products]:
    """All kinds of products that a torch device has; on the CPU those that serve GPUs elsewhere."""
    return {
        kind: TorchProducts(device, tile) if kind == "float32" else CoarseTorchProducts(device, kind, tile)
        for kind in GPU_KINDS
    }


def graph_in_blocks(x: np.ndarray, products: Products) -> tuple[np.ndarray, np.ndarray]:
    """The graph of x (n, D) as a large set's is made, from two blocks of several tiles, sent in many small steps."""
    if isinstance(products, TorchProducts):
        products.sender.staged_bytes = STAGED_BYTES
    middle, lanes, clock = len(x) // 2, [products], Clock()
    rows, others = (Block.load(part, products, K, widen=True) for part in (x[:middle], x[middle:]))
    first = compare_within(rows, GraphLists.empty(len(rows), K), 0, lanes, clock)
    second = compare_within(others, GraphLists.empty(len(others), K), middle, lanes, clock)
    first, second = compare_between(rows, others, first, second, 0, middle, lanes, clock)
    scores, ids = published(*map(np.concatenate, ((first.scores, second.scores), (first.ids, second.ids))))
    return ids, scores


def search_agrees(x: np.ndarray, device: torch.device) -> bool:
    """Whether a search of some of the rows x (n, D) among all of them, in several tiles, gives what the CPU's does."""
    products = TorchProducts(device, TILE)
    products.entries = TILE**2
    queries = x[:: len(x) // 100 or 1]
    return _equal(published(*best_rows(queries, Block.load(x, products), K, [products])), topk(queries, x, K))


def faiss_agrees(
    x: np.ndarray, expected: tuple[np.ndarray, np.ndarray], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Whether faiss's graph of x (n, D) is the expected one; made on the device, if it is a GPU and faiss knows any."""
    import faiss

    there = device.type == "cuda" and hasattr(faiss, "StandardGpuResources")
    clock = Clock()
    same = _equal(faiss_graph(x, K, device=device if there else None, clock=clock), expected)
    name = "faiss agrees, on the GPU" if there else "faiss agrees, on the CPU"
    return {name: {"passed": same, "uncertain": clock.counts["uncertain"]}}


def _equal(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether two pairs of arrays are equal to the last bit."""
    return all(np.array_equal(one, other) for one, other in zip(found, expected))


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
    there, here = (augmented_on(name, x)() for name in (str(device), "cpu"))
    worst = float(np.abs(there - here).max())
    return {"passed": worst <= TOLERANCE, "largest difference": worst}


def hop_sums(x: np.ndarray, ids: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Sums of one hop of x (n, D) over neighbors ids (n, k), there and on the CPU; rows that lie on the device, and
    rows that are sent block by block, must give the same bits.
    """
    H, n = x.astype(np.float32), len(x)
    S = directed(np.full((n, 1 + ids.shape[1]), 1 / ids.shape[1], np.float32), np.insert(ids, 0, np.arange(n), 1), n)
    lying, sent = SparseSums(device), SparseSums(device)
    lying.take(H)
    sent.take(H, stay=False)
    sent.block_bytes = H.nbytes // 4  # several blocks
    there, again = lying.multiply(S), sent.multiply(S)
    worst = float(np.abs(there - S @ H).max())
    return {"passed": worst <= TOLERANCE and bool((there == again).all()), "largest difference": worst}


def augmented_on(name: str, x: np.ndarray) -> Callable[[], np.ndarray]:
    """What augments all rows of x (n, D) on the device of that name, and gives them (n, D) float32."""
    from lattqe.expansion.attention import AttentionExpansion
    from lattqe.expansion.rows import augment_rows
    from lattqe.search import FlatIndex

    ids, scores = knn_graph(x, min(256, len(x) - 1))
    index, method = FlatIndex(x), AttentionExpansion(dba=True, device=name)
    return lambda: augment_rows(index, np.arange(len(x)), scores, ids, method, NETWORK_K).vectors


def kill_and_resume(x: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Augment stored rows x (n, D) in a process that is killed after its first block; then resume, and compare with a
    run that nothing disturbed.
    """
    from lattqe.search.stored import publish_graph
    from lattqe.store import FeatureSet, FeatureWriter

    with tempfile.TemporaryDirectory() as folder:
        with FeatureWriter(f"{folder}/features", x.shape[1], dtype="float16") as writer:
            writer.append(x, [str(row) for row in range(len(x))])
        publish_graph(FeatureSet.open(f"{folder}/features"), min(256, len(x) - 1), f"{folder}/graph")
        call = (
            f"from lattqe.acceptance import augment_stored; augment_stored({folder!r}, 'killed', {str(device)!r}, True)"
        )
        ended = subprocess.run([sys.executable, "-c", call], stdout=subprocess.DEVNULL).returncode
        resumed, whole = (augment_stored(folder, name, str(device)) for name in ("killed", "whole"))
        return {
            "passed": ended == -signal.SIGKILL and resumed.digest == whole.digest,
            "rows": len(x),
            "blocks": -(-len(x) // KILL_BLOCK),
        }


def augment_stored(folder: str, name: str, device: str, die: bool = False) -> Any:
    """Augment the rows in a folder on a device, or what is missing of them: the finished set. With `die` this process
    kills itself after the first block.
    """
    from lattqe.augmentation.index import begin_index, build_index
    from lattqe.augmentation.recipe import Augmentation
    from lattqe.store import FeatureSet

    task = Augmentation(
        f"{folder}/features",
        f"{folder}/graph",
        f"{folder}/{name}",
        "lattqe",
        NETWORK_K,
        {"dba": True, "device": device},
        block_rows=KILL_BLOCK,
    )
    pending = begin_index(task)
    build_index(task, (lambda rows: os.kill(os.getpid(), signal.SIGKILL)) if die else lambda rows: None)
    pending.finish()
    return FeatureSet.open(task.to)


STORAGE_RATE = "storage, GB/s"
CORE_RATE = "one core, GFLOP/s"


def rates(device: torch.device) -> dict[str, float]:
    """Products in GFLOP/s of each kind, selection in millions of entries, copies in GB/s, rows that the network
    augments, and float32 products of one core of the CPU, each in a second.
    """
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
    held = products.hold(x)
    found["copies to the device, GB/s"] = x.nbytes / _seconds(lambda: products.hold(x), device) / 1e9
    if device.type != "cpu":
        pinned = torch.from_numpy(x).pin_memory()
        seconds = _seconds(lambda: held.copy_(pinned, non_blocking=True), device)
        found["pinned copies to the device, GB/s"] = x.nbytes / seconds / 1e9
        found["copies from the device, GB/s"] = x.nbytes / _seconds(held.cpu, device) / 1e9
    few = x[: min(NETWORK_ROWS, side)] / np.linalg.norm(x[: min(NETWORK_ROWS, side)], axis=1, keepdims=True)
    found["network, rows/s"] = len(few) / _seconds(augmented_on(str(device), few), device)
    with lanes_on(kind=NumpyProducts.kind):  # BLAS on one thread
        core, rows = NumpyProducts(), x[:1024]
        seconds = _seconds(lambda: core.multiply(rows, rows[::-1].copy()), torch.device("cpu"))
    found[CORE_RATE] = 2 * len(rows) ** 2 * 512 / seconds / 1e9
    return {name: _rounded(rate) for name, rate in found.items()}


def storage_rate(uri: str) -> float:
    """Bytes a second to and from a storage: one object written, read and deleted."""
    from lattqe.store import open_place

    place, name = open_place(uri), f"doctor-{uuid.uuid4().hex}"
    content = np.random.default_rng(0).bytes(STORED_BYTES)
    started = time.perf_counter()
    place.create(name, content)
    try:
        place.read(name)
        return 2 * len(content) / (time.perf_counter() - started)
    finally:
        place.delete(name)


def peaks_of(name: str) -> dict[str, float]:
    """TFLOP/s of a GPU by the kind of products, from its data sheet; empty where it is not known."""
    words = name.replace("-", " ").split()
    return next((peaks for gpu, peaks in PEAKS.items() if set(gpu.split()) <= set(words)), {})


def machine(device: torch.device, measured: dict[str, float]) -> dict[str, float]:
    """What a plan assumes of a node like this one, by the keys of `--assume`; GPUs are like the one that was tested."""
    found = {"cpus": os.cpu_count() or 1, "memory": allowed_bytes(), "gflops": measured[CORE_RATE]}
    if device.type != "cpu":
        found["gpus"] = torch.cuda.device_count()
        found["gpu_memory"] = torch.cuda.get_device_properties(device).total_memory
        found["tflops"] = max(measured[f"{kind}, GFLOP/s"] for kind in GPU_KINDS) / 1000
    if STORAGE_RATE in measured:
        found["network"] = measured[STORAGE_RATE] * 1e9
    return found


def _rounded(rate: float) -> float:
    """Four digits, however small it is."""
    return float(f"{rate:.4g}")


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
