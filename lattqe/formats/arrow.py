"""Arrow IPC, as a file or as a stream; the parts of our own feature sets are such files."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from lattqe.formats.batches import BatchReader
from lattqe.formats.reader import Options

FILE_MAGIC = b"ARROW1"


class ArrowReader(BatchReader):
    """One IPC file or stream, memory-mapped."""

    def __init__(self, path: Path, options: Options) -> None:
        self._path = path
        with path.open("rb") as file:
            self._is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        rows = sum(batch.num_rows for batch in self._stored([]))
        super().__init__(str(path), self._open().schema, rows, options, "Arrow")

    def batches(self, columns: list[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield the named columns in the batches that are stored."""
        return self._stored(columns)

    def _open(self, columns: list[str] | None = None) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
        options = pa.ipc.IpcReadOptions(use_threads=False)
        if columns:
            names = self._open().schema.names
            options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=[names.index(name) for name in columns])
        source = pa.memory_map(str(self._path))
        opener = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opener(source, options=options)

    def _stored(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        reader = self._open(columns)
        if self._is_file:
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from reader


def open_arrow(path: Path, options: Options) -> ArrowReader:
    """Open an Arrow file or stream."""
    return ArrowReader(path, options)
