"""Inference of LAttQE at the paper's size on a CPU, beside torch's own encoder and beside the bare matrix products.

    python benchmarks/expand.py            about six minutes on two cores
    python benchmarks/expand.py --quick    one minute, noisier

All contestants take turns within one process, round after round, on the same lists; a ratio is the median over
rounds of the ratio of neighboring runs, so that a machine that slows down for a while slows down both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from lattqe.expansion import aggregate
from lattqe.model import FastLAttQE, LAttQE, LAttQEConfig
from lattqe.model.fast import TOKENS

GOALS = [
    # (what, contestant, beside, at least)
    ("float32 beside the bare products", "lattqe", "products", 0.85),
    ("shared (LAttDBA) beside nn.TransformerEncoder", "lattqe shared", "nn.TransformerEncoder", 1.15),
    ("int8 beside float32", "lattqe int8", "lattqe", 1.5),
]


def neighbor_lists(n: int, k: int, dim: int) -> torch.Tensor:
    """Unit vectors (n, 1 + k, dim): neighbors whose cosine with the query falls from .85 to .25."""
    query = nn.functional.normalize(torch.randn(n, 1, dim), dim=-1)
    other = torch.randn(n, k, dim)
    other = nn.functional.normalize(other - (other * query).sum(-1, keepdim=True) * query, dim=-1)
    cosine = torch.linspace(0.85, 0.25, k)[:, None]
    return torch.cat([query, cosine * query + (1 - cosine**2).sqrt() * other], dim=1)


def bare_products(config: LAttQEConfig, n: int, t: int) -> Callable[[], None]:
    """The matrix products of the network and nothing else: no bias, no softmax, no norm, nothing allocated."""
    width, hidden = config.token_width, config.hidden
    batch = max(1, TOKENS // t)
    shapes = [(width, 3 * width), (width, width), (width, hidden), (hidden, width)] * config.layers
    weights = [torch.randn(b, a) for a, b in shapes]
    inputs = {a: torch.randn(batch * t, a) for a, _ in shapes}
    outputs = {b: torch.empty(batch * t, b) for _, b in shapes}

    def run() -> None:
        for start in range(0, n, batch):
            rows = min(batch, n - start) * t
            for (a, b), weight in zip(shapes, weights):
                torch.mm(inputs[a][:rows], weight.t(), out=outputs[b][:rows])

    return run


def torch_encoder(network: LAttQE, items: torch.Tensor) -> Callable[[], None]:
    """The encoder of torch itself with the same sizes, in whichever of its modes and batch sizes is the fastest."""
    config = network.config
    layer = nn.TransformerEncoderLayer(config.dim, config.heads, config.hidden, batch_first=True)
    encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False).eval()
    tokens = (items + network.tokens.positions[: items.shape[1]]).detach()

    def run(fused: bool, batch: int) -> None:
        torch.backends.mha.set_fastpath_enabled(fused)
        for block in tokens.split(batch):
            encoder(block)

    seconds = {}
    for fused in (True, False):
        for batch in (8, 16, 32):
            if batch <= len(items):
                seconds[fused, batch] = min(timed(lambda f=fused, b=batch: run(f, b)) for _ in range(2)) / len(items)
    best = min(seconds, key=seconds.__getitem__)
    mode = "its fused path" if best[0] else "plain layers"
    print(f"nn.TransformerEncoder is fastest with {mode} and batches of {best[1]}")
    return lambda: run(*best)


def timed(work: Callable[[], object]) -> float:
    """Seconds on the wall; of the processor with one thread, which a busy machine disturbs less."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def contestants(network: LAttQE, items: torch.Tensor) -> tuple[dict[str, Callable[[], object]], dict[str, FastLAttQE]]:
    """What takes turns: each expands all lists once."""
    n, t, dim = items.shape
    valid = torch.ones(n, t, dtype=torch.bool)
    fast = {precision: FastLAttQE(network, precision) for precision in ("float32", "int8")}
    # Every list's items are rows of a database of n * t rows; a row's own projection is counted once for each list.
    rows = torch.randperm(n * t).view(n, t)
    database = torch.empty(n * t, dim)
    database[rows.flatten()] = items.flatten(0, 1)
    tables = {precision: model.shared_rows(database) for precision, model in fast.items()}

    def shared(precision: str) -> None:
        model, table = fast[precision], tables[precision]
        table[rows[:, 0]] = model.shared_rows(items[:, 0])
        model.weights(items, valid, True, lambda batch: table[rows[batch]])

    return {
        "products": bare_products(network.config, n, t),
        "nn.TransformerEncoder": torch_encoder(network, items),
        "lattqe": lambda: fast["float32"].weights(items, valid),
        "lattqe shared": lambda: shared("float32"),
        "lattqe int8": lambda: fast["int8"].weights(items, valid),
        "lattqe int8 shared": lambda: shared("int8"),
    }, fast


