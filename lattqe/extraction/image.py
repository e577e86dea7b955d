"""Images: which, in which order, under which ids; and one file's bytes to RGB pixels, or a reason why not.

They come from a folder, a bucket, a list file, or a revisited ground truth. Nothing that a file holds may end a run of
a million: every failure is a `BadImage` with a short reason. The header is read first, and a file whose header promises
too many pixels is refused before any of them is decoded.
"""

import io
import math
import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import xxhash

from lattqe.datasets.revisited import RevisitedSet
from lattqe.errors import LattqeError
from lattqe.store import MissingFileError, Place, UnavailableError, open_place
from lattqe.store.local import LocalPlace

try:
    from PIL import Image, UnidentifiedImageError
except ImportError:
    raise LattqeError("decoding images needs Pillow: pip install 'lattqe[extract]'") from None

# Raster formats with self-contained decoders and a signature. Left out on purpose: EPS and PDF (they start an
# interpreter), containers of other images (ICO, ICNS), formats without a signature (TGA takes any bytes).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

# EXIF orientation (tag 0x0112) → what brings the picture upright.
ORIENTATION_TAG = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
}

# A file of more bytes than this is not read at all; the largest photographs are a tenth of it.
MAX_FILE_BYTES = 512 << 20

PILLOW_LIMIT = 178_000_000  # Pillow refuses images of about twice the size that it warns of

Box = tuple[float, float, float, float]

# Ground truths name images without a suffix; the first of these that exists is the file.
IMAGE_SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".JPG", ".JPEG", ".PNG")
SCHEMA = pa.schema([("id", pa.string()), ("name", pa.string()), ("bytes", pa.int64()), ("box", pa.list_(pa.float64()))])


class BadImage(Exception):
    """A file that gives no picture; the message is the reason that is listed in skipped.csv."""


@dataclass(frozen=True)
class Framing:
    """How a picture is brought to the size that the network sees."""

    size: int = 1024  # long side at most this; smaller pictures are never enlarged (published setting)
    center_crop: int | None = None  # instead: the central square, scaled to this (classification encoders)
    exif: bool = True  # turn upright by the orientation tag; the published pipeline ignores it
    max_pixels: int = 89_000_000  # by the header; just below the size that Pillow itself warns of
    share: float = 1.0  # of the short side that the central square takes: backbones were evaluated with 0.875 to 1
    filter: str = "lanczos"  # of the central square's scaling

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.filter not in FILTERS:
            raise LattqeError(
                f"a central square of {self.share} of the short side, scaled by {self.filter!r}, cannot "
                f"be made: use a share up to 1 and one of {', '.join(FILTERS)}"
            )
        for name, value in (("size", self.size), ("center crop", self.center_crop), ("max pixels", self.max_pixels)):
            if value is not None and value < 1:
                raise LattqeError(f"{name} must be at least 1, not {value}")
        if self.max_pixels > PILLOW_LIMIT:
            raise LattqeError(f"max pixels {self.max_pixels} is beyond what Pillow decodes, {PILLOW_LIMIT}")


def read_image_file(place: Place, name: str, size: int = -1) -> bytes:
    """The bytes of an image file; BadImage if it is not a regular file, or too large to be an image."""
    if isinstance(place, LocalPlace):
        _check_regular(place.file(name))
    size = size if size >= 0 else place.size(name)
    if size > MAX_FILE_BYTES:
        raise BadImage(f"too large: a file of {size} bytes, over {MAX_FILE_BYTES}")
    if place.is_local:
        return place.read_range(name, 0, size)
    data = place.read(name)  # whole: only then is it held against the checksum that it was stored with
    if len(data) != size:
        raise LattqeError(f"it has {len(data)} bytes, {size} were listed")
    return data


