"""Tensors in files: .pt and .pth as torch.save writes them (a zip file since torch 1.6), and .safetensors.

Read block by block, bfloat16 too, without torch and without unpickling.
"""

import functools
import io
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
from lattqe.formats.matrix import BFLOAT16, DescribedArray, MatrixReader, Transposed, in_file, open_contents, open_named
from lattqe.formats.pickle_file import loads, loads_first
from lattqe.formats.pickle_names import MEANINGS, Malformed, Name
from lattqe.formats.reader import ReadOptions

LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature; lengths of the name and of the extra field
STORAGES: dict[Name, Any] = {
    Name("torch", f"{name}Storage"): stored
    for name, stored in {
        "Float": np.dtype("<f4"), "Half": np.dtype("<f2"), "Double": np.dtype("<f8"), "BFloat16": BFLOAT16,
        "Long": np.dtype("<i8"), "Int": np.dtype("<i4"), "Short": np.dtype("<i2"), "Char": np.dtype("i1"),
        "Byte": np.dtype("u1"), "Bool": np.dtype("?"),
    }.items()
}  # fmt: skip
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # of torch.save before 1.6
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


def open_torch(path: Path, options: ReadOptions) -> MatrixReader:
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
            raise LattqeError(f"{path} is a zip file, but not from torch.save")
        self.folder = programs[0].removesuffix("data.pkl")

    def value(self) -> Any:
        """Read what was saved, with tensors as matrices that stay in the file and as arrays of one dimension."""
        if self.members.get(f"{self.folder}byteorder") and self.read("byteorder") != b"little":
            raise LattqeError(f"{self.path} was saved on a big-endian machine; save it again on another")
        return loads(self.read("data.pkl"), str(self.path), meanings=_meanings(self.tensor), persistent=self.storage)

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
        stored, name, count = _reference(reference)
        offset, size = self.place(f"data/{name}")
        if type(count) is not int or count * (2 if stored == BFLOAT16 else stored.itemsize) != size:
            raise Malformed(f"a storage declares {count!r:.40} elements and holds {size} bytes")
        return Storage(stored, offset, count)

    def tensor(self, storage: Any, first: Any, shape: Any, strides: Any, *_rest: Any) -> Any:
        """Place a tensor in its storage: matrices stay in the file, one-dimensional tensors are read."""
        _check_tensor(storage, first, shape, strides)
        itemsize = 2 if storage.stored == BFLOAT16 else storage.stored.itemsize
        offset = storage.offset + first * itemsize
        if len(shape) == 2 and strides[1] == 1 and strides[0] >= shape[1]:
            return in_file(self.path, offset, shape, storage.stored, strides[0])
        if len(shape) == 2 and strides[0] == 1 and strides[1] >= shape[0]:
            return Transposed(in_file(self.path, offset, shape[::-1], storage.stored, strides[1]))
        if len(shape) == 1 and strides[0] == 1 and storage.stored != BFLOAT16:
            return np.fromfile(self.path, storage.stored, shape[0], offset=offset)
        return DescribedArray(shape, np.dtype(np.float32) if storage.stored == BFLOAT16 else storage.stored)


def load_torch(data: bytes, name: str, make: Callable[[np.ndarray], Any]) -> Any:
    """Everything that torch.save wrote, in either of its formats: containers, numbers, numpy arrays, tensors by `make`.

    Each tensor is a separate writable array; together they may not be much larger than the data.
    """
    return _TorchBytes(data, name, make).value()


