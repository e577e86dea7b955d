"""Machines that are not there, in words: `--assume "nodes=16,gpus=1"`, or as the doctor of one measured them."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lattqe.cost.work import GB, Machines
from lattqe.errors import LattqeError

UNITS = {"TB": 10**12, "GB": GB, "MB": 10**6, "TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20}
SPEEDS = {"GB/s": GB, "MB/s": 10**6, "Gbit/s": GB / 8}


def _count(least: int) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = int(text)
        if value < least:
            raise ValueError(f"at least {least}")
        return value

    return read


def _number(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("a number from 0")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError("a number above 0")
    return value


def _with_unit(units: Mapping[str, float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        for unit, size in sorted(units.items(), key=lambda item: -len(item[0])):
            if text.lower().endswith(unit.lower()):
                return _positive(text[: -len(unit)]) * size
        raise ValueError("no unit")

    return read


# Each key: how it is read, and what it must look like.
KEYS: dict[str, tuple[Callable[[str], float], str]] = {
    "nodes": (_count(1), "a whole number from 1"),
    "gpus": (_count(0), "a whole number from 0, for each node"),
    "cpus": (_count(1), "a whole number from 1, for each node"),
    "memory": (_with_unit(UNITS), "such as 32GB, of each node"),
    "gpu_memory": (_with_unit(UNITS), "such as 24GB, of each GPU"),
    "tflops": (_positive, "a number above 0, of each GPU"),
    "network": (_with_unit(SPEEDS), "such as 1.2GB/s, of each node"),
    "price": (_number, "dollars for a node and hour, from 0"),
    "gflops": (_positive, "a number above 0, of each core"),
}


def _measured(path: str) -> dict[str, float]:
    """What `lattqe doctor --gpu --json` found of a machine: values by key."""
    try:
        found = json.loads(Path(path).read_bytes())
        passed, machine = found["passed"], {key: float(value) for key, value in found["machine"].items()}
    except OSError as error:
        raise LattqeError(f"--assume measured={path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise LattqeError(
            f"--assume measured={path}: not what a doctor wrote: lattqe doctor --gpu --json > {path}"
        ) from None
    if passed is not True:
        raise LattqeError(f"--assume measured={path}: that machine failed its checks: fix it, and test it again")
    wrong = [key for key, value in machine.items() if key not in KEYS or not (math.isfinite(value) and value > 0)]
    if wrong:
        raise LattqeError(f"--assume measured={path}: {wrong[0]} is unknown or no number above 0: test it again")
    return machine


def parse_assumption(text: str) -> Machines:
    """Read "nodes=16,gpus=1,cpus=8,tflops=120,network=1.2GB/s,price=0.5"; what is left out is as `Machines` says, or,
    with "measured=FILE", as the machine that `lattqe doctor --gpu --json` tested.

    LattqeError names the key that is unknown or wrong, and what is accepted.
    """
    values: dict[str, float] = {}
    measured: dict[str, float] | None = None
    for entry in (part.strip() for part in text.split(",")):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if (key not in KEYS and key != "measured") or not equals:
            raise LattqeError(
                f"--assume {entry!r}: keys are {', '.join(KEYS)} and measured, as in nodes=16,network=1.2GB/s"
            )
        if key in values or (key == "measured" and measured is not None):
            raise LattqeError(f"--assume names {key} twice: give it once")
        if key == "measured":
            measured = _measured(value)
            continue
        read, wanted = KEYS[key]
        try:
            values[key] = read(value)
        except ValueError:
            raise LattqeError(f"--assume {entry!r}: {key} is {wanted} (keys: {', '.join(KEYS)})") from None
    known = (measured or {}) | values
    if not known.get("gpus"):
        for key in ("tflops", "gpu_memory"):
            if key in values:
                raise LattqeError(f"--assume {key} is of a GPU, and gpus is 0: add gpus=1, or leave {key} out")
    whole = {each.name for each in fields(Machines) if each.type is int}
    given: dict[str, Any] = {key: int(value) if key in whole else value for key, value in known.items()}
    return Machines(**given)
