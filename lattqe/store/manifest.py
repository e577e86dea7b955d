"""What a stored artifact is: its manifest, the columns of its kind, and how its rows are cut into parts.

The manifest is written last and exclusively, so an artifact without one does not exist.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from lattqe import __version__
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store.place import MissingFileError, Place, check_name

NAME = "manifest.json"
WORK = "_work/"
PLAN = WORK + "plan.json"
FORMAT = "lattqe"
FORMAT_VERSION = 1
# A manifest names each part in about 150 bytes: this is some hundred thousand parts, far beyond any real one.
MAX_BYTES = 64 << 20
SEAL_BYTES = 16
MEASURED = "measured"  # in a configuration: what making the artifact found out, not what was requested
APPROXIMATE = "approximate"  # of an input: what its graph lacks
KINDS = {
    "features": "feature set",
    "neighbors": "neighbor graph",
    "ranks": "list of ranks",
    "model": "model",
    "edges": "weighted graph",
}
# Of a manifest's body, beside its format: each key with its type.
KEYS: dict[str, type] = {
    "kind": str,
    "rows": int,
    "fields": dict,
    "parts": list,
    "config": dict,
    "inputs": dict,
    "code_version": str,
    "digest": str,
}
DTYPES = {"float16": pa.float16(), "float32": pa.float32()}
NUMBERS = {pa.float16(): "float16", pa.float32(): "float32", pa.int32(): "int32"}  # that lists are made of
DEFAULT_PART_BYTES = 64 << 20
# What an id is taken to need when rows are counted into parts before any id is seen.
NOMINAL_ID_BYTES = 24


def describe_kind(kind: str) -> str:
    """Words for a kind, with an article: a feature set (kind 'features')."""
    return f"a {KINDS[kind]} (kind {kind!r})" if kind in KINDS else f"an artifact of kind {kind!r}"


@dataclass(frozen=True)
class Part:
    """One file of a stored artifact. `rows` is 0 for files that are not cut by rows."""

    name: str
    rows: int
    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What a stored artifact is, which files it consists of, and what made it."""

    kind: str
    rows: int
    parts: tuple[Part, ...]
    fields: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    code_version: str = __version__
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """Digest of the content alone: equal bytes, equal digest, wherever, whenever and however made."""
        content = {
            "kind": self.kind,
            "fields": self.fields,
            "parts": [[part.rows, part.bytes, part.checksum] for part in self.parts],
        }
        return xxhash.xxh3_128_hexdigest(canonical_json(content))

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def approximation(self) -> str | None:
        """How many neighbors an approximate graph has, or the one that this was made of; None where all are exact."""
        if self.config.get("exact") is False:
            found = self.config.get(MEASURED)
            if not isinstance(found, dict) or not {"mean", "low", "high", "rows", "kept"} <= set(found):
                return "a recall that was not measured"
            missed = "" if found["kept"] else f", below the target of {self.config.get('recall')}"
            return (
                f"recall@{self.fields.get('k')} {found['mean']:.4f} (95 % interval {found['low']:.4f} to "
                f"{found['high']:.4f}, {found['rows']:,} rows measured){missed}"
            )
        return next((entry[APPROXIMATE] for entry in self.inputs.values() if APPROXIMATE in entry), None)

    def to_json(self) -> bytes:
        """The file's content, with a checksum of itself."""
        body = {
            "format": FORMAT,
            "format_version": self.format_version,
            "kind": self.kind,
            "rows": self.rows,
            "fields": self.fields,
            "parts": [vars(part) for part in self.parts],
            "config": self.config,
            "inputs": self.inputs,
            "code_version": self.code_version,
            "digest": self.digest,
        }
        body["checksum"] = checksum(canonical_json(body))
        return json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def canonical_json(value: Any) -> bytes:
    """One spelling for each value, for digests; NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def plain_json(value: Any, what: str) -> Any:
    """The value as JSON gives it back (tuples are lists, keys are strings); LattqeError where JSON cannot hold it."""
    try:
        return json.loads(canonical_json(value))
    except (TypeError, ValueError) as error:
        raise LattqeError(f"{what} cannot be stored as JSON: {error}") from error


def checksum(data: Any) -> str:
    """The checksum of any bytes-like object: XXH3, 128 bits, as fast as memory."""
    return xxhash.xxh3_128_hexdigest(memoryview(data))


def seal_bytes(data: bytes) -> bytes:
    """The data after its own checksum: for intermediate files, which no manifest names."""
    return xxhash.xxh3_128_digest(data) + data


def unseal_bytes(data: bytes | memoryview, where: str) -> memoryview:
    """What `seal_bytes` was given; CorruptDataError where it was damaged."""
    whole = memoryview(data).cast("B")  # Arrow's buffers count bytes from -128 on, and would compare unequal
    seal, body = bytes(whole[:SEAL_BYTES]), whole[SEAL_BYTES:]
    if len(seal) < SEAL_BYTES or xxhash.xxh3_128_digest(body) != seal:
        raise CorruptDataError(f"{where} does not match its checksum: it was damaged; run the same command again")
    return body


def seal_json(body: dict[str, Any]) -> bytes:
    """A JSON object with its own checksum in it, under "seal"."""
    return canonical_json(body | {"seal": checksum(canonical_json(body))})


def unseal_json(data: bytes, where: str) -> dict[str, Any]:
    """What `seal_json` was given; CorruptDataError where it was damaged or edited."""
    body = parse_json(data, where)
    _check_own_checksum(body, body.pop("seal", None), where)
    return body


def _check_own_checksum(body: dict[str, Any], stated: Any, where: str) -> None:
    try:
        sound = stated == checksum(canonical_json(body))
    except ValueError:  # a number such as 1e999 is read as infinity
        sound = False
    if not sound:
        raise CorruptDataError(f"{where} does not match its own checksum: it was damaged or edited by hand")


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest strictly; `where` is its address, for messages."""
    body = parse_json(data, where)
    version = body.get("format_version")
    if body.get("format") != FORMAT or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CorruptDataError(f"{where} is not a lattqe manifest")
    if version > FORMAT_VERSION:
        raise LattqeError(
            f"{where} has format version {version}, this lattqe {__version__} reads up to "
            f"{FORMAT_VERSION}: install a newer lattqe"
        )
    _check_own_checksum(body, body.pop("checksum", None), where)
    _check_keys(body, where)
    manifest = Manifest(
        body["kind"],
        body["rows"],
        tuple(_parse_part(part, where) for part in body["parts"]),
        body["fields"],
        body["config"],
        _parse_inputs(body["inputs"], where),
        body["code_version"],
        version,
    )
    _check_content(manifest, body["digest"], where)
    return manifest


