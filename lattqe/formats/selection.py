"""Which rows are kept: a range A:B, a mask, a list of row numbers, or the rows whose value is V in a file beside."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.npy import read_array
from lattqe.formats.reader import check_file


def kept_rows(total: int, rows: str | None = None, select: Sequence[str] = ()) -> np.ndarray | None:
    """Return a mask (total,) bool of the rows that satisfy all conditions; None where all rows are kept.

    `rows` is "A:B" as in Python. Each of `select` is FILE.npy (a mask, or ascending row numbers) or
    FILE.npy=VALUE (one value for each row; those equal to VALUE are kept).
    """
    if rows is None and not select:
        return None
    mask = np.ones(total, dtype=bool)
    if rows is not None:
        mask &= _range_mask(total, rows)
    for condition in select:
        mask &= _file_mask(total, condition)
    if not mask.any():
        raise LattqeError(f"no row of {total:,} is selected by {' and '.join([*([rows] if rows else []), *select])}")
    return mask


def _range_mask(total: int, rows: str) -> np.ndarray:
    match = re.fullmatch(r"(-?\d{1,18})?:(-?\d{1,18})?", rows.strip())
    if match is None:
        raise LattqeError(f"--rows {rows!r} is not a range; write A:B, as in 0:1000")
    mask = np.zeros(total, dtype=bool)
    mask[slice(*(None if side is None else int(side) for side in match.groups()))] = True
    return mask


def _file_mask(total: int, condition: str) -> np.ndarray:
    name, equals, wanted = condition.rpartition("=") if not Path(condition).exists() else (condition, "", "")
    if not equals:
        name = condition
    path = Path(name)
    check_file(path)
    if path.suffix.lower() != ".npy":
        raise LattqeError(f"--select {condition}: a .npy file of flags, row numbers or values is needed")
    values = read_array(path)
    if values.ndim != 1 or values.dtype.kind not in "biuSU":
        raise LattqeError(f"--select {path}: its shape is {values.shape} of {values.dtype}; a column is needed")
    if equals or values.dtype == bool:
        if len(values) != total:
            raise LattqeError(f"--select {path} has {len(values):,} entries for {total:,} rows")
        return _equal(values, wanted, path) if equals else values
    return _row_mask(total, values, path)


def _equal(values: np.ndarray, wanted: str, path: Path) -> np.ndarray:
    """Compare by the text of the values, so that =2, =True and =train all mean what they say."""
    if values.dtype == bool:
        wanted = {"0": "False", "1": "True"}.get(wanted, wanted.capitalize())
    distinct, where = np.unique(values, return_inverse=True)
    texts = [str(value, "utf-8", "replace") if isinstance(value, bytes) else str(value) for value in distinct.tolist()]
    if wanted not in texts:
        raise LattqeError(f"--select {path}={wanted}: no row has this value; there are {', '.join(texts[:8])}")
    return where == texts.index(wanted)


def _row_mask(total: int, values: np.ndarray, path: Path) -> np.ndarray:
    if values.dtype.kind not in "iu" or (np.diff(values.astype(object)) <= 0).any():
        raise LattqeError(f"--select {path}: neither flags nor ascending row numbers ({path}=VALUE keeps one value)")
    outside = values[(values < 0) | (values >= total)]
    if len(outside):
        raise LattqeError(f"--select {path}: row {outside[0]} is outside of 0..{total - 1}")
    mask = np.zeros(total, dtype=bool)
    mask[values.astype(np.int64)] = True
    return mask
