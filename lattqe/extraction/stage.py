"""From images to vectors in blocks, and from blocks to a feature set.

Threads read and decode ahead while the network works. Which images are bad shows only when they are decoded, so the
feature set's rows are not known beforehand. Blocks are therefore cut by image number and stored with a row for every
image, good or bad, below `_work` of the destination: small, so that little is lost with a killed worker. When all are
there, the good rows are copied in order into parts of the usual size, `skipped.csv` lists the others, and the manifest
is published.
"""

import csv
import io
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from lattqe.errors import LattqeError
from lattqe.extraction.encoder import ImageEncoder
from lattqe.extraction.image import BadImage, Framing, ImageEntry, ImageList, read_picture
from lattqe.store import (
    Manifest,
    Pending,
    Place,
    features_schema,
    find_manifest,
    open_place,
    part_row_counts,
    row_bytes,
)
from lattqe.store.export import plain_cell
from lattqe.store.features import normalised
from lattqe.store.parts import StoredRows, matrix_column
from lattqe.store.pending import clean_up, read_plan, refuse_foreign_files, refuse_other

STAGE = "_work/blocks"
LIST_NAME = "images.arrow"
SKIPPED_NAME = "skipped.csv"
MIN_BLOCK = 64  # images: minutes of a CPU's work at full size
MAX_BLOCKS = 4096  # files below _work: a million images make blocks of 245
CROP_COLUMN = pa.field("crop", pa.list_(pa.field("item", pa.float32(), nullable=False), 4), nullable=False)


@dataclass
class DescribedBlock:
    """What became of n images, in their order."""

    vectors: np.ndarray  # (n, D) float32 unit vectors; zeros where there is a reason
    reasons: list[str] = field(default_factory=list)  # (n,) '' for a good image, else why there is no vector

    @property
    def bad(self) -> int:
        """How many images gave no vector."""
        return sum(bool(reason) for reason in self.reasons)


def read_pixels(place: Place, entry: ImageEntry, framing: Framing, pin: bool = False) -> Tensor:
    """Read and decode one image: (1, h, w, 3) uint8. Raises BadImage for whatever is wrong with the file."""
    # Copied, because Pillow's pixels are read-only and torch needs writable memory.
    pixels = torch.from_numpy(read_picture(place, entry, framing).copy()).unsqueeze(0)
    return pixels.pin_memory() if pin else pixels


