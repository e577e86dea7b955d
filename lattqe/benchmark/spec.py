"""What a run measures: data sets, distractors, methods with their settings, how those are chosen, and what a trained
model says about how to use it.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lattqe.errors import LattqeError
from lattqe.expansion import METHODS
from lattqe.expansion.base import Described
from lattqe.expansion.diffusion import RANKERS, Propagation
from lattqe.store import load_model, open_place

# fixed: given; validation, test: the best of a grid there; model: what training chose on its own validation sets.
CHOICES = ("fixed", "validation", "test", "model")
ROLES = ("test", "validation")
TABLE2_NQE = 64  # of the paper's Table 2
NQE_SWEEP = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
NUMBERS = ("nqe", "ndba", "nqe_with_dba")

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
    """Rows that are relevant to no query; `of` names the one data set they are for, None: all of them."""

    name: str
    features: str
    of: str | None = None


@dataclass(frozen=True)
class Setting:
    """One step of a pipeline: a method with its parameters, and the number of neighbors it weighs."""

    method: str
    k: int
    params: Params = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"method": self.method, "k": self.k, **dict(self.params)}


@dataclass(frozen=True)
class Pipeline:
    """How rows and queries are treated: rows augmented, queries expanded, rows ranked otherwise than by products."""

    dba: Setting | None = None
    qe: Setting | None = None
    rank: Setting | None = None


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
class Candidate:
    """A method with the settings it may take: one, or a grid that validation or test decides.

    The method's own parameters and nQE are settled for queries first; nDBA and the nQE that goes with it are settled
    after that, with those parameters, or with `own_dba` with all of them again.
    """

    method: str
    label: str
    choose: str
    nqe: tuple[int, ...]
    ndba: tuple[int, ...] = ()
    nqe_with_dba: tuple[int, ...] = ()
    params: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    own_dba: bool = False

    @property
    def dba_label(self) -> str:
        """'AQE' -> 'ADBA + AQE'."""
        return f"{METHODS[self.method].dba_label} + {self.label}"

    def variants(self) -> list[Params]:
        """All combinations of the method's own parameters."""
        return combinations(self.params)

    def qe_settings(self) -> list[Setting]:
        """Settings for queries against the original database."""
        return [Setting(self.method, k, params) for params in self.variants() for k in self.nqe]

    def dba_settings(self, params: Params) -> list[tuple[Setting, Setting]]:
        """Pairs of settings for the database and for the queries that search it, with the parameters settled."""
        return [
            (Setting(self.method, ndba, params), Setting(self.method, nqe, params))
            for ndba in self.ndba
            for nqe in self.nqe_with_dba
        ]


@dataclass(frozen=True)
class GraphCandidate:
    """A method on the whole graph with the pipelines it may take: diffusion alone or after DBA + QE, propagation."""

    method: str
    label: str
    choose: str
    pipelines: tuple[Pipeline, ...]


def combinations(params: Mapping[str, tuple[Any, ...]]) -> list[Params]:
    """All combinations of parameters that each may take several values."""
    names = sorted(params)
    return [tuple(zip(names, values)) for values in itertools.product(*(params[name] for name in names))]


def tuned(method: str, choose: str = "test") -> Candidate:
    """A method without learning over all that its class says is worth trying."""
    of = METHODS[method]
    return Candidate(
        method,
        of.label,
        choose,
        of.tries_k,
        *of.tries_dba,
        {name: each.tries for name, each in of.parameters().items()},
    )


GRAPH_METHODS: dict[str, type[Described]] = {**RANKERS, Propagation.name: Propagation}


def graph_candidate(
    method: str,
    choose: str,
    label: str = "",
    before: Pipeline | None = None,
    adapt: bool = False,
    **tries: tuple[Any, ...],
) -> GraphCandidate:
    """A method on the whole graph, over the values given and those its class says are worth trying.

    before: what is done first. A ranker follows it; propagation takes the place of its augmentation.
    adapt: rows, which nothing augmented before, are adapted to their collection first.
    """
    of: Any = GRAPH_METHODS[method]
    before = before or Pipeline()
    own = {name: tries.get(name, each.tries) for name, each in of.parameters().items()}
    first = next(iter(own))  # kq, k: what Setting calls k
    space: Params = (("adapt", True),) if adapt else ()
    settings = [
        Setting(method, k, (*space, *params))
        for params in combinations({n: v for n, v in own.items() if n != first})
        for k in own[first]
    ]
    ranks = method in RANKERS
    pipelines = tuple(
        Pipeline(before.dba, before.qe, each) if ranks else Pipeline(each, before.qe) for each in settings
    )
    return GraphCandidate(method, label or of.label, choose, pipelines)


