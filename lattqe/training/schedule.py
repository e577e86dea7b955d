"""The learning rate as a function of the step alone, so that a resumed run needs no memory of it."""

import math

from lattqe.training.config import TrainingConfig

COSINE_FLOOR = 0.02  # of the full rate, where the cosine ends


TEMPERATURE_FLOOR = 0.05  # of the temperature's rate, where its straight line ends


def temperature_rate(config: TrainingConfig, step: int) -> float:
    """The rate of the second stage's update number `step`, counted from the beginning of the first."""
    done = (step - config.steps) / config.temperature_steps
    return config.temperature_rate * max(TEMPERATURE_FLOOR, 1 - done)


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The rate of update number `step`, from 0."""
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.schedule == "cosine":
        fall = COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * step / config.steps)) / 2
    else:
        fall = config.decay ** (step // config.epoch_steps)
    return config.learning_rate * rise * fall
