"""A folder on this machine that keeps parts fetched from S3, keyed by the digest of what they belong to."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from lattqe.errors import CorruptDataError
from lattqe.store.local import LocalPlace, explained
from lattqe.store.manifest import Part
from lattqe.store.place import Place


class PartCache:
    """`folder/<digest>/<part>`: filled part by part, as parts are needed, once among all processes of the machine."""

    def __init__(self, folder: str, digest: str) -> None:
        self.place = LocalPlace(folder).child(digest)

    def load(self, source: Place, part: Part) -> pa.Buffer:
        """The part, mapped from the cache; fetched first where it is not there or is damaged."""
        from lattqe.store.parts import load_part  # parts.py reads through this cache

        try:
            return load_part(self.place, part)
        except CorruptDataError:  # absent or damaged
            pass
        with _locked(self.place.file(f"{part.name}.lock")):
            try:
                return load_part(self.place, part)  # somebody else fetched it while we waited
            except CorruptDataError:
                self.place.write(part.name, load_part(source, part))
        return load_part(self.place, part)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process (or thread) at a time; the lock goes with its holder, so a killed one blocks nobody."""
    with explained("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
