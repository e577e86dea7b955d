"""Ids and labels: from values of any kind to text and to int32, and from the files that stand beside a matrix."""

import csv
import json
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.reader import Labels, check_file, decoding

INT32 = np.iinfo(np.int32)
MAX_ID = 4096  # characters
NEEDED = "a column of text or whole numbers is needed"


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
    """The list of a revisited ground truth that names so many rows."""
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
            + ("write the names that you mean into a .txt file" if fitting else "give all of one list")
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
        try:  # there and back: numpy makes texts of numbers beyond Unicode, and Python encodes them
            text.encode("utf-8").decode("utf-8")
        except UnicodeError:
            raise LattqeError(f"{name}: row {row} is not valid Unicode") from None
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
        from lattqe.formats.npy_fvecs import read_array

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
