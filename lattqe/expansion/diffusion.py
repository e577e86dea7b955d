"""What flows over a whole neighbor graph: hops of features, and the rivals. All algebra is sparse (scipy).

Hops: the weights that a method gives to the lists of all rows are the edges W of a graph; negative ones are dropped.
With A = (W + Wᵀ)/2 + diag(w₀), w₀ each row's weight for itself, and S = A with rows that add up to 1, a hop is
H ← α S H + (1 - α) X, from H = X. After the last one rows are L2-normalised: the result is an ordinary index.
Everything is cut by rows (S) and by columns (H), and every number is computed in an order that no cut changes: entries
of S by their column, sums of S H one by one along a row. So a band of rows of a cluster's worker has the bytes of the
same rows in one process.

Diffusion (Iscen et al. 2017; truncated, offline: Yang et al. 2019), up to `MOST_ROWS` rows in one process, ranks rows
by f with (I - α S) f = y, where A_ij = max(cos, 0)^γ for mutual neighbors (each among the first kd of the other),
S = D^-½ A D^-½ and y holds the query's kq best rows. A row without mutual neighbors keeps f = y; rows that nothing
reaches have f = 0 and follow in the order of their similarity to the query; equal rows in the order of their numbers.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sparse

from lattqe.errors import LattqeError
from lattqe.expansion.base import CANCELLED, Described, check_hops, parameter
from lattqe.search import knn_graph, topk

COLUMN_BYTES = 64 << 20  # of the columns of H that are held twice at once
MOST_ROWS = 100_000  # graphs of more rows are not held in one process
UNMEASURED = f"not measured: more than {MOST_ROWS:,} rows"  # what a report says of them
TOLERANCE = 1e-6  # of the residual beside y; ranks no longer change far above it
ITERATIONS = 1000  # of conjugate gradients: α = .99 takes about 100
BLOCK_FLOATS = 1 << 22  # numbers of one dense block: 32 MiB each, of which conjugate gradients hold five


def directed(weights: np.ndarray, rows: np.ndarray, n: int) -> sparse.csr_array:
    """W (m, n) float32 of some rows: the positive weights of weights (m, 1 + k) for rows (m, 1 + k), -1 for none.

    Column 0, the row itself, is left out. A row that is listed twice has both weights.
    """
    if weights.shape != rows.shape or weights.ndim != 2:
        raise LattqeError(f"weights {weights.shape} do not fit rows {rows.shape}: expected (n, 1 + k) twice")
    if not np.isfinite(weights).all():
        bad = int(np.flatnonzero(~np.isfinite(weights).all(axis=1))[0])
        raise LattqeError(f"edges of row {bad}: NaN or infinite weights")
    if rows.size and rows.max() >= n:
        raise LattqeError(f"edges to row {int(rows.max())}, but there are {n} rows: these are edges of other features")
    kept = (rows[:, 1:] >= 0) & (weights[:, 1:] > 0)
    starts = np.concatenate([[0], np.cumsum(kept.sum(axis=1))])
    if starts[-1] < 2**30:  # then no sum with the transpose needs wider numbers, which would be half of its memory
        starts = starts.astype(np.int32)
    values = weights[:, 1:][kept].astype(np.float32)
    W = sparse.csr_array((values, rows[:, 1:][kept], starts), shape=(len(rows), n))
    W.sum_duplicates()
    return W


def transition(W: sparse.csr_array, incoming: sparse.csr_array, loops: np.ndarray, first: int) -> sparse.csr_array:
    """Rows of S (m, n) float32, from W (m, n), the same rows of Wᵀ, and w₀ (m,); `first`: number of the first row.

    A row without any edge stays itself.
    """
    own = np.arange(len(loops))
    A = (W.astype(np.float64) + incoming.astype(np.float64)) / 2
    A = A + _entries(np.maximum(loops, 0), own, first + own, W.shape)
    total = A @ np.ones(A.shape[1])
    alone = np.flatnonzero(total == 0)
    if len(alone):
        A = A + _entries(np.ones(len(alone)), alone, first + alone, W.shape)
        total[alone] = 1
    data = (A.data / np.repeat(total, np.diff(A.indptr))).astype(np.float32)
    return sparse.csr_array((data, A.indices, A.indptr), shape=A.shape)


def _entries(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, ...]) -> sparse.csr_array:
    where = (rows.astype(np.int32), columns.astype(np.int32))
    return sparse.csr_array((values.astype(np.float64), where), shape=shape)


def hopped(out: np.ndarray, x: np.ndarray, alpha: float) -> np.ndarray:
    """One hop of some rows, from their S H in `out` (m, c) float32, which it becomes; x (m, c): original vectors."""
    out *= np.float32(alpha)
    out += np.float32(1 - alpha) * np.asarray(x, dtype=np.float32)
    return out


def unit_rows(H: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rows of H (m, D) L2-normalised, float32; where a sum cancelled, the original vector x (m, D)."""
    sums = np.ascontiguousarray(H, dtype=np.float64)
    norms = np.sqrt((sums * sums).sum(axis=1, keepdims=True))
    return np.where(norms > CANCELLED, sums / np.maximum(norms, CANCELLED), x).astype(np.float32)


