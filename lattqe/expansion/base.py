"""The generalised query expansion: x̂ = Σ θ(d_i | q, {d}, {d}⁻, i) / Z with θ = w_i d_i, and Z the L2 norm.

A method only says what the weights are (`Method.weights`). Reading arrays, cutting them into blocks that fit in
the cache, masking, summing, normalising and the degenerate cases are here, once for all methods.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from lattqe.device import pick_device
from lattqe.errors import LattqeError

# Bytes of float32 vectors that are weighted at once: large enough to keep every core busy, small beside any memory.
BLOCK_BYTES = 32 << 20
# The same on a GPU, where more is computed at once: 16,000 vectors of 2048 numbers are what the network takes.
BLOCK_BYTES_GPU = 128 << 20
# A sum this small beside its terms is rounding noise: the terms cancelled, and its direction means nothing.
CANCELLED = 1e-6
HOP_ALPHA = 0.9  # share of a hop that comes from the neighbors, where no network has learned one
MOST_HOPS = 64  # with α = 0.9 one part in 1,000 of the first vectors' neighbors is left after 64


@dataclass(frozen=True)
class Expanded:
    """What an expansion gives: `vectors` (n, D) float32, L2-normalised, and `weights` (n, 1 + k + m) float32.

    Column 0 is the item itself, columns 1..k its neighbors by rank, the last m its negatives. `rows` (n, 1 + k + m)
    int32 are the row numbers that the weights belong to, -1 for none: with them the weights are edges of a graph.
    They are there where lists were given as row numbers (`lattqe.expansion.rows`).
    """

    vectors: np.ndarray
    weights: np.ndarray
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int32))

    @classmethod
    def joined(cls, parts: "list[Expanded]", dim: int, width: int) -> "Expanded":
        """Several, one after the other; none at all is empty arrays of `dim` and `width` columns."""
        if len(parts) == 1:
            return parts[0]
        empty = cls(np.empty((0, dim), np.float32), np.empty((0, width), np.float32), np.empty((0, width), np.int32))
        all_parts = [empty, *parts]
        return cls(
            *(np.concatenate([getattr(part, name) for part in all_parts]) for name in ("vectors", "weights", "rows"))
        )


@dataclass(frozen=True)
class Lists:
    """Some items with their neighbor lists, as one padded tensor on the method's device.

    items (n, 1 + k + m, D) float32: the item, its k neighbors, its m negatives; padding is zeros.
    valid (n, 1 + k + m) bool: False on padding; the item itself is always valid.
    scores (n, k) float32: similarity of each neighbor to the item; 0 on padding.
    weighed: how many of the neighbors are weighed one by one, where the method asked for more (`Method.depth`).
    """

    items: torch.Tensor
    valid: torch.Tensor
    scores: torch.Tensor
    weighed: int | None = None

    @property
    def k(self) -> int:
        """Columns that belong to neighbors."""
        return self.scores.shape[1]


class RowSource(Protocol):
    """What expansion needs of an index, wherever its rows are: every `lattqe.search.Index` is one."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """The vectors (n, D) of rows (n,), float16 or float32."""

    def lowest(self, xq: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k rows with the lowest scores, ascending: D (nq, k) float32, I (nq, k) int32."""


def resident(source: RowSource, device: torch.device) -> torch.Tensor | None:
    """All rows (n, D) of a source on a device, if it can keep them there (`FlatIndex.resident`) and there is room."""
    find = getattr(source, "resident", None)
    return None if find is None else find(device)


@dataclass(frozen=True)
class Parameter:
    """A parameter as people meet it: an option of a verb, a key of a run's file, a part of a row of a report."""

    name: str
    kind: type
    default: Any
    help: str
    symbol: str  # what reports call it
    tries: tuple[Any, ...]  # values worth trying where a benchmark tunes it; the default alone where there are none
    address: bool  # a folder or s3:// address

    @property
    def option(self) -> str:
        """Its option on the command line."""
        return "--" + self.name.replace("_", "-")


def parameter(default: Any, help: str, *, symbol: str = "", tries: tuple[Any, ...] = (), address: bool = False) -> Any:
    """A dataclass field that users may set: verbs, run files and reports know it from this alone."""
    kind = str if address else type(default)
    return field(
        default=default,
        metadata={"help": help, "symbol": symbol, "tries": tries or (default,), "kind": kind, "address": address},
    )


