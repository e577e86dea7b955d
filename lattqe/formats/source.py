"""Several foreign files, on disk or S3, as one matrix: joined in order, with ids, labels, a choice of rows, columns."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from lattqe.errors import LattqeError
from lattqe.formats.matrix import read_array
from lattqe.formats.reader import (
    Labels,
    Reader,
    ReadOptions,
    RowBlock,
    check_count,
    check_file,
    open_reader,
    read_ids,
    read_labels,
)
from lattqe.store import open_place
from lattqe.store.local import scratch_folder
from lattqe.store.place import check_name

CHUNK = 8 << 20


@contextmanager
def local_files(uris: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield a path on disk for each of the named `uris` (paths, file:// or s3://); downloads are gone afterwards.

    Errors raised meanwhile name the URI instead of the downloaded copy.
    """
    with scratch_folder("import") as folder:
        origins: dict[str, str] = {}
        try:
            yield {name: _local(uri, folder / name, origins) for name, uri in uris.items()}
        except LattqeError as error:
            message = str(error)
            for copy, uri in origins.items():
                message = message.replace(copy, uri)
            raise type(error)(message) from error


def file_digest(path: str | Path) -> str:
    """xxh3-128 of a file's content, for provenance and for telling whether a source has changed."""
    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise LattqeError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _local(uri: str, folder: Path, origins: dict[str, str]) -> str:
    """Return the path of a local file as it was given; download others into `folder`."""
    if "://" not in uri:
        return uri
    parent, _, name = uri.rpartition("/")
    place = open_place(parent)
    if place.is_local:
        return str(Path(place.uri) / check_name(name))
    copy = folder / check_name(name)
    origins[str(copy)] = uri
    try:
        folder.mkdir()
    except OSError as error:
        raise LattqeError(f"cannot download {uri} to {copy.parent}: {error.strerror or error}") from error
    place.download(name, copy)
    return str(copy)


def selected_rows(total: int, rows: str | None = None, select: Sequence[str] = ()) -> np.ndarray | None:
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


@dataclass(frozen=True)
class ImportSource:
    """What is to be imported: `rows` × `dim`, and the names of text labels (label i is `label_names[i]`)."""

    rows: int
    dim: int
    has_labels: bool
    label_names: list[str] | None
    notes: list[str]
    _parts: list["_File"]
    _mask: np.ndarray | None

    @property
    def has_ids(self) -> bool:
        """Whether every file brings its own ids, or a file of ids was given."""
        return all(part.ids is not None or part.reader.has_ids for part in self._parts)

    def blocks(self, size: int) -> Iterator[RowBlock]:
        """Yield at most `size` rows: vectors (n, dim) of floats, ids, labels (n,) int32 or None."""
        first = 0
        for part in self._parts:
            for block in part.blocks(size, self.label_names):
                stop = first + len(block.vectors)
                if self._mask is None:
                    yield _cut(block, self.dim)
                elif (kept := self._mask[first:stop]).any():
                    yield _cut(_keep(block, kept), self.dim)
                first = stop


@dataclass(frozen=True)
class _File:
    """One file, with the ids and labels that were given for it outside of it."""

    reader: Reader
    stem: str
    ids: list[str] | None
    labels: Labels | None

    @property
    def label_kind(self) -> type | None:
        if self.labels is None:
            return self.reader.labels
        return int if isinstance(self.labels, np.ndarray) else str

    def label_names(self) -> set[str]:
        if isinstance(self.labels, list):
            return set(self.labels)
        return self.reader.label_names() if self.labels is None else set()

    def blocks(self, size: int, label_names: list[str] | None) -> Iterator[RowBlock]:
        numbers = {name: number for number, name in enumerate(label_names or [])}
        first = 0
        for block in self.reader.blocks(size):
            stop = first + len(block.vectors)
            ids = block.ids if self.ids is None else self.ids[first:stop]
            if ids is None:
                ids = [f"{self.stem}-{row}" for row in range(first, stop)]
            labels = block.labels if self.labels is None else self.labels[first:stop]
            if isinstance(labels, list):
                labels = np.array([numbers[label] for label in labels], dtype=np.int32)
            yield RowBlock(block.vectors, ids, labels)
            first = stop


