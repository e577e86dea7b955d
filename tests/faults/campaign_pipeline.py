"""The pipeline that a fault campaign runs: its commands on small data, and what tells a right result."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lattqe.store import FeatureWriter, open_place
from lattqe.store.artifacts import METRICS, verify_artifact

DIM, CLASSES, IMAGES, K = 16, 60, 12, 12
NETWORK = [
    "network.layers=1",
    "network.heads=2",
    "network.max_k=16",
    "batch=8",
    "slots=4",
    "steps=16",
    "k_min=4",
    "k_max=8",
    "pool=60",
    "pool_steps=8",
    "validate_every=8",
    "checkpoint_every=4",
    "validate_k=4,8",
    "choose_qe=4,8",
    "choose_dba=2,4",
    "temperature_steps=2",
    "learning_rate=1e-3",
]


@dataclass
class Pass:
    """One way through the pipeline: where its inputs lie, and where each finished stage's result does."""

    given: str
    base: str
    made: dict[str, str] = field(default_factory=dict)

    def place_for(self, name: str) -> str:
        return f"{self.base}/{name}"


@dataclass(frozen=True)
class Stage:
    """One verb of the pipeline: what it makes, and its words (without --to) from what is there."""

    verb: str
    makes: str
    words: Callable[[Pass], list[str]]
    on_ray: bool = True


def _train(run: Pass) -> list[str]:
    settings = [word for setting in NETWORK for word in ("--set", setting)]
    return [run.made["features"], "--val", f"{run.given}/val", "--workers", "1", "--threads", "1", *settings]


STAGES = (
    Stage(
        "import",
        "features",
        lambda run: [f"{run.given}/source/x.npy", "--labels", f"{run.given}/source/labels.npy"],
        on_ray=False,
    ),
    Stage(
        "neighbors",
        "graph",
        lambda run: [run.made["features"], "-k", str(K), "--block-rows", "120", "--workers", "2", "--cache", "~/cache"],
    ),
    Stage("train", "model", _train),
    Stage(
        "augment",
        "index",
        lambda run: [
            run.made["features"],
            "--model",
            run.made["model"],
            "-k",
            "8",
            "--neighbors",
            run.made["graph"],
            "--workers",
            "2",
            "--cache",
            "~/cache",
        ],
    ),
    Stage("append", "index2", lambda run: [run.made["index"], f"{run.given}/new", "--workers", "2"]),
    Stage(
        "search",
        "ranks",
        lambda run: [
            run.made["index2"],
            f"{run.given}/queries",
            "-k",
            "20",
            "--expand",
            "lattqe",
            "--nqe",
            "8",
            "--model",
            run.made["model"],
            "--workers",
            "2",
            "--cache",
            "~/cache",
        ],
    ),
)


def write_given(uri: str) -> None:
    """The sources: foreign files to import, and feature sets for validation, queries and growth."""
    x, labels = clusters(0, CLASSES, IMAGES)
    for name, array in (("x", x), ("labels", labels)):
        file = io.BytesIO()
        np.save(file, array)
        open_place(f"{uri}/source").write(f"{name}.npy", file.getvalue())
    for seed, name, classes, images in ((1, "val", 6, 8), (2, "queries", 60, 2), (3, "new", 10, 6)):
        x, labels = clusters(seed, classes, images)
        with FeatureWriter(f"{uri}/{name}", DIM, labels=True) as writer:
            writer.append(x, [f"{name}-{row}" for row in range(len(x))], labels)


def clusters(seed: int, classes: int, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors (classes * images, DIM) around random centres, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes, dtype=np.int32), images)
    x = rng.normal(size=(classes, DIM))[labels] + 0.8 * rng.normal(size=(len(labels), DIM))
    return x.astype(np.float32), labels


def fingerprint(uri: str) -> list[list[str | int]]:
    """Name, bytes and checksum of every file of a finished artifact, all of them read and found so.

    But for a model's metrics: they say how long the training took.
    """
    manifest = verify_artifact(uri)  # what `lattqe verify` does
    left = [name for name in open_place(uri).list() if "_work/" in name]
    if left:
        raise RuntimeError(f"{uri} is finished, but {left} was left behind")
    return [[part.name, part.bytes, part.checksum] for part in manifest.parts if part.name != METRICS]