def column_groups(n: int, dim: int, most_bytes: int = COLUMN_BYTES) -> list[slice]:
    """Columns cut so that all rows of a group, in float32, are about that many bytes; columns never mix."""
    step = max(8, most_bytes // max(1, 4 * n))
    return [slice(low, min(low + step, dim)) for low in range(0, dim, step)]


def hop(
    weights: np.ndarray,
    rows: np.ndarray,
    x: np.ndarray,
    alpha: float,
    hops: int,
    on_hop: Callable[[], None] | None = None,
) -> np.ndarray:
    """All rows x (n, D) after that many hops over their edges: (n, D) float32, L2-normalised.

    weights, rows (n, 1 + k): as `augment_rows` gives them, column 0 the row itself. on_hop: called after each hop of
    each group of columns.
    """
    check_hops(hops, alpha)
    n = len(x)
    if len(rows) != n:
        raise LattqeError(f"edges of {len(rows)} rows, but {n} vectors: these are edges of other features")
    W = directed(weights, rows, n)
    S = transition(W, W.T.tocsr(), weights[:, 0], 0)
    out = np.empty(x.shape, dtype=np.float32)
    for columns in column_groups(n, x.shape[1]):
        original = np.ascontiguousarray(x[:, columns], dtype=np.float32)
        H = original
        for _ in range(hops):
            H = hopped(S @ H, original, alpha)
            if on_hop is not None:
                on_hop()
        out[:, columns] = H
    return unit_rows(out, x)


def mutual_affinity(I: np.ndarray, D: np.ndarray, kd: int, gamma: float) -> sparse.csr_array:
    """A (n, n): max(cos, 0)^gamma where two rows are among each other's first kd of I, D (n, k >= kd); symmetric."""
    n = len(I)
    near, score = I[:, :kd], np.asarray(D[:, :kd], dtype=np.float64)
    there = (near >= 0) & (near != np.arange(n)[:, None])
    rows = np.broadcast_to(np.arange(n)[:, None], near.shape)[there]
    weights = np.maximum(score[there], 0) ** gamma
    directed = sparse.csr_array((weights, (rows, near[there])), shape=(n, n))
    # The two sides of a pair may differ by the rounding of their scores: both get the smaller.
    return sparse.csr_array(directed.minimum(directed.T))


def symmetric_normalised(A: sparse.csr_array) -> sparse.csr_array:
    """D^-½ A D^-½; rows without any weight stay zero."""
    degree = np.asarray(A.sum(axis=1)).ravel()
    scale = sparse.diags_array(np.where(degree > 0, 1 / np.sqrt(np.where(degree > 0, degree, 1)), 0))
    return sparse.csr_array(scale @ A @ scale)


def solve(S: sparse.csr_array, alpha: float, y: np.ndarray) -> np.ndarray:
    """Solve (I - alpha S) f = y for f, y (n, b), each column by conjugate gradients to `TOLERANCE`."""
    f, r = np.zeros_like(y), y.copy()
    p, rr = r.copy(), np.einsum("nb,nb->b", y, y)
    enough = TOLERANCE**2 * rr
    active = np.flatnonzero(rr > 0)
    for _ in range(ITERATIONS):
        if not len(active):
            break
        if len(active) < y.shape[1]:  # the others are done: they would only cost
            step, r[:, active], p[:, active], rr[active] = _iterate(S, alpha, r[:, active], p[:, active], rr[active])
            f[:, active] += step
        else:
            step, r, p, rr = _iterate(S, alpha, r, p, rr)
            f += step
        active = active[rr[active] > enough[active]]
    return f


def _iterate(
    S: sparse.csr_array, alpha: float, r: np.ndarray, p: np.ndarray, rr: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One step of conjugate gradients for each column: what f gains, and the next r, p and r·r."""
    q = p - alpha * (S @ p)
    length = rr / np.einsum("nb,nb->b", p, q)
    r = r - length * q
    following = np.einsum("nb,nb->b", r, r)
    return length * p, r, r + (following / rr) * p, following


def seeds(D: np.ndarray, I: np.ndarray, n: int, kq: int, gamma: float) -> np.ndarray:
    """The sources y (nq, n): max(cos, 0)^gamma at the first kq rows of I, D (nq, k >= kq)."""
    y = np.zeros((len(I), n))
    near = I[:, :kq]
    weights = np.where(near >= 0, np.maximum(np.asarray(D[:, :kq], dtype=np.float64), 0) ** gamma, 0)
    np.put_along_axis(y, np.maximum(near, 0), weights, axis=1)
    return y


class GraphRows:
    """The rows of an index with their exact neighbor lists, and what was computed from them once.

    Settings that differ in the query alone share it.
    """

    def __init__(self, xb: np.ndarray) -> None:
        if len(xb) > MOST_ROWS:
            raise LattqeError(
                f"{len(xb):,} rows: diffusion and propagation work in one process, up to "
                f"{MOST_ROWS:,} rows: leave them out here"
            )
        self.xb = np.ascontiguousarray(xb, dtype=np.float32)
        self._lists: tuple[np.ndarray, np.ndarray] | None = None
        self._made: dict[Any, Any] = {}
        self.took: dict[Any, float] = {"graph": 0.0}  # seconds that each product took when it was made

    def lists(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """I and D (n, k), or as many as there are; never the row itself."""
        k = min(k, len(self.xb) - 1)
        if k < 1:
            return np.zeros((len(self.xb), 0), np.int32), np.zeros((len(self.xb), 0), np.float32)
        if self._lists is None or self._lists[0].shape[1] < k:
            started = time.perf_counter()
            self._lists = knn_graph(self.xb, k)
            self.took["graph"] = time.perf_counter() - started
        return self._lists[0][:, :k], self._lists[1][:, :k]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was first asked for under this key; the latest few are kept."""
        if key not in self._made:
            while len(self._made) > 3:
                self._made.pop(next(iter(self._made)))
            started = time.perf_counter()
            self._made[key] = make()
            self.took[key] = time.perf_counter() - started
        return self._made[key]


@dataclass
class Ranker(Described):
    """A way of ranking all rows for a query other than by the product of two vectors. Its fields are its parameters."""

    name: ClassVar[str]
    label: ClassVar[str]
    kq: int = parameter(10, "Best rows of the query, where the flow starts", symbol="kq", tries=(5, 10, 20))
    kd: int = parameter(20, "Neighbors of a row, of which the mutual ones are edges", symbol="kd", tries=(20, 30))
    gamma: float = parameter(3.0, "Power of the similarity on the edges", symbol="γ", tries=(3.0, 6.0))
    alpha: float = parameter(0.99, "Share that flows on instead of staying", symbol="α", tries=(0.9, 0.97, 0.99))

    def __post_init__(self) -> None:
        for name in ("kq", "kd"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LattqeError(f"{self.name}: {name} is {value!r}: use a whole number from 1, such as 20")
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise LattqeError(f"{self.name}: gamma is {self.gamma}: use a finite number above 0, such as 3")
        if not 0 <= self.alpha < 1:
            raise LattqeError(f"{self.name}: alpha is {self.alpha}: use a share from 0 to below 1, such as 0.99")

    def graph(self, rows: GraphRows) -> sparse.csr_array:
        """S (n, n), made once for all queries."""
        lists = rows.lists(self.kd)
        return rows.once(self.graph_key, lambda: symmetric_normalised(mutual_affinity(*lists, self.kd, self.gamma)))

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """What S depends on."""
        return "S", self.kd, self.gamma

    @abstractmethod
    def prepare(self, rows: GraphRows) -> float:
        """Make what does not depend on queries; the seconds it took, whenever that was, without the neighbor lists."""

    @abstractmethod
    def flow(self, rows: GraphRows, y: np.ndarray) -> np.ndarray:
        """The flow f (nq, n) of seeds y (nq, n)."""

    def rankings(self, rows: GraphRows, xq: np.ndarray, exclude: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """All rows (b, n) int64 for each block of queries xq (nq, D): by f, then similarity, then row number.

        exclude (nq,): the row of each query that is itself in the database, where no flow may start.
        """
        n = len(rows.xb)
        step = max(1, BLOCK_FLOATS // max(n, 1))
        for start in range(0, len(xq), step):
            block = np.ascontiguousarray(xq[start : start + step], dtype=np.float32)
            own = None if exclude is None else exclude[start : start + step]
            D, I = topk(block, rows.xb, min(self.kq, n - (own is not None)), exclude=own)
            f = self.flow(rows, seeds(D, I, n, self.kq, self.gamma))
            yield np.lexsort((-(block @ rows.xb.T), -f), axis=1)


@dataclass
class Diffusion(Ranker):
    """Diffusion of each query over the whole graph, by conjugate gradients (Iscen et al. 2017)."""

    name: ClassVar[str] = "diffusion"
    label: ClassVar[str] = "diffusion"

    def prepare(self, rows: GraphRows) -> float:
        """The graph."""
        self.graph(rows)
        return rows.took[self.graph_key]

    def flow(self, rows: GraphRows, y: np.ndarray) -> np.ndarray:
        """See Ranker."""
        return solve(self.graph(rows), self.alpha, np.ascontiguousarray(y.T)).T


@dataclass
class OfflineDiffusion(Ranker):
    """Diffusion from every row alone, solved before any query comes, among its nearest rows (Yang et al. 2019).

    A query then adds up the flows of its kq rows. S is normalised on the whole graph and cut to each row's nearest
    rows afterwards (the paper's late truncation); with `truncation` at the number of rows it is `Diffusion`.
    """

    name: ClassVar[str] = "offline-diffusion"
    label: ClassVar[str] = "offline diffusion"
    truncation: int = parameter(1000, "Nearest rows that the flow of a row is cut to", symbol="cut")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.truncation, bool) or not isinstance(self.truncation, int) or self.truncation < 1:
            raise LattqeError(f"{self.name}: truncation is {self.truncation!r}: use a whole number from 1")

    def prepare(self, rows: GraphRows) -> float:
        """The graph, and the flows of all rows."""
        self.flows(rows)
        return rows.took[self.graph_key] + rows.took[self.flow_key]

    def flows(self, rows: GraphRows) -> sparse.csr_array:
        """(n, n) float32: row i holds the flow that starts in row i, among its first `truncation` neighbors."""
        near = rows.lists(max(self.truncation, self.kd))[0][:, : self.truncation]
        S = self.graph(rows)
        return rows.once(self.flow_key, lambda: self._flows(S, near))

    @property
    def flow_key(self) -> tuple[Any, ...]:
        """What the flows depend on."""
        return "flows", self.kd, self.gamma, self.alpha, self.truncation

    def _flows(self, S: sparse.csr_array, near: np.ndarray) -> sparse.csr_array:
        n = len(near)
        counts, columns, values = np.zeros(n + 1, dtype=np.int64), [], []
        place = np.full(n, -1)
        for row in range(n):
            inside = np.concatenate([[row], near[row][near[row] >= 0]])
            place[inside] = np.arange(len(inside))
            f = _from_first(_cut(S, inside, place), self.alpha)
            place[inside] = -1
            kept = np.flatnonzero(f)
            counts[row + 1] = len(kept)
            columns.append(inside[kept].astype(np.int32))
            values.append(f[kept].astype(np.float32))
        return sparse.csr_array((np.concatenate(values), np.concatenate(columns), np.cumsum(counts)), shape=(n, n))

    def flow(self, rows: GraphRows, y: np.ndarray) -> np.ndarray:
        """See Ranker."""
        return np.asarray((sparse.csr_array(y) @ self.flows(rows)).todense())


def _cut(S: sparse.csr_array, inside: np.ndarray, place: np.ndarray) -> sparse.csr_array:
    """S between some rows; `place` (n,): where each row stands among them, -1 for the others."""
    starts, lengths = S.indptr[inside], S.indptr[inside + 1] - S.indptr[inside]
    entries = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths) + np.arange(lengths.sum())
    columns = place[S.indices[entries]]
    kept = columns >= 0
    rows = np.repeat(np.arange(len(inside)), lengths)[kept]
    return sparse.csr_array((S.data[entries][kept], (rows, columns[kept])), shape=(len(inside), len(inside)))


def _from_first(S: sparse.csr_array, alpha: float) -> np.ndarray:
    """The flow f (n,) of (I - alpha S) f = e, with e the first row alone."""
    f = np.zeros(S.shape[0])
    f[0] = 1.0
    return solve(S, alpha, f[:, None])[:, 0]


@dataclass
class Propagation(Described):
    """Features that flow over the graph without any learning: the result is an ordinary index.

    Edges W weigh the k nearest neighbors by rank, from 1 down to 1/k; S is (W + Wᵀ)/2 with rows that add up to 1;
    H ← α S H + (1 - α) X from H = X, `hops` times; rows are normalised. A row without neighbors stays what it was, and
    so does one whose sum cancels.
    """

    name: ClassVar[str] = "propagation"
    label: ClassVar[str] = "propagation"
    k: int = parameter(10, "Neighbors of a row", symbol="k", tries=(10, 20))
    hops: int = parameter(8, "Times that features flow on", symbol="hops", tries=(4, 8))
    alpha: float = parameter(0.9, "Share that flows on instead of staying", symbol="α", tries=(0.9,))

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise LattqeError(f"{self.name}: k is {self.k!r}: use a whole number from 1, such as 10")
        check_hops(self.hops, self.alpha)

    def augment(self, rows: GraphRows) -> np.ndarray:
        """The rows (n, D) float32 after all hops, L2-normalised."""
        I = rows.lists(self.k)[0]
        n, k = I.shape
        by_rank = np.append(0, np.arange(k, 0, -1) / max(k, 1)).astype(np.float32)
        numbers = np.concatenate([np.arange(n, dtype=np.int32)[:, None], I], axis=1)
        return hop(np.tile(by_rank, (n, 1)), numbers, rows.xb, self.alpha, self.hops)


RANKERS: dict[str, type[Ranker]] = {"diffusion": Diffusion, "offline-diffusion": OfflineDiffusion}
