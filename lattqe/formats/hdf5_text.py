"""Texts of any length in HDF5, read from the file's bytes.

A dataset of such texts holds for each its length and where it lies: a collection (heap) of objects, a number in it. The
library trusts both: a damaged length makes it fill gigabytes, and free space of size 0 keeps it busy for ever
(HDF5 2.0). Here every number is compared with the file first.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lattqe.errors import LattqeError

REFERENCE = struct.Struct("<IQI")  # length in bytes, address of the collection, number of the object
COLLECTION = struct.Struct("<4sB3xQ")  # signature, version, size
OBJECT = struct.Struct("<H6xQ")  # number (0: free space), size
MAX_TEXT = 1 << 16  # bytes


def read_texts(path: Path, dataset: Any) -> list[bytes]:
    """Read a one-dimensional dataset of texts of variable length."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        collections: dict[int, dict[int, tuple[int, int]]] = {}
        texts = []
        for length, address, number in _references(path, dataset, data):
            if length == 0:
                texts.append(b"")
                continue
            if address not in collections:
                collections[address] = _collection(path, data, address)
            start, size = collections[address].get(number, (0, 0))
            if not length <= min(size, MAX_TEXT):
                name = f"text {len(texts)} of {dataset.name} ({length:,} bytes)"
                raise LattqeError(f"{path} is damaged: {name} is not where it should be")
            texts.append(data[start : start + length])
        return texts


def _references(path: Path, dataset: Any, data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """Yield (length, address, number) of each text, from storage that is in one piece or in plain chunks."""
    rows, stored = int(dataset.shape[0]), dataset.id
    if stored.get_offset() is not None:
        pieces = [(stored.get_offset(), rows)]
    elif dataset.chunks and stored.get_create_plist().get_nfilters() == 0:
        infos = sorted((stored.get_chunk_info(number) for number in range(stored.get_num_chunks())), key=_first_row)
        pieces = [(info.byte_offset, min(dataset.chunks[0], rows - _first_row(info))) for info in infos]
    else:
        pieces = []
    if dataset.file.userblock_size or sum(count for _, count in pieces) != rows:
        raise LattqeError(f"{path}: the texts of {dataset.name} are stored in an uncommon way; give them by a file")
    for offset, count in pieces:
        if count < 0 or offset + count * REFERENCE.size > len(data):
            raise LattqeError(f"{path} is damaged: {dataset.name} lies outside of the file")
        yield from REFERENCE.iter_unpack(data[offset : offset + count * REFERENCE.size])


def _first_row(info: Any) -> int:
    return int(info.chunk_offset[0])


def _collection(path: Path, data: mmap.mmap, address: int) -> dict[int, tuple[int, int]]:
    """Return number -> (offset, size) of the objects in a collection."""
    damaged = LattqeError(f"{path} is damaged: there are no texts at byte {address:,}")
    if address + COLLECTION.size > len(data):
        raise damaged
    signature, version, size = COLLECTION.unpack_from(data, address)
    position, end = address + COLLECTION.size, address + size
    if signature != b"GCOL" or version != 1 or end > len(data):
        raise damaged
    objects: dict[int, tuple[int, int]] = {}
    while position + OBJECT.size <= end:
        number, length = OBJECT.unpack_from(data, position)
        if number == 0:  # free space, up to the end
            break
        position += OBJECT.size
        if position + length > end:
            raise damaged
        objects[number] = (position, length)
        position += (length + 7) // 8 * 8
    return objects
