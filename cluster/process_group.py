"""How training workers find each other where none is on another machine: through a file, and over loopback.

Ray's own way is torch's TCPStore, which listens on every interface and lets anyone in. It remains the way of
workers on several machines.
"""

import os
import secrets
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

LOOPBACK = "127.0.0.1"
# What gloo and NCCL may listen on. NCCL takes a name for a prefix unless it is told otherwise.
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def torch_config(backend: str, workers: int, folder: str, timeout: float) -> TorchConfig:
    """How that many workers join: not at all if there is one, by a file in `folder` if all nodes are on this machine.

    backend: "gloo" or "nccl"; timeout: seconds for an operation of all workers.
    """
    on_loopback = all(node["NodeManagerAddress"] == LOOPBACK for node in ray.nodes() if node["Alive"])
    if workers == 1 or on_loopback:
        return OneMachineConfig(backend=backend, timeout_s=int(timeout), folder=folder)
    return TorchConfig(backend=backend, timeout_s=int(timeout))


@dataclass
class OneMachineConfig(TorchConfig):
    """Ray's settings for a process group, and the folder for the file by which the workers find each other."""

    folder: str = ""

    @property
    def backend_cls(self) -> type["OneMachine"]:
        """What starts the group."""
        return OneMachine


class OneMachine(_TorchBackend):
    """Ray's backend for torch with another start."""

    def on_start(self, worker_group: Any, backend_config: OneMachineConfig) -> None:
        """Let the workers join, by a new file each time: the last group may have lost one of them."""
        size, file = len(worker_group), Path(backend_config.folder, secrets.token_hex(8))
        if size == 1:
            return
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, join, str(file), rank, size, backend_config.backend, backend_config.timeout_s
                )
                for rank in range(size)
            ]
        )


def join(file: str, rank: int, size: int, backend: str, seconds: float) -> None:
    """Join the process group of all workers that open this file."""
    os.environ |= INTERFACES
    store = dist.FileStore(file, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
