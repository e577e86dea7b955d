"""Named configurations."""

from typing import Any

from lattqe.errors import LattqeError
from lattqe.model import LAttQEConfig
from lattqe.training.config import TrainingConfig, changed

PRESETS: dict[str, dict[str, Any]] = {
    # Sections 3.3 and 4.1 of the paper: the defaults.
    "paper": {},
}


def preset(name: str, dim: int, settings: list[str] | None = None) -> TrainingConfig:
    """A preset for vectors of `dim` columns, with `key=value` and `network.key=value` changes applied."""
    if name not in PRESETS:
        raise LattqeError(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
    values = changed(PRESETS[name], settings or [])
    return TrainingConfig(**{**values, "network": LAttQEConfig(**{**values["network"], "dim": dim})})
