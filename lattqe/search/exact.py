"""What exact means: the score of two vectors, the order of a list, and how far faster products may be from the truth.

The score of two rows is the BLAS dot product `ddot` of their stored values in float64, one call for each pair: it
depends on the two vectors alone, never on the batch, the block or the number of threads. For float16 vectors of unit
length it is the true value, with no rounding at all (products are multiples of 2^-48, sums stay below 2), so it is the
same on every machine; for float32 it is the same wherever BLAS uses the same kernel.
Everything that is kept is scored by this one function; faster products only decide what is worth scoring, and their
error bound decides how much slack that needs. Stored float32 scores are these float64 scores rounded once, so graphs
and ranks are the same bytes for any cut of the work.

Coarse products are faster than float32. A row x is stored as s·c with c in int8, float16 or TF32 and s a scale of its
own, and the norm of what that leaves out, r = ‖x - s·c‖, is measured in float64. Then
|⟨x, y⟩ - s t ⟨c, d⟩| ≤ r_x ‖y‖ + ‖s·c‖ r_y, whatever the data. Codes are exact in their format before they are
multiplied, so the only other error is that of the accumulation. A row for which the bound would be too wide to be
useful (a spike among small values, a norm far from the others') is multiplied in float32 instead, as a row and as a
column.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from lattqe.device import matmul_precision
from lattqe.search.rows import Rows, as_tensor, pieces_of, split_rows, tiles

SCORING_CHUNK = 262_144  # elements gathered at once: enough that threads seldom meet in the interpreter, and cached
SHORT_RUN = 2  # pairs of one query, below which its vector may as well be gathered for each of them
CALL_ELEMENTS = 8192  # elements that are gathered in the time that one call takes
SERIAL_ELEMENTS = 32_768  # that torch converts in the calling thread, which is one of several, instead of starting more
TINY = 1e-25  # sums of squares below it may have lost terms to float32's underflow
DOT_LENGTH = 8192  # OpenBLAS splits longer dot products among threads, and then the sum depends on their number
ENCODED_ROWS = 4096  # at once
MAX_RESIDUAL = 0.04  # of the norm, for a useful bound
OUTLIER = 4.0  # times the median norm or residual: beyond, one row would widen the bound of all others
SCALES = 2.0**-60, 2.0**60  # between which a product of two scales neither overflows nor loses bits
UNIT = 2.0**-24
SIGNLESS = 2**63 - 1
INT8_MAX = 127
INT8_DIM = (2**31 - 1) // INT8_MAX**2  # longer vectors could overflow 32 bits


def exact_scores(xq: Rows, xb: Rows, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Score the pairs (xq[i[p]], xb[j[p]]) for p in 0..n: (n,) float64. Fast where equal i stand together."""
    if isinstance(xq, np.ndarray) and isinstance(xb, np.ndarray):
        return _score(xq, xb, i, j)
    scores = np.empty(len(i))
    for asked, queries, query in split_rows(xq, i):
        for found, rows, row in split_rows(xb, j[asked]):
            scores[asked[found]] = _score(queries, rows, query[found], row)
    return scores