def _check_regular(path: Path) -> None:
    """Refuse pipes, sockets and devices: reading one may wait forever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise BadImage("not a regular file but a pipe, socket or device")


def decode(data: bytes, framing: Framing, box: Box | None = None) -> np.ndarray:
    """Decode, crop to `box`, turn upright, scale: → (h, w, 3) uint8 RGB. Raises BadImage.

    `box` is (x1, y1, x2, y2) in pixels of the raster as stored, as the revisited ground truth has it; what remains is
    scaled by the factor that the full picture would be scaled by.
    """
    if not data:
        raise BadImage("empty file")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_header(image, framing)
            image.load()  # an animation's first frame
            full_side = max(image.size)
            picture = to_rgb(image)
            orientation = _orientation(image) if framing.exif else 1
        if box is not None:
            picture = crop(picture, box)
        if orientation in UPRIGHT:
            picture = picture.transpose(UPRIGHT[orientation])
        return np.asarray(scale(picture, framing, full_side))
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image of a known format") from None
    except Image.DecompressionBombError:
        raise BadImage(f"too large: over {framing.max_pixels} pixels by its header") from None
    except MemoryError:
        raise BadImage("too large: out of memory") from None
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise BadImage(f"cannot be decoded: {' '.join(str(error).split())[:200] or type(error).__name__}") from None


def read_picture(place: Place, entry: "ImageEntry", framing: Framing) -> np.ndarray:
    """Read and decode one image: (h, w, 3) uint8. Raises BadImage for whatever is wrong with the file.

    Storage that does not answer is not the image's fault: that ends the run, to be continued later. Nor is what happens
    to it on the way from S3, and not every object there has a checksum: what cannot be decoded is read again.
    """
    data = _read_entry(place, entry)
    try:
        return decode(data, framing, entry.box)
    except BadImage:
        if place.is_local or (again := _read_entry(place, entry)) == data:
            raise
        return decode(again, framing, entry.box)


def _read_entry(place: Place, entry: "ImageEntry") -> bytes:
    try:
        return read_image_file(place, entry.name, entry.bytes)
    except UnavailableError:
        raise
    except MissingFileError:
        raise BadImage("missing file") from None
    except LattqeError as error:
        raise BadImage(f"cannot be read: {error}") from None


def _check_header(image: Image.Image, framing: Framing) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise BadImage(f"no pixels: {width}×{height} by its header")
    if width * height > framing.max_pixels:
        raise BadImage(f"too large: {width}×{height} by its header, over {framing.max_pixels} pixels")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION_TAG, 1))
    except Exception:  # damaged EXIF of a sound picture: take it as it is
        return 1


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB: grey is repeated, 16 bits are scaled to 8, transparency is laid over white."""
    if image.mode.startswith("I"):
        return _grey16_to_rgb(image)
    if image.mode == "F":
        raise BadImage("floating-point pixels have no agreed range")
    if image.has_transparency_data:
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return image.convert("RGB")


def _grey16_to_rgb(image: Image.Image) -> Image.Image:
    """Scale 0..65535 to 0..255; Pillow's own conversion would clip everything above 255 to white."""
    values = np.asarray(image)
    if values.size and (values.min() < 0 or values.max() > 65_535):
        raise BadImage("integer pixels beyond 16 bits have no agreed range")
    return Image.fromarray(np.rint(values / 257).astype(np.uint8)).convert("RGB")


def crop(picture: Image.Image, box: Box) -> Image.Image:
    """Cut out the box, its corners rounded to whole pixels and clipped to the picture."""
    x1, y1, x2, y2 = (round(float(corner)) for corner in box)
    clipped = max(x1, 0), max(y1, 0), min(x2, picture.width), min(y2, picture.height)
    if clipped[0] >= clipped[2] or clipped[1] >= clipped[3]:
        raise BadImage(f"the crop {tuple(box)} holds nothing of its {picture.width}×{picture.height} pixels")
    return picture.crop(clipped)


def scale(picture: Image.Image, framing: Framing, full_side: int) -> Image.Image:
    """Shrink with Lanczos: by the factor that brings a picture with a long side of `full_side` to the size limit."""
    if framing.center_crop is not None:
        return _central_square(picture, framing.center_crop, framing.share, FILTERS[framing.filter])
    limit = max(1, math.floor(framing.size * max(picture.size) / full_side))
    target = fitted_size(picture.width, picture.height, limit)
    return picture if target == picture.size else picture.resize(target, Image.Resampling.LANCZOS)


def fitted_size(width: int, height: int, limit: int) -> tuple[int, int]:
    """Largest (width, height) within limit × limit of nearly this aspect; never larger than it was.

    The short side is rounded to the neighbour whose aspect is nearer, as Pillow's thumbnail does.
    """
    long, short = max(width, height), min(width, height)
    if long <= limit:
        return width, height
    exact = limit * short / long
    aspect = width / height

    def miss(side: int) -> float:
        if side < 1:
            return math.inf
        return abs(aspect - (limit / side if width >= height else side / limit))

    side = max(1, min(math.floor(exact), math.ceil(exact), key=miss))
    return (limit, side) if width >= height else (side, limit)


def _central_square(picture: Image.Image, side: int, share: float, resampling: Image.Resampling) -> Image.Image:
    """Scale the central square to `side` × `side`, enlarging too; the rest is cut before scaling, not after."""
    short = min(picture.size) * share
    left, top = (picture.width - short) / 2, (picture.height - short) / 2
    return picture.resize((side, side), resampling, box=(left, top, left + short, top + short))


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
        """Open a stored list; it is mapped where it is on disk."""
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
        raise LattqeError(f"{parent.uri}/{name} is not a UTF-8 text file: give one image path per line") from None
    listed = [line.strip() for line in lines if line.strip()]
    if not listed:
        raise LattqeError(f"{parent.uri}/{name} lists no images: give one image path per line")
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
        raise LattqeError(f"{tops.count('')} images are not in a folder: labels by folder need every image in one")
    names = sorted(set(tops))
    numbers = {top: number for number, top in enumerate(names)}
    return [numbers[top] for top in tops], names
