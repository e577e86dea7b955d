"""Writing a feature set as it streams by: any number of rows in the memory of two parts."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store.features import MAX_DIM, NORM_TOLERANCE, FeatureSet, IdRegister, as_matrix, bad_ids, normalised, norms
from lattqe.store.manifest import (
    DEFAULT_PART_BYTES,
    PLAN,
    Manifest,
    Part,
    check_dtype,
    checksum,
    features_schema,
    schema_columns,
)
from lattqe.store.parts import encode_part, features_table, load_part, string_column
from lattqe.store.pending import check_inputs, claim, make_plan, part_name, publish_manifest
from lattqe.store.place import UnavailableError, open_place

# Values converted in one go: what the writer needs does not depend on how much comes at once.
APPEND_VALUES = 4 << 20
JOIN_ROWS = 16384  # copied at a time
PARALLEL_COPIES = 8  # of whole parts, by the storage


class FeatureWriter:
    """Streams rows into a feature set. Parts appear one by one, the set itself with `close`, or never.

    Where the destination holds the same finished set already (same configuration and inputs), `finished` is that set
    and nothing can be appended. Leaving the `with` block with an error removes the parts written, unless the storage
    is out of reach: then the same command continues later.

    `unique`: it is known that no id comes twice, so nothing of the ids is kept to find out.
    """

    def __init__(
        self,
        uri: str,
        dim: int,
        dtype: str = "float16",
        labels: bool = False,
        config: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Mapping[str, str]] | None = None,
        normalise: bool = True,
        skip_bad: bool = False,
        part_bytes: int = DEFAULT_PART_BYTES,
        extra: Sequence[pa.Field] = (),
        label_names: Sequence[str] | None = None,
        unique: bool = False,
    ) -> None:
        if not 1 <= dim <= MAX_DIM:
            raise LattqeError(f"dimension {dim} cannot be stored: 1 to {MAX_DIM} can")
        if part_bytes < 1:
            raise LattqeError(f"parts of {part_bytes} bytes cannot be written")
        check_inputs(inputs)
        self.dim, self.dtype = dim, check_dtype(dtype)
        self.seen = self.rows = self.skipped = 0  # rows that came, were kept, were left out
        self._labels, self._normalise, self._skip_bad, self._part_bytes = labels, normalise, skip_bad, part_bytes
        self._extra = {column.name for column in extra}
        self._schema = features_schema(dim, self.dtype, labels, extra)
        self._fields: dict[str, Any] = {"dim": dim, "dtype": self.dtype, "columns": schema_columns(self._schema)}
        if label_names is not None:  # text labels: label i is label_names[i]
            self._fields["label_names"] = list(label_names)
            if broken := [name for name in label_names if set("\r\n") & set(name)]:
                raise LattqeError(f"the label {broken[0][:80]!r} has several lines: give each label one line")
        self._plan = make_plan("features", self._fields, config, inputs, None)
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._parts: list[Part] = []
        self._created: list[str] = []
        self._ids = None if unique else IdRegister()
        self.place = open_place(uri)
        self.uri = self.place.uri
        there = claim(self.place, self._plan)
        self.finished = None if there is None else FeatureSet(self.place, there)
        self._there = set(self.place.list())

    def append(
        self,
        vectors: np.ndarray,
        ids: Sequence[str] | pa.Array | pa.ChunkedArray,
        labels: np.ndarray | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Add rows: vectors (n, D) of any numeric dtype, ids (n,), labels (n,) where announced, other columns."""
        if self.finished is not None:
            raise AlreadyExistsError(f"{self.uri} is finished already: choose another destination or delete it")
        vectors = as_matrix(vectors, self.dim)
        if len(ids) != len(vectors) or (labels is not None) != self._labels or set(extra or {}) != self._extra:
            given = ["labels"] * (labels is not None) + sorted(extra or {})
            raise LattqeError(
                f"{len(vectors)} vectors came with {len(ids)} ids and the columns {given}; "
                f"announced were {self._schema.names[2:]}"
            )
        step = max(1, APPEND_VALUES // self.dim)
        for start in range(0, len(vectors), step):
            rows = slice(start, start + step)
            self._append(
                vectors[rows],
                ids[rows],
                None if labels is None else labels[rows],
                {name: values[rows] for name, values in (extra or {}).items()},
            )

    def _append(
        self,
        vectors: np.ndarray,
        ids: Sequence[str] | pa.Array | pa.ChunkedArray,
        labels: np.ndarray | None,
        extra: Mapping[str, Any],
    ) -> None:
        stored, good = self._prepare(vectors)
        table = features_table(_id_column(ids, self.seen), stored, labels, extra).cast(self._schema)
        if not good.all():
            table = self._drop(table, vectors, good)
        self.seen += len(vectors)
        self.rows += table.num_rows
        if table.num_rows:
            if self._ids is not None:
                self._ids.add(table.column("id"))
            self._hold(table)

    def adopt(self, source: FeatureSet, numbers: Sequence[int]) -> None:
        """Add whole parts of another set with the same columns, as they are: the storage copies them where it can.

        Their checksums are those of the other set. What a killed run left of them is replaced by the same bytes, which
        takes less than reading it. For writers of ids that are known to be unique.
        """
        if self._held:
            self._flush()
        first, known = len(self._parts), [source.manifest.parts[number] for number in numbers]
        parts = [replace(part, name=part_name(first + place)) for place, part in enumerate(known)]

        def copy(part: Part, ours: Part) -> None:
            if not self.place.copy_from(source.place, part.name, ours.name):
                self.place.write(ours.name, load_part(source.place, part))

        self._created += [part.name for part in parts if part.name not in self._there]
        with ThreadPoolExecutor(PARALLEL_COPIES) as pool:
            list(pool.map(copy, known, parts))
        self._parts += parts
        self.rows += sum(part.rows for part in parts)
        self.seen += sum(part.rows for part in parts)

    def _prepare(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The vectors as they are stored, and which of them are fit to be (n,)."""
        if self._normalise:
            return normalised(vectors, self.dtype)
        lengths = norms(vectors)
        good = np.isfinite(lengths) & (lengths > 0)
        off = np.flatnonzero(good & (np.abs(lengths - 1) > NORM_TOLERANCE[self.dtype]))
        if len(off):
            raise LattqeError(f"row {self.seen + off[0]} has norm {lengths[off[0]]:.6g}, not 1: normalise it")
        with np.errstate(over="ignore"):
            return vectors.astype(self.dtype), good

    def _drop(self, table: pa.Table, vectors: np.ndarray, good: np.ndarray) -> pa.Table:
        if not self._skip_bad:
            row = int(np.flatnonzero(~good)[0])
            what = "is all zeros" if np.isfinite(vectors[row]).all() else "holds NaN or infinity"
            raise LattqeError(
                f"the vector of id {table.column('id')[row].as_py()!r} (row {self.seen + row}) {what}: "
                "fix the source, or leave such rows out with --skip-bad"
            )
        self.skipped += int((~good).sum())
        return table.filter(pa.array(good))

    def _hold(self, table: pa.Table) -> None:
        """Keep rows until a part is full. Where parts are cut depends on the rows alone, not on how they came."""
        needs = np.cumsum(_bytes_of_rows(table))
        start = 0
        while start < table.num_rows:
            used = needs[start - 1] if start else 0
            cut = int(np.searchsorted(needs, used + self._part_bytes - self._held_bytes)) + 1
            stop = min(cut, table.num_rows)
            self._held.append(table.slice(start, stop - start))
            self._held_bytes += int(needs[stop - 1] - used)
            if self._held_bytes >= self._part_bytes:
                self._flush()
            start = stop

    def _flush(self) -> None:
        table = pa.concat_tables(self._held)
        self._held, self._held_bytes = [], 0
        data = encode_part(table, self._schema)
        part = Part(part_name(len(self._parts)), table.num_rows, data.size, checksum(data))
        new = part.name not in self._there and self._create(part.name, data)
        # What is there is of a killed run or of a twin at work: the same, or refused. Nothing is ever overwritten.
        if not new and checksum(self.place.fetch(part.name)) != part.checksum:
            raise AlreadyExistsError(
                f"{self.uri}/{part.name} holds other rows: another writer is at work there, "
                "or one was stopped: choose another destination or delete it"
            )
        self._parts.append(part)

    def _create(self, name: str, data: pa.Buffer) -> bool:
        try:
            self.place.create(name, data)
        except AlreadyExistsError:
            return False
        self._created.append(name)
        return True

    def close(self) -> FeatureSet:
        """Write the rest and publish the set."""
        if self.finished is not None:
            return self.finished
        if not self.rows:
            raise LattqeError(
                f"nothing to store at {self.uri}: no rows were given"
                + (f", {self.skipped} bad ones were skipped" if self.skipped else "")
            )
        if self._held:
            self._flush()
        repeated = [] if self._ids is None else self._ids.duplicates(limit=3)
        if repeated:
            named = ", ".join(f"{self._id(rows[0])!r} (rows {', '.join(map(str, rows))})" for rows in repeated)
            raise LattqeError(f"ids must be unique, but some are repeated: {named}")
        sizes = self.place.sizes()
        if any(sizes.get(part.name) != part.bytes for part in self._parts):
            raise AlreadyExistsError(f"parts of {self.uri} were removed by another writer: run again")
        manifest = Manifest(
            "features", self.rows, tuple(self._parts), self._plan["fields"], self._plan["config"], self._plan["inputs"]
        )
        self.finished = FeatureSet(self.place, publish_manifest(self.place, manifest))
        return self.finished

    def _id(self, row: int) -> str:
        """An id that is written already, read back to name it."""
        for part in self._parts:
            if row < part.rows:
                batch = pa.ipc.open_file(pa.BufferReader(self.place.fetch(part.name))).get_batch(0)
                return batch.column("id")[row].as_py()
            row -= part.rows
        raise LattqeError(f"row {row} was never written")

    def abort(self) -> None:
        """Give up: remove what this writer put there."""
        for name in self._created:
            self.place.delete(name)
        if set(self.place.list()) <= {PLAN}:  # else the claim is also that of a twin, or of a run to be continued
            self.place.delete(PLAN)
            self.place.remove_if_empty()

    def __enter__(self) -> "FeatureWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.close()
            except UnavailableError:
                raise
            except LattqeError:
                self._abandon()
                raise
        elif not issubclass(kind, UnavailableError | KeyboardInterrupt):
            self._abandon()

    def _abandon(self) -> None:
        if self.finished is None:
            with suppress(LattqeError):  # the first error is the one to report
                self.abort()


def _id_column(ids: Sequence[str] | pa.Array | pa.ChunkedArray, first_row: int) -> pa.Array:
    """Ids as an Arrow column; LattqeError names the first that cannot be one."""
    column = string_column(ids)
    wrong = np.flatnonzero(bad_ids(column))
    if len(wrong):
        raise LattqeError(
            f"the id of row {first_row + wrong[0]} is empty or holds a line break: {column[int(wrong[0])].as_py()!r}"
        )
    return column


def _bytes_of_rows(table: pa.Table) -> np.ndarray:
    """Bytes that each row (n,) will need in a part; nested columns, which are rare, are not counted."""
    needs = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            needs += 4 + pc.fill_null(pc.binary_length(column), 0).to_numpy()
        elif pa.types.is_fixed_size_list(kind):
            needs += kind.list_size * kind.value_type.bit_width // 8
        elif pa.types.is_primitive(kind):
            needs += kind.bit_width // 8
    return needs


def check_same_vectors(old: FeatureSet, new: FeatureSet) -> None:
    """Refuse sets whose vectors cannot stand in one matrix."""
    for name in ("dim", "dtype"):
        if getattr(old, name) != getattr(new, name):
            raise LattqeError(
                f"{new.uri} has {name} {getattr(new, name)}, {old.uri} has {getattr(old, name)}: "
                "import the new rows like the old ones"
            )


def stack_features(sets: Sequence[FeatureSet], to: str) -> FeatureSet:
    """Write ids and vectors of several sets, one after the other; labels and other columns, which may differ, stay."""
    for other in sets[1:]:
        check_same_vectors(sets[0], other)
    writer = FeatureWriter(
        to,
        sets[0].dim,
        sets[0].dtype,
        normalise=False,
        config={"job": "stack"},
        inputs={f"set{number}": each.as_input() for number, each in enumerate(sets)},
    )
    if writer.finished is not None:
        return writer.finished
    with writer:
        for each in sets:
            for start, vectors in each.blocks(JOIN_ROWS):
                writer.append(vectors, each.id_column(start, start + len(vectors)))
    return FeatureSet.open(to)
