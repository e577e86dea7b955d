"""Whitening a whole feature set into a new one, part by part, so that a killed run continues at its next part."""

from collections.abc import Callable

import pyarrow as pa

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, Manifest, Pending, features_schema, part_row_counts, row_bytes
from lattqe.store.tables import matrix_column
from lattqe.whitening.model import Whitening

# Rows whitened at a time: 64 MiB in float32 at 2048-D.
BLOCK_ROWS = 8192


def whiten_features(features: FeatureSet, whitening_uri: str, to: str, dtype: str | None = None,
                    on_part: Callable[[int, int], None] = lambda rows, total: None) -> Manifest:
    """Write the whitened rows to `to`, with all other columns as they are. `on_part(rows, total)` hears of progress.

    In memory: one part of the source and one of the destination, and a block between them.
    """
    whitening, model = Whitening.load(whitening_uri)
    if whitening.input_dim != features.dim:
        raise LattqeError(f"{whitening_uri} whitens {whitening.input_dim}-D vectors, "
                          f"{features.uri} has {features.dim}-D ones")
    dtype = dtype or features.dtype
    schema = _schema(features, whitening.dim, dtype)
    fields = {"dim": whitening.dim, "dtype": dtype, "labels": features.has_labels}
    part_rows = part_row_counts(features.rows, row_bytes("features", fields))
    inputs = {"features": features.as_input(),
              "whitening": {"uri": whitening_uri, "digest": model.digest, "kind": "model"}}
    pending = Pending.begin(to, "features", fields, part_rows, {"whitening": dict(whitening.config)}, inputs,
                            schema=schema)
    missing = set(pending.missing())
    start = 0
    for number, rows in enumerate(part_rows):
        if number in missing:
            pending.publish(number, _whiten_rows(features, whitening, start, start + rows, schema, dtype))
        start += rows
        on_part(rows, features.rows)
    return pending.finish()


def _schema(features: FeatureSet, dim: int, dtype: str) -> pa.Schema:
    source = features.table(0, 0).schema
    extra = [column for column in source if column.name not in ("id", "vector", "label")]
    return features_schema(dim, dtype, features.has_labels, extra)


def _whiten_rows(features: FeatureSet, whitening: Whitening, start: int, stop: int, schema: pa.Schema,
                 dtype: str) -> pa.Table:
    pieces = []
    for low in range(start, stop, BLOCK_ROWS):
        high = min(low + BLOCK_ROWS, stop)
        pieces.append(matrix_column(whitening.apply(features.read(low, high), dtype)))
    others = features.table(start, stop)
    columns = [pa.chunked_array(pieces) if name == "vector" else others.column(name) for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)