class Describer:
    """Describes blocks of images with one encoder. Several threads may call it: one at a time has the network.

    While one block holds the network the next is already reading and decoding its first images, and the one before
    is being stored, so the network does not wait for either.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        dim: int,
        place: Place,
        framing: Framing,
        scales: Sequence[float] = (1.0,),
        batch: int = 1,
        threads: int = 2,
    ) -> None:
        if batch < 1 or threads < 1:
            raise LattqeError(f"batch {batch} and threads {threads} must be at least 1")
        self.encoder, self.dim, self.place, self.framing, self.scales = encoder, dim, place, framing, tuple(scales)
        self.batch, self.ahead = batch, 2 * threads + batch
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._network = threading.Lock()

    def describe(self, entries: Sequence[ImageEntry]) -> DescribedBlock:
        """Describe a block; the result depends on these images and the settings alone, not on threads or timing."""
        decoded = _Ahead(entries, self._decode, self._pool, self.ahead)
        reasons = [""] * len(entries)
        finished: list[tuple[list[int], Tensor]] = []
        with self._network:
            for rows, pixels in self._batches(decoded, reasons):
                vectors = self._encode(rows, pixels, reasons)
                if vectors is not None:
                    finished.append((rows, vectors))
        return self._collect(finished, reasons)

    def _decode(self, entry: ImageEntry) -> Tensor:
        return read_pixels(self.place, entry, self.framing, pin=self.encoder.device.type == "cuda")

    def _batches(self, decoded: "_Ahead", reasons: list[str]) -> Iterator[tuple[list[int], Tensor]]:
        """Gather images of one size; a batch leaves when it is full, the rest in the order of their first image."""
        waiting: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
        for row, coming in enumerate(decoded):
            try:
                pixels = coming.result()
            except BadImage as error:
                reasons[row] = str(error)
                continue
            alike = waiting.setdefault(tuple(pixels.shape), [])
            alike.append((row, pixels))
            if len(alike) == self.batch:
                yield _stack(waiting.pop(tuple(pixels.shape)))
        for alike in waiting.values():
            yield _stack(alike)

    def _encode(self, rows: list[int], pixels: Tensor, reasons: list[str]) -> Tensor | None:
        try:
            return self.encoder.describe(pixels, self.scales)
        except (RuntimeError, AssertionError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise LattqeError(
                    f"the network ran out of memory on {len(rows)} images of {pixels.shape[2]}×"
                    f"{pixels.shape[1]}: use a smaller --batch, --size or fewer workers"
                ) from None
            for row in rows:  # an exported encoder that does not take this size
                reasons[row] = f"refused by the encoder: {' '.join(str(error).split())[:200]}"
            return None
        except Exception as error:  # a fault of a user's own encoder, whatever the image
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise LattqeError(
                f"the encoder failed with {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
            ) from error

    def _collect(self, finished: list[tuple[list[int], Tensor]], reasons: list[str]) -> DescribedBlock:
        """Fetch all vectors from the device: the one point that waits for it."""
        vectors = np.zeros((len(reasons), self.dim), dtype=np.float32)
        for rows, values in finished:
            vectors[rows] = values.cpu().numpy()
        for row in np.flatnonzero(~np.isfinite(vectors).all(axis=1)):
            reasons[row] = "the encoder gives NaN or infinity"
            vectors[row] = 0
        for row in np.flatnonzero(~vectors.any(axis=1)):
            reasons[row] = reasons[row] or "the encoder gives a zero vector"
        return DescribedBlock(vectors, reasons)


def _stack(alike: list[tuple[int, Tensor]]) -> tuple[list[int], Tensor]:
    rows, images = [row for row, _ in alike], [pixels for _, pixels in alike]
    if len(images) == 1:
        return rows, images[0]
    stacked = torch.cat(images)
    return rows, stacked.pin_memory() if images[0].is_pinned() else stacked


class _Ahead:
    """The futures of `function` over `entries`, in order, with up to `depth` of them started already."""

    def __init__(
        self,
        entries: Sequence[ImageEntry],
        function: Callable[[ImageEntry], Tensor],
        pool: ThreadPoolExecutor,
        depth: int,
    ) -> None:
        self._rest, self._function, self._pool = iter(entries), function, pool
        self._started: deque[Future[Tensor]] = deque()
        self._start(depth)

    def _start(self, count: int) -> None:
        self._started.extend(self._pool.submit(self._function, entry) for entry in islice(self._rest, count))

    def __iter__(self) -> Iterator[Future[Tensor]]:
        while self._started:
            coming = self._started.popleft()
            self._start(1)
            yield coming


class DescribedImages(StoredRows):
    """All blocks together: id, vector (zeros for a bad image) and reason ('' for a good one) of every image."""

    kind: ClassVar[str] = "described images"


@dataclass(frozen=True)
class Destination:
    """What is to be made where: all that decides the bytes of the feature set but the images that turn out bad."""

    uri: str
    dim: int
    dtype: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, str]]

    @property
    def stage_uri(self) -> str:
        """Where the blocks are."""
        return open_place(self.uri).child(STAGE).uri

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, about."""
        return row_bytes("features", {"dim": self.dim, "dtype": self.dtype})

    def find_finished(self) -> Manifest | None:
        """The manifest of an equal feature set that is there already; AlreadyExistsError for another one.

        What a run that was killed just after publishing left behind is cleared away.
        """
        place = open_place(self.uri)
        manifest = find_manifest(place)
        if manifest is not None:
            self._refuse_other(manifest.kind, manifest.fields, manifest.config, manifest.inputs, "a finished artifact")
            clean_up(place)
        return manifest

    def _refuse_other(
        self, kind: str, fields: Mapping[str, Any], config: Mapping[str, Any], inputs: Mapping[str, Any], what: str
    ) -> None:
        there = {
            "kind": kind,
            "dim": fields.get("dim"),
            "dtype": fields.get("dtype"),
            "inputs": dict(inputs),
            "config": {key: value for key, value in config.items() if key != "skipped"},
        }
        here = {
            "kind": "features",
            "dim": self.dim,
            "dtype": self.dtype,
            "inputs": dict(self.inputs),
            "config": dict(self.config),
        }
        refuse_other(open_place(self.uri), there, here, what)

    def begin(self, images: ImageList) -> Pending:
        """Claim the destination's blocks, or join those who make the same; the list is stored for the workers.

        What would stand in the way of publishing in the end is refused now, not after hours of work.
        """
        place = open_place(self.uri)
        plan = read_plan(place)
        if plan is not None:
            self._refuse_other(plan["kind"], plan["fields"], plan["config"], plan["inputs"], "an unfinished artifact")
        else:
            refuse_foreign_files(place)
        pending = Pending.begin(
            self.stage_uri,
            DescribedImages.kind,
            {"dim": self.dim, "dtype": self.dtype},
            block_rows(len(images)),
            self.config,
            self.inputs,
            schema=_stage_schema(self.dim, self.dtype),
        )
        images.save(open_place(self.stage_uri), LIST_NAME)
        return pending


