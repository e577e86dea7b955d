"""What every importer gives: one file as blocks of vectors, with ids and labels; and which importer reads what."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from lattqe.errors import LattqeError

MAX_COLUMNS = 1 << 20  # beyond any descriptor; a damaged header must not decide how much is allocated
BLOCK_BYTES = 1 << 25  # of float32, whatever number of rows was asked for
MAX_EXPANSION = 100  # bytes of float32 for each byte of a file: vectors of numbers hardly compress
UNFOLDED_BYTES = 64 << 20  # that do no harm, however small the file

Labels = np.ndarray | list[str]


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows: vectors (n, D) float16, float32 or float64; ids of length n; labels (n,) int32 or n texts."""

    vectors: np.ndarray
    ids: list[str] | None = None
    labels: Labels | None = None


@dataclass(frozen=True)
class Options:
    """What the user may say about a file: which array is what, and whether columns (True) or rows are images."""

    key: str | None = None
    transposed: bool | None = None
    allow_expansion: bool = False  # whether a small file may unfold to very many rows
    ids_key: str | None = None  # the array or column with ids; None: one with a usual name
    labels_key: str | None = None

    def refuse_column_names(self, path: object, why: str) -> None:
        """Refuse names of columns for a file that has none."""
        for option, name in (("--ids-key", self.ids_key), ("--labels-key", self.labels_key)):
            if name is not None:
                raise LattqeError(f"{path} {why}: leave out {option}, or give a file by {option.removesuffix('-key')}")


class Reader(ABC):
    """One foreign file, opened: its size is known, its vectors are still in the file."""

    name: str
    kind: str  # of the file, for messages: ".npy", "Parquet"
    rows: int
    dim: int
    has_ids = False
    labels: type | None = None  # int, str, or None where the file has no labels
    notes: Sequence[str] = ()  # what was assumed, to be shown to the user

    def blocks(self, size: int) -> Iterator[RowBlock]:
        """Yield the rows in order, at most `size` in a block and never more than BLOCK_BYTES of float32."""
        with decoding(self.name, self.kind):
            yield from self._blocks(max(1, min(size, BLOCK_BYTES // (4 * self.dim))))

    def label_names(self) -> set[str]:
        """Return the distinct labels of a file that has text labels."""
        with decoding(self.name, self.kind):
            return self._label_names()

    @abstractmethod
    def _blocks(self, step: int) -> Iterator[RowBlock]:
        """Yield the rows in order, at most `step` in a block."""

    def _label_names(self) -> set[str]:
        return set()


@contextmanager
def decoding(name: object, kind: str) -> Iterator[None]:
    """Turn whatever a decoder raises for a damaged file into one line: its libraries raise nearly everything."""
    try:
        yield
    except LattqeError:
        raise
    except MemoryError as error:
        raise LattqeError(f"{name} is not a readable {kind} file: it declares more than fits into memory") from error
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LattqeError(f"{name} is not a readable {kind} file: {first_line[:200]}") from error


def check_file(path: Path) -> None:
    """Refuse what is not a regular, non-empty file."""
    try:
        if path.is_dir():
            raise LattqeError(f"{path} is a directory: give the files in it")
        if not path.exists():
            raise LattqeError(f"{path} does not exist")
        if not path.is_file():
            raise LattqeError(f"{path} is not a regular file: save it to disk first")
        with path.open("rb") as file:
            if not file.read(1):
                raise LattqeError(f"{path} is empty")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise LattqeError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def check_matrix(name: str, shape: Sequence[int], dtype: Any) -> tuple[int, int]:
    """Return (rows, columns) of something that can hold vectors; refuse other shapes and element types."""
    if len(shape) != 2:
        raise LattqeError(f"{name} has shape {tuple(shape)}: a matrix (images, dimensions) is needed")
    if not is_numeric(dtype):
        raise LattqeError(f"{name} holds {dtype}: real numbers are needed")
    rows, columns = int(shape[0]), int(shape[1])
    if rows == 0 or columns == 0:
        raise LattqeError(f"{name} is empty: its shape is {rows} × {columns}")
    if columns > MAX_COLUMNS:
        raise LattqeError(f"{name} has {columns:,} columns; at most {MAX_COLUMNS:,} are read (is it transposed?)")
    return rows, columns


def is_numeric(dtype: Any) -> bool:
    """Whether elements of this type are real numbers (flags and complex numbers are not)."""
    return getattr(dtype, "kind", None) in ("f", "i", "u") and dtype.itemsize <= 16


def as_vectors(array: np.ndarray) -> np.ndarray:
    """Make (n, D) floats of any real matrix, in native byte order and row by row; nothing is rounded but wide integers.

    Floats keep their width, so that they are rounded once, after normalisation.
    """
    narrow = array.dtype.kind in "iu" and array.dtype.itemsize <= 2
    native = {2: np.float16, 4: np.float32}.get(array.dtype.itemsize, np.float64) if array.dtype.kind == "f" else None
    with np.errstate(over="ignore"):  # a long double beyond float64 becomes infinite, and is refused by its row later
        return np.ascontiguousarray(array, dtype=native or (np.float32 if narrow else np.float64))


@dataclass(frozen=True)
class Format:
    """A foreign format: its file endings, and the module and function that open it (loaded when first needed)."""

    endings: tuple[str, ...]
    module: str
    function: str


FORMATS = (
    Format((".npy",), "npy_fvecs", "open_npy"),
    Format((".mat",), "mat", "open_mat"),
    Format((".pkl", ".pickle"), "pickle_file", "open_pickle"),
    Format((".fvecs",), "npy_fvecs", "open_fvecs"),
    Format((".h5", ".hdf5"), "hdf5", "open_hdf5"),
    Format((".parquet",), "arrow_parquet", "open_parquet"),
    Format((".arrow",), "arrow_parquet", "open_arrow"),
    Format((".pt", ".pth"), "tensors", "open_torch"),
    Format((".safetensors",), "tensors", "open_safetensors"),
)
ENDINGS = tuple(ending for format in FORMATS for ending in format.endings)


def open_reader(path: str | Path, options: Options | None = None) -> Reader:
    """Open one foreign file by its ending."""
    path = Path(path)
    format = find_format(str(path))
    check_file(path)
    opener = getattr(importlib.import_module(f"lattqe.formats.{format.module}"), format.function)
    options = options or Options()
    with decoding(path, format.endings[0]):
        reader = cast(Reader, opener(path, options))
    if not options.allow_expansion:
        check_expansion(path, reader.rows, reader.dim)
    return reader


def check_expansion(path: Path, rows: int, dim: int) -> None:
    """Refuse a small file that would fill the disk: compression, or rows that were declared and never written."""
    size, unfolded = path.stat().st_size, rows * dim * 4
    if unfolded > UNFOLDED_BYTES and unfolded > MAX_EXPANSION * size:
        times = unfolded // size
        raise LattqeError(
            f"{path} has {size:,} bytes and declares {rows:,} × {dim} numbers, {times:,} times as much: "
            f"{MAX_EXPANSION} times is the limit, give --allow-expansion if this is meant"
        )


def find_format(name: str) -> Format:
    """Return the format of a file name; refuse unknown endings."""
    if Path(name).is_dir():
        raise LattqeError(f"{name} is a directory: give the files in it, such as {name.rstrip('/')}/*.arrow")
    ending = Path(name).suffix.lower()
    for format in FORMATS:
        if ending in format.endings:
            return format
    raise LattqeError(f"{name}: the ending {ending!r} is unknown; known are {' '.join(ENDINGS)}")
