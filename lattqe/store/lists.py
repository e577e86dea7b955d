"""A neighbor graph (row i: the neighbors of row i of its feature set) and lists of ranks (one row for each query)."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store.manifest import Manifest, describe_kind
from lattqe.store.parts import StoredRows
from lattqe.store.place import Place
from lattqe.store.tables import check_columns, column_matrix, schema_of

MAX_K = 1 << 24


class NeighborGraph(StoredRows):
    """k neighbors for each row: row numbers, -1 padding at the end, and scores, 0 where padded."""

    kind = "neighbors"

    def __init__(self, place: Place, manifest: Manifest, cache: str | None = None) -> None:
        self.k = _list_length(manifest, place.uri)
        super().__init__(place, manifest, cache)

    def read(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(I (n, k) int32, D (n, k) float32) of rows start..stop; read-only views where they lie in one part."""
        start, stop = self.parts.span(start, stop)
        pieces = [_lists(batch) for _, batch in self.parts.slices(start, stop)]
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return np.empty((0, self.k), np.int32), np.empty((0, self.k), np.float32)
        return np.concatenate([piece[0] for piece in pieces]), np.concatenate([piece[1] for piece in pieces])

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(I, D) of a row list (n,) in its order, repeats allowed."""
        rows = self.parts.check_rows(rows)
        I = np.empty((len(rows), self.k), np.int32)  # noqa: E741
        D = np.empty((len(rows), self.k), np.float32)
        for batch, places, within in self.parts.groups(rows):
            neighbors, scores = _lists(batch)
            I[places], D[places] = neighbors[within], scores[within]
        return I, D

    def blocks(self, size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(start, I, D) over all rows, `size` rows at a time."""
        if size < 1:
            raise LattqeError(f"a block needs at least one row, not {size}")
        for start in range(0, self.rows, size):
            yield start, *self.read(start, min(start + size, self.rows))

    def verify(self) -> None:
        """Check every checksum and every invariant; CorruptDataError at the first fault."""
        from lattqe.store.artifacts import verify_lists

        verify_lists(self)


class Ranks(NeighborGraph):
    """What a search found: for each query its id, the best k database rows and their scores."""

    kind = "ranks"

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Ids of the queries of rows start..stop."""
        start, stop = self.parts.span(start, stop)
        return [name for _, batch in self.parts.slices(start, stop) for name in batch.column("id").to_pylist()]


def _lists(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    return column_matrix(batch.column("neighbors")), column_matrix(batch.column("scores"))


def _list_length(manifest: Manifest, uri: str) -> int:
    k = manifest.fields.get("k")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise CorruptDataError(f"{uri}: {describe_kind(manifest.kind)} with k = {k!r} cannot be")
    check_columns(manifest, schema_of(manifest.kind, {"k": k}), uri)
    for part in manifest.parts:
        if part.rows < 1 or part.bytes < part.rows * k * 8:
            raise CorruptDataError(f"{uri}/{part.name}: {part.bytes} bytes cannot hold {part.rows} × {k} neighbors")
    return k
