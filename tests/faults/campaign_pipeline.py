"""The pipeline that a fault campaign runs: its commands on small data, and what tells a right result."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from lattqe.benchmark.cells import Measured
from lattqe.store import FeatureWriter, open_place
from lattqe.store.artifacts import verify_artifact
from lattqe.store.models import METRICS

DIM, CLASSES, IMAGES, K = 16, 60, 12, 12
PHOTOS = 24
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


BENCHMARK = """bootstrap = 100
[[dataset]]
name = "small"
database = "{features}"
queries = "{queries}"
[[method]]
method = "aqe"
nqe = 3
ndba = 3
[[method]]
method = "lattqe"
model = "{model}"
nqe = 4
"""


@dataclass
class Pass:
    """One way through the pipeline: where its inputs lie, where each finished stage's result does, a local folder."""

    given: str
    base: str
    files: Path
    made: dict[str, str] = field(default_factory=dict)

    def place_for(self, name: str) -> str:
        """Where the result of a stage goes."""
        return f"{self.base}/{name}"

    def run_file(self) -> str:
        """The benchmark's TOML."""
        text = BENCHMARK.format(**self.made, queries=f"{self.given}/queries")
        path = self.files / "run.toml"
        path.write_text(text)
        return str(path)


@dataclass(frozen=True)
class Stage:
    """One verb of the pipeline: what it makes, its words (without --to) from what is there, what made before it reads.

    other: words for the same destination that ask for something else.
    """

    verb: str
    makes: str
    words: Callable[[Pass], list[str]]
    reads: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    on_ray: bool = True
    label: str = ""

    @property
    def name(self) -> str:
        """How it is called in tables."""
        return self.label or self.verb


ON_RAY = ("--workers", "2")
CACHED = (*ON_RAY, "--cache", "~/cache")


def _train(run: Pass) -> list[str]:
    settings = [word for setting in NETWORK for word in ("--set", setting)]
    return [run.made["features"], "--val", f"{run.given}/val", "--workers", "1", "--threads", "1", *settings]


def _augment(run: Pass) -> list[str]:
    made = run.made
    return [made["features"], "--model", made["model"], "--neighbors", made["graph"], *CACHED]


def _search(run: Pass) -> list[str]:
    expand = ["--expand", "lattqe", "--nqe", "8", "--model", run.made["model"]]
    return [run.made["index2"], f"{run.given}/queries", *expand, *CACHED]


STAGES = (
    Stage(
        "import",
        "features",
        lambda run: [f"{run.given}/source/x.npy", "--labels", f"{run.given}/source/labels.npy"],
        other=("--dtype", "float32"),
        on_ray=False,
    ),
    Stage(
        "neighbors",
        "graph",
        lambda run: [run.made["features"], "--block-rows", "120", *CACHED, "-k", str(K)],
        ("features",),
        ("-k", "5"),
    ),
    Stage("train", "model", _train, ("features",), ("--set", "seed=9")),
    Stage("augment", "index", lambda run: [*_augment(run), "-k", "8"], ("features", "graph", "model"), ("-k", "6")),
    Stage(
        "augment",
        "hops",
        lambda run: [*_augment(run), "-k", "8", "--hops", "2"],
        ("features", "graph", "model"),
        ("--hops", "3"),
        label="augment --hops",
    ),
    Stage(
        "append",
        "index2",
        lambda run: [run.made["index"], f"{run.given}/new", *ON_RAY],
        ("index", "features", "graph", "model"),
    ),
    Stage("search", "ranks", lambda run: [*_search(run), "-k", "20"], ("index2", "model"), ("-k", "10")),
    Stage(
        "extract",
        "described",
        lambda run: [f"{run.given}/photos", "--encoder", "tiny_encoder:make", *ON_RAY, "--size", "24", "--scales", "1"],
        other=("--size", "16"),
    ),
    Stage("benchmark", "results", lambda run: [run.run_file(), *ON_RAY, "--shards", "2"], ("features", "model")),
)


def write_given(uri: str) -> None:
    """The sources: foreign files to import, images, and feature sets for validation, queries and growth."""
    x, labels = clusters(0, CLASSES, IMAGES)
    for name, array in (("x", x), ("labels", labels)):
        file = io.BytesIO()
        np.save(file, array)
        open_place(f"{uri}/source").write(f"{name}.npy", file.getvalue())
    for seed, name, classes, images in ((1, "val", 6, 8), (2, "queries", 60, 2), (3, "new", 10, 6)):
        x, labels = clusters(seed, classes, images)
        with FeatureWriter(f"{uri}/{name}", DIM, labels=True) as writer:
            writer.append(x, [f"{name}-{row}" for row in range(len(x))], labels)
    rng = np.random.default_rng(4)
    for number in range(PHOTOS):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (20, 28, 3)).astype(np.uint8)).save(file, "PNG")
        open_place(f"{uri}/photos").write(f"{number:03d}.png", file.getvalue())


def clusters(seed: int, classes: int, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors (classes * images, DIM) around random centres, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes, dtype=np.int32), images)
    x = rng.normal(size=(classes, DIM))[labels] + 0.8 * rng.normal(size=(len(labels), DIM))
    return x.astype(np.float32), labels


def fingerprint(uri: str) -> list[list[str | int]]:
    """Name, bytes and checksum of every file of a finished artifact, all of them read and found so.

    But for a model's metrics, which say how long the training took; of a benchmark, the scores of its cells.
    """
    place = open_place(uri)
    names = place.list()
    cells = [name for name in names if name.startswith("cells/")]
    left = [name for name in names if "_work/" in name or ".tmp-" in name]
    if left:
        raise RuntimeError(f"{uri} is finished, but {left} was left behind")
    if cells:  # named by what they measured: of a model also its metrics, so names differ from pass to pass
        measured = [Measured.from_bytes(place.read(name), PurePosixPath(name).stem) for name in cells]
        scores = sorted(json.dumps([one.to_dict() for one in each.scores]) for each in measured)
        table = [line.rpartition(",")[0] for line in place.read("results.csv").decode().splitlines()]
        return [["scores", len(scores), *scores], ["table", len(table), *table]]
    manifest = verify_artifact(uri)  # what `lattqe verify` does
    return [[part.name, part.bytes, part.checksum] for part in manifest.parts if part.name != METRICS]