def agreement(network: LAttQE, fast: dict[str, FastLAttQE], items: torch.Tensor) -> list[tuple[str, float, bool]]:
    """(What, value, as it should be): float32 weights beside the module's, int8 vectors beside float32 ones."""
    valid = torch.ones(items.shape[:2], dtype=torch.bool)
    weights = {precision: model.weights(items, valid) for precision, model in fast.items()}
    difference = (weights["float32"] - network(items, valid).weights).abs().max().item()
    cosine = (aggregate(weights["int8"], items) * aggregate(weights["float32"], items)).sum(dim=1).mean().item()
    return [
        ("largest difference of a float32 weight to the module's", difference, difference < 1e-4),
        ("mean cosine of int8 to float32", cosine, cosine > 0.999),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and lists")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (default 15, quick 5)")
    parser.add_argument("--lists", type=int, help="lists in a turn (default 30, quick 15)")
    parser.add_argument("--neighbors", type=int, default=64)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument(
        "--threads",
        type=int,
        help="of torch (default: its own choice); 1 counts CPU time: for a machine that others use",
    )
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = LAttQEConfig(dim=options.dim, heads=options.heads, positional_start="small")
    network = LAttQE(config).eval()
    n = options.lists or (15 if options.quick else 30)
    items = neighbor_lists(n, options.neighbors, options.dim)
    with torch.inference_mode():
        runs, fast = contestants(network, items)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range((options.rounds or (5 if options.quick else 15)) + 1):
            for name, run in runs.items():
                spent = timed(run)
                if turn:  # the first turn warms up
                    seconds[name].append(spent)
        measured = agreement(network, fast, items[:15])
    report(seconds, measured, n, options)


def ratio(seconds: dict[str, list[float]], name: str, beside: str) -> tuple[float, float, float]:
    """How many times as fast, over rounds: lower quartile, median, upper quartile."""
    ratios = [b / a for a, b in zip(seconds[name], seconds[beside])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high


def report(
    seconds: dict[str, list[float]], measured: list[tuple[str, float, bool]], n: int, options: argparse.Namespace
) -> None:
    speeds = {name: n / statistics.median(times) for name, times in seconds.items()}
    print(f"\n{options.dim}-D, {options.heads} heads, 3 encoders, {options.neighbors} neighbors, "
          f"{torch.get_num_threads()} threads, {len(seconds['lattqe'])} rounds")  # fmt: skip
    print(f"{'':24}{'lists/s':>10}{'of products':>14}{'of nn.TransformerEncoder':>27}")
    for name, speed in speeds.items():
        beside = [ratio(seconds, name, other)[1] for other in ("products", "nn.TransformerEncoder")]
        print(f"{name:24}{speed:10.2f}{beside[0]:14.3f}{beside[1]:27.3f}")
    goals = {}
    for what, name, beside, least in GOALS:
        low, middle, high = ratio(seconds, name, beside)
        goals[what] = middle
        verdict = "met" if middle >= least else "MISSED"
        print(f"{verdict}: {what} {middle:.3f} (quartiles {low:.3f} to {high:.3f}), goal {least}")
    for what, value, good in measured:
        print(f"{'met' if good else 'MISSED'}: {what} {value:.6f}")
    if options.json:
        with open(options.json, "w") as file:
            agreed = {what: value for what, value, _ in measured}
            json.dump({"lists_per_second": speeds, "ratios": goals, "agreement": agreed}, file, indent=1)


if __name__ == "__main__":
    main()