def graph_method(setting: Setting) -> Any:
    """The ranker, or the propagation, of a setting."""
    of = GRAPH_METHODS[setting.method]
    own = {name: value for name, value in setting.params if name != "adapt"}  # the rows' matter, not the method's
    return of(**{next(iter(of.parameters())): setting.k, **own})


def describe_steps(pipeline: Pipeline) -> dict[str, Any]:
    """{"dba": ..., "qe": ..., "rank": ...}, None where there is nothing to do."""
    steps = {"dba": pipeline.dba, "qe": pipeline.qe, "rank": pipeline.rank}
    return {name: step.to_dict() if step else None for name, step in steps.items()}


def setting_parts(row: Mapping[str, Any]) -> dict[str, str]:
    """{'nDBA': '48', 'nQE': '64', 'α': '3'} of one row of Table 3; parameters by the symbols their methods give."""
    parts: dict[str, str] = {}
    for name, step in (("nDBA", row["dba"]), ("nQE", row["qe"]), ("", row["rank"])):
        if step is None:
            continue
        of = GRAPH_METHODS.get(step["method"]) or METHODS[step["method"]]
        known = of.parameters()
        first = next(iter(known.values())).symbol if step["method"] in GRAPH_METHODS else name
        parts[first] = str(step["k"])
        parts |= {"hops": str(step["hops"])} if "hops" in step else {}
        parts |= {"hop α": f"{step['hop_alpha']:g}"} if "hop_alpha" in step else {}
        parts |= {"space": "adapted"} if step.get("adapt") else {}
        parts |= {
            known[key].symbol: value if isinstance(value, str) else f"{value:g}"
            for key, value in step.items()
            if key in known and not known[key].address and (name != "nDBA" or step["method"] in GRAPH_METHODS)
        }
    return parts


def describe_setting(row: Mapping[str, Any]) -> str:
    """'nDBA 48, nQE 64, α 3' of one row of Table 3."""
    return ", ".join(f"{name} {value}" for name, value in setting_parts(row).items())


def is_learned(method: str) -> bool:
    """Whether a row's method is a trained one; 'none' and the rivals on the graph are not."""
    return method in METHODS and METHODS[method].learned