def block_rows(images: int) -> list[int]:
    """Cut `images` into blocks, by their number alone."""
    size = max(MIN_BLOCK, -(-images // MAX_BLOCKS))
    return [min(size, images - start) for start in range(0, images, size)]


def _stage_schema(dim: int, dtype: str) -> pa.Schema:
    return features_schema(dim, dtype, extra=[pa.field("reason", pa.string())])


def block_table(entries: Sequence[ImageEntry], block: DescribedBlock, dtype: str) -> pa.Table:
    """A block as it is stored: unit vectors rounded once to `dtype`, zeros for bad images."""
    vectors, _ = normalised(block.vectors, dtype)
    vectors[[bool(reason) for reason in block.reasons]] = 0
    columns = [
        pa.array([entry.id for entry in entries], pa.string()),
        matrix_column(vectors),
        pa.array(block.reasons, pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=_stage_schema(block.vectors.shape[1], dtype))


@dataclass(frozen=True)
class Skipped:
    """The bad images: number in the list, id, reason."""

    rows: list[tuple[int, str, str]]

    def to_csv(self) -> bytes:
        """number,id,reason with a header line."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("number", "id", "reason"))
        writer.writerows((number, plain_cell(name), plain_cell(reason)) for number, name, reason in self.rows)
        return text.getvalue().encode()


def find_skipped(described: DescribedImages) -> Skipped:
    """Collect the bad images of all blocks."""
    rows: list[tuple[int, str, str]] = []
    for start, table in _blocks(described):
        for number, reason in enumerate(table.column("reason").to_pylist(), start):
            if reason:
                rows.append((number, table.column("id")[number - start].as_py(), reason))
    return Skipped(rows)


def _blocks(described: DescribedImages) -> Iterator[tuple[int, pa.Table]]:
    start = 0
    for part in described.manifest.parts:
        yield start, described.table(start, start + part.rows)
        start += part.rows


def merge(
    destination: Destination,
    described: DescribedImages,
    skipped: Skipped,
    labels: np.ndarray | None = None,
    crops: np.ndarray | None = None,
    label_names: Sequence[str] | None = None,
) -> Manifest:
    """Copy the good rows, in order, into the feature set and publish it. `labels` (n,) and `crops` (n, 4) are by image.

    Label i is named `label_names[i]`.

    One part and a few blocks are in memory at a time; a killed merge continues at its next part.
    """
    good = np.ones(described.rows, dtype=bool)
    good[[number for number, _, _ in skipped.rows]] = False
    if not good.any():
        raise LattqeError(f"not one of {described.rows} images gave a vector, the first because: {skipped.rows[0][2]}")
    extra = [CROP_COLUMN] if crops is not None else []
    schema = features_schema(destination.dim, destination.dtype, labels is not None, extra)
    fields: dict[str, Any] = {"dim": destination.dim, "dtype": destination.dtype, "labels": labels is not None}
    if label_names is not None:
        fields["label_names"] = list(label_names)
    part_rows = part_row_counts(int(good.sum()), row_bytes("features", fields))
    pending = Pending.begin(
        destination.uri,
        "features",
        fields,
        part_rows,
        {**destination.config, "skipped": len(skipped.rows)},
        destination.inputs,
        schema=schema,
    )
    missing = set(pending.missing())
    images_of_parts = np.split(np.flatnonzero(good), np.cumsum(part_rows)[:-1])
    for number, images in enumerate(images_of_parts):
        if number in missing:
            pending.publish(number, _part_table(described, images, schema, labels, crops))
    open_place(destination.uri).write(SKIPPED_NAME, skipped.to_csv())
    return pending.finish()


def _part_table(
    described: DescribedImages,
    images: np.ndarray,
    schema: pa.Schema,
    labels: np.ndarray | None,
    crops: np.ndarray | None,
) -> pa.Table:
    """The rows of the given images, all within one part."""
    first, last = int(images[0]), int(images[-1])
    table = described.table(first, last + 1).select(["id", "vector"]).take(images - first).combine_chunks()
    columns = [column.chunk(0) for column in table.columns]
    if labels is not None:
        columns.append(pa.array(labels[images], pa.int32()))
    if crops is not None:
        columns.append(matrix_column(crops[images].astype(np.float32)))
    return pa.Table.from_arrays(columns, schema=schema)
