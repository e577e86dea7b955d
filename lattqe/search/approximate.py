"""Approximate kNN graphs: each row searches the clusters near it with the exact kernel, and the recall is measured.

A row is in the cluster of its nearest centroid. It searches that one and those whose centroids are little farther from
it, by a margin that is the same for all rows, and its list is the exact k best of their rows: scores in float64 and an
order as in an exact graph, with some neighbors missing. A row between clusters searches many, one in the middle of its
own few: for a recall that takes about four fifths of the products of one number for all.

A true neighbor is found exactly where its cluster is searched. So the exact lists of a few rows tell, before anything
is built, which margin a recall takes. The recall that is published is that of other, random rows: the share of their
true neighbors that are in the clusters they search. Clusters come from faiss's k-means with one seed and one thread,
and nearest centroids from blocks of one size: the graph does not depend on threads or workers. All of it runs on the
CPU.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from lattqe.errors import LattqeError
from lattqe.search.exact import published
from lattqe.search.graph import faiss_threads
from lattqe.search.index import best_rows
from lattqe.search.lanes import lanes_on
from lattqe.search.products import Block, Products
from lattqe.search.rows import Clock, Rows, check_rows, in_lanes, row_range, tiles
from lattqe.search.topk import RunningTopK, capacity_for

SEED = 0
LEAST_ROWS = 20_000  # below, an exact graph takes no longer
LEAST_CLUSTERS = 8
DEPTH = 24  # most clusters that a row searches: few rows need more for a recall of 0.95, and doubled where they do
PER_CENTROID, ITERATIONS = 32, 6  # rows of the sample for each centroid: clusters need not be good, only many
PLANNED_ROWS, MEASURED_ROWS = 256, 1_000
NORMAL_95 = 1.959964
ASSIGNED_ROWS = 8_192  # at once, whatever the threads: the last bits of products may depend on it
SETTLED_ROWS = 2_048  # at once: their candidates stay in the cache
BUFFER_BYTES = 128 << 20  # of candidates, for the rows that one thread works on


@dataclass(frozen=True)
class Recall:
    """Recall@k of random rows, with its 95 % interval."""

    mean: float
    low: float
    high: float
    rows: int

    @classmethod
    def of(cls, shares: np.ndarray) -> "Recall":
        """From the share (n,) of its true neighbors that each row has: Wilson's interval, for rows as a whole.

        Neighbors of one row are found or missed together, so rows count, not pairs: as many yes-or-no answers as would
        scatter like these rows.
        """
        n, p = len(shares), float(shares.mean())
        variance = float(shares.var(ddof=1)) / n if n > 1 else 0.0
        answers = p * (1 - p) / variance if variance > 0 else n
        z = NORMAL_95**2 / answers
        center, reach = (p + z / 2) / (1 + z), np.sqrt(z * p * (1 - p) + z * z / 4) / (1 + z)
        low, high = max(float(center - reach), 0.0), min(float(center + reach), 1.0)
        return cls(round(p, 6), round(low, 6), round(high, 6), n)


@dataclass(frozen=True)
class Approximation:
    """How a graph is approximated, and how well.

    nearest (n, m) int32: the clusters that each row searches, nearest first, then -1; it is in the first of them.
    """

    nearest: np.ndarray
    clusters: int
    planned: float  # clusters for each row that were expected to do
    wanted: float
    recall: Recall

    @property
    def searched(self) -> float:
        """Clusters that a row searches, on average."""
        return round(float((self.nearest >= 0).sum(axis=1).mean()), 2)

    @property
    def kept(self) -> bool:
        """Whether the recall is what was requested."""
        return self.recall.mean >= self.wanted

    def facts(self) -> dict[str, Any]:
        """What the manifest keeps of it."""
        return {
            **asdict(self.recall),
            "kept": self.kept,
            "clusters": self.clusters,
            "searched": self.searched,
            "searched_planned": self.planned,
        }


class Membership:
    """Which clusters each row searches, `nearest` (n, m) of Approximation, and which rows are in them.

    `surplus` (n,) marks rows that can be in no list.
    """

    def __init__(self, nearest: np.ndarray, clusters: int, surplus: np.ndarray | None = None) -> None:
        self.nearest = nearest
        rows = np.argsort(nearest[:, 0], kind="stable").astype(np.int32)
        self._rows = rows if surplus is None else rows[~surplus[rows]]
        self._starts = np.searchsorted(nearest[self._rows, 0], np.arange(clusters + 1))

    def members(self, cluster: int) -> np.ndarray:
        """Rows of a cluster, ascending."""
        return self._rows[self._starts[cluster] : self._starts[cluster + 1]]

    def visits(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(cluster, which of `rows` search it) for all clusters that one of them searches.

        Each row's own cluster is first: its k best there are a threshold that little of the others passes.
        """
        for columns in (slice(0, 1), slice(1, None)):
            mine = self.nearest[rows, columns]
            which, _ = np.nonzero(mine >= 0)
            mine = mine[mine >= 0]
            order = np.argsort(mine, kind="stable")
            visited, starts = np.unique(mine[order], return_index=True)
            yield from zip(visited.tolist(), np.split(which[order], starts[1:]))


