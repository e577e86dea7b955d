"""A small world for benchmark tests: two graded data sets, distractors, and runs over them that take seconds."""

import dataclasses
from pathlib import Path

import numpy as np

from cluster.benchmark import Bench
from lattqe.benchmark.cells import Cell
from lattqe.benchmark.presets import synthetic_run
from lattqe.benchmark.spec import Candidate, Run
from lattqe.datasets.synthetic import SyntheticWorld

FACTS = {"inputs": {}, "run": {}, "warnings": [], "published": {}}
FIXED = (
    Candidate("aqe", "AQE", "fixed", (4,), (4,), (4,)),
    Candidate("dqe", "DQE", "fixed", (4,), (2,), (2,), {"C": (0.1,), "negatives": (5,)}),
    Candidate("alphaqe", "αQE", "test", (4, 16), (8,), (4, 8), {"alpha": (1.0, 3.0)}),
)


def small_run(folder: Path | str, methods: tuple[Candidate, ...] = FIXED) -> Run:
    """Some 400 rows for each data set and 300 distractors, made in `folder`."""
    world = SyntheticWorld(seed=3, dim=32, scale=0.1, distractors=300)
    return dataclasses.replace(synthetic_run(str(folder), methods, world), nqe_sweep=(1, 4, 16), bootstrap=200)


def fill(bench: Bench) -> int:
    """Complete a run; how many cells were measured."""
    measured = 0
    while cells := bench.cells_to_do():
        done: list[Cell] = []
        bench.fill(cells, done.append)
        assert len(set(done)) == len(done) == len(cells)
        measured += len(done)
    return measured


def rows_of(bench: Bench, dataset: str, distractors: bool) -> np.ndarray:
    sets = [bench.inputs[dataset].database]
    if distractors:
        sets.append(bench.distractors[dataset, "distractors"])
    return np.concatenate([each.read() for each in sets])
