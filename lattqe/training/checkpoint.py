"""Where a training stands, in storage and among its workers, who are alone or joined by torch.distributed.

A checkpoint lies in `_work/` of the destination: tensors as safetensors, the rest as JSON, never a pickle.
`state.json` is replaced in one step and names the tensor files that belong to it, so that a reader sees one whole
state or the one before. Files that no state names any more are deleted afterwards.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store import ChangedError, MissingFileError, Place
from lattqe.store.manifest import parse_json, seal_json, unseal_json

READS = 3  # of a file that does not match its checksum, before it counts as damaged
STATE = "_work/state.json"
STAGES = ("network", "temperature", "choice")
MOST_STEPS = 1 << 53
MOST = 1e300
Tensors = dict[str, torch.Tensor]
Arrays = TypeVar("Arrays", bound=tuple[NDArray[Any], ...])

CPU = torch.device("cpu")


@dataclass
class State:
    """Counters of a training: what is done, what it gave, and which weights were best.

    stage: "network", "temperature" or "choice"; step: updates done, over both stages; history: one entry for each
    checkpoint; best: {"step", "map"} of the best validation; files: role -> {"name", "checksum"} of tensor files.
    """

    stage: str = "network"
    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None
    files: dict[str, dict[str, str]] = field(default_factory=dict)


class Checkpoints:
    """Reads and writes the state of one training; only the leading worker writes.

    A state takes the place of the very one that was read or written here before. So a run that another has
    overtaken (a worker that was frozen or cut off, a second driver) ends, and never brings back a state whose files
    are gone.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._seen: bytes | None = None

    def load(self) -> State:
        """The state of an earlier run, or that of a new one."""
        try:
            self._seen = self.place.read(STATE)
        except MissingFileError:
            self._seen = None
            return State()
        where = f"{self.place.uri}/{STATE}"
        try:
            body = parse_json(self._seen, where)
            state = State(**(unseal_json(self._seen, where) if "seal" in body else body))  # 0.1.0 wrote none
        except (CorruptDataError, TypeError) as error:
            raise CorruptDataError(f"{where} is damaged ({error}): delete {self.place.uri} and train again") from error
        if not _possible(state):
            raise CorruptDataError(f"{where} is not a valid training state: delete {self.place.uri} and train again")
        return state

    def tensors(self, state: State, role: str) -> Tensors:
        """The tensors that the state names for a role ("last" or "best"), checksum checked."""
        entry = state.files.get(role)
        if entry is None:
            raise CorruptDataError(
                f"{self.place.uri}/{STATE} names no {role} weights: delete {self.place.uri} and train again"
            )
        for _ in range(READS):  # a large one comes in ranges, whose damage on the way only our checksum finds
            data = self.place.read(entry["name"])
            if xxhash.xxh3_128_hexdigest(data) == entry["checksum"]:
                try:
                    return safetensors.torch.load(data)
                except (SafetensorError, ValueError, KeyError):
                    break
        raise CorruptDataError(
            f"{self.place.uri}/{entry['name']} is not what was written: delete {self.place.uri} and train again"
        )

    def save(self, state: State, **tensors: Tensors) -> None:
        """Write new tensors for the roles given, then the state that names them, then drop what it replaced."""
        old = {entry["name"] for entry in state.files.values()}
        for role, values in tensors.items():
            data = safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in values.items()})
            checksum = xxhash.xxh3_128_hexdigest(data)
            # Named by content too: the same with more workers has other last bits.
            name = f"_work/{role}-{state.step:08d}-{checksum[:8]}.safetensors"
            self.place.write(name, data)
            state.files[role] = {"name": name, "checksum": checksum}
        data = seal_json(asdict(state))
        try:
            self.place.replace(STATE, data, self._seen)
        except ChangedError:
            raise LattqeError(
                f"another run trains to {self.place.uri} too: let it finish, or stop it and give the same command again"
            ) from None
        self._seen = data
        for name in old - {entry["name"] for entry in state.files.values()}:
            self.place.delete(name)


def _possible(state: State) -> bool:
    """Whether every value is of the kind that `save` writes: the file may have been edited."""
    return (
        state.stage in STAGES
        and _is_step(state.step)
        and _is_number(state.seconds)
        and isinstance(state.history, list)
        and all(map(_is_entry, state.history))
        and (state.best is None or (_numbers(state.best) and {"step", "map"} <= set(state.best)))
        and isinstance(state.files, dict)
        and all(map(_is_file, state.files.values()))
    )


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("stage") not in STAGES or not _is_step(entry.get("step")):
        return False
    found = entry.get("map", {})
    return (
        {"time", "seconds"} <= set(entry)
        and _numbers({name: value for name, value in entry.items() if name not in ("stage", "map")})
        and isinstance(found, dict)
        and all(k.isdigit() and _numbers(means) and "mean" in means for k, means in found.items())
    )


def _is_file(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"name", "checksum"}
        and all(isinstance(text, str) for text in entry.values())
        and entry["name"].startswith("_work/")
    )


def _numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(map(_is_number, values.values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST  # nor NaN


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEPS


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> Tensors:
    """Adam's moments and counts by parameter name."""
    return {
        f"adam.{key}.{names[parameter]}": value
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], tensors: Tensors) -> None:
    """Put back what `optimizer_tensors` gave."""
    for parameter, name in names.items():
        moments = {key: tensors.get(f"adam.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
        if all(value is not None for value in moments.values()):
            optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device)  # type: ignore[union-attr]
                for key, value in moments.items()
            }


@dataclass(frozen=True)
class Team:
    """Rank and number of workers, and what they do together: add up numbers and gradients, share what one computes."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @classmethod
    def joined(cls, device: torch.device) -> "Team":
        """The team of the process group that was set up (by Ray Train, torchrun, ...); alone if there is none."""
        if not dist.is_initialized():
            return cls(device=device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def leads(self) -> bool:
        """Whether this worker writes the files."""
        return self.rank == 0

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the workers, the same on each."""
        if self.size == 1:
            return values
        shared = values.detach().clone().to(self.device)
        dist.all_reduce(shared)
        return shared.to(values.device)

    @property
    def gpu(self) -> torch.device | None:
        """The device for searches: a GPU, or None for the CPU and its own products."""
        return None if self.device.type == "cpu" else self.device

    def from_leader(self, compute: Callable[[], Arrays], zeros: Arrays) -> Arrays:
        """What the leader computes, on every worker. zeros: arrays of the same shapes and types, for the others."""
        if self.size == 1:
            return compute()
        mine = compute() if self.leads else zeros
        return cast(Arrays, tuple(self.total(torch.from_numpy(np.ascontiguousarray(x))).numpy() for x in mine))

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network with gradients averaged over the workers."""
        if self.size == 1:
            return network
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(network, device_ids=devices, gradient_as_bucket_view=True)

    def share(self, count: int, unit: int = 1) -> slice:
        """Return this worker's part of `count` indivisible units."""
        units = -(-count // unit)
        start, stop = (units * rank // self.size * unit for rank in (self.rank, self.rank + 1))
        return slice(min(start, count), min(stop, count))

    def slots(self, slots: int) -> range:
        """Return this worker's slots of the global batch."""
        if slots % self.size:
            raise LattqeError(
                f"{self.size} workers cannot share {slots} slots evenly: "
                f"use a divisor, or --set slots={self.size * max(1, slots // self.size)}"
            )
        each = slots // self.size
        return range(self.rank * each, (self.rank + 1) * each)
