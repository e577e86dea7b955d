"""Reading a run's TOML file: every key checked, nothing assumed in silence."""

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lattqe.benchmark.spec import (
    CHOICES,
    GRAPH_METHODS,
    NQE_SWEEP,
    ROLES,
    Ablation,
    Candidate,
    Dataset,
    Distractors,
    GraphCandidate,
    Pipeline,
    Run,
    Setting,
    as_trained,
    graph_candidate,
    graph_method,
    hopping,
    trained_ablations,
    with_hops,
)
from lattqe.errors import LattqeError
from lattqe.expansion import METHODS, create
from lattqe.expansion.base import HOP_ALPHA, check_hops
from lattqe.store.models import SHIPPED, model_address

MOST_BYTES = 1 << 20  # of a run's file: more is not written by hand
MOST_NESTED = 8
# From the beginning of a word on and never back: else the time grows with the square of a long word.
MANY_DOTS = re.compile(rb"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){64}""")
MOST_NUMBER = 10**6  # of neighbors, and of resamples: beyond it memory ends before sense does
RUN_KEYS = {"title", "dataset", "distractors", "method", "ablation", "ablations"}
RUN_KEYS |= {"nqe_sweep", "published", "bootstrap", "graphs"}
HOP_KEYS = ("hops", "hop_alpha")  # of every method that augments rows