def approximate_graph(
    xb: Rows, k: int, recall: float = 0.95, *, on_rows: Callable[[int], None] = lambda rows: None
) -> tuple[np.ndarray, np.ndarray, Approximation]:
    """The approximate k best other rows of each row of xb (n, D): I (n, k) int32, D (n, k) float32, and how good it is.

    `on_rows(n)` is called after each n rows. LattqeError where xb has too few rows (`reason_for_exact`).
    """
    check_recall(recall)
    with lanes_on() as lanes:
        whole = Block.load(check_rows(xb), lanes[0], k)
        approximation = approximate(whole, k, recall, lanes)
        membership = Membership(approximation.nearest, approximation.clusters, whole.surplus)
        scores, ids = lists_of(whole, membership, 0, len(whole), k, lanes, on_rows=on_rows)
    return ids, scores, approximation


def check_recall(recall: float) -> None:
    """Refuse a recall that cannot be promised."""
    if not 0 < recall < 1:
        raise LattqeError(
            f"recall {recall:g} is not possible: give a number between 0 and 1, or leave --approximate out"
        )


def reason_for_exact(rows: int, k: int) -> str | None:
    """Why a graph of that many rows is made exactly even where an approximate one would do, or None.

    LattqeError where k is too large for any clusters.
    """
    if rows < LEAST_ROWS:
        return f"{rows:,} rows are too few to approximate (fewer than {LEAST_ROWS:,}): the graph is exact"
    if cluster_count(rows, k) < LEAST_CLUSTERS:
        raise LattqeError(
            f"k = {k} is too large to approximate the graph of {rows} rows: use at most {rows // LEAST_CLUSTERS}, or "
            "leave --approximate out"
        )
    return None


