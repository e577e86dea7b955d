"""The kNN graph of a set with itself in one process: made, made by faiss, or brought up to date.

Every way gives the same exact lists.

faiss is a second engine and a referee. It gives k + m candidates of each row in float32. Whatever it left out has a
float32 score not above its last candidate's, so an exact score not above that plus the error bound of float32. Where
the exact k-th score of the candidates is above this, the list is certain; the other rows (ties, near ties, duplicates)
are searched by our own products.

An update costs in proportion to what changes: a new row enters an old row's list only if its score reaches the list's
last one, which the graph holds. So the new rows are multiplied with the old ones once, feeding both sides; a list is
touched only where something may enter, and only touched lists are scored and ordered again. A list that lost a member
says nothing about what comes next: its row is searched again.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from lattqe.errors import LattqeError
from lattqe.search.compare import Lists, compare_between, compare_within, rows_per_block
from lattqe.search.exact import best_of, exact_scores, float32_error, just_below, merge, published
from lattqe.search.index import best_rows, pair_scores, search_block
from lattqe.search.lanes import CLEARLY, kinds_for, lanes_on
from lattqe.search.products import Block, Products, TorchProducts
from lattqe.search.rows import Clock, Rows, all_pairs, check_k, check_rows, row_range, tiles

SAMPLE_FLOPS = 4e9  # for each thread, of the graph of the sample that is measured: about a twentieth of a second
SAMPLE_ROWS = 1024, 8192
MEASURED_FLOPS = 5e10  # of a whole graph, a second or so: below, measuring takes longer than the best kind saves
TURNS = 3  # of each kind at least: the first touches memory that the following kinds find ready
TRIAL_ROWS, HOPELESS = 256, 3.0  # a kind that is this many times slower on a small trial is not measured further
SPARE = 32  # candidates beyond k: enough that few rows of ordinary data go without a certificate
GPU_CANDIDATES = 2048  # the most that faiss selects on a GPU
CANDIDATE_ROWS = 4096  # rows whose candidates are scored at once
JOINED_ROWS = 2048  # rows compared at once: k² bytes for each

# (i (n,) rows of the lists, j (n,) row numbers) -> exact scores (n,) float64
Rescore = Callable[[np.ndarray, np.ndarray], np.ndarray]


def knn_graph(
    xb: Rows,
    k: int,
    *,
    device: torch.device | None = None,
    block_rows: int | None = None,
    clock: Clock | None = None,
    kind: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the exact k best other rows of each row of xb (nb, D): I (nb, k) int32, D (nb, k) float32.

    Ordered by float64 dot product, then row; a row is never its own neighbor, its duplicates may be. Fewer than k
    other rows: -1 and 0. Memory: 12 k bytes for each row, plus at most two blocks (float16 rows are widened block by
    block) and their candidates: less than 1 GiB; on a GPU a third block, which is sent meanwhile. The result depends
    neither on `block_rows` nor on the `kind` of products (`lattqe.search.lanes.kinds_for(device)`).
    """
    xb = check_rows(xb)
    k = check_k(k)
    clock = clock or Clock()
    size = block_rows or rows_per_block(xb.shape[1], k, copied=device is not None or xb.dtype != np.float32)
    cuts = list(tiles(len(xb), size))
    lists = [Lists.empty(stop - start, k) for start, stop in cuts]
    pairs = all_pairs(len(cuts))
    with lanes_on(device, kind) as lanes:
        for (a, b), block in zip(pairs, _loaded(xb, [cuts[b] for _, b in pairs], k, lanes[0], clock)):
            first, visiting = cuts[a][0], cuts[b][0]
            if a == b:
                rows = block
                lists[a] = compare_within(rows, lists[a], first, lanes, clock, alone=len(cuts) == 1)
            else:
                lists[a], lists[b] = compare_between(rows, block, lists[a], lists[b], first, visiting, lanes, clock)
    if not lists:
        return np.empty((0, k), dtype=np.int32), np.empty((0, k), dtype=np.float32)
    parts = [published(part.scores, part.ids) for part in lists]
    scores, ids = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts))
    return ids, scores


