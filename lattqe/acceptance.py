"""One acceptance run for a device: every part that was only tested on torch's CPU device, on the real one.

Bounds of all kinds of products are attacked, the graph must be the CPU's to the last bit, faiss must agree, augmented
rows must be the CPU's within a tolerance; and the rates that the plans depend on are measured.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lattqe.search.exact import exact_scores
from lattqe.search.graph import Lists as GraphLists
from lattqe.search.graph import compare_within, knn_graph
from lattqe.search.pairing import Clock
from lattqe.search.products import GPU_KINDS, Block, CoarseTorchProducts, Products, TorchProducts
from lattqe.search.second import faiss_graph

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
