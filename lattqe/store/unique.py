"""Whether ids can be ids, and whether millions of them are unique: in 16 bytes for each, sorted once at the end."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash


def bad_ids(ids: pa.Array) -> np.ndarray:
    """Which ids (n,) are missing, empty, or hold a line break: ids are exported as lines."""
    bad = pc.or_kleene(pc.equal(pc.binary_length(ids), 0), pc.match_substring_regex(ids, "[\r\n]"))
    return pc.fill_null(bad, True).to_numpy(zero_copy_only=False)


class IdRegister:
    """Collects the 128-bit hashes of ids row by row and finds those that came twice."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []

    def add(self, ids: pa.ChunkedArray | pa.Array) -> None:
        """Register the ids of the next rows."""
        digest = xxhash.xxh3_128_digest
        data = b"".join([digest(text) for text in ids.cast(pa.binary()).to_pylist()])
        self._chunks.append(np.frombuffer(data, np.uint64).reshape(-1, 2))

    def duplicates(self, limit: int) -> list[list[int]]:
        """Rows that share an id, for the first `limit` such ids in order of their first row."""
        if not self._chunks:
            return []
        hashes = np.concatenate(self._chunks)
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: rows ascend among equals
        ordered = hashes[order]
        starts = np.flatnonzero(np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)])
        stops = np.r_[starts[1:], len(order)]
        repeated = [order[start:stop] for start, stop in zip(starts[stops - starts > 1], stops[stops - starts > 1])]
        return [rows[:4].tolist() for rows in sorted(repeated, key=lambda rows: rows[0])[:limit]]
