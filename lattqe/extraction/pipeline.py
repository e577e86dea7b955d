"""A block of images to vectors: threads read and decode ahead while the network works."""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from lattqe.errors import LattqeError
from lattqe.extraction.encoder import Encoder
from lattqe.extraction.image import BadImage, Framing, decode, read_image_file
from lattqe.extraction.sources import ImageEntry
from lattqe.store import MissingFileError, Place, UnavailableError


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
    """Read and decode one image: (1, h, w, 3) uint8. Raises BadImage for whatever is wrong with the file.

    Only storage that does not answer is not the image's fault: that ends the run, to be continued later.
    """
    try:
        data = read_image_file(place, entry.name, entry.bytes)
    except UnavailableError:
        raise
    except MissingFileError:
        raise BadImage("missing file") from None
    except LattqeError as error:
        raise BadImage(f"cannot be read: {error}") from None
    # Copied, for Pillow's pixels are read-only and torch wants to own what it sends.
    pixels = torch.from_numpy(decode(data, framing, entry.box).copy()).unsqueeze(0)
    return pixels.pin_memory() if pin else pixels


class Describer:
    """Describes blocks of images with one encoder. Several threads may call it: one at a time has the network.

    While one block holds the network the next is already reading and decoding its first images, and the one before
    is being stored, so the network does not wait for either.
    """

    def __init__(
        self,
        encoder: Encoder,
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
        except Exception as error:  # a fault of somebody's own encoder, whatever the image
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
