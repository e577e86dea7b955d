"""Coarse products: rows as scale × codes of few bits, multiplied faster than float32, with an error bound measured.

A row x is stored as s·c with c in int8, float16 or TF32 and s a scale of its own, and the norm of what that leaves out,
r = ‖x - s·c‖, is measured in float64. Then |⟨x, y⟩ - s t ⟨c, d⟩| ≤ r_x ‖y‖ + ‖s·c‖ r_y, whatever the data. Codes are
exact in their format before they are multiplied, so the only other error is that of the accumulation. A row for which
the bound would be too wide to be useful (a spike among small values, a norm far from the others') is multiplied in
float32 instead, as a row and as a column.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from lattqe.device import matmul_precision
from lattqe.search.rows import Rows, as_tensor

CHUNK = 4096  # rows encoded at once
MAX_RESIDUAL = 0.04  # of the norm, for a useful bound
OUTLIER = 4.0  # times the median norm or residual: beyond, one row would widen the bound of all others
SCALES = 2.0**-60, 2.0**60  # between which a product of two scales neither overflows nor loses bits
UNIT = 2.0**-24
INT8_MAX = 127
INT8_DIM = (2**31 - 1) // INT8_MAX**2  # longer vectors could overflow 32 bits


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
    if a.device.type == "cuda":
        return torch.mm(a, b.T, out_dtype=torch.float32)
    with matmul_precision(a.device):
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
    chunks = (x[start : start + CHUNK] for start in range(0, max(n, 1), CHUNK))
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
