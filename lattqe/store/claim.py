"""Claiming a destination: `_work/plan.json` says what is being made there, so that two different makers never mix."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from lattqe import __version__
from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store.manifest import NAME, PLAN, WORK, Manifest, canonical_json, find_manifest, parse_json, plain_json
from lattqe.store.place import MissingFileError, Place

PARALLEL_DELETES = 8
KEYS = {"kind": str, "fields": dict, "config": dict, "inputs": dict, "part_rows": list | None, "code_version": str}


def make_plan(kind: str, fields: Mapping[str, Any], config: Mapping[str, Any] | None,
              inputs: Mapping[str, Mapping[str, str]] | None, part_rows: list[int] | None) -> dict[str, Any]:
    """All that decides the bytes of the thing to be made."""
    return plain_json({"kind": kind, "fields": dict(fields), "config": dict(config or {}),
                       "inputs": dict(inputs or {}), "part_rows": part_rows, "code_version": __version__}, "the plan")


def claim(place: Place, plan: dict[str, Any]) -> Manifest | None:
    """Claim the destination, or join those who make the same thing there, or get it where it is finished already."""
    finished = find_manifest(place)
    if finished is not None:
        there = {key: getattr(finished, key) for key in ("kind", "fields", "config", "inputs")}
        _refuse_other(place, there, {key: plan[key] for key in there}, "a finished thing")
        clean_up(place)
        return finished
    names = place.list()
    strange = [name for name in names if "/" not in name and not name.startswith(".")]
    if strange and PLAN not in names and NAME not in names:
        raise AlreadyExistsError(f"{place.uri} holds other files ({strange[0]}): choose a destination that is empty")
    try:
        place.create(PLAN, canonical_json(plan))
    except AlreadyExistsError:
        standing = read_plan(place)
        if standing is None:  # finished and cleaned up between our two looks
            return claim(place, plan)
        _refuse_other(place, standing, plan, "an unfinished thing")
    return None


def read_plan(place: Place) -> dict[str, Any] | None:
    """The claim on the place, if any."""
    try:
        plan = parse_json(place.read(PLAN), f"{place.uri}/{PLAN}")
    except MissingFileError:
        return None
    if set(plan) != set(KEYS) or not all(isinstance(plan[key], kind) for key, kind in KEYS.items()):
        raise CorruptDataError(f"{place.uri}/{PLAN} is damaged: delete {place.uri} and start again")
    return plan


def _refuse_other(place: Place, there: dict[str, Any], plan: dict[str, Any], what: str) -> None:
    found = differences(plan, there)
    if found:
        raise AlreadyExistsError(
            f"{place.uri} holds {what} that differs: {'; '.join(found[:5])}{'; ...' if len(found) > 5 else ''}: "
            "choose another destination or delete it")


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What differs between two JSON values, as 'config.k: 10 there, 20 here'."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        # Where an input lies does not matter, what is in it does.
        ignored = {"uri"} if path.startswith("inputs.") else set()
        return [line for key in sorted({*ours, *theirs} - ignored)
                for line in differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)]
    if ours == theirs:
        return []
    return [f"{path}: {_short(theirs)} there, {_short(ours)} here"]


def _short(value: Any) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def publish_manifest(place: Place, manifest: Manifest) -> Manifest:
    """Write the manifest, last and exclusively; the one that is there where another process made the same thing."""
    try:
        place.create(NAME, manifest.to_json())
    except AlreadyExistsError:
        there = find_manifest(place)
        if there is None or there.digest != manifest.digest or there.config != manifest.config:
            raise AlreadyExistsError(f"{place.uri} was published by another writer meanwhile: choose another "
                                     "destination or delete it") from None
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
    with suppress(LattqeError):  # tidiness is no reason to fail, and may not be permitted
        place.sweep()


def check_inputs(inputs: Mapping[str, Mapping[str, str]] | None) -> None:
    """Each input names its uri, digest and kind."""
    for name, entry in (inputs or {}).items():
        if not {"uri", "digest", "kind"} <= set(entry):
            raise LattqeError(f"input {name!r} must name its uri, digest and kind, not {sorted(entry)}")