def load_run(path: str | Path) -> Run:
    """Read a run's TOML file; relative addresses in it are taken from its own folder."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise LattqeError(
                f"{path} has more than {MOST_BYTES:,} bytes: a run file names data, it does not contain any"
            )
        if MANY_DOTS.search(data):  # time grows with the square of their number
            raise RecursionError
        content = tomllib.loads(data.decode())
    except OSError as error:
        raise LattqeError(f"cannot read {path}: {error.strerror}: give a TOML file, or a preset") from error
    except RecursionError:
        raise LattqeError(f"{path} is not valid TOML for a run: its values are nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise LattqeError(f"{path} is not valid TOML: {error}") from error
    return parse_run(content, path.parent, str(path))


def parse_run(content: Mapping[str, Any], folder: Path, where: str) -> Run:
    """Make a Run of parsed TOML; unknown keys, wrong types and contradictions are refused by name."""
    _check_values(content, where)
    top = Entry(content, folder, where)
    top.known(RUN_KEYS)
    methods, on_graph = [], []
    for entry in top.tables("method"):
        if _on_graph(entry):
            on_graph.append(_graph_method(entry))
            continue
        methods.append(_method(entry))
        on_graph += _hopping(entry, methods[-1])
    run = Run(
        title=top.text("title", "Benchmark"),
        datasets=tuple(_dataset(entry) for entry in top.tables("dataset")),
        methods=tuple(methods),
        graph_methods=(*on_graph, *with_hops(methods)),
        distractors=tuple(_distractors(entry) for entry in top.tables("distractors")),
        ablations=(
            *(_ablation(entry) for entry in top.tables("ablation")),
            *(trained_ablations(top.address("ablations")) if "ablations" in content else ()),
        ),
        nqe_sweep=top.numbers("nqe_sweep", NQE_SWEEP),
        published=top.flag("published"),
        bootstrap=top.numbers("bootstrap", (10_000,))[0],
        graphs=top.addresses("graphs"),
    )
    _check_run(run, where)
    return run


def _check_values(content: Mapping[str, Any], where: str) -> None:
    """Refuse what cannot even be shown in a message: numbers beyond 64 bits, and tables nested by dots forever."""
    todo: list[tuple[Any, int]] = [(content, 0)]
    while todo:
        value, depth = todo.pop()
        if depth > MOST_NESTED:
            raise LattqeError(f"{where}: its values are nested too deeply")
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise LattqeError(f"{where} has a number beyond 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise LattqeError(f"{where} has {value} where a number is needed")
        if isinstance(value, Mapping | list):
            todo += [(each, depth + 1) for each in (value.values() if isinstance(value, Mapping) else value)]


def _check_run(run: Run, where: str) -> None:
    """Refuse what is whole in its parts but contradicts itself."""
    if not run.datasets_of("test"):
        raise LattqeError(f"{where}: no [[dataset]] with role 'test': there is nothing to measure")
    if not run.methods and not run.graph_methods:
        raise LattqeError(f"{where}: no [[method]]: there is nothing to compare")
    if any(method.choose == "validation" for method in run.entries) and not run.datasets_of("validation"):
        raise LattqeError(f"{where}: a method is chosen on validation, but no [[dataset]] has role 'validation'")
    names = [dataset.name for dataset in run.datasets]
    for each in run.distractors:
        if each.of is not None and each.of not in names:
            raise LattqeError(
                f"{where}: distractors {each.name!r} belong to {each.of!r}, but no [[dataset]] has that name"
            )
    columns = [f"{dataset.name}+{distractors}" for dataset, distractors in run.columns()]
    for kind, found in (
        ("dataset", names),
        ("distractors", columns),
        ("method", [one.label for one in run.entries]),
        ("ablation", [one.label for one in run.ablations]),
    ):
        twice = sorted({name for name in found if found.count(name) > 1})
        if twice:
            raise LattqeError(f"{where}: two entries of [[{kind}]] are called {twice[0]!r}")


@dataclass(frozen=True)
class Entry:
    """One table of the file; readers of its values name the file, the key and the value they refuse."""

    content: Mapping[str, Any]
    folder: Path
    where: str

    def known(self, keys: set[str]) -> None:
        """Refuse keys that mean nothing here."""
        unknown = sorted(set(self.content) - keys)
        if unknown:
            raise LattqeError(f"{self.where}: unknown key {unknown[0]!r}: known are {', '.join(sorted(keys))}")

    def tables(self, key: str) -> list["Entry"]:
        """The tables [[key]]."""
        entries = self.content.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise LattqeError(f"{self.where}: write each {key} as a table [[{key}]]")
        return [
            Entry(entry, self.folder, f"{self.where}, {key} {number}") for number, entry in enumerate(entries, start=1)
        ]

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty."""
        value = self.content.get(key, default)
        if not isinstance(value, str) or not value:
            raise LattqeError(f"{self.where}: {key} must be a string, not {value!r}")
        return value

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        """One of a few words."""
        value = self.text(key, default)
        if value not in allowed:
            raise LattqeError(f"{self.where}: {key} is {value!r}: use one of {', '.join(allowed)}")
        return value

    def address(self, key: str) -> str:
        """A file or folder, relative to the run's file, or an s3:// address."""
        value = self.text(key)
        return value if "://" in value or Path(value).is_absolute() else str(self.folder / value)

    def addresses(self, key: str) -> tuple[str, ...]:
        """A list of addresses; none where it is not given."""
        values = self.content.get(key, [])
        if not isinstance(values, list):
            raise LattqeError(f"{self.where}: {key} must be a list of addresses, not {values!r}")
        return tuple(Entry({key: value}, self.folder, self.where).address(key) for value in values)

    def model(self) -> str:
        """The address of the entry's model; without one, or by its name, that of the model that ships."""
        if self.content.get("model") in (None, *SHIPPED):
            return model_address(self.content.get("model"))
        return self.address("model")

    def flag(self, key: str) -> bool:
        """True or false; false where it is not given."""
        value = self.content.get(key, False)
        if not isinstance(value, bool):
            raise LattqeError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value

    def numbers(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """One whole number from 1, or a list of them."""
        value = self.content.get(key, default)
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in values):
            raise LattqeError(f"{self.where}: {key} must be whole numbers from 1, not {value!r}")
        if max(values, default=0) > MOST_NUMBER:
            raise LattqeError(f"{self.where}: {key} is {max(values):.3g}: use at most {MOST_NUMBER:,}")
        if key in self.content and not values:
            raise LattqeError(f"{self.where}: {key} is an empty list: give a number, or leave it out")
        return tuple(dict.fromkeys(values))

    def values(self, key: str, kind: type) -> tuple[Any, ...]:
        """One number (or text), or a list to choose from, as int, float or str."""
        value = self.content[key]
        values = value if isinstance(value, list) else [value]
        if kind is str:
            if not values or not all(isinstance(each, str) for each in values):
                raise LattqeError(f"{self.where}: {key} must be a string, not {value!r}")
            return tuple(values)
        allowed = int if kind is int else (int, float)
        if not values or not all(isinstance(each, allowed) and not isinstance(each, bool) for each in values):
            raise LattqeError(f"{self.where}: {key} must be {kind.__name__} numbers, not {value!r}")
        return tuple(kind(each) for each in values)


def _dataset(entry: Entry) -> Dataset:
    entry.known({"name", "database", "queries", "truth", "role"})
    truth = "labels" if entry.text("truth", "labels") == "labels" else entry.address("truth")
    return Dataset(
        entry.text("name"),
        entry.address("database"),
        entry.address("queries"),
        truth,
        entry.one_of("role", ROLES, "test"),
    )


def _distractors(entry: Entry) -> Distractors:
    entry.known({"name", "features", "of"})
    of = entry.text("of") if "of" in entry.content else None
    return Distractors(entry.text("name"), entry.address("features"), of)


def _ablation(entry: Entry) -> Ablation:
    entry.known({"label", "model", "nqe"})
    model = entry.address("model")
    nqe = entry.numbers("nqe") or as_trained(model).nqe
    if len(nqe) > 1:
        raise LattqeError(f"{entry.where}: nqe must be one number, not {list(nqe)}")
    return Ablation(entry.text("label"), model, nqe[0])


def _on_graph(entry: Entry) -> bool:
    return entry.content.get("method") in list(GRAPH_METHODS)


