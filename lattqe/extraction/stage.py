"""From blocks of described images to a feature set.

Which images are bad shows only when they are decoded, so the feature set's rows are not known beforehand. Blocks are
therefore cut by image number and stored with a row for every image, good or bad, below `_work` of the destination:
small, so that little is lost with a killed worker. When all are there, the good rows are copied in order into parts
of the usual size, `skipped.csv` lists the others, and the manifest is published.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from lattqe.errors import LattqeError
from lattqe.extraction.pipeline import DescribedBlock
from lattqe.extraction.sources import ImageEntry, ImageList
from lattqe.store import Manifest, Pending, features_schema, find_manifest, open_place, part_row_counts, row_bytes
from lattqe.store.export import plain_cell
from lattqe.store.features import normalised
from lattqe.store.parts import StoredRows
from lattqe.store.pending import clean_up, read_plan, refuse_foreign_files, refuse_other
from lattqe.store.tables import matrix_column

STAGE = "_work/blocks"
LIST_NAME = "images.arrow"
SKIPPED_NAME = "skipped.csv"
MIN_BLOCK = 64  # images: minutes of a CPU's work at full size
MAX_BLOCKS = 4096  # files below _work: a million images make blocks of 245

CROP_COLUMN = pa.field("crop", pa.list_(pa.field("item", pa.float32(), nullable=False), 4), nullable=False)


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
        """Where the blocks lie."""
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
