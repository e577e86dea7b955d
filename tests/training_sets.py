"""Small worlds of clusters on a sphere, and a training of them that takes seconds."""

from pathlib import Path

import numpy as np

from lattqe.store import FeatureWriter
from lattqe.training import TrainingPlan, make, preset

DIM = 16
TINY = [
    "network.layers=1",
    "network.heads=2",
    "network.max_k=16",
    "batch=8",
    "slots=4",
    "steps=6",
    "k_min=4",
    "k_max=8",
    "pool=60",
    "pool_steps=3",
    "validate_every=3",
    "checkpoint_every=2",
    "validate_k=4,8",
    "choose_qe=4,8",
    "choose_dba=2,4",
    "temperature_steps=3",
    "learning_rate=1e-3",
]


def clusters(seed: int, classes: int, images: int, first_label: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors (classes * images, DIM) around random centres, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), images)
    x = rng.normal(size=(classes, DIM))[labels] + 0.8 * rng.normal(size=(len(labels), DIM))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), (labels + first_label).astype(np.int32)


def write_set(folder: Path | str, name: str, seed: int, classes: int, images: int, first_label: int = 0) -> str:
    """A labelled feature set on disk or S3."""
    x, labels = clusters(seed, classes, images, first_label)
    with FeatureWriter(f"{folder}/{name}", DIM, labels=True) as writer:
        writer.append(x, [f"{name}-{row}" for row in range(len(x))], labels)
    return f"{folder}/{name}"


def write_sets(folder: Path | str) -> dict[str, str]:
    """Two training sets and a validation database with queries of its classes."""
    shapes = {"a": (1, 8, 12, 0), "b": (2, 6, 10, 100), "database": (3, 5, 10, 200), "queries": (3, 5, 2, 200)}
    return {name: write_set(folder, name, *shape) for name, shape in shapes.items()}


def plan_for(sets: dict[str, str], destination: Path | str, *settings: str) -> TrainingPlan:
    """A tiny training of both sets, its destination claimed."""
    config = preset("paper", DIM, [*TINY, *settings])
    plan = make(str(destination), config, [sets["a"], sets["b"]], [(sets["database"], sets["queries"])])
    plan.claim()
    return plan