@dataclass
class Described:
    """A dataclass that says what its parameters are."""

    label: ClassVar[str] = ""

    @classmethod
    def parameters(cls) -> dict[str, Parameter]:
        """The parameters that users may set, by name."""
        found = {f.name: f for f in dataclasses.fields(cls) if "help" in f.metadata}
        return {
            name: Parameter(
                name,
                f.metadata["kind"],
                f.default,
                f.metadata["help"],
                f.metadata["symbol"] or name,
                f.metadata["tries"],
                f.metadata["address"],
            )
            for name, f in found.items()
        }


@dataclass
class Method(Described, ABC):
    """One θ. Its dataclass fields are its parameters; `create` checks their names.

    All that verbs, run files and reports must know of a method stands in its class: names, defaults, what to try.
    """

    name: ClassVar[str]
    label: ClassVar[str] = ""  # what reports call it for queries; by default its name
    dba_label: ClassVar[str] = ""  # and for database rows
    learned: ClassVar[bool] = False  # needs a trained network, named by the parameter `model`
    row_params: ClassVar[dict[str, Any]] = {}  # parameters that database rows have beyond those of queries
    tries_k: ClassVar[tuple[int, ...]] = (2, 4, 8, 16, 32)  # nQE worth trying where a benchmark tunes it
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((4, 8, 16), (4, 8, 16))  # nDBA, and nQE with it
    default_k: ClassVar[int]  # neighbors of a query where the caller does not say: the paper's choice for this method
    default_k_dba: ClassVar[int]  # neighbors of a database row, likewise
    device: str = field(default="auto", kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = getattr(cls, "name", cls.__name__)
        cls.label = cls.label or name
        cls.dba_label = cls.dba_label or f"{cls.label} (DBA)"

    @property
    def largest_k(self) -> int | None:
        """The most neighbors that can be weighed; None: any number."""
        return None

    @property
    def negatives(self) -> int:
        """Low-ranked items wanted for each row; DQE makes it a parameter."""
        return 0

    def suggested_k(self, dba: bool, augmented: bool = False) -> int:
        """How many neighbors to use for queries, or for database rows (dba), where the caller does not say.

        augmented: queries of an augmented database, from which they are expanded.
        """
        return self.default_k_dba if dba else self.default_k

    @property
    def default_hops(self) -> int:
        """Hops over the graph of all rows where the caller does not say; 1: each row from its own neighbors."""
        return 1

    @property
    def adapts(self) -> bool:
        """Whether database rows are adapted to their collection first (`lattqe.adaptation`), unless asked otherwise."""
        return False

    def hop_alpha(self, rows: int) -> float:
        """Share of a hop among that many rows that comes from the neighbors, where the caller does not say."""
        return HOP_ALPHA

    def origin_of_k(self, augmented: bool = False) -> str:
        """Where `suggested_k` for queries comes from, in words."""
        return "the paper's number"

    def check_k(self, k: int, what: str = "") -> None:
        """Refuse more neighbors than can be weighed; `what` names what asks for them, by default the method."""
        if self.largest_k is not None and k > self.largest_k:
            raise LattqeError(
                f"{what or self.name}: {k} neighbors, but this network was made for {self.largest_k}: use "
                f"{self.largest_k} or fewer"
            )

    def depth(self, k: int) -> int:
        """How many neighbors must be fetched so that k of them can be weighed."""
        return k

    def check_width(self, dim: int, what: str = "vectors") -> None:
        """Refuse vectors of a length that the method was not made for; `what` names them. Formulas take any."""

    def check_device(self, device: torch.device) -> None:
        """Refuse a device that cannot compute what the parameters ask for. Formulas run anywhere."""

    @property
    def shared_width(self) -> int:
        """Floats that all lists share of one database row (`AttentionExpansion.shared_rows`); 0: nothing."""
        return 0

    @property
    def shared_products(self) -> int:
        """Multiplications that sharing spares for each item of each list."""
        return 0

    @abstractmethod
    def weights(self, lists: Lists) -> torch.Tensor:
        """The weights (n, 1 + k) or (n, 1 + k + m); what stands on padding is ignored."""

    @property
    def params(self) -> dict[str, Any]:
        """What decides the result, ready for JSON (the device does not)."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        values.pop("device")
        return values

    def expand(
        self,
        x: np.ndarray,
        neighbors: np.ndarray,
        scores: np.ndarray,
        valid: np.ndarray | None = None,
        negatives: np.ndarray | None = None,
        negatives_valid: np.ndarray | None = None,
        k: int | None = None,
    ) -> Expanded:
        """Expand n items from their neighbor lists.

        x (n, D), neighbors (n, k, D) by descending score, scores (n, k), valid (n, k) bool (default: all),
        negatives (n, m, D), negatives_valid (n, m) bool; float16 or float32, never changed, read block by block:
        beyond its output this holds about `BLOCK_BYTES` (plus what the method's weights need).
        k: how many neighbors to weigh, where the lists are longer because `depth(k)` asked for it.
        A row without neighbors, or whose weighted sum cancels, stays what it was. Deterministic.
        """
        _check_shapes(x, neighbors, scores, valid, negatives, negatives_valid)
        self.check_k(k or 0)
        (n, depth, dim) = neighbors.shape
        if valid is None:
            valid = np.ones((n, depth), dtype=bool)
        if negatives is None:
            negatives = np.zeros((n, 0, dim), dtype=np.float32)
        if negatives_valid is None:
            negatives_valid = np.ones(negatives.shape[:2], dtype=bool)
        parts, masks = [x[:, None], neighbors, negatives], [np.ones((n, 1), dtype=bool), valid, negatives_valid]
        return self._expand(
            parts, masks, scores, lambda rows, lists: self.weights(dataclasses.replace(lists, weighed=k))
        )

    def terms(self, lists: Lists) -> torch.Tensor:
        """What the weights belong to (n, 1 + k + m, D): the vectors themselves."""
        return lists.items

    def _expand(
        self,
        parts: list[np.ndarray],
        masks: list[np.ndarray],
        scores: np.ndarray,
        weigh: Callable[[slice, Lists], torch.Tensor],
    ) -> Expanded:
        """Expand block by block with the weights that `weigh` gives to the rows of a slice."""
        n, dim = parts[0].shape[0], parts[0].shape[2]
        t = sum(part.shape[1] for part in parts)
        vectors = np.empty((n, dim), dtype=np.float32)
        weights = np.zeros((n, t), dtype=np.float32)
        device = pick_device(self.device)
        with torch.inference_mode():
            for rows in blocks(n, t * dim * 4, None if device.type == "cpu" else BLOCK_BYTES_GPU):
                lists = pack([part[rows] for part in parts], [mask[rows] for mask in masks], scores[rows], device)
                vectors[rows], weights[rows] = self._sums(lists, weigh(rows, lists))
        check_finite(self.name, vectors)
        return Expanded(vectors, weights)

    def expand_places(
        self, x: np.ndarray, table: torch.Tensor, places: np.ndarray, scores: np.ndarray, k: int
    ) -> Expanded:
        """`expand` of n items at once, on the device where their lists' vectors are.

        x (n, D); table (r, D) float32 has the vectors that places (n, t + m) name, -1 for missing: the t neighbors,
        then the negatives; scores (n, t).
        """
        device, known = table.device, torch.from_numpy(places >= 0).to(table.device)
        with torch.inference_mode():
            own = torch.from_numpy(x.astype(np.float32)).to(device)
            others = table[torch.from_numpy(np.maximum(places, 0)).to(device)].masked_fill_(~known[..., None], 0)
            given = np.where(places[:, : scores.shape[1]] >= 0, scores, 0).astype(np.float32)
            lists = Lists(
                torch.cat([own[:, None], others], dim=1),
                torch.nn.functional.pad(known, (1, 0), value=True),
                torch.from_numpy(given).to(device),
                k,
            )
            vectors, weights = self._sums(lists, self.weights(lists))
        check_finite(self.name, vectors)
        return Expanded(vectors, weights)

    def _sums(self, lists: Lists, w: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Vectors (n, D), and their weights (n, 1 + k + m), 0 where the method gives none, in main memory."""
        w = torch.where(lists.valid[:, : w.shape[1]], w, 0)
        vectors = aggregate(w, self.terms(lists)[:, : w.shape[1]])
        return vectors.cpu().numpy(), np.pad(w.cpu().numpy(), ((0, 0), (0, lists.items.shape[1] - w.shape[1])))


def is_finite(value: Any) -> bool:
    """Whether a parameter is a finite number; a run file or a notebook can give text, or nothing."""
    return isinstance(value, Real) and math.isfinite(value)


def check_hops(hops: int, alpha: float) -> None:
    """Refuse numbers that mean nothing."""
    if isinstance(hops, bool) or not isinstance(hops, Integral) or not 1 <= hops <= MOST_HOPS:
        raise LattqeError(f"hops is {hops!r}: use a whole number from 1 (each row from its neighbors) to {MOST_HOPS}")
    if not (is_finite(alpha) and 0 < alpha < 1):
        raise LattqeError(f"the share of the neighbors is {alpha!r}: use a number between 0 and 1, such as {HOP_ALPHA}")


def check_finite(name: str, vectors: np.ndarray) -> None:
    """Refuse results that are not numbers, naming the method and the row."""
    if not np.isfinite(vectors).all():
        bad = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise LattqeError(f"{name}: row {bad} has NaN or infinite values in its vectors or scores: clean them")


def aggregate(weights: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """The normalised weighted sum (n, D) of items (n, t, D) under weights (n, t); column 0 where the sum cancels."""
    total = torch.bmm(weights[:, None], items)[:, 0]
    norm = total.norm(dim=1, keepdim=True)
    scale = weights.abs().sum(dim=1, keepdim=True)
    own = items[:, 0]
    own = own / own.norm(dim=1, keepdim=True).clamp(min=torch.finfo(own.dtype).tiny)
    # Both branches are evaluated for every row: the clamps keep the gradient of the branch not taken free of NaN.
    return torch.where(norm <= CANCELLED * scale, own, total / norm.clamp(min=torch.finfo(norm.dtype).tiny))


def blocks(n: int, row_bytes: int, block_bytes: int | None = None) -> Iterator[slice]:
    """Cut n rows of that many bytes into slices of about `block_bytes`, by default `BLOCK_BYTES`."""
    step = max(1, (block_bytes or BLOCK_BYTES) // max(1, row_bytes))
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))


def pack(parts: list[np.ndarray], masks: list[np.ndarray], scores: np.ndarray, device: torch.device) -> Lists:
    """Join arrays (n, t_j, D) and their masks (n, t_j) into `Lists`, with zeros on padding."""
    valid = np.concatenate(masks, axis=1)
    items = np.empty((*valid.shape, parts[0].shape[2]), dtype=np.float32)
    np.concatenate(parts, axis=1, out=items, casting="same_kind")
    items[~valid] = 0  # padding may hold anything, NaN included
    scores = np.where(valid[:, 1 : 1 + scores.shape[1]], scores, 0).astype(np.float32)
    there = [torch.from_numpy(array).to(device) for array in (items, valid, scores)]
    return Lists(there[0], there[1], there[2])


def _check_shapes(
    x: np.ndarray,
    neighbors: np.ndarray,
    scores: np.ndarray,
    valid: np.ndarray | None,
    negatives: np.ndarray | None,
    negatives_valid: np.ndarray | None,
) -> None:
    """Refuse arrays that do not belong together, by name."""
    if x.ndim != 2 or neighbors.ndim != 3 or len(x) != len(neighbors) or x.shape[1] != neighbors.shape[2]:
        raise LattqeError(f"x {x.shape} and neighbors {neighbors.shape} do not fit: expected (n, D) and (n, k, D)")
    if scores.shape != neighbors.shape[:2]:
        raise LattqeError(f"scores {scores.shape} do not fit neighbors {neighbors.shape}: expected (n, k)")
    if valid is not None and valid.shape != scores.shape:
        raise LattqeError(f"valid {valid.shape} does not fit scores {scores.shape}: expected (n, k)")
    if negatives is not None and (negatives.ndim != 3 or negatives[:, 0:0].shape != neighbors[:, 0:0].shape):
        raise LattqeError(f"negatives {negatives.shape} do not fit x {x.shape}: expected (n, m, D)")
    if negatives_valid is not None and (negatives is None or negatives_valid.shape != negatives.shape[:2]):
        raise LattqeError(f"negatives_valid {negatives_valid.shape} does not fit the negatives: expected (n, m)")
