"""A thing in the making that is cut into parts by row numbers: made by many, killed at any time, continued by anyone.

Each part is created once, whole and exclusively, and then gets a receipt `_work/part-00000.json` with its size and
checksum. Whoever comes second with a part adopts the one that is there, so receipts and parts never disagree.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store.claim import check_inputs, claim, make_plan, publish_manifest, read_plan
from lattqe.store.manifest import WORK, Manifest, Part, canonical_json, find_manifest, parse_json
from lattqe.store.parts import checksum, load_part
from lattqe.store.place import MissingFileError, Place, open_place
from lattqe.store.tables import decode_part, encode_part, schema_columns, schema_of

PARALLEL_CHECKS = 8


def part_name(number: int) -> str:
    """The file of part `number`."""
    return f"part-{number:05d}.arrow"


def _receipt_name(number: int) -> str:
    return f"{WORK}part-{number:05d}.json"


def _seal(receipt: Mapping[str, Any]) -> str:
    """A receipt's own checksum: what it says goes into the manifest unseen."""
    return checksum(canonical_json(receipt))


class Pending:
    """An output that is being made. `finished` is its manifest where it is complete already."""

    def __init__(self, place: Place, plan: dict[str, Any], finished: Manifest | None = None) -> None:
        self.place, self.uri, self.plan, self.finished = place, place.uri, plan, finished
        self._checked: set[int] = set()

    @classmethod
    def begin(cls, uri: str, kind: str, fields: Mapping[str, Any], part_rows: Sequence[int],
              config: Mapping[str, Any] | None = None, inputs: Mapping[str, Mapping[str, str]] | None = None,
              schema: pa.Schema | None = None) -> "Pending":
        """Claim `uri`, or join an equal claim. `schema` is needed where the kind and its fields do not decide it."""
        rows = [int(count) for count in part_rows]
        if not rows or min(rows) < 1:
            raise LattqeError(f"nothing to store at {uri}: every part needs at least one row")
        check_inputs(inputs)
        columns = schema_columns(schema if schema is not None else schema_of(kind, fields))
        fields = {**{key: value for key, value in fields.items() if key != "labels"}, "columns": columns}
        plan = make_plan(kind, fields, config, inputs, rows)
        place = open_place(uri)
        return cls(place, plan, claim(place, plan))

    @classmethod
    def attach(cls, uri: str) -> "Pending":
        """Take part in what another process has begun at `uri`."""
        place = open_place(uri)
        plan = read_plan(place)
        if plan is not None:
            return cls(place, plan)
        finished = find_manifest(place)
        if finished is None:
            raise LattqeError(f"nobody has begun anything at {uri}")
        return cls(place, {"part_rows": [part.rows for part in finished.parts], "fields": finished.fields}, finished)

    @property
    def part_rows(self) -> list[int]:
        """Rows of each part."""
        return self.plan["part_rows"]

    def missing(self) -> list[int]:
        """Numbers of the parts still to make. Receipts are held against their parts; damaged parts are removed."""
        if self.finished is not None:
            return []
        sizes = self.place.sizes()
        numbers = [number for number in range(len(self.part_rows)) if _receipt_name(number) in sizes]
        with ThreadPoolExecutor(PARALLEL_CHECKS) as pool:
            good = {number for number, fine in zip(numbers, pool.map(self._sound, numbers)) if fine}
        return [number for number in range(len(self.part_rows)) if number not in good]

    def _sound(self, number: int) -> bool:
        """Whether the part is what its receipt says (read once by this process); what is not, is removed."""
        if number in self._checked:
            return True
        try:
            load_part(self.place, self._receipt(number))
        except MissingFileError:  # the receipt is gone: another driver has finished and cleaned up
            return False
        except CorruptDataError:
            if find_manifest(self.place) is None:
                self.place.delete(_receipt_name(number))
                self.place.delete(part_name(number))
            return False
        self._checked.add(number)
        return True

    def _receipt(self, number: int) -> Part:
        where = f"{self.uri}/{_receipt_name(number)}"
        body = parse_json(self.place.read(_receipt_name(number)), where)
        if body.pop("seal", None) != _seal(body):
            raise CorruptDataError(f"{where} is damaged")
        if body.get("rows") != self.part_rows[number] or body.get("name") != part_name(number):
            raise CorruptDataError(f"{where} belongs to other rows")
        try:
            return Part(**body)
        except TypeError as error:
            raise CorruptDataError(f"{where} is not a receipt") from error

    def publish(self, number: int, table: pa.Table) -> None:
        """Store part `number`; nothing happens where it is stored already."""
        if self.finished is not None:
            return
        rows, columns, name = self.part_rows[number], self.plan["fields"]["columns"], part_name(number)
        if table.num_rows != rows:
            raise LattqeError(f"part {number} of {self.uri} has {rows} rows, {table.num_rows} were given")
        if schema_columns(table.schema) != columns:
            raise LattqeError(f"part {number} of {self.uri} has columns {columns}, {schema_columns(table.schema)} "
                              "were given")
        data = encode_part(table, table.schema)
        try:
            self.place.create(name, data)
        except AlreadyExistsError:
            data = self._adopt(name, data)
            decode_part(data, columns, rows, f"{self.uri}/{name}")
        receipt = vars(Part(name, rows, data.size, checksum(data)))
        if find_manifest(self.place) is None:
            self.place.write(_receipt_name(number), canonical_json(receipt | {"seal": _seal(receipt)}))

    def _adopt(self, name: str, ours: pa.Buffer) -> pa.Buffer:
        """The part that another process has stored: ours, or one of which two readings agree."""
        there = self.place.fetch(name)
        if there != ours and there != self.place.fetch(name):
            raise CorruptDataError(f"{self.uri}/{name} is damaged on its way from the storage: run the same command "
                                   "again")
        return there

    def finish(self) -> Manifest:
        """Publish the manifest when all parts are there; the same one whoever of several drivers comes first."""
        if self.finished is None:
            self.finished = publish_manifest(self.place, find_manifest(self.place) or self._assemble())
        return self.finished

    def _assemble(self) -> Manifest:
        """The manifest out of the receipts; where another driver finishes meanwhile and clears them away, its own."""
        numbers = range(len(self.part_rows))
        try:
            with ThreadPoolExecutor(PARALLEL_CHECKS) as pool:
                parts = tuple(pool.map(self._receipt, numbers))
            sizes = self.place.sizes()
            complete = all(sizes.get(part.name) == part.bytes for part in parts)
        except (MissingFileError, CorruptDataError):
            complete = False
        if complete:
            return Manifest(self.plan["kind"], sum(self.part_rows), parts, self.plan["fields"], self.plan["config"],
                            self.plan["inputs"])
        finished = find_manifest(self.place)
        if finished is None:
            raise LattqeError(f"{self.uri} is not complete: {len(self.missing())} parts are still to make")
        return finished