def _loaded(xb: Rows, spans: Sequence[tuple[int, int]], k: int, products: Products, clock: Clock) -> Iterator[Block]:
    """Blocks of xb, one after the other; to another device a thread sends the next one while this one is compared."""

    def load(span: tuple[int, int]) -> Block:
        return Block.load(row_range(xb, *span), products, k, widen=True)

    if not isinstance(products, TorchProducts):
        for span in spans:
            with clock("loading"):
                block = load(span)
            yield block
        return
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(load, span) for span in spans[:1])
        for following in [*spans[1:], None] if spans else []:
            with clock("loading"):
                block = ahead.popleft().result()
            if following is not None:
                ahead.append(pool.submit(load, following))
            yield block


def sample_size(dim: int) -> int:
    """Rows of a sample whose graph says how fast a kind of products is for rows of so many columns."""
    return int(np.clip(np.sqrt(SAMPLE_FLOPS * torch.get_num_threads() / max(dim, 1)), *SAMPLE_ROWS))


def fastest_kind(
    x: np.ndarray, k: int, rows: int, device: torch.device | None = None, engine: str = "lattqe", seconds: float = 0.5
) -> tuple[str, float]:
    """Find the kind of products that makes the graph of `rows` rows fastest, from a sample x (m, D) of them: its name,
    and products per second, selection and exact scores included.

    The graph of the sample is computed by every kind in turn, with neighbors in the same proportion to the rows, so
    that as many entries of a tile are worth keeping as there will be. Takes about `seconds`; of a small graph only the
    first kind is tried, on a few rows. Another must be clearly faster than it. The second engine, "faiss", has its own
    kind. Kinds of the CPU are compared by their processor time, which other programs disturb far less than the clock.
    """
    small = float(rows) ** 2 * x.shape[1] < MEASURED_FLOPS
    k = max(round(k * len(x) / max(rows, 1)), 1)

    on_cpu = device is None or device.type == "cpu"
    taken = time.process_time if on_cpu else time.perf_counter

    def spent(sample: np.ndarray, kind: str) -> np.ndarray:
        before = np.array([taken(), time.perf_counter()])
        if kind == "faiss":
            faiss_graph(sample, k, device=device)
        else:
            knn_graph(sample, k, device=device, kind=kind)
        return np.array([taken(), time.perf_counter()]) - before  # what is compared, and on the clock

    kinds = ("faiss",) if engine == "faiss" else kinds_for(device)
    trial = x[:: max(-(-len(x) // TRIAL_ROWS), 1)]
    # Twice, as the first time pays for loading libraries.
    first = {kind: np.minimum(spent(trial, kind), spent(trial, kind)) for kind in (kinds[:1] if small else kinds)}
    if small:
        return kinds[0], len(trial) ** 2 / 2 / max(float(first[kinds[0]][1]), 1e-9)
    likely = [kind for kind, took in first.items() if took[0] <= HOPELESS * min(each[0] for each in first.values())]
    best = {kind: np.full(2, np.inf) for kind in likely}
    deadline = taken() + seconds * (torch.get_num_threads() if on_cpu else 1)  # as many turns on a crowded machine
    turns = 0
    while turns < (TURNS if seconds else 1) or taken() < deadline:
        turns += 1
        for kind in likely:
            best[kind] = np.minimum(best[kind], spent(x, kind))
    kind = min(likely, key=lambda each: best[each][0])
    if kinds[0] in best and best[kinds[0]][0] < CLEARLY * best[kind][0]:
        kind = kinds[0]
    return kind, len(x) ** 2 / 2 / max(float(best[kind][1]), 1e-9)


def faiss_lists(
    rows: Block,
    others: Block,
    k: int,
    *,
    hidden: np.ndarray | None = None,
    device: torch.device | None = None,
    clock: Clock | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact k best of `others` for each of `rows`, but for row `hidden` (n,) of them (-1: none), by way of faiss.

    (n, k) float64 (-inf missing), (n, k) int32 (-1 missing): the same as `search_block` gives. Both blocks are held
    as float32 on the CPU. `clock` counts the rows that had no certificate as "uncertain".
    """
    clock = clock or Clock()
    scores, ids = np.full((len(rows), k), -np.inf), np.full((len(rows), k), -1, dtype=np.int32)
    if not len(rows) or not len(others):
        return scores, ids
    with clock("faiss"):
        found, candidates = _candidates(rows, others, min(k + SPARE + (hidden is not None), len(others)), device)
    certain = np.zeros(len(rows), dtype=bool)
    error = float32_error(rows.dim, rows.norms, others.norms.max(initial=0.0))
    with clock("scoring"):
        for start, stop in tiles(len(rows), CANDIDATE_ROWS):
            part = slice(start, stop)
            own = None if hidden is None else hidden[part, None]
            real = candidates[part] >= 0 if own is None else (candidates[part] >= 0) & (candidates[part] != own)
            i, slot = np.nonzero(real)
            exact = np.full(real.shape, -np.inf)
            exact[i, slot] = exact_scores(rows.stored, others.stored, start + i, candidates[start + i, slot])
            scores[part], ids[part] = best_of(exact, np.where(real, candidates[part], -1).astype(np.int32), k)
            left_out = found[part, -1].astype(np.float64) + error[part]
            certain[part] = (scores[part, -1] > left_out) | (candidates.shape[1] == len(others))
    again = np.flatnonzero(~certain)
    clock.count("uncertain", len(again))
    with clock("searching again"), lanes_on() as lanes:
        database = others.without(k)
        for start, stop in tiles(len(again), CANDIDATE_ROWS):
            few = again[start:stop]
            scores[few], ids[few] = search_block(
                rows.take(few), database, k, lanes[0], None if hidden is None else hidden[few]
            )
    return scores, ids


def faiss_graph(
    xb: Rows, k: int, *, device: torch.device | None = None, clock: Clock | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same as `knn_graph` gives, by way of faiss: I (n, k) int32, D (n, k) float32."""
    with lanes_on() as lanes:
        block = Block.load(check_rows(xb), lanes[0], widen=True)
    scores, ids = faiss_lists(block, block, k, hidden=np.arange(len(block)), device=device, clock=clock)
    if clock is not None:
        clock.count("products", len(block) ** 2 // 2)  # of which faiss makes both halves
    return ids, np.where(ids < 0, 0.0, scores).astype(np.float32)


def _candidates(rows: Block, others: Block, count: int, device: torch.device | None) -> tuple[np.ndarray, np.ndarray]:
    """Scores (n, count) float32 descending and row numbers (n, count), as faiss finds them."""
    import faiss

    xq, xb = (np.ascontiguousarray(block.held[:]) for block in (rows, others))
    if device is not None and device.type == "cuda":
        if not hasattr(faiss, "StandardGpuResources"):
            raise LattqeError("this faiss has no GPU support: pip install 'lattqe[gpu]', or leave --engine faiss out")
        return faiss.knn_gpu(
            faiss.StandardGpuResources(),
            xq,
            xb,
            min(count, GPU_CANDIDATES),
            metric=faiss.METRIC_INNER_PRODUCT,
            device=device.index or 0,
        )
    with faiss_threads(torch.get_num_threads()):
        return faiss.knn(xq, xb, count, metric=faiss.METRIC_INNER_PRODUCT)


@contextmanager
def faiss_threads(count: int) -> Iterator[None]:
    """Faiss with `count` threads."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def join_lists(
    ids: np.ndarray, scores: np.ndarray, newcomers: Lists, rescore: Rescore
) -> tuple[np.ndarray, np.ndarray]:
    """Merge exact newcomers into stored lists: ids (n, k) int32, scores (n, k) float32 -> the same, exact order.

    Rounding keeps order, so the rounded scores decide wherever they differ. Only lists in which a newcomer's rounded
    score equals a stored one, or equal stored scores hide their order, are scored again in float64.
    """
    ids, scores = ids.copy(), scores.copy()
    touched = np.flatnonzero((newcomers.ids >= 0).any(axis=1))
    for start in range(0, len(touched), JOINED_ROWS):
        rows = touched[start : start + JOINED_ROWS]
        known = np.where(ids[rows] < 0, -np.inf, scores[rows].astype(np.float64))
        unclear = np.flatnonzero(_unclear(ids[rows], scores[rows], newcomers.scores[rows].astype(np.float32)))
        i, m = np.nonzero(ids[rows[unclear]] >= 0)
        known[unclear[i], m] = rescore(rows[unclear[i]], ids[rows[unclear[i]], m])
        joined = merge([(known, ids[rows]), (newcomers.scores[rows], newcomers.ids[rows])], ids.shape[1])
        scores[rows], ids[rows] = published(*joined)
    return ids, scores


def _unclear(ids: np.ndarray, scores: np.ndarray, newcomers: np.ndarray) -> np.ndarray:
    """Which lists (n,) the rounded scores do not order: ids, scores (n, k) stored, newcomers (n, k) rounded."""
    there = ids >= 0
    equal = ((scores[:, :, None] == newcomers[:, None, :]) & there[:, :, None]).any(axis=(1, 2))
    hidden = (scores[:, 1:] == scores[:, :-1]) & (ids[:, 1:] < ids[:, :-1]) & there[:, 1:]
    return equal | hidden.any(axis=1)


def update_graph(
    xb: np.ndarray,
    I: np.ndarray,
    D: np.ndarray,
    stale: np.ndarray | None = None,
    *,
    device: torch.device | None = None,
    clock: Clock | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Bring a graph up to date: I (n, k) int32, D (n, k) float32, the same as `knn_graph(xb, k)` gives.

    xb (n, D): the surviving old rows in their order, then the new ones. I, D (m, k): the old rows' lists in the row
    numbers of xb. `stale` (m,) bool marks old rows whose list lost a member; their I and D are not looked at.
    Products: (n - m)·n for the new rows, and n for each stale row; `clock.counts` has them counted.
    """
    n, (m, k) = len(xb), I.shape
    if m > n:
        raise LattqeError(f"a graph of {m} rows cannot belong to {n} rows")
    stale = np.zeros(m, dtype=bool) if stale is None else stale
    clock = clock or Clock()
    new_I, new_D = np.empty((n, k), dtype=np.int32), np.empty((n, k), dtype=np.float32)
    new_I[:m], new_D[:m] = I, D
    with lanes_on(device, dim=xb.shape[1], products=float(n) * (n - m + stale.sum())) as lanes:
        for start, stop in tiles(n - m, rows_per_block(xb.shape[1], k)):
            rows = Block.load(xb[m + start : m + stop], lanes[0], k, widen=True)
            lists = compare_within(rows, Lists.empty(stop - start, k), m + start, lanes, clock)
            for lo, hi in tiles(m + start, rows_per_block(xb.shape[1], k)):
                lists = _compare_with_known(rows, lists, m + start, xb, (lo, hi), new_I, new_D, lanes, clock)
            new_D[m + start : m + stop], new_I[m + start : m + stop] = published(lists.scores, lists.ids)
        _search_again(xb, np.flatnonzero(stale), new_I, new_D, lanes, clock)
    return new_I, new_D


def _compare_with_known(
    rows: Block,
    lists: Lists,
    first_row: int,
    xb: np.ndarray,
    known: tuple[int, int],
    I: np.ndarray,
    D: np.ndarray,
    lanes: Sequence[Products],
    clock: Clock,
) -> Lists:
    """Compare new rows with rows lo..hi, whose lists I, D are complete without them and are updated in place."""
    lo, hi = known
    k = I.shape[1]
    # A stand-in for each known list: k entries just below its last score. What comes before them may enter.
    floor = np.where(I[lo:hi, -1] < 0, -np.inf, just_below(D[lo:hi, -1].astype(np.float64)))
    stand_in = Lists(np.repeat(floor[:, None], k, axis=1), np.full((hi - lo, k), -1, dtype=np.int32))
    visitors = Block.load(xb[lo:hi], lanes[0], k, widen=True)
    lists, offered = compare_between(rows, visitors, lists, stand_in, first_row, lo, lanes, clock)
    touched = np.flatnonzero((offered.ids >= 0).any(axis=1))
    if len(touched):
        own = I[lo + touched]
        own_scores = np.where(own < 0, -np.inf, pair_scores(xb[lo + touched], xb, own))
        clock.count("scored", int((own >= 0).sum()))
        newcomers = offered.ids[touched]
        scores = np.where(newcomers < 0, -np.inf, offered.scores[touched])
        D[lo + touched], I[lo + touched] = published(*merge([(own_scores, own), (scores, newcomers)], k))
    return lists


def _search_again(
    xb: np.ndarray, rows: np.ndarray, I: np.ndarray, D: np.ndarray, lanes: Sequence[Products], clock: Clock
) -> None:
    """Search rows whose lists lost a member among all others."""
    if not len(rows):
        return
    clock.count("products", len(rows) * len(xb))
    found = best_rows(xb[rows], Block.load(xb, lanes[0]), I.shape[1], lanes, exclude=rows)
    D[rows], I[rows] = published(*found)