def _check_keys(body: dict[str, Any], where: str) -> None:
    """Exactly the keys of a manifest, each of its type."""
    expected = {"format", "format_version", *KEYS}
    if set(body) != expected:
        raise CorruptDataError(f"{where} has missing or unknown keys: {sorted(set(body) ^ expected)}")
    for key, kind in KEYS.items():
        if not isinstance(body[key], kind) or isinstance(body[key], bool):
            raise CorruptDataError(f"{where}: {key!r} is not a valid {kind.__name__}")


def _check_content(manifest: Manifest, digest: str, where: str) -> None:
    """Parts, rows and digest agree with each other."""
    if not manifest.parts:
        raise CorruptDataError(f"{where} names no parts: an artifact has at least one")
    names = [part.name for part in manifest.parts]
    if len(set(names)) != len(names):
        raise CorruptDataError(f"{where} names a part twice")
    if manifest.rows < 0 or manifest.rows != sum(part.rows for part in manifest.parts):
        raise CorruptDataError(f"{where}: the parts' rows do not add up to {manifest.rows}")
    if manifest.digest != digest:
        raise CorruptDataError(f"{where}: the digest does not match the content")


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without NaN or infinity."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not allowed")

    try:
        body = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise CorruptDataError(f"{where} is not a JSON object")
    return body


def _parse_part(entry: Any, where: str) -> Part:
    expected = {"name": str, "rows": int, "bytes": int, "checksum": str}
    if not isinstance(entry, dict) or set(entry) != set(expected):
        raise CorruptDataError(f"{where}: a part needs exactly name, rows, bytes and checksum")
    for key, kind in expected.items():
        if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
            raise CorruptDataError(f"{where}: a part's {key!r} is not a valid {kind.__name__}")
    if entry["rows"] < 0 or entry["bytes"] < 0:
        raise CorruptDataError(f"{where}: part {entry['name']!r} has negative rows or bytes")
    check_name(entry["name"])
    return Part(**entry)


def _parse_inputs(inputs: dict[str, Any], where: str) -> dict[str, dict[str, str]]:
    for name, entry in inputs.items():
        if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
            raise CorruptDataError(f"{where}: input {name!r} is not a plain table of strings")
        if not {"uri", "digest"} <= set(entry):
            raise CorruptDataError(f"{where}: input {name!r} lacks its address (uri) or its digest")
    return inputs


def find_manifest(place: Place) -> Manifest | None:
    """The manifest of the place, or None where there is none."""
    where = f"{place.uri}/{NAME}"
    try:
        if place.size(NAME) > MAX_BYTES:
            raise CorruptDataError(f"{where} is larger than any manifest ({MAX_BYTES >> 20} MiB)")
        return parse_manifest(place.read(NAME), where)
    except MissingFileError:
        return None


