"""An artifact in the making: claimed by a plan, made part by part by many, killed at any time, continued by anyone.

`_work/plan.json` says what is being made, so that two different makers never mix. Each part is created once, whole and
exclusively, and then gets a receipt `_work/part-00000.json` with its size and checksum. A process that comes second
with a part adopts the one that is there, so receipts and parts never disagree. The manifest comes last.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa

from lattqe import __version__
from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store.manifest import (
    MEASURED,
    NAME,
    PLAN,
    WORK,
    Manifest,
    Part,
    canonical_json,
    checksum,
    find_manifest,
    parse_json,
    plain_json,
    schema_columns,
    schema_of,
    seal_json,
    unseal_json,
)
from lattqe.store.parts import decode_part, encode_part, load_part
from lattqe.store.place import Bytes, MissingFileError, Place, open_place

PARALLEL_DELETES = 8
KEYS = {"kind": str, "fields": dict, "config": dict, "inputs": dict, "part_rows": list | None, "code_version": str}
PARALLEL_CHECKS = 8


def make_plan(
    kind: str,
    fields: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    inputs: Mapping[str, Mapping[str, str]] | None,
    part_rows: list[int] | None,
) -> dict[str, Any]:
    """All that decides the bytes of the artifact to be made."""
    return plain_json(
        {
            "kind": kind,
            "fields": dict(fields),
            "config": dict(config or {}),
            "inputs": dict(inputs or {}),
            "part_rows": part_rows,
            "code_version": __version__,
        },
        "the plan",
    )


def claim(place: Place, plan: dict[str, Any]) -> Manifest | None:
    """Claim the destination, or join those who make the same artifact there, or get it where it is finished already."""
    finished = find_manifest(place)
    if finished is not None:
        there = {key: getattr(finished, key) for key in ("kind", "fields", "config", "inputs")}
        there["config"] = {key: value for key, value in finished.config.items() if key != MEASURED}
        refuse_other(place, there, {key: plan[key] for key in there}, "a finished artifact")
        clean_up(place)
        return finished
    refuse_foreign_files(place)
    try:
        place.create(PLAN, canonical_json(plan))
    except AlreadyExistsError:
        standing = read_plan(place)
        if standing is None:  # finished and cleaned up between our two looks
            return claim(place, plan)
        refuse_other(place, standing, plan, "an unfinished artifact")
    return None


def refuse_foreign_files(place: Place) -> None:
    """A destination is empty, or holds what lattqe made: no folder of photographs gets a manifest."""
    names = place.list()
    if PLAN in names or NAME in names:
        return
    # Artifacts below this one (the graph in an index) may be there first, finished or in the making.
    made = tuple(name.removesuffix(end) for name in names for end in (f"/{NAME}", f"/{PLAN}") if name.endswith(end))
    own = (WORK, ".", *(f"{folder}/" for folder in made))
    foreign = [name for name in names if not name.startswith(own)]
    if foreign:
        raise AlreadyExistsError(f"{place.uri} holds other files ({foreign[0]}): choose a destination that is empty")


def refuse_unlike(place: Place, known: dict[str, Any]) -> None:
    """Refuse a destination before anything is put below it: other files, or an artifact that differs in what is known.

    known: `kind`, `config` and `inputs` of the plan to come, as far as they are known; the device does not count.
    """
    refuse_foreign_files(place)
    finished = find_manifest(place)
    standing = read_plan(place) if finished is None else {key: getattr(finished, key) for key in known}
    if standing is None:
        return
    config = {name: value for name, value in standing["config"].items() if name != "device"}
    inputs = {name: standing["inputs"].get(name) for name in known["inputs"]}
    there = {"kind": standing["kind"], "config": config, "inputs": inputs}
    what = "an unfinished artifact" if finished is None else "a finished artifact"
    refuse_other(place, there, known, what)


def read_plan(place: Place) -> dict[str, Any] | None:
    """The claim on the place, if any."""
    try:
        plan = parse_json(place.read(PLAN), f"{place.uri}/{PLAN}")
    except MissingFileError:
        return None
    if set(plan) != set(KEYS) or not all(isinstance(plan[key], kind) for key, kind in KEYS.items()):
        raise CorruptDataError(f"{place.uri}/{PLAN} is damaged: delete {place.uri} and start again")
    return plan


def refuse_other(place: Place, there: dict[str, Any], plan: dict[str, Any], what: str) -> None:
    """AlreadyExistsError with the first difference, where what is `there` differs from the plan."""
    first, last = ("kind", "config.job"), ("fields.columns", "part_rows", "code_")  # last: what follows from the others
    found = sorted(differences(plan, there), key=lambda line: (not line.startswith(first), line.startswith(last)))
    if found:
        others = len(found) - 1
        more = f" (and {others} more {'difference' if others == 1 else 'differences'})" if others else ""
        raise AlreadyExistsError(
            f"{place.uri} holds {what} that differs: {found[0]}{more}: choose another destination or delete it"
        )


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What differs between two JSON values, as 'config.k: 10 there, 20 here'."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        # Where an input is does not matter, what is in it does.
        ignored = {"uri"} if path.startswith("inputs.") else set()
        return [
            line
            for key in sorted({*ours, *theirs} - ignored)
            for line in differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
        ]
    if ours == theirs:
        return []
    return [f"{path}: {_short(theirs)} there, {_short(ours)} here"]


def _short(value: Any) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def keep_first(place: Place, name: str, ours: Bytes) -> pa.Buffer:
    """Store a file that other processes may be about to store too: what stands there then, the first one's for ever.

    Another's is read twice, unless it is ours.
    """
    data = pa.py_buffer(ours)
    try:
        place.create(name, data)
    except AlreadyExistsError:
        there = place.fetch(name)
        if there != data and there != place.fetch(name):
            raise CorruptDataError(
                f"{place.uri}/{name} was damaged on its way from the storage: run the same command again"
            ) from None
        return there
    return data


def publish_manifest(place: Place, manifest: Manifest) -> Manifest:
    """Write the manifest, last and exclusively; the one that is there where another process made the same artifact."""
    try:
        place.create(NAME, manifest.to_json())
    except AlreadyExistsError:
        there = find_manifest(place)
        if there is None or there.digest != manifest.digest or there.config != manifest.config:
            raise AlreadyExistsError(
                f"{place.uri} was published by another writer in the meantime: choose another destination or delete it"
            ) from None
        manifest = there
    clean_up(place)
    return manifest


def clean_up(place: Place) -> None:
    """Remove the traces of the work: the claim goes last, so that a killed clean-up is found again."""
    leftovers = [name for name in place.list() if name.startswith(WORK)]
    with ThreadPoolExecutor(PARALLEL_DELETES) as pool:
        list(pool.map(place.delete, [name for name in leftovers if name != PLAN]))
    if PLAN in leftovers:
        place.delete(PLAN)
    with suppress(LattqeError):  # failing to tidy up, perhaps for lack of permission, is not an error
        place.sweep()


def check_inputs(inputs: Mapping[str, Mapping[str, str]] | None) -> None:
    """Each input names its uri, digest and kind."""
    for name, entry in (inputs or {}).items():
        if not {"uri", "digest", "kind"} <= set(entry):
            raise LattqeError(f"input {name!r} must name its uri, digest and kind, not {sorted(entry)}")


def part_name(number: int) -> str:
    """The file of part `number`."""
    return f"part-{number:05d}.arrow"


def _receipt_name(number: int) -> str:
    return f"{WORK}part-{number:05d}.json"


class Pending:
    """An output that is being made. `finished` is its manifest where it is complete already."""

    def __init__(self, place: Place, plan: dict[str, Any], finished: Manifest | None = None) -> None:
        self.place, self.uri, self.plan, self.finished = place, place.uri, plan, finished
        self._checked: set[int] = set()

    @classmethod
    def begin(
        cls,
        uri: str,
        kind: str,
        fields: Mapping[str, Any],
        part_rows: Sequence[int],
        config: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Mapping[str, str]] | None = None,
        schema: pa.Schema | None = None,
    ) -> "Pending":
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
            raise LattqeError(f"there is no unfinished artifact at {uri}")
        return cls(place, {"part_rows": [part.rows for part in finished.parts], "fields": finished.fields}, finished)

    @property
    def part_rows(self) -> list[int]:
        """Rows of each part."""
        return self.plan["part_rows"]

    def missing(self) -> list[int]:
        """Numbers of the parts still to make. Receipts are held against their parts; damaged parts are removed."""
        if self.finished is not None:
            return []
        there = set(self._received())
        self.check(sorted(there - self._checked))
        return [number for number in range(len(self.part_rows)) if number not in there & self._checked]

    def _received(self) -> list[int]:
        """Numbers of the parts that have a receipt."""
        sizes = self.place.sizes()
        return [number for number in range(len(self.part_rows)) if _receipt_name(number) in sizes]

    def unchecked(self) -> list[int]:
        """Numbers of the parts that are there and that `missing` would have to read."""
        return [] if self.finished is not None else [n for n in self._received() if n not in self._checked]

    def check(self, numbers: Sequence[int]) -> list[int]:
        """Read parts and hold them against their receipts: those that are sound. Damaged parts are removed."""
        with ThreadPoolExecutor(PARALLEL_CHECKS) as pool:
            sound = [number for number, fine in zip(numbers, pool.map(self._sound, numbers)) if fine]
        self.trust(sound)
        return sound

    def trust(self, numbers: Sequence[int]) -> None:
        """Other processes have checked these parts."""
        self._checked.update(numbers)

    def _sound(self, number: int) -> bool:
        """Whether the part is what its receipt says; what is not, is removed."""
        try:
            load_part(self.place, self._receipt(number))
        except MissingFileError:  # the receipt is gone: another driver has finished and cleaned up
            return False
        except CorruptDataError:
            if find_manifest(self.place) is None:
                self.place.delete(_receipt_name(number))
                self.place.delete(part_name(number))
            return False
        return True

    def _receipt(self, number: int) -> Part:
        where = f"{self.uri}/{_receipt_name(number)}"
        body = unseal_json(self.place.read(_receipt_name(number)), where)  # it goes into the manifest unseen
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
            raise LattqeError(
                f"part {number} of {self.uri} has columns {columns}, {schema_columns(table.schema)} were given"
            )
        data = encode_part(table, table.schema)
        if (there := keep_first(self.place, name, data)) != data:
            decode_part(data := there, columns, rows, f"{self.uri}/{name}")
        receipt = vars(Part(name, rows, data.size, checksum(data)))
        if find_manifest(self.place) is None:
            self.place.write(_receipt_name(number), seal_json(receipt))

    def finish(self, measured: Mapping[str, Any] | None = None) -> Manifest:
        """Publish the manifest when all parts are there; the same one, whichever of several drivers is first.

        `measured`: what making it found out, kept in the configuration beside what was requested.
        """
        if self.finished is not None:
            clean_up(self.place)  # what this run wrote before it saw that another had finished
        else:
            self.finished = publish_manifest(self.place, find_manifest(self.place) or self._assemble(measured))
        return self.finished

    def _assemble(self, measured: Mapping[str, Any] | None) -> Manifest:
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
            return Manifest(
                self.plan["kind"],
                sum(self.part_rows),
                parts,
                self.plan["fields"],
                self.plan["config"] | ({} if measured is None else {MEASURED: dict(measured)}),
                self.plan["inputs"],
            )
        finished = find_manifest(self.place)
        if finished is None:
            raise LattqeError(f"{self.uri} is not complete: {len(self.missing())} parts are still to make")
        return finished