@dataclass(frozen=True)
class Run:
    """A whole run."""

    title: str
    datasets: tuple[Dataset, ...]
    methods: tuple[Candidate, ...]
    distractors: tuple[Distractors, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    nqe_sweep: tuple[int, ...] = NQE_SWEEP
    published: bool = False  # show the paper's numbers beside ours, and check the golden ones
    bootstrap: int = 10_000
    graph_methods: tuple[GraphCandidate, ...] = ()
    more_sweeps: tuple[tuple[str, Setting], ...] = ()  # figure 3: further lines, labels and the parameters they keep
    regime_settings: tuple[Setting, ...] = ()  # figure 4: settings by method; else those of the table
    graphs: tuple[str, ...] = ()  # finished graphs of its rows, which need not be computed

    @property
    def entries(self) -> list[Candidate | GraphCandidate]:
        """All that is compared, in order."""
        return [*self.methods, *self.graph_methods]

    def datasets_of(self, role: str) -> list[Dataset]:
        """The datasets that are tested, or that choose parameters."""
        return [dataset for dataset in self.datasets if dataset.role == role]

    def distractors_of(self, dataset: str) -> list[Distractors]:
        """The distractors that a data set is also measured with."""
        return [each for each in self.distractors if each.of in (None, dataset)]

    def columns(self) -> list[tuple[Dataset, str | None]]:
        """The columns of Table 3: each tested data set alone and with each set of distractors."""
        return [
            (dataset, distractors)
            for dataset in self.datasets_of("test")
            for distractors in (None, *(each.name for each in self.distractors_of(dataset.name)))
        ]

    def augmentations(self) -> list[Setting]:
        """The settings of database rows whose weights come from a graph of neighbors."""
        plain = [pair[0] for each in self.methods for params in each.variants() for pair in each.dba_settings(params)]
        hopping = [each.dba for method in self.graph_methods for each in method.pipelines if each.dba is not None]
        return [*plain, *(each for each in hopping if each.method not in GRAPH_METHODS)]

    def expansions(self) -> list[Setting]:
        """The settings of queries that it names, in whatever rows they search."""
        alone = [setting for each in self.methods for setting in each.qe_settings()]
        with_dba = [
            pair[1] for each in self.methods for params in each.variants() for pair in each.dba_settings(params)
        ]
        on_graph = [each.qe for method in self.graph_methods for each in method.pipelines if each.qe is not None]
        return [*alone, *with_dba, *on_graph, *(each.setting for each in self.ablations)]

    def models(self) -> list[str]:
        """The addresses of all models, sorted."""
        steps = [
            step for method in self.graph_methods for each in method.pipelines for step in (each.dba, each.qe) if step
        ]
        found = {value for method in self.methods for value in method.params.get("model", ())}
        found |= {each.model for each in self.ablations}
        return sorted(found | {dict(step.params)["model"] for step in steps if "model" in dict(step.params)})


def chosen_neighbors(model: str) -> dict[str, int]:
    """The nQE, nDBA and nQE with DBA that training chose on its validation sets and stored with the model."""
    metrics: dict[str, Any] = load_model(model)[2]
    chosen = metrics.get("chosen", metrics)
    if not all(isinstance(chosen.get(name), int) and chosen[name] > 0 for name in NUMBERS):
        raise LattqeError(
            f"{model} does not say which numbers of neighbors its training chose: give nqe, ndba and "
            "nqe_with_dba yourself"
        )
    return {name: chosen[name] for name in NUMBERS}


def as_trained(model: str, label: str = METHODS["lattqe"].label, method: str = "lattqe") -> Candidate:
    """A learned method with the numbers of neighbors that its training chose."""
    chosen = chosen_neighbors(model)
    return Candidate(
        method, label, "model", (chosen["nqe"],), (chosen["ndba"],), (chosen["nqe_with_dba"],), {"model": (model,)}
    )


def with_hops(methods: Sequence[Candidate]) -> tuple[GraphCandidate, ...]:
    """What `lattqe augment` makes of the models among some methods, and `lattqe search` searches: augmentations that
    flow on over the graph, as often as training chose, in the space they were chosen for; none where it chose one hop.
    """
    found = []
    for each in methods:
        if each.choose != "model":
            continue
        of, model = METHODS[each.method], each.params["model"][0]
        metrics, chosen = load_model(model)[2], chosen_neighbors(model)
        hops = metrics.get("hops", 1)
        if not isinstance(hops, int) or hops < 2:
            continue
        adapts: Params = (("adapt", True),) if metrics.get("adapt") is True else ()
        rows = Setting(each.method, chosen["ndba"], (*adapts, ("hops", hops), ("model", model)))
        queries = Setting(each.method, chosen["nqe_with_dba"], (("model", model),))
        label = f"{of.dba_label}, {hops} hops + {of.label}" if each.label == of.label else f"{each.label}, {hops} hops"
        found.append(GraphCandidate(each.method, label, "model", (Pipeline(rows, queries),)))
    return tuple(found)


def hopping(method: Candidate, hops: tuple[int, ...], alphas: tuple[float, ...]) -> GraphCandidate:
    """The line of a method whose augmentations flow on over the graph, as `lattqe augment --hops` makes them.

    Several values are all tried, with all of its other settings. alphas: none is the method's own share.
    """
    of = METHODS[method.method]
    shares: list[Params] = [(("hop_alpha", alpha),) for alpha in alphas] or [()]
    pipelines = []
    for params, share, number in itertools.product(method.variants(), shares, hops):
        adapts = of.learned and load_model(dict(params)["model"])[2].get("adapt") is True
        space: Params = (("adapt", True),) if adapts else ()
        pipelines += [
            Pipeline(Setting(rows.method, rows.k, (*space, *share, ("hops", number), *params)), queries)
            for rows, queries in method.dba_settings(params)
        ]
    several = " or ".join(map(str, hops))
    label = f"{of.dba_label}, {several} hops + {method.label}"
    return GraphCandidate(method.method, label, method.choose, tuple(pipelines))


def trained_ablations(folder: str) -> tuple[Ablation, ...]:
    """The variants that `lattqe ablate --to folder` trained, each at the paper's nQE and at what validation chose.

    Table 2 is printed at nQE 64, which some variants cannot use: each is shown at its best too.
    """
    place = open_place(folder)
    if not place.exists("ablations.json"):
        raise LattqeError(f"{folder} has no ablations.json: give the folder of a finished lattqe ablate")
    try:
        names = list(json.loads(place.read("ablations.json")))
    except (ValueError, TypeError, RecursionError) as error:
        raise LattqeError(f"{folder}/ablations.json is not valid JSON ({error}): run lattqe ablate again") from error
    models = {
        name: f"{folder.rstrip('/')}/{name}"
        for name in names
        if isinstance(name, str) and name and "/" not in name and ".." not in name
    }
    best = {name: chosen_neighbors(model)["nqe"] for name, model in models.items()}
    settings = {name: load_model(model)[1].get("network") or {} for name, model in models.items()}
    most = {name: int(each.get("max_k", best[name])) for name, each in settings.items()}
    return tuple(
        Ablation(f"{name}, nQE {k}", model, k)
        for name, model in models.items()
        for k in dict.fromkeys((min(TABLE2_NQE, most[name]), best[name]))
    )