def read_manifest(place: Place, kind: str | None = None) -> Manifest:
    """The manifest of an artifact that must exist and, where `kind` is given, be of that kind."""
    manifest = None if place.is_local and place.is_file() else find_manifest(place)
    if manifest is None:
        if place.is_file():
            hint = (
                f"import it first: lattqe import {shlex.quote(place.uri)} --to FEATURES"
                if kind in (None, "features")
                else f"{describe_kind(kind)} is needed here"
            )
            raise LattqeError(f"{place.uri} is a file, not an artifact: {hint}")
        if place.exists(PLAN):
            raise LattqeError(f"{place.uri} is not finished: run the command that was writing it again")
        hint = ", or leave it out for the model that ships" if kind == "model" else ""
        raise LattqeError(f"there is no finished artifact at {place.uri} (no {NAME} there): check the address{hint}")
    if kind is not None and manifest.kind != kind:
        raise LattqeError(f"{place.uri} is {describe_kind(manifest.kind)}, but {describe_kind(kind)} is needed here")
    return manifest


def check_dtype(dtype: str) -> str:
    """float16 or float32."""
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in DTYPES:
        raise LattqeError(f"dtype {name!r} cannot be stored: use float16 or float32")
    return name


def _column(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def list_type(kind: pa.DataType, size: int) -> pa.DataType:
    """Lists of that many numbers, none of them missing."""
    return pa.list_(pa.field("item", kind, nullable=False), size)


def features_schema(
    dim: int, dtype: str = "float16", labels: bool = False, extra: Sequence[pa.Field] = ()
) -> pa.Schema:
    """Columns id, vector, label (with `labels`), then `extra`."""
    columns = [_column("id", pa.string()), _column("vector", list_type(DTYPES[check_dtype(dtype)], dim))]
    if labels:
        columns.append(_column("label", pa.int32()))
    taken = {"id", "vector", "label"}
    for column in extra:
        if column.name in taken:
            raise LattqeError(f"column {column.name!r} is repeated or has a reserved name")
        taken.add(column.name)
    return pa.schema([*columns, *(column.remove_metadata() for column in extra)])


def neighbors_schema(k: int) -> pa.Schema:
    """Columns neighbors (k row numbers, -1 = none) and scores."""
    return pa.schema([_column("neighbors", list_type(pa.int32(), k)), _column("scores", list_type(pa.float32(), k))])


def edges_schema(k: int) -> pa.Schema:
    """Columns neighbors (k row numbers, -1 = none) and weights: the row's own, then those of its neighbors."""
    return pa.schema(
        [_column("neighbors", list_type(pa.int32(), k)), _column("weights", list_type(pa.float32(), 1 + k))]
    )


def ranks_schema(k: int) -> pa.Schema:
    """The id of the query, then as in a neighbor graph."""
    return pa.schema([_column("id", pa.string()), *neighbors_schema(k)])


def schema_of(kind: str, fields: Mapping[str, Any]) -> pa.Schema:
    """The schema of a kind from its fields: dim, dtype and labels for features, k for the others."""
    try:
        if kind == "features":
            return features_schema(int(fields["dim"]), fields["dtype"], bool(fields.get("labels", False)))
        if kind == "neighbors":
            return neighbors_schema(int(fields["k"]))
        if kind == "edges":
            return edges_schema(int(fields["k"]))
        if kind == "ranks":
            return ranks_schema(int(fields["k"]))
    except KeyError as error:
        raise LattqeError(f"kind {kind!r} needs the field {error}") from error
    raise LattqeError(f"kind {kind!r} has no schema of its own: pass one")


def schema_columns(schema: pa.Schema) -> list[dict[str, str]]:
    """The columns as in a manifest: name and type, in order."""
    return [{"name": column.name, "type": str(column.type)} for column in schema]


def check_columns(manifest: Manifest, schema: pa.Schema, uri: str) -> None:
    """An artifact has at least the columns of its kind, in their order; CorruptDataError otherwise."""
    columns, needed = manifest.fields.get("columns"), schema_columns(schema)
    if not isinstance(columns, list) or columns[: len(needed)] != needed or not all(map(_is_column, columns)):
        raise CorruptDataError(f"{uri}: the columns in its manifest are not those of {describe_kind(manifest.kind)}")


def _is_column(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"name", "type"}
        and all(isinstance(text, str) for text in entry.values())
    )


def part_row_counts(rows: int, bytes_per_row: int, part_bytes: int = DEFAULT_PART_BYTES) -> list[int]:
    """Cut `rows` into parts of about `part_bytes`: all equal but the last. A function of these numbers alone."""
    if rows < 1 or bytes_per_row < 1:
        raise LattqeError(f"nothing to store: {rows} rows of {bytes_per_row} bytes")
    each = max(1, min(part_bytes // bytes_per_row, rows))
    return [min(each, rows - start) for start in range(0, rows, each)]


def row_bytes(kind: str, fields: Mapping[str, Any]) -> int:
    """Bytes that one row of a kind needs, for `part_row_counts`; ids count with a nominal length."""
    if kind == "features":
        width = int(fields["dim"]) * np.dtype(fields["dtype"]).itemsize
        return width + NOMINAL_ID_BYTES + 4 * bool(fields.get("labels", False))
    return 8 * int(fields["k"]) + {"ranks": NOMINAL_ID_BYTES, "edges": 4}.get(kind, 0)