def cluster_count(rows: int, k: int) -> int:
    """2√n: twice as many cost more to find than they save at 200,000 rows; and no fewer rows in one than k."""
    return min(round(2 * np.sqrt(rows)), rows // max(k, 1))


def approximate(
    whole: Block, k: int, wanted: float, lanes: Sequence[Products], clusters: int | None = None, seed: int = SEED
) -> Approximation:
    """Find clusters, and the margin within which they have to be searched for the recall `wanted`.

    A margin that falls short on the rows measured is raised; not beyond the work of an exact graph.
    """
    count = clusters or cluster_count(len(whole), k)
    centroids = find_centroids(whole.stored, count, seed)
    shuffled = np.random.default_rng([seed, 1]).permutation(len(whole))
    cut = min(PLANNED_ROWS, len(whole) // 2)
    planned_rows, rows = np.sort(shuffled[:cut]), np.sort(shuffled[cut : cut + MEASURED_ROWS])
    planned_truth, truth = (exact_lists(whole, some, k, lanes) for some in (planned_rows, rows))
    depth = min(DEPTH, count)
    while True:
        ranked, gaps = nearest_clusters(whole.stored, centroids, depth, lanes)
        sizes = np.bincount(ranked[:, 0], minlength=count)
        columns = _affordable(ranked, sizes)
        ranked, gaps = ranked[:, :columns], gaps[:, :columns]
        needed = margins_needed(ranked, gaps, rows, truth)
        planned = least_margin(
            margins_needed(ranked, gaps, planned_rows, planned_truth), lambda recall: recall.low >= wanted
        )
        margin = max(planned, least_margin(needed, lambda recall: recall.mean >= wanted))
        if np.isfinite(margin) or columns < depth or depth == count:
            break
        depth = min(2 * depth, count)
    searched = within_margin(ranked, gaps, sizes, k, margin)
    nearest = np.where(searched, ranked, -1)[:, : int(searched.sum(axis=1).max())]
    expected = within_margin(ranked, gaps, sizes, k, planned).sum(axis=1).mean()
    recall = Recall.of(shares_met(nearest, rows, truth))
    return Approximation(np.ascontiguousarray(nearest), count, round(float(expected), 2), wanted, recall)


def find_centroids(xb: Rows, clusters: int, seed: int = SEED) -> np.ndarray:
    """Centroids (clusters, D) float32 by faiss's spherical k-means of a sample; the same for any number of threads."""
    import faiss

    sample = np.sort(np.random.default_rng([seed, 0]).permutation(len(xb))[: PER_CENTROID * clusters])
    kmeans = faiss.Kmeans(
        xb.shape[1],
        clusters,
        niter=ITERATIONS,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=PER_CENTROID,
    )
    with faiss_threads(1), threadpool_limits(1, user_api="blas"):
        kmeans.train(np.ascontiguousarray(xb[sample], dtype=np.float32))
    return np.asarray(kmeans.centroids)


def nearest_clusters(
    x: Rows, centroids: np.ndarray, depth: int, lanes: Sequence[Products]
) -> tuple[np.ndarray, np.ndarray]:
    """The clusters of each row of x (n, D), nearest first, (n, depth) int32, and how much less similar each is than the
    first, (n, depth) float32.
    """
    import faiss

    def rank(_: Products, cut: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.ascontiguousarray(row_range(x, *cut)[:], dtype=np.float32)
        with faiss_threads(1):
            scores, numbers = faiss.knn(rows, centroids, depth, metric=faiss.METRIC_INNER_PRODUCT)
        return numbers.astype(np.int32), scores[:, :1] - scores

    with threadpool_limits(1, user_api="blas"):
        numbers, gaps = zip(*in_lanes(rank, list(tiles(len(x), ASSIGNED_ROWS)), lanes))
    return np.concatenate(numbers), np.concatenate(gaps)


def exact_lists(whole: Block, rows: np.ndarray, k: int, lanes: Sequence[Products]) -> np.ndarray:
    """The true neighbors of some rows (m,): (m, k) int32, -1 missing."""
    return best_rows(whole.stored[rows], whole, k, lanes, exclude=rows)[1]


def margins_needed(ranked: np.ndarray, gaps: np.ndarray, rows: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The margin (m, k) from which on each row (m,) searches the cluster of each of its true neighbors (m, k).

    inf: of a cluster that is not among those ranked (n, depth), at `gaps` (n, depth); NaN: no neighbor.
    """
    needed = np.full(truth.shape, np.inf, dtype=np.float32)
    for number, gap in zip(ranked[rows].T, gaps[rows].T):
        needed = np.where(number[:, None] == ranked[truth, 0], gap[:, None], needed)
    return np.where(truth >= 0, needed, np.nan)


def least_margin(needed: np.ndarray, enough: Callable[[Recall], bool]) -> float:
    """The smallest margin whose recall is enough, or inf, for the margins (m, k) that neighbors need."""
    choices = np.unique(needed[np.isfinite(needed)])
    real = np.maximum((~np.isnan(needed)).sum(axis=1), 1)
    place = bisect_left(choices, True, key=lambda margin: enough(Recall.of((needed <= margin).sum(axis=1) / real)))
    return float(choices[place]) if place < len(choices) else np.inf


def within_margin(ranked: np.ndarray, gaps: np.ndarray, sizes: np.ndarray, k: int, margin: float) -> np.ndarray:
    """Which of the clusters ranked (n, depth) each row searches, (n, depth) bool: from the nearest on.

    In any case as many as it takes to meet k others: a row with fewer would be searched among all rows.
    """
    searched, met = gaps <= margin, np.zeros(len(ranked), dtype=np.int64)
    for column, numbers in enumerate(ranked.T):
        searched[:, column] |= met <= k
        met += sizes[numbers]
    return searched


def shares_met(nearest: np.ndarray, rows: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The share (m,) of its true neighbors (m, k) that each row has where it searches `nearest` of Approximation.

    A true neighbor is better than what is not among the k best, so it is in the list wherever it is met.
    """
    met = np.zeros(truth.shape, dtype=bool)
    for number in nearest[rows].T:
        met |= number[:, None] == nearest[truth, 0]
    return (met & (truth >= 0)).sum(axis=1) / np.maximum((truth >= 0).sum(axis=1), 1)


def shares_found(ids: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The share (m,) of its true neighbors (m, k) that each row's list (m, k) has."""
    found = np.array([np.isin(true[true >= 0], own).sum() for own, true in zip(ids, truth)])
    return found / np.maximum((truth >= 0).sum(axis=1), 1)


def _affordable(ranked: np.ndarray, sizes: np.ndarray) -> int:
    """How many columns of the clusters ranked (n, depth) can be searched with less work than an exact graph."""
    work = np.cumsum([float(sizes[column].sum()) for column in ranked.T])
    return max(int(np.searchsorted(work, len(ranked) ** 2 / 2, side="right")), 1)


def lists_of(
    whole: Block,
    membership: Membership,
    start: int,
    stop: int,
    k: int,
    lanes: Sequence[Products],
    clock: Clock | None = None,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> tuple[np.ndarray, np.ndarray]:
    """The lists of rows start..stop, as they are stored: D (n, k) float32, I (n, k) int32. Lanes share the rows."""
    most = max(BUFFER_BYTES // (8 * capacity_for(k)), 1)
    shares = max(-(-(stop - start) // len(lanes)), 1)
    # Rows of one cluster together: they visit the same clusters, and have the same candidates to be scored.
    order = np.argsort(membership.nearest[start:stop, 0], kind="stable")
    scores, ids = np.empty((len(order), k), np.float32), np.empty((len(order), k), np.int32)

    def search(products: Products, cut: tuple[int, int]) -> None:
        some = order[slice(*cut)]
        scores[some], ids[some] = published(*lists_of_rows(whole, membership, start + some, k, products, clock))
        on_rows(len(some))

    in_lanes(search, list(tiles(len(order), min(most, shares))), lanes)
    return scores, ids


def lists_of_rows(
    whole: Block, membership: Membership, rows: np.ndarray, k: int, products: Products, clock: Clock | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The exact k best of the rows in the clusters that each of `rows` (m,) searches.

    (m, k) float64 (-inf missing), (m, k) int32 (-1 missing). A row with fewer than k such is searched among all.
    """
    clock = clock or Clock()
    queries = Block.load(whole.stored[rows], products, widen=True)
    running = RunningTopK(queries, whole, k, products.error(queries, whole))
    for cluster, asking in membership.visits(rows):
        members = membership.members(cluster)
        if not len(members):
            continue
        with clock("loading"):
            others = products.widen(whole.stored[members])
        for lo, hi in tiles(len(asking), max(products.entries // len(members), 1)):
            _visit(running, rows, asking[lo:hi], members, others, products, clock)
    scores, ids = np.empty((len(rows), k)), np.empty((len(rows), k), dtype=np.int32)
    with clock("scoring"):
        for lo, hi in tiles(len(rows), SETTLED_ROWS):
            running.settle(lo, hi)
        running.prepare_scores()
        for lo, hi in tiles(len(rows), SETTLED_ROWS):
            clock.count("scored", running.score(lo, hi))
            scores[lo:hi], ids[lo:hi] = running.lists(lo, hi)
    short = np.flatnonzero((ids >= 0).sum(axis=1) < min(k, len(whole) - 1))
    if len(short):
        clock.count("short", len(short))
        with clock("searching exactly"):
            scores[short], ids[short] = best_rows(queries.stored[short], whole, k, [products], exclude=rows[short])
    return scores, ids


def _visit(
    running: RunningTopK,
    rows: np.ndarray,
    asking: np.ndarray,
    members: np.ndarray,
    others: Any,
    products: Products,
    clock: Clock,
) -> None:
    """Compare the rows that search a cluster, rows[asking], with its members, whose vectors are `others`."""
    numbers = rows[asking]
    with clock("products"):
        tile = products.multiply(running.rows.held[asking], others)
    clock.count("products", len(asking) * len(members))
    with clock("selection"):
        place = np.minimum(np.searchsorted(members, numbers), len(members) - 1)
        itself = np.flatnonzero(members[place] == numbers)
        products.blank(tile, itself, place[itself])
        bare = np.flatnonzero(np.isneginf(running.threshold[asking]))
        if len(bare) and len(members) > running.k:
            running.lift(asking[bare], products.kth(tile[bare], running.k))
        i, j, scores = products.passing(tile, running.threshold[asking])
        running.offer(asking, i, members[j], scores)
