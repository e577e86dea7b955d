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
        rows = sum(batch.num_rows for batch in self._stored())
        super().__init__(str(path), self._open().schema, rows, options, "Arrow")

    def batches(self, columns: list[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield the named columns in the batches that are stored."""
        # Columns are chosen afterwards: asking Arrow to skip the others makes it copy what it would only map.
        return (batch.select(columns) for batch in self._stored())

    def _open(self) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
        opener = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opener(pa.memory_map(str(self._path)), options=pa.ipc.IpcReadOptions(use_threads=False))

    def _stored(self) -> Iterator[pa.RecordBatch]:
        reader = self._open()
        if self._is_file:
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from reader


def open_arrow(path: Path, options: Options) -> ArrowReader:
    """Open an Arrow file or stream."""
    return ArrowReader(path, options)
