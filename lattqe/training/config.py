"""How a network is trained: one frozen dataclass whose defaults are the paper's, and changes to it by name.

`presets.toml` has the named configurations; variants take one part of one away, for tables such as the paper's Table 2.
"""

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lattqe.errors import LattqeError
from lattqe.model import LAttQEConfig

CHOICES = {
    "sampler": ("tuples", "worlds", "densities"),
    "schedule": ("exponential", "cosine"),
    "optimizer": ("adam", "adamw"),
    "k_draw": ("uniform", "log"),
    "k_for": ("batch", "query"),
    "pairs": ("labels", "published"),
    "temperature_on": ("queries", "worlds"),
}


def loss(weight: float) -> Any:
    """The field of a loss: its name is that of the loss, which `lattqe.training.stage` computes; 0 leaves it out."""
    return field(default=weight, metadata={"loss": True})


@dataclass(frozen=True)
class TrainingConfig:
    """Sampling, losses, optimisation and validation; the network's own settings are under `network`."""

    network: LAttQEConfig = field(default_factory=LAttQEConfig)
    seed: int = 0
    start: str = ""  # a trained model of the same network whose weights this training starts with; empty: from the seed
    steps: int = 200_000  # the paper's 100 epochs of 2,000 updates; the best of them is kept
    batch: int = 64  # queries of one update over all workers together; the paper's
    slots: int = 8  # parts of the batch with their own dropout masks; the number of workers must divide it

    # Sampling
    sampler: str = "tuples"  # the paper's; "worlds": each batch meets a random part of the classes and images
    k_min: int = 32  # the paper's range of neighbors, drawn again for each batch
    k_max: int = 64
    k_draw: str = "uniform"  # "log": small numbers as often as large ones
    drop_max: float = 0.6  # a query's neighbors are dropped with a probability from U(0, this); the paper's
    positives: int = 1  # drawn for each query; the losses that look at more use them all
    k_for: str = "batch"  # tuples: "query" draws the number of neighbors for each query, as the paper says
    pairs: str = "labels"  # tuples: "published": queries and positives of the data set's own pairs, where it has some
    distinct_negatives: bool = False  # at most one hard negative of each class, as in the paper's code base
    pool: int = 20_000  # tuples: rows that negatives come from, the paper's
    pool_steps: int = 2_000  # tuples: updates after which the pool is drawn again, the paper's
    world_classes: float = 0.2  # worlds: smallest share of a set's classes that are present
    world_images: float = 0.3  # worlds: smallest share of those classes' images that are present
    world_rows: int = 3_000  # worlds: largest number of images; more cost time and teach the same
    widths: tuple[int, ...] = (32, 64, 96, 128, 192, 256, 384)  # densities: first columns taken, beside all of them
    synthetic: float = 0.15  # densities: share of worlds of synthetic landmarks, which are long rows and no blobs
    altered: float = 1.0  # densities: times the usual shares of worlds whose space is altered
    clusters: float = 0.0  # densities: share of worlds of Gaussian clusters
    alike: float = 0.0  # densities: share of worlds in which all classes have about the same few images
    ordinary: float = 0.0  # densities: share of the updates, the first ones, that meet neither of these two
    adapted: float = 0.0  # densities: share of worlds whose space is adapted to them, as that of an augmented index is
    hop_every: int = 0  # densities: of so many batches one is a world augmented through hops; 0: none
    hop_world_rows: int = 4_000  # its rows at most: as long lists as in use
    hop_rows: int = 700  # of them at most so many, those around the queries, are augmented
    hop_k: int = 32  # its neighbors of each row at most; half as many at least
    hops: int = 4  # one less or one more at random

    # Losses: the weight of each; 0 leaves it out
    contrastive: float = loss(1.0)
    margin: float = 0.1  # the paper's: push away only what is nearly on top of the query
    negatives: int = 5  # hardest ones by the current expanded query, for each positive; the paper's
    pull: float = loss(0.0)
    listwise: float = loss(0.0)
    listwise_temperature: float = 0.05
    smooth_ap: float = loss(0.0)
    smooth_ap_temperature: float = 0.02
    smooth_ap_spread: float = 0.0  # instead of the temperature, this share of the spread of each query's similarities
    auxiliary: float = loss(0.5)  # the paper gives no balance; the two losses then have about equal gradients at start

    # Optimisation
    accumulate: int = 1  # batches of one update; worlds differ so much that one alone says little
    optimizer: str = "adam"
    learning_rate: float = 1e-4
    schedule: str = "exponential"  # learning_rate · decay^epoch; "cosine": down to a fiftieth over all the steps
    decay: float = 0.99
    epoch_steps: int = 2_000  # an epoch lasts as long as a pool
    warmup: int = 0  # updates over which the rate rises from zero
    relation_rate: float = 1.0  # times the learning rate, for the factors of similarities in the attention
    weight_decay: float = 1e-6
    clip: float = 0.0  # largest norm of the gradient; 0: as it is
    ema: float = 0.0  # what is validated and kept is a running average of the weights with this decay; 0: off

    # The second stage: the temperature of the softmax for database rows, all else frozen
    temperature_on: str = "queries"  # as in the first stage; "worlds": on whole worlds that are augmented, as in use
    temperature_steps: int = 2_000
    temperature_rate: float = 1e-2
    temperature_k: int = 48  # worlds: neighbors of each row, the paper's nDBA
    temperature_rows: int = 1_500  # worlds: rows at most, all of which are expanded in each update

    # Validation
    validate_every: int = 2_000
    checkpoint_every: int = 500
    validate_k: tuple[int, ...] = (32, 64)  # the best of them decides which weights are kept
    choose_qe: tuple[int, ...] = (4, 8, 16, 32, 48, 64, 96, 128)  # nQE is chosen among these
    choose_dba: tuple[int, ...] = (4, 8, 16, 32, 48, 64)  # and nDBA among these
    choose_hops: tuple[int, ...] = (1,)  # and the number of hops among these
    adapt: bool = False  # in databases that are adapted to their collection first, as the model's users then do
    validate_densities: tuple[int, ...] = ()  # relevant images to which validation sets are also cut, the other sets
    #                                           being distractors; the mean over all of these decides
    validate_widths: tuple[int, ...] = ()  # first columns at which that is done; none: all of them
    validate_shift: float = 0.0  # above 0: at the first width also with a mean of this length added to all vectors
    validate_queries: int = 100  # of each set, at most, where sets are cut
    shared_labels: bool = False  # True: equal labels mean equal classes across sets; else each set has its own

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise LattqeError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(allowed)}")
        self._check_numbers()
        if self.batch % self.slots:
            raise LattqeError(f"a batch of {self.batch} does not fall into {self.slots} slots: set batch or slots")
        if self.k_min > self.k_max:
            raise LattqeError(f"k_min {self.k_min} is above k_max {self.k_max}")
        largest = max(self.k_max, *self.validate_k, *self.choose_qe, *self.choose_dba)
        if largest > self.network.max_k:
            raise LattqeError(
                f"{largest} neighbors, but the network has ranks for {self.network.max_k}: set network.max_k"
            )
        if not any(getattr(self, name) for name in RANKING_LOSSES):
            raise LattqeError(f"no ranking loss: give one of {', '.join(RANKING_LOSSES)} a weight")
        if self.sampler == "densities" and (not self.network.gated or self.temperature_steps):
            raise LattqeError(
                "sampler densities trains gated networks, which have no temperature: set "
                "network.gated=true and temperature_steps=0"
            )
        if self.network.direct and self.temperature_steps:
            raise LattqeError("a direct network has no weights to temper: set temperature_steps=0")
        if self.network.gated and self.sampler == "tuples":
            raise LattqeError("a gated network learns from worlds: set sampler=densities or worlds")
        if self.temperature_on == "worlds" and self.sampler != "worlds":
            raise LattqeError("temperature_on worlds needs sampler worlds: set both")
        if self.auxiliary and self.network.auxiliary == "none":
            raise LattqeError("the auxiliary loss has a weight but the network no classifier: set auxiliary=0")

    def _check_numbers(self) -> None:
        """Refuse numbers outside their range, by name."""
        for names, allowed, use in RANGES:
            for name in names.split():
                if not allowed(getattr(self, name)):
                    raise LattqeError(f"{name} is {getattr(self, name)}: {use}")
        for name in ("steps", "validate_every", "checkpoint_every"):
            if getattr(self, name) % self.accumulate:
                raise LattqeError(f"{name} is {getattr(self, name)}: use a multiple of accumulate ({self.accumulate})")

    @property
    def graph_k(self) -> int | None:
        """Neighbors of each training row that the sampler needs beforehand; None where it finds its own."""
        return max(self.k_max, self.network.background) if self.sampler == "tuples" else None

    def choices(self, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of choose_qe and of choose_dba that a database of so many rows has neighbors for."""
        qe, dba = (tuple(k for k in ks if k < rows) for ks in (self.choose_qe, self.choose_dba))
        return qe, dba

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            **{f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)},
            "network": self.network.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingConfig":
        """The configuration written by `to_dict`; unknown keys are refused by name."""
        network = LAttQEConfig.from_dict(values["network"])
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise LattqeError(f"unknown training setting {', '.join(unknown)}: made by a newer version of lattqe?")
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        plain["network"] = network
        return cls(**plain)


LOSSES = tuple(each.name for each in dataclasses.fields(TrainingConfig) if "loss" in each.metadata)
RANKING_LOSSES = tuple(name for name in LOSSES if name != "auxiliary")

# Names of settings, what their values may be, and what to say of others.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "batch slots k_min positives pool pool_steps world_rows negatives epoch_steps validate_every checkpoint_every "
        "temperature_k temperature_rows accumulate hop_world_rows hop_rows hop_k hops validate_queries",
        lambda value: value >= 1,
        "use a whole number from 1",
    ),
    (
        "seed steps warmup temperature_steps clip weight_decay margin hop_every smooth_ap_spread validate_shift "
        + " ".join(LOSSES),
        lambda value: 0 <= value < float("inf"),
        "use a number from 0",
    ),
    (
        "learning_rate relation_rate temperature_rate decay listwise_temperature smooth_ap_temperature",
        lambda value: 0 < value < float("inf"),
        "use a number above 0",
    ),
    ("drop_max ema synthetic clusters alike ordinary", lambda value: 0 <= value < 1, "use a share from 0 to below 1"),
    ("altered adapted", lambda value: 0 <= value <= 1, "use a number from 0 to 1"),
    ("world_classes world_images", lambda value: 0 < value <= 1, "use a share above 0"),
    (
        "validate_k choose_qe choose_dba choose_hops widths",
        lambda values: bool(values) and min(values) >= 1,
        "give whole numbers from 1",
    ),
    (
        "validate_densities validate_widths",
        lambda values: all(value >= 1 for value in values),
        "give whole numbers from 1",
    ),
)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def changed(values: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """A nested dict of settings with `key=value` and `network.key=value` applied, each parsed by its field's type."""
    result = {**values, "network": dict(values.get("network", {}))}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise LattqeError(f"--set {setting!r}: write key=value, for example steps=1000")
        inside = name.startswith("network.")
        owner: type = LAttQEConfig if inside else TrainingConfig
        kinds = typing.get_type_hints(owner)
        key = name.removeprefix("network.")
        if key not in kinds or key == "network":
            raise LattqeError(f"--set {setting!r}: there is no setting {name!r}; see docs/training.md for all of them")
        (result["network"] if inside else result)[key] = _parse(text.strip(), kinds[key], setting)
    return result


def _parse(text: str, kind: Any, setting: str) -> Any:
    """Read the text as the type of a field: bool, int, float, str, a tuple of ints, or one of these and None."""
    if isinstance(kind, types.UnionType):
        if text.lower() == "none":
            return None
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if typing.get_origin(kind) is tuple:
            return tuple(int(part) for part in text.split(","))
        return kind(text)
    except (KeyError, ValueError) as error:
        raise LattqeError(
            f"--set {setting!r}: {text!r} is not a valid {getattr(kind, '__name__', 'list of numbers')}"
        ) from error


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


_STORED = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS: dict[str, dict[str, Any]] = {
    name: {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    for name, settings in _STORED.items()
}


def preset(name: str, dim: int, settings: list[str] | None = None) -> TrainingConfig:
    """A preset for vectors of `dim` columns, with `key=value` and `network.key=value` changes applied."""
    if name not in PRESETS:
        raise LattqeError(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
    values = changed(PRESETS[name], settings or [])
    return TrainingConfig(**{**values, "network": LAttQEConfig(**{**values["network"], "dim": dim})})


# Table 2 of the paper, rows (ii) to (vi), and what its text calls weak.
TABLE_2: dict[str, list[str]] = {
    "full": [],
    "no-attention": ["network.attention=false"],
    "no-position": ["network.positional=false"],
    "no-visual": ["network.visual=false", "network.positional_start=small"],
    "no-auxiliary": ["network.auxiliary=none", "auxiliary=0"],
    "direct": ["network.direct=true", "temperature_steps=0"],
}

# The same questions for the relational network, and what else it is made of.
RELATIONAL: dict[str, list[str]] = {
    "full": [],
    "no-attention": ["network.attention=false", "network.relation_bias=false"],
    "no-position": ["network.positional=false"],
    "no-relations": ["network.relation_bias=false"],
    "no-background": ["network.background=0"],
    "positive-weights": ["network.clamp_negative=true"],
    "with-content": ["network.visual=true", "network.content_dropout=0.3"],
    "with-auxiliary": ["network.auxiliary=cosine", "auxiliary=0.1"],
    "contrastive": ["smooth_ap=0", "contrastive=1", "positives=1"],
    "listwise": ["smooth_ap=0", "pull=1", "listwise=0.3"],
    "no-worlds": ["world_classes=1", "world_images=1"],
}


# A gated network cannot do without relations and background; what it learns from can be taken away.
GATED: dict[str, list[str]] = {
    "full": [],
    "no-attention": ["network.attention=false"],
    "no-auxiliary": ["network.auxiliary=none", "auxiliary=0"],
    "contrastive": RELATIONAL["contrastive"],
    "listwise": RELATIONAL["listwise"],
    "no-hops": ["hop_every=0"],
    "no-altered-spaces": ["altered=0"],
}


def variants(config: TrainingConfig) -> dict[str, list[str]]:
    """The variants that make sense for a configuration: name -> changes, as `--set` takes them."""
    if config.network.gated:
        return GATED
    return RELATIONAL if config.network.relational else TABLE_2
