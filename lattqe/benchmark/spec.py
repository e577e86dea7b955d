"""What a benchmark run measures: read from a TOML file, every key checked, nothing assumed in silence."""

import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lattqe.errors import LattqeError
from lattqe.expansion import METHODS

CHOICES = ("fixed", "validation", "test")
ROLES = ("test", "validation")
LABELS = {"aqe": "AQE", "aqewd": "AQEwD", "dqe": "DQE", "alphaqe": "αQE", "lattqe": "LAttQE"}
DBA_LABELS = {"aqe": "ADBA", "aqewd": "ADBAwD", "dqe": "DDBA", "alphaqe": "αDBA", "lattqe": "LAttDBA"}
NQE_SWEEP = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


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
class Ablation:
    """A trained variant of the network, for Table 2."""

    label: str
    model: str
    nqe: int

    @property
    def setting(self) -> "Setting":
        """How its queries are expanded."""
        return Setting("lattqe", self.nqe, (("model", self.model),))


@dataclass(frozen=True)
class Setting:
    """One way of expanding: a method with its parameters, and the number of neighbors it weighs."""

    method: str
    k: int
    params: tuple[tuple[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"method": self.method, "k": self.k, **dict(self.params)}


@dataclass(frozen=True)
class Method:
    """A method with the settings it may take: one (fixed), or a grid that validation or test decides."""

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

    def variants(self) -> list[tuple[tuple[str, Any], ...]]:
        """All combinations of the method's own parameters."""
        names = sorted(self.params)
        return [tuple(zip(names, values)) for values in itertools.product(*(self.params[name] for name in names))]

    def qe_settings(self) -> list[Setting]:
        """Settings for queries against the original database."""
        return [Setting(self.method, k, params) for params in self.variants() for k in self.nqe]

    def dba_settings(self) -> list[tuple[Setting, Setting]]:
        """Pairs of settings for the database and for the queries that search it; both share the parameters."""
        return [(Setting(self.method, ndba, params), Setting(self.method, nqe, params))
                for params in self.variants() for ndba in self.ndba for nqe in self.nqe_with_dba]


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


def load_run(path: str | Path) -> Run:
    """Read a run's TOML file; relative addresses in it are taken from its own folder."""
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise LattqeError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LattqeError(f"{path} is not valid TOML: {error}") from error
    return parse_run(content, path.parent, str(path))


def parse_run(content: Mapping[str, Any], folder: Path, where: str) -> Run:
    """Make a Run of parsed TOML; unknown keys, wrong types and contradictions are refused by name."""
    _known(content, {"title", "dataset", "distractors", "method", "ablation", "nqe_sweep", "published", "bootstrap"},
           where)
    datasets = tuple(_dataset(entry, folder, where) for entry in _tables(content, "dataset", where))
    methods = tuple(_method(entry, folder, where) for entry in _tables(content, "method", where))
    distractors = tuple(_distractors(entry, folder, where) for entry in _tables(content, "distractors", where))
    ablations = tuple(_ablation(entry, folder, where) for entry in _tables(content, "ablation", where))
    run = Run(str(content.get("title", "Benchmark")), datasets, methods, distractors, ablations,
              _numbers(content.get("nqe_sweep", NQE_SWEEP), "nqe_sweep", where),
              bool(content.get("published", False)), int(content.get("bootstrap", 10_000)))
    if not run.datasets_of("test"):
        raise LattqeError(f"{where}: no [[dataset]] with role 'test': there is nothing to measure")
    if not methods:
        raise LattqeError(f"{where}: no [[method]]: there is nothing to compare")
    if any(method.choose == "validation" for method in methods) and not run.datasets_of("validation"):
        raise LattqeError(f"{where}: a method is chosen on validation, but no [[dataset]] has role 'validation'")
    for each in distractors:
        if each.of is not None and each.of not in [dataset.name for dataset in datasets]:
            raise LattqeError(f"{where}: distractors {each.name!r} are of {each.of!r}, which is no [[dataset]]")
    for kind, names in (("dataset", [each.name for each in datasets]), ("method", [each.label for each in methods])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise LattqeError(f"{where}: two entries of [[{kind}]] are called {twice[0]!r}")
    return run


def _tables(content: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    entries = content.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise LattqeError(f"{where}: write each {key} as a table [[{key}]]")
    return entries


def _known(entry: Mapping[str, Any], keys: set[str], where: str) -> None:
    unknown = sorted(set(entry) - keys)
    if unknown:
        raise LattqeError(f"{where}: unknown key {unknown[0]!r}: known are {', '.join(sorted(keys))}")


def _text(entry: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str) or not value:
        raise LattqeError(f"{where}: {key} must be a text, not {value!r}")
    return value


def _address(value: str, folder: Path) -> str:
    return value if "://" in value or Path(value).is_absolute() else str(folder / value)


def _dataset(entry: Mapping[str, Any], folder: Path, where: str) -> Dataset:
    _known(entry, {"name", "database", "queries", "truth", "role"}, where)
    truth = _text(entry, "truth", where, "labels")
    role = _text(entry, "role", where, "test")
    if role not in ROLES:
        raise LattqeError(f"{where}: role is {role!r}: use one of {', '.join(ROLES)}")
    return Dataset(_text(entry, "name", where), _address(_text(entry, "database", where), folder),
                   _address(_text(entry, "queries", where), folder),
                   truth if truth == "labels" else _address(truth, folder), role)


def _distractors(entry: Mapping[str, Any], folder: Path, where: str) -> Distractors:
    _known(entry, {"name", "features", "of"}, where)
    return Distractors(_text(entry, "name", where), _address(_text(entry, "features", where), folder), entry.get("of"))


def _ablation(entry: Mapping[str, Any], folder: Path, where: str) -> Ablation:
    _known(entry, {"label", "model", "nqe"}, where)
    (nqe,) = _numbers(entry.get("nqe", 64), "nqe", where)
    return Ablation(_text(entry, "label", where), _address(_text(entry, "model", where), folder), nqe)


def _method(entry: Mapping[str, Any], folder: Path, where: str) -> Method:
    own = {"alphaqe": {"alpha"}, "dqe": {"C", "negatives"}, "lattqe": {"model"}}
    name = _text(entry, "method", where)
    if name not in METHODS:
        raise LattqeError(f"{where}: unknown method {name!r}: use one of {', '.join(METHODS)}")
    _known(entry, {"method", "label", "choose", "nqe", "ndba", "nqe_with_dba"} | own.get(name, set()), where)
    choose = _text(entry, "choose", where, "fixed")
    if choose not in CHOICES:
        raise LattqeError(f"{where}: choose is {choose!r}: use one of {', '.join(CHOICES)}")
    params = {key: tuple(entry[key]) if isinstance(entry[key], list) else (entry[key],)
              for key in own.get(name, set()) & set(entry)}
    if name == "lattqe":
        params["model"] = (_address(_text(entry, "model", where), folder),)
    if "nqe" not in entry:
        raise LattqeError(f"{where}: method {name!r} needs nqe, the number of neighbors for queries")
    method = Method(name, _text(entry, "label", where, LABELS[name]), choose, _numbers(entry["nqe"], "nqe", where),
                    _numbers(entry.get("ndba", ()), "ndba", where),
                    _numbers(entry.get("nqe_with_dba", entry["nqe"]), "nqe_with_dba", where), params)
    if choose == "fixed" and (len(method.qe_settings()) > 1 or len(method.dba_settings()) > 1):
        raise LattqeError(f"{where}: method {method.label!r} is fixed but has several settings: give one, or set "
                          "choose to 'validation' or 'test'")
    return method


def _numbers(value: Any, key: str, where: str) -> tuple[int, ...]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in values):
        raise LattqeError(f"{where}: {key} must be whole numbers from 1, not {value!r}")
    return tuple(values)
