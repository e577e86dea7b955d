"""Where a training stands, in storage and among its workers, who are alone or joined by torch.distributed.

A checkpoint lies in `_work/` of the destination: tensors as safetensors, the rest as JSON, never a pickle.
`state.json` is replaced in one step and names the tensor files that belong to it, so that a reader sees one whole
state or the one before. Files that no state names any more are deleted afterwards.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store import ChangedError, MissingFileError, Place

READS = 3  # of a file that does not match its checksum, before it counts as damaged
STATE = "_work/state.json"
Tensors = dict[str, torch.Tensor]

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
            return State(**json.loads(self._seen))
        except MissingFileError:
            self._seen = None
            return State()
        except (ValueError, TypeError) as error:
            raise CorruptDataError(
                f"{self.place.uri}/{STATE} is damaged ({error}): delete {self.place.uri} and train again"
            ) from error

    def tensors(self, state: State, role: str) -> Tensors:
        """The tensors that the state names for a role ("last" or "best"), checksum checked."""
        entry = state.files[role]
        for _ in range(READS):  # a large one comes in ranges, whose damage on the way only our checksum finds
            data = self.place.read(entry["name"])
            if xxhash.xxh3_128_hexdigest(data) == entry["checksum"]:
                return safetensors.torch.load(data)
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
        data = json.dumps(asdict(state), allow_nan=False).encode()
        try:
            self.place.replace(STATE, data, self._seen)
        except ChangedError:
            raise LattqeError(
                f"another run trains to {self.place.uri} too: let it finish, or stop it and give the same command again"
            ) from None
        self._seen = data
        for name in old - {entry["name"] for entry in state.files.values()}:
            self.place.delete(name)


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
    """Rank and number of workers, and the two things they do together: add up numbers, and gradients."""

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

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network with gradients averaged over the workers."""
        if self.size == 1:
            return network
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(network, device_ids=devices, gradient_as_bucket_view=True)

    def share(self, count: int, unit: int = 1) -> slice:
        """Return this worker's part of `count` things that come in whole units."""
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
