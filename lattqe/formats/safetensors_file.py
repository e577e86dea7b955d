""".safetensors: a JSON header and then the tensors, each in one piece. Read block by block, bfloat16 too."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.matrix import BFLOAT16, Described, MatrixReader, in_file
from lattqe.formats.named import open_named
from lattqe.formats.reader import Options

MAX_HEADER = 100_000_000  # bytes, the format's own limit
DTYPES: dict[str, Any] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip


def open_safetensors(path: Path, options: Options) -> MatrixReader:
    """Open a tensor with a row for each image."""
    return open_named(str(path), _tensors(path), options, kind=".safetensors", columns_are_images=False)


def _tensors(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, MAX_HEADER):
            raise LattqeError(f"{path} is not a readable .safetensors file: a header of {length:,} bytes is declared")
        header = json.loads(file.read(length))
    start = 8 + length
    return {name: _tensor(path, name, start, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, start: int, entry: dict[str, Any]) -> Any:
    stored, shape, (begin, end) = DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if stored is None:
        return Described(tuple(shape), entry["dtype"])
    if not all(type(side) is int and side >= 0 for side in (*shape, begin, end)):
        raise LattqeError(f"{path} is damaged: {name} has the shape {shape}")
    itemsize = 2 if stored == BFLOAT16 else stored.itemsize
    count = int(np.prod(shape, dtype=object))
    if end - begin != count * itemsize or start + end > path.stat().st_size:
        raise LattqeError(f"{path} is cut short or damaged: {name} {shape} does not fit its place in the file")
    if len(shape) == 2:
        return in_file(path, start + begin, shape, stored)
    if len(shape) == 1 and stored != BFLOAT16:
        return np.fromfile(path, stored, count, offset=start + begin)
    return Described(tuple(shape), np.dtype(np.float32) if stored == BFLOAT16 else stored)