def open_source(
    paths: str | Path | Sequence[str | Path],
    *,
    ids: str | Path | None = None,
    labels: str | Path | None = None,
    key: str | None = None,
    ids_key: str | None = None,
    labels_key: str | None = None,
    transposed: bool | None = None,
    columns: int | None = None,
    rows: str | None = None,
    select: Sequence[str] = (),
    allow_expansion: bool = False,
) -> ImportSource:
    """Open foreign files as one source; nothing is read yet but headers, ids and labels.

    `ids` and `labels` are files (.npy, .txt, .csv) with one entry for each row of all files together; `ids` may be a
    revisited ground truth (.pkl, .json), whose imlist or qimlist is taken by its length. `ids_key` and `labels_key`
    name columns or arrays of the files themselves. `columns` keeps that many columns,
    the first ones; `rows` ("A:B") and `select` (see `selected_rows`) keep some rows, numbered over all files.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not paths:
        raise LattqeError("there is nothing to import: give at least one file")
    readers = [open_reader(path, ReadOptions(key, transposed, allow_expansion, ids_key, labels_key)) for path in paths]
    _check_dims(readers)
    total = sum(reader.rows for reader in readers)
    dim = readers[0].dim
    if total < 1 or dim < 1:
        raise LattqeError(f"{readers[0].name} declares {total} rows of {dim} columns: it is empty or damaged")
    if columns is not None and not 1 <= columns <= dim:
        raise LattqeError(f"--columns {columns}: the vectors have {dim} columns")
    mask = selected_rows(total, rows, select)
    parts = _parts(readers, _stems(paths), ids, labels, total)
    kinds = _label_kind(parts)
    names = sorted(set().union(*(part.label_names() for part in parts))) if kinds is str else None
    return ImportSource(
        rows=total if mask is None else int(mask.sum()),
        dim=columns or dim,
        has_labels=kinds is not None,
        label_names=names,
        notes=[f"{reader.name}: {note}" for reader in readers for note in reader.notes],
        _parts=parts,
        _mask=mask,
    )


def _check_dims(readers: Sequence[Reader]) -> None:
    for reader in readers[1:]:
        if reader.dim != readers[0].dim:
            first = readers[0]
            raise LattqeError(f"{first.name} has {first.dim} dimensions and {reader.name} has {reader.dim}")


def _stems(paths: Sequence[str | Path]) -> list[str]:
    """Name each file for its rows' ids: its stem, made unique by a number where two files share one."""
    stems: list[str] = []
    for path in paths:
        stem = candidate = Path(path).stem
        number = 1
        while candidate in stems:
            number += 1
            candidate = f"{stem}.{number}"
        stems.append(candidate)
    return stems


def _parts(
    readers: Sequence[Reader], stems: Sequence[str], ids: str | Path | None, labels: str | Path | None, total: int
) -> list[_File]:
    """Give each file its share of the ids and labels."""
    all_ids = None if ids is None else read_ids(ids, total)
    all_labels = None if labels is None else read_labels(labels)
    if all_ids is not None:
        check_count(all_ids, total, str(ids), "ids")
    if all_labels is not None:
        check_count(all_labels, total, str(labels), "labels")
    parts, first = [], 0
    for reader, stem in zip(readers, stems, strict=True):
        stop = first + reader.rows
        parts.append(
            _File(
                reader,
                stem,
                None if all_ids is None else all_ids[first:stop],
                None if all_labels is None else all_labels[first:stop],
            )
        )
        first = stop
    return parts


def _label_kind(parts: Sequence[_File]) -> type | None:
    """All files have labels of one kind, or none has any."""
    first = parts[0]
    for part in parts[1:]:
        if part.label_kind is not first.label_kind:
            words: dict[type | None, str] = {None: "no labels", int: "labels as numbers", str: "labels as text"}
            raise LattqeError(
                f"{first.reader.name} has {words[first.label_kind]}, {part.reader.name} has {words[part.label_kind]}: "
                "give one file of labels for all with --labels"
            )
    return first.label_kind


def _cut(block: RowBlock, dim: int) -> RowBlock:
    if block.vectors.shape[1] == dim:
        return block
    return RowBlock(np.ascontiguousarray(block.vectors[:, :dim]), block.ids, block.labels)


def _keep(block: RowBlock, kept: np.ndarray) -> RowBlock:
    ids = None if block.ids is None else [id for id, keep in zip(block.ids, kept) if keep]
    labels = block.labels[kept] if isinstance(block.labels, np.ndarray) else None
    return RowBlock(block.vectors[kept], ids, labels)
