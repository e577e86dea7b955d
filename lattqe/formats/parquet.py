"""Parquet: a column of lists with the vectors. Read batch by batch."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lattqe.formats.batches import BatchReader
from lattqe.formats.reader import Options


class ParquetReader(BatchReader):
    """One Parquet file."""

    def __init__(self, path: Path, options: Options) -> None:
        # A row group is read piece by piece (buffer_size), not fetched whole beforehand.
        self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        super().__init__(str(path), self._file.schema_arrow, self._file.metadata.num_rows, options, "Parquet")

    def batches(self, columns: list[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield the named columns in batches of at most `size` rows."""
        return self._file.iter_batches(batch_size=size, columns=columns, use_threads=False)


def open_parquet(path: Path, options: Options) -> ParquetReader:
    """Open a Parquet file."""
    return ParquetReader(path, options)