class _TorchBytes:
    """A saved file in memory. Before torch 1.6 it was five pickles, then the storages, each after its length."""

    def __init__(self, data: bytes, name: str, make: Callable[[np.ndarray], Any]) -> None:
        self.data, self.name, self.make = memoryview(data), name, make
        self.budget = 4 * len(data) + (1 << 20)  # bytes: tensors can share a storage
        self.kinds: dict[str, Any] = {}  # of the storages mentioned, by key
        self.raw: dict[str, memoryview] = {}

    def value(self) -> Any:
        """Read what was saved."""
        try:
            if not zipfile.is_zipfile(io.BytesIO(self.data)):
                return self._legacy()
            with zipfile.ZipFile(io.BytesIO(self.data)) as archive:
                return self._zipped(archive)
        except LattqeError:
            raise
        except Exception as error:  # zipfile raises nearly everything for a damaged file
            raise LattqeError(f"{self.name} is refused: it is damaged ({type(error).__name__})") from error

    def _zipped(self, archive: zipfile.ZipFile) -> Any:
        programs = [info.filename for info in archive.infolist() if info.filename.rpartition("/")[2] == "data.pkl"]
        if len(programs) != 1 or any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
            raise LattqeError(f"{self.name} is refused: it is a zip file, but not from torch.save")
        folder = programs[0].removesuffix("data.pkl")
        for info in archive.infolist():
            if info.filename.startswith(f"{folder}data/"):
                self.raw[info.filename.removeprefix(f"{folder}data/")] = memoryview(archive.read(info))
        return loads(archive.read(programs[0]), self.name, meanings=_meanings(self.tensor), persistent=self.storage)

    def _legacy(self) -> Any:
        magic, position = loads_first(self.data, self.name)
        if magic != LEGACY_MAGIC:
            raise LattqeError(f"{self.name} is refused: it is not a file of torch.save")
        for _ in range(2):  # the format's version, and the machine that wrote it
            position += loads_first(self.data[position:], self.name)[1]
        program = self.data[position:]
        # The storages follow the program, so it runs twice: to know their types, and to make the tensors.
        mentioned = _meanings(lambda *_parts: None)
        position += loads_first(program, self.name, meanings=mentioned, persistent=self._mention)[1]
        keys, length = loads_first(self.data[position:], self.name)
        position += length
        for key in keys if isinstance(keys, list) else []:
            (count,) = struct.unpack_from("<q", self.data, position) if position + 8 <= len(self.data) else (-1,)
            size = count * _itemsize(self.kinds.get(key, np.dtype("u1")))
            position += 8
            if count < 0 or position + size > len(self.data):
                raise LattqeError(f"{self.name} is refused: it is truncated in the middle of a storage")
            self.raw[key] = self.data[position : position + size]
            position += size
        return loads_first(program, self.name, meanings=_meanings(self.tensor), persistent=self.storage)[0]

    def _mention(self, reference: Any) -> None:
        stored, key, _ = _reference(reference)
        self.kinds[key] = stored

    def storage(self, reference: Any) -> tuple[Storage, memoryview]:
        """The storage and its bytes."""
        stored, key, count = _reference(reference)
        raw = self.raw.get(key)
        if raw is None or type(count) is not int or count * _itemsize(stored) != len(raw):
            raise Malformed(f"the storage {key!r:.40} is missing or not of {count!r:.40} elements")
        return Storage(stored, 0, count), raw

    def tensor(self, stored: Any, first: Any, shape: Any, strides: Any, *_rest: Any) -> Any:
        """One tensor, copied out of its storage."""
        if not isinstance(stored, tuple) or len(stored) != 2:
            raise Malformed("a tensor is malformed")
        storage, raw = stored
        _check_tensor(storage, first, shape, strides)
        size = _itemsize(storage.stored)
        self.budget -= math.prod(shape) * size
        if self.budget < 0:
            raise Malformed("its tensors expand to far more than its own size")
        flat = np.frombuffer(raw, "<u2" if storage.stored == BFLOAT16 else storage.stored)[first:]
        array = np.lib.stride_tricks.as_strided(flat, shape, [stride * size for stride in strides], writeable=False)
        if storage.stored == BFLOAT16:
            return self.make((array.astype(np.uint32) << 16).view(np.float32))
        return self.make(np.array(array, order="C"))


def _meanings(tensor: Callable[..., Any]) -> dict[Name, Callable[..., Any]]:
    """What the names in a torch file mean, tensors being made by `tensor(storage, first, shape, strides)`."""
    return {
        **MEANINGS,
        **dict.fromkeys(STORAGES, _not_callable),
        Name("torch._utils", "_rebuild_tensor"): tensor,
        Name("torch._utils", "_rebuild_tensor_v2"): tensor,
        Name("torch._utils", "_rebuild_parameter"): lambda tensor, *_rest: tensor,
        Name("torch", "Size"): lambda sides: tuple(sides),
    }


def _reference(reference: Any) -> tuple[Any, str, Any]:
    """Type, key and number of elements of ('storage', torch.FloatStorage, '0', 'cpu', count, None in old files)."""
    if (
        not isinstance(reference, tuple)
        or len(reference) not in (5, 6)
        or reference[5:] not in ((), (None,))
        or reference[1] not in STORAGES
        or not isinstance(reference[2], str)
    ):
        raise Malformed(f"it refers to an unknown kind of storage {reference!r:.120}")
    return STORAGES[reference[1]], reference[2], reference[4]


def _itemsize(stored: Any) -> int:
    return 2 if stored == BFLOAT16 else int(stored.itemsize)


def _check_tensor(storage: Any, first: Any, shape: Any, strides: Any) -> None:
    """Refuse a tensor that is not within its storage."""
    if (
        not isinstance(storage, Storage)
        or not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or not all(type(number) is int and number >= 0 for number in (first, *shape, *strides))
    ):
        raise Malformed("a tensor is malformed")
    last = first + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and (last >= storage.count or math.prod(shape) > storage.count):
        raise Malformed(f"a tensor of shape {shape} is larger than its storage of {storage.count}")


def _not_callable(*_arguments: Any) -> Any:
    raise Malformed("it calls a torch storage, which may only be mentioned")


def open_safetensors(path: Path, options: ReadOptions) -> MatrixReader:
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
        return DescribedArray(tuple(shape), entry["dtype"])
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
    return DescribedArray(tuple(shape), np.dtype(np.float32) if stored == BFLOAT16 else stored)
