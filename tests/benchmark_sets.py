"""A small world for benchmark tests: two graded data sets, distractors, and runs over them that take seconds."""

import dataclasses
from pathlib import Path

from lattqe.benchmark.presets import synthetic_run
from lattqe.benchmark.spec import Candidate, Run
from lattqe.datasets.synthetic import SyntheticWorld

FIXED = (
    Candidate("aqe", "AQE", "fixed", (4,), (4,), (4,)),
    Candidate("dqe", "DQE", "fixed", (4,), (2,), (2,), {"C": (0.1,), "negatives": (5,)}),
    Candidate("alphaqe", "αQE", "test", (4, 16), (8,), (4, 8), {"alpha": (1.0, 3.0)}),
)


def small_run(folder: Path | str, methods: tuple[Candidate, ...] = FIXED) -> Run:
    """Some 400 rows for each data set and 300 distractors, made in `folder`."""
    world = SyntheticWorld(seed=3, dim=32, scale=0.1, distractors=300)
    return dataclasses.replace(synthetic_run(str(folder), methods, world), nqe_sweep=(1, 4, 16), bootstrap=200)
