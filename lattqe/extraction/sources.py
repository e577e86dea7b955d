"""Which images, in which order, under which ids: a folder, a bucket, a list file, or a revisited ground truth."""

import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import pyarrow as pa
import xxhash

from lattqe.datasets.revisited import RevisitedSet
from lattqe.errors import LattqeError
from lattqe.extraction.image import Box
from lattqe.store import Place, open_place
from lattqe.store.local import LocalPlace

# Ground truths name images without a suffix; the first of these that exists is the file.
IMAGE_SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".JPG", ".JPEG", ".PNG")

SCHEMA = pa.schema([("id", pa.string()), ("name", pa.string()), ("bytes", pa.int64()), ("box", pa.list_(pa.float64()))])


@dataclass(frozen=True)
class ImageEntry:
    """One image: its id in the feature set, its file below the root, its size if known (else -1), its crop if any."""

    id: str
    name: str
    bytes: int = -1
    box: Box | None = None


class ImageList:
    """Images below one root, in the order of the rows to come. Held as an Arrow table, so that a million are cheap."""

    def __init__(self, root: str, table: pa.Table) -> None:
        self.root, self._table = root, table

    @classmethod
    def of(cls, root: str, entries: Iterable[ImageEntry]) -> "ImageList":
        """Gather entries; names that are not text are shown with escapes (they cannot be read, and will be listed)."""
        rows = [(_as_text(entry.id), _as_text(entry.name), entry.bytes, entry.box) for entry in entries]
        seen: set[str] = set()
        for identifier, *_ in rows:
            if identifier in seen:
                raise LattqeError(f"image {identifier!r} is listed twice: ids must be unique, remove one")
            seen.add(identifier)
        return cls(root, pa.table([list(column) for column in zip(*rows)], schema=SCHEMA))

    def __len__(self) -> int:
        return self._table.num_rows

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[ImageEntry]:
        """The images start..stop."""
        for row in self._table.slice(start, None if stop is None else stop - start).to_pylist():
            yield ImageEntry(row["id"], row["name"], row["bytes"], tuple(row["box"]) if row["box"] else None)

    def digest(self) -> str:
        """Digest of ids, sizes and crops: what decides the features, as far as it shows without reading images."""
        state = xxhash.xxh3_128()
        for entry in self.entries():
            state.update(f"{entry.id}\0{entry.bytes}\0{entry.box}\n".encode())
        return state.hexdigest()

    def save(self, place: Place, name: str) -> None:
        """Store the list for workers."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(self._table.combine_chunks())
        place.write(name, sink.getvalue())

    @classmethod
    def load(cls, root: str, place: Place, name: str) -> "ImageList":
        """Open a stored list; it is mapped where it lies on disk."""
        return cls(root, pa.ipc.open_file(pa.BufferReader(place.fetch(name))).read_all())


def _as_text(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def list_images(uri: str, root: str | None = None) -> ImageList:
    """List the images of a folder or prefix (recursively, sorted, hidden ones left out), or of a list file.

    A list file (any file on disk, an object *.txt on S3) has one path on each line, relative to `root` (by default
    the folder of the list), and its order is kept. Ids are the paths: below the folder, or as the list writes them.
    """
    place = open_place(uri)
    if place.path.is_file() if isinstance(place, LocalPlace) else uri.endswith(".txt"):
        folder, _, name = place.uri.rpartition("/")
        return _from_list_file(open_place(folder or "/"), name, root)
    if root is not None:
        raise LattqeError("--root goes with a list file; a folder is its own root")
    entries = [
        ImageEntry(found, found, size)
        for found, size in place.sizes().items()
        if not any(part.startswith(".") for part in found.split("/"))
    ]
    if not entries:
        raise LattqeError(f"there are no images at {uri}: give a folder, an s3:// prefix or a list file (.txt)")
    return ImageList.of(place.uri, entries)


def _from_list_file(parent: Place, name: str, root: str | None) -> ImageList:
    try:
        lines = parent.read(name).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise LattqeError(f"{parent.uri}/{name} is not a UTF-8 text file: give one image path on each line") from None
    listed = [line.strip() for line in lines if line.strip()]
    if not listed:
        raise LattqeError(f"{parent.uri}/{name} lists no images: give one image path on each line")
    base = open_place(root) if root is not None else parent
    if base.is_local:
        # Lists name files anywhere on the disk, so the root is the disk.
        paths = [posixpath.normpath(posixpath.join(base.uri, line)) for line in listed]
        return ImageList.of(
            "/", (ImageEntry(line, path.lstrip("/"), _local_bytes(path)) for line, path in zip(listed, paths))
        )
    return ImageList.of(base.uri, (ImageEntry(line, line) for line in listed))


def _local_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def list_ground_truth(uri: str, truth: RevisitedSet, queries: bool) -> ImageList:
    """The database images of a revisited ground truth, or its queries with their crops, in the rows' order.

    Ids are the names of the ground truth; the file is the one of that name, with or without a usual suffix.
    """
    place = open_place(uri)
    sizes = place.sizes()
    if not sizes:
        raise LattqeError(f"there are no images at {uri}: give the folder that holds those of the ground truth")
    names: Sequence[str] = truth.qimlist if queries else truth.imlist
    boxes: Sequence[Box | None] = truth.boxes if queries else [None] * len(names)
    return ImageList.of(place.uri, (_named_entry(name, box, sizes) for name, box in zip(names, boxes)))


def _named_entry(name: str, box: Box | None, sizes: dict[str, int]) -> ImageEntry:
    for suffix in IMAGE_SUFFIXES:
        if name + suffix in sizes:
            return ImageEntry(name, name + suffix, sizes[name + suffix], box)
    return ImageEntry(name, name + ".jpg", -1, box)


def folder_labels(images: ImageList) -> tuple[list[int], list[str]]:
    """One label for each image, the number of its top folder among the sorted top folders; and these folders."""
    tops = [PurePosixPath(entry.id).parts[0] if "/" in entry.id else "" for entry in images.entries()]
    if "" in tops:
        raise LattqeError(f"{tops.count('')} images lie in no folder: labels by folder need every image in one")
    names = sorted(set(tops))
    numbers = {top: number for number, top in enumerate(names)}
    return [numbers[top] for top in tops], names
