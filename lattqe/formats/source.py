"""Several foreign files as one matrix: joined in the order given, with ids, labels, a choice of rows and columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lattqe.errors import LattqeError
from lattqe.formats.columns import check_count, read_ids, read_labels
from lattqe.formats.reader import Block, Labels, Options, Reader
from lattqe.formats.registry import open_reader
from lattqe.formats.selection import kept_rows


@dataclass(frozen=True)
class Source:
    """What is to be imported: `rows` × `dim`, and the names of text labels (label i is `label_names[i]`)."""

    rows: int
    dim: int
    has_labels: bool
    label_names: list[str] | None
    notes: list[str]
    _parts: list["_Part"]
    _mask: np.ndarray | None

    def blocks(self, size: int) -> Iterator[Block]:
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
class _Part:
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

    def blocks(self, size: int, label_names: list[str] | None) -> Iterator[Block]:
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
            yield Block(block.vectors, ids, labels)
            first = stop


def open_source(
    paths: str | Path | Sequence[str | Path],
    *,
    ids: str | Path | None = None,
    labels: str | Path | None = None,
    key: str | None = None,
    transposed: bool | None = None,
    columns: int | None = None,
    rows: str | None = None,
    select: Sequence[str] = (),
) -> Source:
    """Open foreign files as one source; nothing is read yet but headers, ids and labels.

    `ids` and `labels` are files (.npy, .txt, .csv) with one entry for each row of all files together. `columns` keeps
    the first so many; `rows` ("A:B") and `select` (see `kept_rows`) keep some rows, numbered over all files together.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not paths:
        raise LattqeError("there is nothing to import: give at least one file")
    readers = [open_reader(path, Options(key, transposed)) for path in paths]
    _check_dims(readers)
    total = sum(reader.rows for reader in readers)
    dim = readers[0].dim
    if columns is not None and not 1 <= columns <= dim:
        raise LattqeError(f"--columns {columns}: the vectors have {dim} columns")
    mask = kept_rows(total, rows, select)
    parts = _parts(readers, _stems(paths), ids, labels, total)
    kinds = _label_kind(parts)
    names = sorted(set().union(*(part.label_names() for part in parts))) if kinds is str else None
    return Source(
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
) -> list[_Part]:
    """Give each file its share of the ids and labels."""
    all_ids = None if ids is None else read_ids(ids)
    all_labels = None if labels is None else read_labels(labels)
    if all_ids is not None:
        check_count(all_ids, total, str(ids), "ids")
    if all_labels is not None:
        check_count(all_labels, total, str(labels), "labels")
    parts, first = [], 0
    for reader, stem in zip(readers, stems, strict=True):
        stop = first + reader.rows
        parts.append(
            _Part(
                reader,
                stem,
                None if all_ids is None else all_ids[first:stop],
                None if all_labels is None else all_labels[first:stop],
            )
        )
        first = stop
    return parts


def _label_kind(parts: Sequence[_Part]) -> type | None:
    """All files have labels of one kind, or none has any."""
    first = parts[0]
    for part in parts[1:]:
        if part.label_kind is not first.label_kind:
            words: dict[type | None, str] = {None: "no labels", int: "labels as numbers", str: "labels as text"}
            raise LattqeError(
                f"{first.reader.name} has {words[first.label_kind]}, {part.reader.name} has {words[part.label_kind]}: "
                "give one file of labels for all by --labels"
            )
    return first.label_kind


def _cut(block: Block, dim: int) -> Block:
    if block.vectors.shape[1] == dim:
        return block
    return Block(np.ascontiguousarray(block.vectors[:, :dim]), block.ids, block.labels)


def _keep(block: Block, kept: np.ndarray) -> Block:
    ids = None if block.ids is None else [id for id, keep in zip(block.ids, kept) if keep]
    labels = block.labels[kept] if isinstance(block.labels, np.ndarray) else None
    return Block(block.vectors[kept], ids, labels)
