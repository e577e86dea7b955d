"""The one seam between CPU and GPU: everything that allocates asks here where to."""

import torch

from lattqe.errors import LattqeError


def pick_device(name: str = "auto") -> torch.device:
    """Turn 'auto', 'cpu', 'cuda' or 'cuda:1' into a device; 'auto' takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LattqeError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LattqeError(f"device {name!r} asked for, but torch sees no GPU: use cpu, or install torch with CUDA")
    return device
