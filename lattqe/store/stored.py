"""What feature sets, neighbor graphs and ranks have in common: a place, a manifest, rows cut into parts."""

from typing import ClassVar, Self

import pyarrow as pa

from lattqe.store.manifest import Manifest, read_manifest
from lattqe.store.parts import Parts
from lattqe.store.place import Place, open_place


class StoredRows:
    """A finished thing that is cut into parts by rows."""

    kind: ClassVar[str]

    def __init__(self, place: Place, manifest: Manifest, cache: str | None = None) -> None:
        self.place, self.manifest, self.uri = place, manifest, place.uri
        self.parts = Parts(place, manifest, cache)

    @classmethod
    def open(cls, uri: str, cache: str | None = None) -> Self:
        """Open a finished thing of this kind; `cache` is a local folder to keep parts of a remote one in."""
        place = open_place(uri)
        return cls(place, read_manifest(place, cls.kind), cache)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.manifest.rows

    @property
    def digest(self) -> str:
        """Digest of the content."""
        return self.manifest.digest

    @property
    def columns(self) -> list[str]:
        """Names of the stored columns."""
        return [column["name"] for column in self.manifest.fields["columns"]]

    def as_input(self) -> dict[str, str]:
        """How a thing made from this one names it in its manifest."""
        return {"uri": self.uri, "digest": self.digest, "kind": self.kind}

    def table(self, start: int = 0, stop: int | None = None) -> pa.Table:
        """All columns of rows start..stop."""
        start, stop = self.parts.span(start, stop)
        if start == stop:
            return pa.Table.from_batches([self.parts.batch(0).slice(0, 0)])
        return pa.Table.from_batches([batch for _, batch in self.parts.slices(start, stop)])
