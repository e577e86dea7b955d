"""Unfinished neighbor lists in storage: `_work/lists/<block>-<which blocks it has seen>.bin`.

The lists of a block after it was compared with a set of blocks are the exact k best among their rows: a function of
that set alone, no matter which worker computed it and in whatever order. So the set is the file's name, two writers
of one name write the same bytes, and what a killed job has achieved can be read from the names of its files.
"""

import re
from contextlib import suppress

import numpy as np

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.search.graph import Lists
from lattqe.store import MissingFileError, Place
from lattqe.store.manifest import seal_bytes, unseal_bytes

FOLDER = "_work/lists/"
_NAME = re.compile(re.escape(FOLDER) + r"(\d{5})-([0-9a-f]+)\.bin")


class StaleListsError(LattqeError):
    """The lists that were to be continued are gone or damaged: look again at what is there."""


def file_name(block: int, seen: int) -> str:
    """Where the lists of a block are that has seen the blocks whose bits are set."""
    return f"{FOLDER}{block:05d}-{seen:x}.bin"


def find_lists(place: Place, blocks: int) -> list[int]:
    """For each block the largest set of blocks that it has seen according to its files; 0: nothing yet."""
    best = [0] * blocks
    for name in place.sizes():
        match = _NAME.fullmatch(name)
        if match and int(match[1]) < blocks:
            block, seen = int(match[1]), int(match[2], 16)
            best[block] = max(best[block], seen, key=lambda bits: (bits.bit_count(), bits))
    return best


def write_lists(place: Place, block: int, seen: int, lists: Lists) -> None:
    """Store lists behind their checksum, whole or not at all."""
    data = np.ascontiguousarray(lists.ids).tobytes() + np.ascontiguousarray(lists.scores).tobytes()
    place.write(file_name(block, seen), seal_bytes(data))


def read_lists(place: Place, block: int, seen: int, rows: int, k: int) -> Lists:
    """The lists of a block of `rows` rows; a damaged file is removed, so that no worker trips over it again."""
    if not seen:
        return Lists.empty(rows, k)
    name = file_name(block, seen)
    try:
        body = unseal_bytes(memoryview(place.fetch(name)), f"{place.uri}/{name}")
    except MissingFileError as error:
        raise StaleListsError(f"{place.uri}/{name} is gone") from error
    except CorruptDataError:
        body = memoryview(b"")
    if len(body) != rows * k * 12:
        place.delete(name)
        raise StaleListsError(f"{place.uri}/{name} was damaged")
    ids = np.frombuffer(body[: rows * k * 4], dtype=np.int32).reshape(rows, k)
    scores = np.frombuffer(body[rows * k * 4 :], dtype=np.float64).reshape(rows, k)
    return Lists(scores, ids)


def delete_lists(place: Place, block: int, seen: int) -> None:
    """Remove lists that have been continued."""
    if seen:
        with suppress(MissingFileError):
            place.delete(file_name(block, seen))