def _method(entry: Entry) -> Candidate:
    name = entry.one_of("method", (*METHODS, *GRAPH_METHODS), "")
    of = METHODS[name]
    entry.known({"method", "label", "choose", "nqe", "ndba", "nqe_with_dba", *HOP_KEYS, *of.parameters()})
    label = entry.text("label", of.label)
    if of.learned and "nqe" not in entry.content:
        for key in ("choose", "ndba", "nqe_with_dba", *HOP_KEYS):
            if key in entry.content and entry.content[key] != "model":
                raise LattqeError(
                    f"{entry.where}: {key} without nqe: give nqe too, or neither, to take what the "
                    "model's training chose"
                )
        return as_trained(entry.model(), label, name)
    choose = entry.one_of("choose", CHOICES[:-1], "fixed")
    nqe, ndba = entry.numbers("nqe"), entry.numbers("ndba")
    if not nqe:
        raise LattqeError(f"{entry.where}: method {name!r} needs nqe, the number of neighbors for queries")
    params = {
        key: ((entry.model() if key == "model" else entry.address(key)),)
        if each.address
        else entry.values(key, each.kind)
        for key, each in of.parameters().items()
        if key in entry.content or (each.address and of.learned)
    }
    method = Candidate(name, label, choose, nqe, ndba, entry.numbers("nqe_with_dba", nqe) if ndba else (), params)
    if choose == "fixed" and max(len(method.qe_settings()), len(method.dba_settings(method.variants()[0]))) > 1:
        raise _not_fixed(entry, label)
    if not of.learned:  # a network is loaded, and its values are checked, when the run is planned
        for each in method.variants():
            _checked(entry, lambda each=each: create(name, **dict(each)))  # type: ignore[misc]
    return method


def _hopping(entry: Entry, method: Candidate) -> list[GraphCandidate]:
    """The further line of a method whose entry names `hops`, with the share `hop_alpha`; else none."""
    if "hops" not in entry.content:
        if "hop_alpha" in entry.content:
            raise LattqeError(f"{entry.where}: hop_alpha needs hops: add hops = 8, or leave it out")
        return []
    if not method.ndba:
        raise LattqeError(f"{entry.where}: hops need ndba, the number of neighbors of a database row: give it too")
    hops = entry.numbers("hops")
    if min(hops) < 2:
        raise LattqeError(f"{entry.where}: hops is 1, which ndba alone measures already: use 2 or more")
    alphas = entry.values("hop_alpha", float) if "hop_alpha" in entry.content else ()
    _checked(entry, lambda: check_hops(max(hops), HOP_ALPHA))
    for alpha in alphas:
        _checked(replace(entry, where=f"{entry.where}, hop_alpha"), lambda alpha=alpha: check_hops(2, alpha))  # type: ignore[misc]
    if method.choose == "fixed" and len(hops) * max(len(alphas), 1) > 1:
        raise _not_fixed(entry, method.label)
    return [hopping(method, hops, alphas)]


def _graph_method(entry: Entry) -> GraphCandidate:
    """Diffusion or propagation; `before` names the method of the DBA (`ndba`) and the QE (`nqe`) that come first."""
    name = entry.text("method")
    own = GRAPH_METHODS[name].parameters()
    entry.known({"method", "label", "choose", "before", "ndba", "nqe", *own})
    before = Pipeline()
    if "before" in entry.content:
        first = entry.one_of("before", tuple(each for each, of in METHODS.items() if not of.learned), "")
        one = [entry.numbers(key) for key in ("ndba", "nqe")]
        if not any(one) or any(len(numbers) > 1 for numbers in one):
            raise LattqeError(f"{entry.where}: before needs ndba or nqe, one number each")
        before = Pipeline(*(Setting(first, numbers[0]) if numbers else None for numbers in one))
    elif "ndba" in entry.content or "nqe" in entry.content:
        raise LattqeError(f"{entry.where}: ndba and nqe of {name} need before, the method that uses them")
    choose = entry.one_of("choose", CHOICES[:-1], "fixed")
    tries = {
        key: entry.values(key, each.kind) if key in entry.content else (each.default,) for key, each in own.items()
    }
    candidate = graph_candidate(name, choose, entry.text("label", GRAPH_METHODS[name].label), before, False, **tries)
    if choose == "fixed" and len(candidate.pipelines) > 1:
        raise _not_fixed(entry, candidate.label)
    for each in candidate.pipelines:
        setting = each.rank or each.dba
        _checked(entry, lambda setting=setting: graph_method(setting))  # type: ignore[misc]
    return candidate


def _checked(entry: Entry, make: Callable[[], Any]) -> None:
    """Refuse values that a method itself refuses, naming the entry."""
    try:
        make()
    except LattqeError as error:
        raise LattqeError(f"{entry.where}: {error}") from None


def _not_fixed(entry: Entry, label: str) -> LattqeError:
    return LattqeError(
        f"{entry.where}: method {label!r} is fixed but has several settings: give one, or set choose to "
        "'validation' or 'test'"
    )
