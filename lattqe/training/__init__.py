"""Training: tuples and worlds, losses, the loop of one worker, the temperature stage, validation, presets."""

from lattqe.training.checkpoint import Team
from lattqe.training.config import PRESETS, TrainingConfig, preset
from lattqe.training.loop import TrainingProgress, train
from lattqe.training.plan import TrainingPlan, make

__all__ = ["PRESETS", "Team", "TrainingConfig", "TrainingPlan", "TrainingProgress", "make", "preset", "train"]
