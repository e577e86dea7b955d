"""Tensors in files: .pt and .pth as torch.save writes them (a zip file since torch 1.6), and .safetensors.

Read block by block, bfloat16 too, without torch and without unpickling.
"""

import functools
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.matrix import BFLOAT16, Described, MatrixReader, Transposed, in_file, open_named
from lattqe.formats.pickle_file import loads, open_contents
from lattqe.formats.pickle_names import MEANINGS, Malformed, Name
from lattqe.formats.reader import Options

LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature; lengths of the name and of the extra field
STORAGES: dict[Name, Any] = {
    Name("torch", f"{name}Storage"): stored
    for name, stored in {
        "Float": np.dtype("<f4"), "Half": np.dtype("<f2"), "Double": np.dtype("<f8"), "BFloat16": BFLOAT16,
        "Long": np.dtype("<i8"), "Int": np.dtype("<i4"), "Short": np.dtype("<i2"), "Char": np.dtype("i1"),
        "Byte": np.dtype("u1"), "Bool": np.dtype("?"),
    }.items()
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes, the format's own limit
DTYPES: dict[str, Any] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """A tensor's numbers: `count` of them from byte `offset` of the file on."""

    stored: Any
    offset: int
    count: int


def open_torch(path: Path, options: Options) -> MatrixReader:
    """Open a saved tensor, or one of a saved dict of tensors; rows are images unless `--transposed`."""
    if not zipfile.is_zipfile(path):
        raise LattqeError(f"{path} is not a file of torch 1.6 or newer: load it and torch.save it again")
    with zipfile.ZipFile(path) as archive:
        value = TorchFile(path, archive).value()
    return open_contents(path, value, replace(options, transposed=bool(options.transposed)), "torch")


class TorchFile:
    """The members of the zip file; tensors stay in it."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path = path
        self.members = {info.filename: info for info in archive.infolist()}
        programs = [name for name in self.members if name.rpartition("/")[2] == "data.pkl"]
        if len(programs) != 1:
            raise LattqeError(f"{path} is a zip file, but none of torch.save's")
        self.folder = programs[0].removesuffix("data.pkl")

    def value(self) -> Any:
        """Read what was saved, with tensors as matrices that stay in the file and as arrays of one dimension."""
        if self.members.get(f"{self.folder}byteorder") and self.read("byteorder") != b"little":
            raise LattqeError(f"{self.path} was saved on a big-endian machine; save it again on another")
        meanings: dict[Name, Callable[..., Any]] = {
            **MEANINGS,
            **dict.fromkeys(STORAGES, _not_callable),
            Name("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            Name("torch._utils", "_rebuild_parameter"): lambda tensor, *_rest: tensor,
            Name("torch", "Size"): lambda sides: tuple(sides),
        }
        return loads(self.read("data.pkl"), str(self.path), meanings=meanings, persistent=self.storage)

    @functools.cache  # noqa: B019  a storage is shared by many tensors, and this object lives for one call
    def place(self, name: str) -> tuple[int, int]:
        """Return offset and size of a member; its bytes are checked against the zip file's checksum."""
        info = self.members.get(self.folder + name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise LattqeError(f"{self.path} is damaged: its member {name!r:.80} is missing or compressed")
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            signature, name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
            start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
            file.seek(start)
            checksum, left = 0, info.file_size
            while info.CRC and left and (piece := file.read(min(left, 1 << 20))):
                checksum, left = zlib.crc32(piece, checksum), left - len(piece)
        if signature != b"PK\x03\x04" or checksum != info.CRC:  # a checksum of 0: torch was told not to compute it
            raise LattqeError(f"{self.path} is damaged: the checksum of its member {name!r:.80} is wrong")
        return start, info.file_size

    def read(self, name: str) -> bytes:
        """Read a small member whole."""
        offset, size = self.place(name)
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def storage(self, reference: Any) -> Storage:
        """Resolve ('storage', torch.FloatStorage, '0', 'cpu', number of elements)."""
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[1] not in STORAGES:
            raise Malformed(f"it refers to an unknown kind of storage {reference!r:.120}")
        stored, name, count = STORAGES[reference[1]], reference[2], reference[4]
        offset, size = self.place(f"data/{name}")
        if type(count) is not int or count * (2 if stored == BFLOAT16 else stored.itemsize) != size:
            raise Malformed(f"a storage declares {count!r:.40} elements and holds {size} bytes")
        return Storage(stored, offset, count)

    def tensor(self, storage: Any, first: Any, shape: Any, strides: Any, *_rest: Any) -> Any:
        """Place a tensor in its storage: matrices stay in the file, one-dimensional tensors are read."""
        numbers = (first, *shape, *strides)
        if not isinstance(storage, Storage) or not all(type(number) is int and number >= 0 for number in numbers):
            raise Malformed("a tensor is spelled wrong")
        last = first + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and (last >= storage.count or math.prod(shape) > storage.count):
            raise Malformed(f"a tensor of shape {shape} is larger than its storage of {storage.count}")
        itemsize = 2 if storage.stored == BFLOAT16 else storage.stored.itemsize
        offset = storage.offset + first * itemsize
        if len(shape) == 2 and strides[1] == 1 and strides[0] >= shape[1]:
            return in_file(self.path, offset, shape, storage.stored, strides[0])
        if len(shape) == 2 and strides[0] == 1 and strides[1] >= shape[0]:
            return Transposed(in_file(self.path, offset, shape[::-1], storage.stored, strides[1]))
        if len(shape) == 1 and strides[0] == 1 and storage.stored != BFLOAT16:
            return np.fromfile(self.path, storage.stored, shape[0], offset=offset)
        return Described(shape, np.dtype(np.float32) if storage.stored == BFLOAT16 else storage.stored)


def _not_callable(*_arguments: Any) -> Any:
    raise Malformed("it calls a torch storage, which may only be mentioned")


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
