"""What a benchmark run measures: data sets, distractors, methods with their settings, and how those are chosen."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# fixed: given; validation, test: the best of a grid there; model: what training chose on its own validation sets.
CHOICES = ("fixed", "validation", "test", "model")
ROLES = ("test", "validation")
LABELS = {"aqe": "AQE", "aqewd": "AQEwD", "dqe": "DQE", "alphaqe": "αQE", "lattqe": "LAttQE"}
DBA_LABELS = {"aqe": "ADBA", "aqewd": "ADBAwD", "dqe": "DDBA", "alphaqe": "αDBA", "lattqe": "LAttDBA"}
NQE_SWEEP = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)

Params = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Dataset:
    """Queries, the rows they search, and what is relevant: a gnd_*.pkl or .json file, or 'labels'."""

    name: str
    database: str
    queries: str
    truth: str = "labels"
    role: str = "test"


@dataclass(frozen=True)
class Distractors:
    """Rows that are relevant to nobody; `of` names the one data set they are for, None: all of them."""

    name: str
    features: str
    of: str | None = None


@dataclass(frozen=True)
class Setting:
    """One way of expanding: a method with its parameters, and the number of neighbors it weighs."""

    method: str
    k: int
    params: Params = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"method": self.method, "k": self.k, **dict(self.params)}


@dataclass(frozen=True)
class Ablation:
    """A trained variant of the network, for Table 2."""

    label: str
    model: str
    nqe: int

    @property
    def setting(self) -> Setting:
        """How its queries are expanded."""
        return Setting("lattqe", self.nqe, (("model", self.model),))


@dataclass(frozen=True)
class Method:
    """A method with the settings it may take: one, or a grid that validation or test decides.

    The method's own parameters and nQE are settled for queries first; nDBA and the nQE that goes with it are settled
    after that, with those parameters.
    """

    method: str
    label: str
    choose: str
    nqe: tuple[int, ...]
    ndba: tuple[int, ...] = ()
    nqe_with_dba: tuple[int, ...] = ()
    params: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def dba_label(self) -> str:
        """'AQE' -> 'ADBA + AQE'."""
        return f"{DBA_LABELS[self.method]} + {self.label}"

    def variants(self) -> list[Params]:
        """All combinations of the method's own parameters."""
        names = sorted(self.params)
        return [tuple(zip(names, values)) for values in itertools.product(*(self.params[name] for name in names))]

    def qe_settings(self) -> list[Setting]:
        """Settings for queries against the original database."""
        return [Setting(self.method, k, params) for params in self.variants() for k in self.nqe]

    def dba_settings(self, params: Params) -> list[tuple[Setting, Setting]]:
        """Pairs of settings for the database and for the queries that search it, with the parameters settled."""
        return [(Setting(self.method, ndba, params), Setting(self.method, nqe, params))
                for ndba in self.ndba for nqe in self.nqe_with_dba]


@dataclass(frozen=True)
class Run:
    """A whole run."""

    title: str
    datasets: tuple[Dataset, ...]
    methods: tuple[Method, ...]
    distractors: tuple[Distractors, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    nqe_sweep: tuple[int, ...] = NQE_SWEEP
    published: bool = False  # show the paper's numbers beside ours, and check the golden ones
    bootstrap: int = 10_000

    def datasets_of(self, role: str) -> list[Dataset]:
        """The datasets that are tested, or that choose parameters."""
        return [dataset for dataset in self.datasets if dataset.role == role]

    def distractors_of(self, dataset: str) -> list[Distractors]:
        """The distractors that a data set is also measured with."""
        return [each for each in self.distractors if each.of in (None, dataset)]

    def columns(self) -> list[tuple[Dataset, str | None]]:
        """The columns of Table 3: each tested data set alone and with each set of distractors."""
        return [(dataset, distractors) for dataset in self.datasets_of("test")
                for distractors in (None, *(each.name for each in self.distractors_of(dataset.name)))]
