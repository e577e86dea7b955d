"""Small pictures of images by their ids, from folders and buckets, small enough together for one page."""

import base64
import io
from collections.abc import Sequence
from pathlib import PurePosixPath

from PIL import Image

from lattqe.errors import LattqeError
from lattqe.extraction.image import BadImage, Box, Framing, decode, read_image_file
from lattqe.extraction.sources import IMAGE_SUFFIXES
from lattqe.store import MissingFileError, Place, UnavailableError, open_place

# Long side in pixels and JPEG quality, from the finest to the coarsest.
LADDER = ((176, 78), (144, 72), (120, 66), (96, 60), (72, 52), (56, 45), (40, 35))


class Thumbnails:
    """Pictures by id; each is read and decoded once, and has a number from 0 on."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = [open_place(uri) for uri in places]
        self._numbers: dict[tuple[str, Box | None], int | None] = {}
        self._pictures: list[bytes] = []
        self._suffixes = list(IMAGE_SUFFIXES)
        self.missing: list[str] = []  # ids without a picture, in the order in which they were asked for

    def get(self, identifier: str, box: Box | None = None) -> int | None:
        """The number of the picture of an id, cropped to `box`; None where its file is missing or broken."""
        key = (identifier, box)
        if key not in self._numbers:
            picture = self._read(identifier, box)
            if picture is None:
                self.missing.append(identifier)
            else:
                self._pictures.append(picture)
            self._numbers[key] = None if picture is None else len(self._pictures) - 1
        return self._numbers[key]

    def _read(self, identifier: str, box: Box | None) -> bytes | None:
        for place in self._places:
            for stem in dict.fromkeys((identifier, PurePosixPath(identifier).name)):
                data = self._find(place, stem)
                if data is not None:
                    try:
                        return _jpeg(Image.fromarray(decode(data, Framing(size=LADDER[0][0]), box)), LADDER[0][1])
                    except BadImage:
                        return None
        return None

    def _find(self, place: Place, stem: str) -> bytes | None:
        """The file of this name, or with a usual suffix; the suffix that was right last time is tried first."""
        for suffix in tuple(self._suffixes):
            try:
                data = read_image_file(place, stem + suffix)
            except UnavailableError:
                raise
            except (MissingFileError, BadImage, LattqeError):
                continue
            self._suffixes.remove(suffix)
            self._suffixes.insert(0, suffix)
            return data
        return None

    def encoded(self, budget: int) -> list[str] | None:
        """All pictures in base64, as fine as they can be within `budget` bytes; None where they cannot."""
        for side, quality in LADDER:
            texts, total = [], 0
            for picture in self._pictures:
                texts.append(base64.b64encode(_smaller(picture, side, quality)).decode("ascii"))
                total += len(texts[-1])
                if total > budget:
                    break
            else:
                return texts
        return None


def _smaller(picture: bytes, side: int, quality: int) -> bytes:
    if (side, quality) == LADDER[0]:
        return picture
    with Image.open(io.BytesIO(picture)) as image:
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        return _jpeg(image, quality)


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
