"""Approximate kNN graphs: overlapping clusters, the exact kernel inside each, and a recall that is measured.

A row belongs to the clusters whose centroids are nearest to it, `overlap` of them. It is compared with every row that
shares a cluster with it, each once, and its list is the exact k best of those: scores in float64 and an order as in an
exact graph, with some neighbors missing. With as many overlaps as clusters nothing is missing.

A true neighbor is found exactly where it shares a cluster. So the exact lists of a few rows tell, before anything is
built, how much overlap a recall takes. The recall that is published is that of other, random rows, whose lists are
made as those of the graph are. Clusters come from faiss's k-means with one seed and one thread, nearest centroids are
found exactly: the graph does not depend on threads, workers or blocks. All of it runs on the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from lattqe.errors import LattqeError
from lattqe.search.exact import published
from lattqe.search.graph import faiss_threads
from lattqe.search.index import best_rows
from lattqe.search.products import Block, Products, lanes_on
from lattqe.search.rows import Clock, Rows, check_rows, in_lanes, row_range, tiles
from lattqe.search.topk import RunningTopK, capacity_for

SEED = 0
LEAST_ROWS = 20_000  # below, an exact graph takes no longer
LEAST_CLUSTERS = 8
MOST_OVERLAP = 32
PER_CENTROID, ITERATIONS = 32, 6  # rows of the sample for each centroid: clusters need not be good, only many
PLANNED_ROWS, MEASURED_ROWS = 256, 1_000
SHORT_SHARE = 0.002  # of the rows that may have too few rows in their clusters: each of them is searched exactly
NORMAL_95 = 1.959964
ASSIGNED_ROWS = 65_536  # at once
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
    """How a graph is approximated, and how well: the clusters of each row, nearest (n, overlap) int32."""

    nearest: np.ndarray
    clusters: int
    planned: int  # the overlap that was expected to do
    wanted: float
    recall: Recall

    @property
    def overlap(self) -> int:
        """Clusters that each row is in."""
        return int(self.nearest.shape[1])

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
            "overlap": self.overlap,
            "overlap_planned": self.planned,
        }


class Membership:
    """Which rows are in which cluster; `surplus` (n,) marks rows that can be in no list."""

    def __init__(self, nearest: np.ndarray, clusters: int, surplus: np.ndarray | None = None) -> None:
        # By column, ascending: the order in which clusters are visited.
        self.columns = np.ascontiguousarray(np.sort(nearest, axis=1).T)
        order = np.argsort(self.columns.T, axis=None, kind="stable")
        rows = (order // nearest.shape[1]).astype(np.int32)
        numbers = self.columns.T.reshape(-1)[order]
        if surplus is not None:
            numbers, rows = numbers[~surplus[rows]], rows[~surplus[rows]]
        self._rows, self._starts = rows, np.searchsorted(numbers, np.arange(clusters + 1))

    def members(self, cluster: int) -> np.ndarray:
        """Rows of a cluster, ascending."""
        return self._rows[self._starts[cluster] : self._starts[cluster + 1]]

    def visits(self, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """(cluster, which of `rows` are in it) for all clusters that have one of them, ascending."""
        mine = self.columns[:, rows].T
        order = np.argsort(mine, axis=None, kind="stable")
        visited, starts = np.unique(mine.reshape(-1)[order], return_index=True)
        return list(zip(visited.tolist(), np.split(order // mine.shape[1], starts[1:])))

    def first_meeting(self, cluster: int, rows: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Which pairs (rows[i[p]], j[p]) of a cluster share none that was visited before: (n,) bool."""
        visited = self.columns[:, rows]
        visited = np.take(np.where(visited < cluster, visited, -1), i, axis=1)
        fresh, differs = np.ones(len(i), dtype=bool), np.empty(len(i), dtype=bool)
        for one in visited:
            for other in np.take(self.columns, j, axis=1):
                fresh &= np.not_equal(one, other, out=differs)
        return fresh


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
    """2√n: finding the nearest centroids and comparing rows cost about the same; and no fewer rows in one than k."""
    return min(round(2 * np.sqrt(rows)), rows // max(k, 1))


def approximate(
    whole: Block, k: int, wanted: float, lanes: Sequence[Products], clusters: int | None = None, seed: int = SEED
) -> Approximation:
    """Find clusters, and the overlap of them that has the recall `wanted`.

    An overlap that falls short on the rows measured is raised; not beyond the work of an exact graph.
    """
    count = clusters or cluster_count(len(whole), k)
    ranked = nearest_clusters(whole, find_centroids(whole.stored, count, seed), lanes)
    shuffled = np.random.default_rng([seed, 1]).permutation(len(whole))
    cut = min(PLANNED_ROWS, len(whole) // 2)
    planned_rows, rows = np.sort(shuffled[:cut]), np.sort(shuffled[cut : cut + MEASURED_ROWS])
    shares = found_by_overlap(ranked, planned_rows, exact_lists(whole, planned_rows, k, lanes))
    good = [Recall.of(share).low >= wanted for share in shares]
    overlap = planned = _affordable(ranked, count, k, good.index(True) + 1 if True in good else len(good))
    truth = exact_lists(whole, rows, k, lanes)
    while True:
        membership = Membership(ranked[:, :overlap], count, whole.surplus)
        recall = Recall.of(shares_found(lists_of_rows(whole, membership, rows, k, lanes[0])[1], truth))
        more = _affordable(ranked, count, k, overlap + 1)
        if recall.mean >= wanted or more == overlap:
            nearest = np.ascontiguousarray(ranked[:, :overlap])
            return Approximation(nearest, count, planned, wanted, recall)
        overlap = more


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


def nearest_clusters(whole: Block, centroids: np.ndarray, lanes: Sequence[Products]) -> np.ndarray:
    """The clusters of each row that may be worth visiting, nearest first, (n, m) int32; ties to the lower number."""
    depth = int(np.clip(np.ceil(np.sqrt(len(centroids) / 2)), 1, min(MOST_OVERLAP, len(centroids))))
    database = Block.load(centroids, lanes[0])
    cuts = tiles(len(whole), ASSIGNED_ROWS)
    found = [best_rows(row_range(whole.stored, *cut)[:], database, depth, lanes)[1] for cut in cuts]
    return np.concatenate(found)


def exact_lists(whole: Block, rows: np.ndarray, k: int, lanes: Sequence[Products]) -> np.ndarray:
    """The true neighbors of some rows (m,): (m, k) int32, -1 missing."""
    return best_rows(whole.stored[rows], whole, k, lanes, exclude=rows)[1]


def found_by_overlap(ranked: np.ndarray, rows: np.ndarray, truth: np.ndarray) -> list[np.ndarray]:
    """The share (m,) of its true neighbors (m, k) that each row would have with an overlap of 1, 2, … clusters."""
    depth, needed = ranked.shape[1], np.full(truth.shape, ranked.shape[1] + 1)
    for a in range(depth):
        for b in range(depth):
            shared = ranked[rows, a][:, None] == ranked[truth, b]
            needed[shared] = np.minimum(needed[shared], max(a, b) + 1)
    real = np.maximum((truth >= 0).sum(axis=1), 1)
    return [((needed <= overlap) & (truth >= 0)).sum(axis=1) / real for overlap in range(1, depth + 1)]


def shares_found(ids: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The share (m,) of its true neighbors (m, k) that each row's list (m, k) has."""
    found = np.array([np.isin(true[true >= 0], own).sum() for own, true in zip(ids, truth)])
    return found / np.maximum((truth >= 0).sum(axis=1), 1)


def _affordable(ranked: np.ndarray, clusters: int, k: int, overlap: int) -> int:
    """The overlap nearest to the one wanted that is less work than an exact graph and leaves few rows with short lists.

    The second is only a matter of work too: rows with short lists are searched exactly.
    """
    n, depth = ranked.shape

    def sizes(overlap: int) -> np.ndarray:
        return np.bincount(ranked[:, :overlap].reshape(-1), minlength=clusters).astype(np.float64)

    overlap = min(overlap, depth)
    while overlap < depth and np.mean(sizes(overlap)[ranked[:, :overlap]].max(axis=1) <= k) > SHORT_SHARE:
        overlap += 1
    while overlap > 1 and np.square(sizes(overlap)).sum() > n * n / 2:
        overlap -= 1
    return overlap


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
    cuts = [(start + lo, start + hi) for lo, hi in tiles(stop - start, min(most, shares))]

    def search(products: Products, cut: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        found = published(*lists_of_rows(whole, membership, np.arange(*cut), k, products, clock))
        on_rows(cut[1] - cut[0])
        return found

    scores, ids = zip(*in_lanes(search, cuts, lanes))
    return np.concatenate(scores), np.concatenate(ids)


def lists_of_rows(
    whole: Block, membership: Membership, rows: np.ndarray, k: int, products: Products, clock: Clock | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The exact k best of the rows that share a cluster with each of `rows` (m,), ascending.

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
            _visit(running, membership, cluster, rows, asking[lo:hi], members, others, products, clock)
    with clock("scoring"):
        running.settle(0, len(rows))
        running.prepare_scores()
        clock.count("scored", running.score(0, len(rows)))
        scores, ids = running.lists(0, len(rows))
    short = np.flatnonzero((ids >= 0).sum(axis=1) < min(k, len(whole) - 1))
    if len(short):
        clock.count("short", len(short))
        with clock("searching exactly"):
            scores[short], ids[short] = best_rows(queries.stored[short], whole, k, [products], exclude=rows[short])
    return scores, ids


def _visit(
    running: RunningTopK,
    membership: Membership,
    cluster: int,
    rows: np.ndarray,
    asking: np.ndarray,
    members: np.ndarray,
    others: Any,
    products: Products,
    clock: Clock,
) -> None:
    """Compare some rows of a cluster, rows[asking], with all of its members, whose vectors are `others`."""
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
        j = members[j]
        # What was met before is in the buffer, or was not good enough: twice, it would pass for two of the k best.
        fresh = membership.first_meeting(cluster, numbers, i, j)
        running.offer(asking, i[fresh], j[fresh], scores[fresh])
