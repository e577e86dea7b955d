"""Training: tuples and worlds, losses, the loop of one worker, the temperature stage, validation, presets."""

from lattqe.training.checkpoint import Team
from lattqe.training.config import PRESETS, TrainingConfig, preset
from lattqe.training.loop import Progress, train
from lattqe.training.plan import Plan, make

__all__ = ["PRESETS", "Plan", "Progress", "Team", "TrainingConfig", "make", "preset", "train"]
