"""What every importer gives: one file as blocks of vectors, with ids and labels; and which importer reads what.

Ids and labels come as values of any kind, or from the files that stand beside a matrix; they become text and int32.
"""

import csv
import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from lattqe.errors import LattqeError

MAX_COLUMNS = 1 << 20  # beyond any descriptor; a damaged header must not decide how much is allocated
BLOCK_BYTES = 1 << 25  # of float32, whatever number of rows was requested
MAX_EXPANSION = 100  # bytes of float32 for each byte of a file: vectors of numbers hardly compress
UNFOLDED_BYTES = 64 << 20  # that do no harm, however small the file

Labels = np.ndarray | list[str]

INT32 = np.iinfo(np.int32)
MAX_ID = 4096  # characters
NEEDED = "a column of strings or whole numbers is needed"


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows: vectors (n, D) float16, float32 or float64; ids of length n; labels (n,) int32 or n texts."""

    vectors: np.ndarray
    ids: list[str] | None = None
    labels: Labels | None = None


@dataclass(frozen=True)
class ReadOptions:
    """What the user may say about a file: which array is what, and whether columns (True) or rows are images."""

    key: str | None = None
    transposed: bool | None = None
    allow_expansion: bool = False  # whether a small file may expand to very many rows
    ids_key: str | None = None  # the array or column with ids; None: one with a usual name
    labels_key: str | None = None

    def check_expansion(self, path: Path, unfolded: int, what: str) -> None:
        """Refuse a small file that would fill memory or disk: compression, or what was declared and never written.

        unfolded: bytes that reading it makes; what: those bytes in words, "5 × 3 numbers".
        """
        size = path.stat().st_size
        if not self.allow_expansion and unfolded > UNFOLDED_BYTES and unfolded > MAX_EXPANSION * size:
            raise LattqeError(
                f"{path} has {size:,} bytes and declares {what}, {unfolded // size:,} times as much: "
                f"{MAX_EXPANSION} times is the limit, give --allow-expansion if this is intended"
            )

    def refuse_column_names(self, path: object, why: str) -> None:
        """Refuse names of arrays and columns for a file that has none."""
        if self.key is not None:
            raise LattqeError(f"{path} {why}, and none is called {self.key!r}: leave out --key")
        for option, name in (("--ids-key", self.ids_key), ("--labels-key", self.labels_key)):
            if name is not None:
                raise LattqeError(
                    f"{path} {why}: leave out {option}, or give a file with {option.removesuffix('-key')}"
                )


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
class FileFormat:
    """A foreign format: its file endings, and the module and function that open it (loaded when first needed)."""

    endings: tuple[str, ...]
    module: str
    function: str


FORMATS = (
    FileFormat((".npy",), "matrix", "open_npy"),
    FileFormat((".mat",), "hdf5_mat", "open_mat"),
    FileFormat((".pkl", ".pickle"), "matrix", "open_pickle"),
    FileFormat((".fvecs",), "matrix", "open_fvecs"),
    FileFormat((".h5", ".hdf5"), "hdf5_mat", "open_hdf5"),
    FileFormat((".parquet",), "arrow_parquet", "open_parquet"),
    FileFormat((".arrow",), "arrow_parquet", "open_arrow"),
    FileFormat((".pt", ".pth"), "tensors", "open_torch"),
    FileFormat((".safetensors",), "tensors", "open_safetensors"),
)
ENDINGS = tuple(ending for format in FORMATS for ending in format.endings)


def open_reader(path: str | Path, options: ReadOptions | None = None) -> Reader:
    """Open one foreign file by its ending."""
    path = Path(path)
    format = find_format(str(path))
    check_file(path)
    opener = getattr(importlib.import_module(f"lattqe.formats.{format.module}"), format.function)
    options = options or ReadOptions()
    with decoding(path, format.endings[0]):
        reader = cast(Reader, opener(path, options))
    options.check_expansion(path, reader.rows * reader.dim * 4, f"{reader.rows:,} × {reader.dim} numbers")
    return reader


def find_format(name: str) -> FileFormat:
    """Return the format of a file name; refuse unknown endings."""
    if Path(name).is_dir():
        raise LattqeError(f"{name} is a directory: give the files in it, such as {name.rstrip('/')}/*.arrow")
    ending = Path(name).suffix.lower()
    for format in FORMATS:
        if ending in format.endings:
            return format
    raise LattqeError(f"{name}: unknown suffix {ending!r}; known are {' '.join(ENDINGS)}")


def as_ids(values: Any, name: str) -> list[str]:
    """Make text ids of strings, byte strings (UTF-8) or whole numbers."""
    ids = [_text(value, name, row) for row, value in enumerate(_flat(values, name))]
    for row, text in enumerate(ids):
        if not text or len(text) > MAX_ID or "\x00" in text:
            what = "empty" if not text else f"{len(text)} characters long" if len(text) > MAX_ID else "not text"
            raise LattqeError(f"{name}: the id of row {row} is {what}; ids have 1 to {MAX_ID} characters")
    return ids


def as_labels(values: Any, name: str) -> Labels:
    """Make labels: int32 of whole numbers (also written as text), otherwise a list of strings."""
    flat = _flat(values, name)
    kinds = {type(value) for value in flat}
    if kinds <= {int, bool}:
        return _int32(flat, name)
    texts = text_labels([_text(value, name, row) for row, value in enumerate(flat)], name)
    try:
        numbers = [int(text) if text.strip() == text and text.isascii() else int("") for text in texts]
    except ValueError:
        return texts
    return _int32(numbers, name)


def text_labels(texts: list[str], name: str) -> list[str]:
    """The texts, each of which can be a label: one line, as they are exported."""
    for text in dict.fromkeys(texts):
        if not text or len(text) > MAX_ID or set("\x00\r\n") & set(text):
            what = "empty" if not text else f"{len(text)} characters long" if len(text) > MAX_ID else "of several lines"
            raise LattqeError(
                f"{name}: the label of row {texts.index(text)} is {what}; labels have 1 to {MAX_ID} "
                "characters on one line"
            )
    return texts


def read_ids(path: str | Path, rows: int | None = None) -> list[str]:
    """Read ids from .npy, .txt (one on a line), .csv, or a ground truth whose imlist or qimlist has `rows` names."""
    if Path(path).suffix.lower() in (".pkl", ".json"):
        return as_ids(_names_of_ground_truth(Path(path), rows), str(path))
    return as_ids(_read_column(Path(path), ("id", "ids")), str(path))


def _names_of_ground_truth(path: Path, rows: int | None) -> Any:
    """The list of a revisited ground truth that names that many rows."""
    from lattqe.formats.pickle_file import load

    check_file(path)
    with decoding(path, "ground truth"):
        content = json.loads(path.read_text("utf-8")) if path.suffix.lower() == ".json" else load(path)
    lists = {key: content.get(key) for key in ("imlist", "qimlist")} if isinstance(content, dict) else {}
    sizes = {key: len(names) for key, names in lists.items() if isinstance(names, list | tuple)}
    if len(sizes) != 2:
        raise LattqeError(
            f"{path} is not a ground truth with imlist and qimlist: ids are read from one of those, or "
            "from .npy, .txt and .csv"
        )
    fitting = [key for key, size in sizes.items() if size == rows]
    if len(fitting) != 1:
        raise LattqeError(
            f"{path} names {sizes['imlist']:,} images (imlist) and {sizes['qimlist']:,} queries "
            f"(qimlist), and there are {rows:,} rows: "
            + ("write the intended names to a .txt file" if fitting else "give all of one list")
        )
    return lists[fitting[0]]


def read_labels(path: str | Path) -> Labels:
    """Read labels from .npy, .txt (one on a line) or .csv: int32, or text."""
    return as_labels(_read_column(Path(path), ("label", "labels")), str(path))


def _flat(values: Any, name: str) -> list[Any]:
    """Return the values as a list of str, bytes, int or bool."""
    if isinstance(values, np.ndarray):
        if values.ndim == 2 and 1 in values.shape:  # MATLAB has no vectors, only matrices of one row or column
            values = values.ravel()
        if values.ndim != 1 or values.dtype.kind not in "iubSUO":
            raise LattqeError(f"{name} has shape {values.shape} of {values.dtype}: {NEEDED}")
        if values.dtype.kind == "U" and values.dtype.itemsize:  # Python has no texts of numbers beyond Unicode
            codes = np.ascontiguousarray(values).view(f"{values.dtype.str[0]}u4").reshape(len(values), -1)
            if (beyond := (codes > sys.maxunicode).any(axis=1)).any():
                raise LattqeError(f"{name}: row {int(beyond.argmax())} is not valid Unicode")
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise LattqeError(f"{name} holds a {type(values).__name__}: {NEEDED}")
    return list(values)


def _text(value: Any, name: str, row: int) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise LattqeError(f"{name}: row {row} is not UTF-8 text") from None
    if not isinstance(value, (str, int, np.integer)):
        raise LattqeError(f"{name}: row {row} is a {type(value).__name__}; text or a whole number is needed")
    text = str(value)
    if not text.isascii():
        try:  # there and back: numpy makes texts of numbers beyond Unicode, and Python encodes them, or others for them
            valid = text.encode("utf-8").decode("utf-8") == text
        except UnicodeError:
            valid = False
        if not valid:
            raise LattqeError(f"{name}: row {row} is not valid Unicode")
    return text


def _int32(numbers: Sequence[int], name: str) -> np.ndarray:
    for row, number in enumerate(numbers):
        if not INT32.min <= number <= INT32.max:
            raise LattqeError(f"{name}: the label of row {row} is {number!s:.40}, which does not fit into 32 bits")
    return np.array(numbers, dtype=np.int32)


def _read_column(path: Path, headings: Sequence[str]) -> Any:
    check_file(path)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        from lattqe.formats.matrix import read_array

        return read_array(path)
    with decoding(path, "text"):
        if suffix == ".txt":
            return path.read_text("utf-8-sig").removesuffix("\n").split("\n")
        if suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                return _csv_column([row for row in csv.reader(file) if row], headings, path)
    raise LattqeError(f"{path}: ids and labels are read from .npy, .txt and .csv files")


def _csv_column(table: list[list[str]], headings: Sequence[str], path: Path) -> list[str]:
    """Take the column named so in the first line; without such a line, the only column."""
    first = [cell.strip().lower() for cell in table[0]] if table else []
    named = [number for number, cell in enumerate(first) if cell in headings]
    if not named and len(first) > 1:
        raise LattqeError(f"{path} has {len(first)} columns and none is named {headings[0]!r} in its first line")
    column, body = (named[0], table[1:]) if named else (0, table)
    for number, row in enumerate(body, start=2 if named else 1):
        if len(row) != len(first):
            raise LattqeError(f"{path}: line {number} has {len(row)} cells instead of {len(first)}")
    return [row[column] for row in body]


def check_count(values: Sized, rows: int, name: str, what: str) -> None:
    """Refuse ids or labels of another length than their matrix."""
    if len(values) != rows:
        raise LattqeError(f"{name} holds {len(values):,} {what} for {rows:,} rows")