def _score(xq: np.ndarray, xb: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Score pairs of rows that are in one array each."""
    scores = np.empty(len(i))
    asked, found = _Rows(xq, len(i)), _Rows(xb, len(i))
    starts = _cut_runs(i, found.limit)
    changes = np.flatnonzero(np.diff(starts, 2, append=len(i))) + 1  # runs that are not as long as the one before
    if len(i) < SHORT_RUN * len(starts) + CALL_ELEMENTS // max(xq.shape[1], 1) * len(changes):
        for lo, hi in tiles(len(i), found.limit):
            _dots(found.take(j[lo:hi]), asked.take(i[lo:hi]), scores[lo:hi])
    else:
        _score_runs(asked, found, i, j, starts, [*changes.tolist(), len(starts)], scores)
    return scores


def _cut_runs(i: np.ndarray, limit: int) -> np.ndarray:
    """Where runs of equal i start; one that is longer than `limit` counts as several."""
    starts = np.flatnonzero(np.diff(i, prepend=-1))
    lengths = np.diff(starts, append=len(i))
    if lengths.max(initial=0) <= limit:
        return starts
    return np.concatenate([np.arange(start, start + length, limit) for start, length in zip(starts, lengths)])


def _score_runs(
    asked: "_Rows",
    found: "_Rows",
    i: np.ndarray,
    j: np.ndarray,
    starts: np.ndarray,
    changes: list[int],
    out: np.ndarray,
) -> None:
    """Score runs of equal i, each of which fits into a chunk: its vector is gathered once.

    A chunk holds whole runs in the order in which they stand, so scores are written where they belong without looking
    up any place. Neighboring runs of one length, up to the next of `changes`, are one call; most are of length k.
    """
    bounds, first = [*starts.tolist(), len(i)], 0
    while first < len(starts):
        lo, last = bounds[first], bisect_right(bounds, bounds[first] + found.limit) - 1
        rows, queries = found.take(j[lo : bounds[last]]), asked.take(i[starts[first:last]])
        a = first
        while a < last:
            b = min(changes[bisect_right(changes, a)], last)
            shape = b - a, bounds[a + 1] - bounds[a]
            here = rows[bounds[a] - lo : bounds[b] - lo].reshape(*shape, rows.shape[1])
            _dots(here, queries[a - first : b - first, None], out[bounds[a] : bounds[b]].reshape(shape))
            a = b
        first = last


class _Rows:
    """Rows of x in float64, at most `limit` of them, gathered into the same memory each time."""

    def __init__(self, x: np.ndarray, most: int) -> None:
        self.x, self.limit = x, max(min(SCORING_CHUNK // max(x.shape[1], 1), most), 1)
        shape = self.limit, x.shape[1]
        self.narrow, self.wide = np.empty(shape, x.dtype), np.empty(shape)
        self.single, self.strips = self.narrow, []
        if x.dtype == np.float16:
            self.single = np.empty(shape, np.float32)
            both = (torch.from_numpy(each).view(-1).split(SERIAL_ELEMENTS) for each in (self.narrow, self.single))
            self.strips = list(zip(*both))

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows (n,) of x, (n, D) float64, valid until the next call."""
        n = len(rows)
        self.x.take(rows, 0, self.narrow[:n], "clip")  # "clip" only spares numpy a copy: the row numbers are all of x
        # Numpy widens float16 value by value; torch has instructions for it, up to float32. Both steps are exact.
        for half, single in self.strips[: -(-n * self.x.shape[1] // SERIAL_ELEMENTS)]:
            single.copy_(half)
        wide = self.wide[:n]
        wide[:] = self.single[:n]
        return wide


def _dots(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Dot products of a and b (..., D), which numpy hands to `ddot` one by one, into `out` (...)."""
    np.matmul(a[..., None, :DOT_LENGTH], b[..., :DOT_LENGTH, None], out=out[..., None, None])
    for start in range(DOT_LENGTH, a.shape[-1], DOT_LENGTH):
        part = slice(start, start + DOT_LENGTH)
        out += np.matmul(a[..., None, part], b[..., part, None])[..., 0, 0]


def float32_error(dim: int, norms_q: np.ndarray, norms_b: np.ndarray | float) -> np.ndarray:
    """How far a float32 dot product may be from the exact one: γ_D ‖x‖‖y‖, for any order of summation.

    The bound is the rigorous one (D u / (1 - D u), u = 2^-24), because rounding errors of constant or quantised
    vectors all point the same way and a statistical bound fails there. The last term covers underflow.
    """
    gamma = dim * 2.0**-24 / (1 - dim * 2.0**-24)
    return gamma * np.asarray(norms_q, dtype=np.float64) * norms_b + dim * 2.0**-149


def just_below(values: np.ndarray) -> np.ndarray:
    """Round float64 down to a float32 strictly below it, so that `>` keeps everything that might be equal."""
    return np.nextafter(values.astype(np.float32), np.float32(-np.inf))


def norms(x: Rows, chunk: int = 4096) -> np.ndarray:
    """Upper bounds of the row norms of x (n, D), (n,) float64."""
    squares = [np.empty(0)]
    for piece in pieces_of(x):
        for start in range(0, len(piece), chunk):
            rows = piece[start : start + chunk].astype(np.float32, copy=False)
            sums = np.einsum("ij,ij->i", rows, rows).astype(np.float64)
            tiny = np.flatnonzero(sums < TINY)
            sums[tiny] = np.square(rows[tiny].astype(np.float64)).sum(axis=1)
            squares.append(sums)
    return np.sqrt(np.concatenate(squares)) * (1 + 1e-3)  # a float32 sum may be low by D u < 1e-3


def best_of(scores: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Order each list and keep k: (n, m) float64 and (n, m) int32 -> (n, k) and (n, k).

    Score descending, then row ascending; a missing entry is row -1 with score -inf.
    """
    m = scores.shape[1]
    if m < k:
        scores = np.pad(scores, ((0, 0), (0, k - m)), constant_values=-np.inf)
        ids = np.pad(ids, ((0, 0), (0, k - m)), constant_values=-1)
    order, ordered = exact_order(scores, ids)
    return np.ascontiguousarray(ordered[:, :k]), np.take_along_axis(ids, order[:, :k], axis=1)


def exact_order(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The permutation (n, m) that puts each list in exact order, and the scores in it; only lists with ties, or
    scores too close for the rough order, pay for a second key.
    """
    order = _rough_order(scores)
    ordered = np.take_along_axis(scores, order, axis=1)
    tied = ((ordered[:, 1:] >= ordered[:, :-1]) & (ordered[:, 1:] > -np.inf)).any(axis=1)
    order[tied] = np.lexsort((ids[tied], -scores[tied]), axis=-1)
    ordered[tied] = np.take_along_axis(scores[tied], order[tied], axis=1)
    return order, ordered


def _rough_order(scores: np.ndarray) -> np.ndarray:
    """The permutation (n, m) that puts lists (n, m) in descending order, but for scores that differ in their last bits.

    Places are written over those bits and sorted along: integers are sorted by vector instructions, several times as
    fast as numpy's argsort.
    """
    places = (1 << (scores.shape[1] - 1).bit_length()) - 1
    bits = scores.view(np.int64)
    keys = ~(bits ^ ((bits >> 63) & SIGNLESS))  # negative numbers descend as their bits ascend
    keys = (keys & ~places) | np.arange(scores.shape[1])
    keys.sort(axis=1)
    return keys & places


def merge(lists: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Merge exact lists of the same queries over different rows: [((n, m) float64, (n, m) int32)] -> one of k."""
    scores = np.concatenate([part[0] for part in lists], axis=1)
    ids = np.concatenate([part[1] for part in lists], axis=1)
    return best_of(scores, ids, k)


def published(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Turn inner lists (float64, -inf where missing) into what is stored: D float32 (0 where missing), I int32."""
    rounded = scores.astype(np.float32, order="C")
    rounded[ids < 0] = 0.0
    return rounded, np.ascontiguousarray(ids, dtype=np.int32)


@dataclass(frozen=True)
class Codes:
    """Rows (n, D) as scale (n,) × codes (n, D), on a device; `residual` and `norms` (n,) float64 bound ‖x - s·c‖ and
    ‖s·c‖. Rows marked `wide` (n,) are multiplied in float32: `place` (n,) says where they stand in `source`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    residual: np.ndarray
    norms: np.ndarray
    wide: np.ndarray
    source: Any  # the rows as they are stored: Rows, or a tensor on the device
    place: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> "Codes":
        return replace(
            self,
            codes=self.codes[rows],
            scale=self.scale[rows],
            residual=self.residual[rows],
            norms=self.norms[rows],
            wide=self.wide[rows],
            place=self.place[rows],
        )

    def float32(self, rows: np.ndarray | slice = slice(None)) -> torch.Tensor:
        """The rows themselves, (m, D) float32 on the device."""
        found = self.source[self.place[rows]]
        return (found if isinstance(found, torch.Tensor) else torch.from_numpy(found)).float()


@dataclass(frozen=True)
class Format:
    """A kind of codes: how rows become codes, how codes are multiplied, and how exactly they are summed up."""

    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # (n, D) float32 -> codes, scale (n,) float32
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # codes (n, D), (m, D) -> (n, m), any dtype
    accumulation: Callable[[int], float]  # D -> relative to ‖c‖‖d‖
    max_dim: int = 1 << 22


def _encode_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = x.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / INT8_MAX, 1.0)
    return (x / scale[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(0.0).to(torch.int8), scale


def _power_of_two_scale(x: torch.Tensor) -> torch.Tensor:
    """A scale (n,) that brings the largest value of each row to 0.5 .. 1 without rounding."""
    _, exponent = torch.frexp(x.abs().amax(dim=1))
    return torch.ldexp(torch.ones(len(x), device=x.device), exponent.clamp(-100, 100))


def _encode_float16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _power_of_two_scale(x)
    return (x / scale[:, None]).half(), scale


def _encode_tf32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to TF32's 10 bits here, so that the device's own rounding, whichever way it goes, changes nothing."""
    scale = _power_of_two_scale(x)
    bits = (x / scale[:, None]).view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32), scale


def _multiply_int8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[1] == 1:  # torch reads a matrix of one row in the wrong order where the processor has VNNI
        return a.int() * b.int().T
    return torch._int_mm(a.contiguous(), b.contiguous().T)


@cache
def int8_is_exact() -> bool:
    """Whether this processor's int8 products are: some kernels without VNNI add pairs of them in 16 bits, and saturate.

    Asked of the largest values there can be, in all signs and on both sides.
    """
    signs = torch.tensor([[1, 1], [1, -1], [-1, -1], [-1, 1]], dtype=torch.int8).repeat(16, 128) * INT8_MAX
    return bool((_multiply_int8(signs, signs) == (signs.double() @ signs.double().T)).all())


def _multiply_float16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Half times half, summed in float32: on a GPU by its tensor cores, elsewhere by widening the codes."""
    with matmul_precision(a.device):
        if a.device.type == "cuda":
            return torch.mm(a, b.T, out_dtype=torch.float32)
        return torch.mm(a.float(), b.float().T)


def _multiply_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with matmul_precision(a.device, "tf32"):
        return torch.mm(a, b.T)


def _tensor_cores(dim: int) -> float:
    """Products of 11-bit significands are exact in float32; sums may be truncated rather than rounded, and aligned to
    the largest of a group first: four times the bound of rounding sums in any order covers both.
    """
    return 4 * dim * UNIT / (1 - 4 * dim * UNIT)


FORMATS = {
    "int8": Format(_encode_int8, _multiply_int8, lambda dim: 0.0, INT8_DIM),
    "float16": Format(_encode_float16, _multiply_float16, _tensor_cores),
    "tf32": Format(_encode_tf32, _multiply_tf32, _tensor_cores),
}


def encode(x: Rows | torch.Tensor, form: Format) -> Codes:
    """Turn stored rows x (n, D), float16 or float32, into codes on the device they are on."""
    n, dim = x.shape
    chunks = (x[start : start + ENCODED_ROWS] for start in range(0, max(n, 1), ENCODED_ROWS))
    parts = [
        _encode_chunk((chunk if isinstance(chunk, torch.Tensor) else as_tensor(chunk)).float(), form)
        for chunk in chunks
    ]
    codes, scale = (torch.cat([part[column] for part in parts]) for column in (0, 1))
    residual, norms, exact = (torch.cat([part[column] for part in parts]).cpu().numpy() for column in (2, 3, 4))
    wide = _too_wide(scale.cpu().numpy(), residual, norms, exact) | (dim > form.max_dim)
    return Codes(codes, scale, residual, norms, wide, x, np.arange(n))


def _encode_chunk(x: torch.Tensor, form: Format) -> tuple[torch.Tensor, ...]:
    """Codes and scale of x (n, D) float32, and upper bounds of ‖x - s·c‖, ‖s·c‖ and ‖x‖."""
    if not x.numel():
        empty = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        return x.to(form.encode(torch.ones(1, 1))[0].dtype), empty.float() + 1, empty, empty, empty
    codes, scale = form.encode(x)
    back = codes.double() * scale.double()[:, None]  # exact: 24 bits times at most 24
    up = 1 + 2e-16 * (x.shape[1] + 8)
    return (
        codes,
        scale,
        torch.linalg.vector_norm(x.double() - back, dim=1) * up,
        torch.linalg.vector_norm(back, dim=1) * up,
        torch.linalg.vector_norm(x.double(), dim=1) * up,
    )


def _too_wide(scale: np.ndarray, residual: np.ndarray, norms: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Which rows (n,) are better multiplied in float32."""
    if not len(scale):
        return np.zeros(0, dtype=bool)
    bad = (scale < SCALES[0]) | (scale > SCALES[1]) | ~np.isfinite(residual) | (residual > MAX_RESIDUAL * exact)
    good = ~bad
    for sizes in (norms, residual):
        bad |= ~(sizes <= OUTLIER * np.median(sizes[good])) if good.any() else True
    return bad


def multiply_codes(a: Codes, b: Codes, form: Format, out: torch.Tensor) -> torch.Tensor:
    """All approximate dot products of a (n, D) and b (m, D) into `out` (n, m) float32; of wide rows in float32."""
    if not a.codes.shape[1]:
        return out.zero_()
    torch.mul(form.multiply(a.codes, b.codes), a.scale[:, None], out=out)
    out.mul_(b.scale)
    with matmul_precision(out.device):
        if a.wide.any():
            out[torch.from_numpy(a.wide).to(out.device)] = a.float32(a.wide) @ b.float32().T
        if b.wide.any():
            out[:, torch.from_numpy(b.wide).to(out.device)] = a.float32() @ b.float32(b.wide).T
    return out


def coarse_error(a: Codes, b: Codes, form: Format, float32: np.ndarray) -> np.ndarray:
    """How far `multiply_codes` may be from the exact products of each row of a with any of b: (n,) float64.

    `float32` (n,): the same for products in float32, which those of wide rows are.
    """
    narrow = ~b.wide
    norm, residual = b.norms[narrow].max(initial=0.0), b.residual[narrow].max(initial=0.0)
    with np.errstate(all="ignore"):  # of wide rows, whose bound is the other one
        sums = (form.accumulation(a.codes.shape[1]) + 4 * UNIT) * a.norms * norm
        coarse = a.residual * (norm + residual) + a.norms * residual + sums + 2.0**-140
    return np.where(a.wide, float32, np.maximum(float32, coarse))
