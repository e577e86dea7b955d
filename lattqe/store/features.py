"""A feature set: ids, L2-normalised vectors, optional labels and other columns, cut into Arrow parts by rows."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store.manifest import Manifest
from lattqe.store.place import Place
from lattqe.store.stored import StoredRows
from lattqe.store.tables import DTYPES, check_columns, column_matrix, features_schema

MAX_DIM = 1 << 20


class FeatureSet(StoredRows):
    """A finished feature set. Vectors come in their stored dtype; views on mapped files are read-only."""

    kind = "features"

    def __init__(self, place: Place, manifest: Manifest, cache: str | None = None) -> None:
        self.dim, self.dtype = _dimensions(manifest, place.uri)
        super().__init__(place, manifest, cache)

    @property
    def has_labels(self) -> bool:
        """Whether there is a label for each row."""
        return "label" in self.columns

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Vectors of rows start..stop, (n, D); a read-only view where they lie in one part, else a copy."""
        start, stop = self.parts.span(start, stop)
        out: np.ndarray | None = None
        for row, batch in self.parts.slices(start, stop):
            block = column_matrix(batch.column("vector"))
            if len(block) == stop - start:
                return block
            if out is None:
                out = np.empty((stop - start, self.dim), self.dtype)
            out[row - start:row - start + len(block)] = block
        return np.empty((0, self.dim), self.dtype) if out is None else out

    def pieces(self, start: int = 0, stop: int | None = None) -> list[np.ndarray]:
        """Vectors of rows start..stop as read-only views (n_i, D), one for each part that has some of them."""
        batches = [batch for _, batch in self.parts.slices(*self.parts.span(start, stop))]
        return [column_matrix(batch.column("vector")) for batch in batches] or [np.empty((0, self.dim), self.dtype)]

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Vectors of a row list (n,) in its order, repeats allowed: (n, D)."""
        rows = self.parts.check_rows(rows)
        out = np.empty((len(rows), self.dim), self.dtype)
        for batch, places, within in self.parts.groups(rows):
            out[places] = column_matrix(batch.column("vector"))[within]
        return out

    def blocks(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """(start, vectors (n, D)) over all rows, n = `size` but for the last; one part and the next are held."""
        if size < 1:
            raise LattqeError(f"a block needs at least one row, not {size}")
        pending: list[np.ndarray] = []
        start = held = 0
        for _, batch in self.parts.slices(0, self.rows, keep=False):
            matrix = column_matrix(batch.column("vector"))
            while len(matrix):
                taken, matrix = matrix[:size - held], matrix[size - held:]
                pending.append(taken)
                held += len(taken)
                if held == size:
                    yield start, pending[0] if len(pending) == 1 else np.concatenate(pending)
                    start, held, pending = start + held, 0, []
            del matrix, batch
        if pending:
            yield start, pending[0] if len(pending) == 1 else np.concatenate(pending)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Ids of rows start..stop."""
        return self._column("id", start, stop).to_pylist()

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Labels of rows start..stop, (n,) int32."""
        if not self.has_labels:
            raise LattqeError(f"{self.uri} has no labels: import it with --labels")
        return self._column("label", start, stop).to_numpy().astype(np.int32, copy=False)

    def _column(self, name: str, start: int, stop: int | None) -> pa.ChunkedArray:
        start, stop = self.parts.span(start, stop)
        pieces = [batch.column(name) for _, batch in self.parts.slices(start, stop)]
        kind = pa.string() if name == "id" else pa.int32()
        return pa.chunked_array(pieces, type=kind)

    def verify(self) -> None:
        """Check every checksum and every invariant; CorruptDataError at the first thing wrong."""
        from lattqe.store.checks import verify_features

        verify_features(self)


def _dimensions(manifest: Manifest, uri: str) -> tuple[int, str]:
    """Dim and dtype, sound enough that nothing is allocated on the word of a damaged manifest."""
    dim, dtype = manifest.fields.get("dim"), manifest.fields.get("dtype")
    if not isinstance(dim, int) or isinstance(dim, bool) or not 1 <= dim <= MAX_DIM or dtype not in list(DTYPES):
        raise CorruptDataError(f"{uri}: a feature set of dim {dim!r} and dtype {dtype!r} cannot be")
    check_columns(manifest, features_schema(dim, dtype), uri)
    for part in manifest.parts:
        if part.rows < 1 or part.bytes < part.rows * dim * np.dtype(dtype).itemsize:
            raise CorruptDataError(f"{uri}/{part.name}: {part.bytes} bytes cannot hold {part.rows} rows of "
                                   f"{dim} × {dtype}")
    return dim, dtype
