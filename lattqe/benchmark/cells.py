"""The data sets of a run, opened and checked; and its cells: one set, with or without distractors, under one pipeline.

What does not fit together is refused by name before anything runs. A cell is kept in a file.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from lattqe import adaptation
from lattqe.augmentation.recipe import Augmentation
from lattqe.benchmark.spec import Dataset, Params, Pipeline, Setting, graph_method
from lattqe.datasets.revisited import RevisitedSet, load_gnd
from lattqe.device import peak_bytes
from lattqe.duplicates import own_rows
from lattqe.errors import LattqeError
from lattqe.evaluation import GroundTruth, LabelTruth, Scores, evaluate, score_ranking
from lattqe.evaluation.analysis import weights_by_rank
from lattqe.evaluation.truth import label_truth
from lattqe.expansion import METHODS, Method, create
from lattqe.expansion.diffusion import GraphRows
from lattqe.expansion.rows import Found, candidates, expand_queries, nearest
from lattqe.formats.source import local_files
from lattqe.search import Index
from lattqe.store import FeatureSet, NeighborGraph, read_manifest
from lattqe.store.manifest import canonical_json
from lattqe.store.place import MissingFileError, Place, open_place

ADAPTED = "adapted"  # of rows in the space that was adapted to them
COMPARED_ROWS = 65_536  # of two sets at once
FORMAT = 2  # of a stored cell; raised when the same key would hold other numbers


@dataclass(frozen=True)
class OpenedDataset:
    """A data set: its rows, queries, ground truth, and the digest of the last."""

    database: FeatureSet
    queries: FeatureSet
    truth: GroundTruth
    truth_digest: str
    exclude: np.ndarray | None = None  # (nq,) the row of each query that is itself in the database, -1 for the others

    @classmethod
    def open(cls, dataset: Dataset) -> "OpenedDataset":
        """Open a data set; queries or rows that do not fit the ground truth are refused."""
        database, queries = FeatureSet.open(dataset.database), FeatureSet.open(dataset.queries)
        if database.dim != queries.dim:
            raise LattqeError(
                f"{dataset.name}: the database has {database.dim} dimensions and the queries "
                f"{queries.dim}: use one extractor for both"
            )
        own = own_rows(database, queries)
        left_out = "" if own is None else ", own rows left out"
        if dataset.truth == "labels":
            truth = _label_truth(dataset.name, database, queries, own)
            return cls(database, queries, truth, f"labels{left_out}", own)
        with local_files({"truth": dataset.truth}) as local:
            gnd = load_gnd(local["truth"])
        _check_rows(dataset.name, gnd, database, queries)
        content = {"gnd": [{grade: list(map(int, rows)) for grade, rows in one.items()} for one in gnd.gnd]}
        digest = xxhash.xxh3_128_hexdigest(canonical_json(content))
        return cls(database, queries, gnd.truth, f"{digest}{left_out}", own)


def refuse_foreign_results(place: Place) -> None:
    """A run overwrites its results and removes its earlier figures, so those in its folder must be a run's own."""
    there = [name for name in ("results.json", "results.csv", "report.html") if place.exists(name)]
    there += [f"figures/{name}" for name in place.child("figures").list()]
    if not there:
        return
    try:
        results = json.loads(place.read("results.json"))  # the first that is written
    except (MissingFileError, ValueError, RecursionError):
        results = None
    if not isinstance(results, dict) or "inputs" not in results:
        raise LattqeError(f"{place.uri} holds {there[0]}, which no benchmark made: choose another destination")


def _label_truth(name: str, database: FeatureSet, queries: FeatureSet, rows: np.ndarray | None) -> LabelTruth:
    """Relevant is what has the query's label; a query without any is refused, because its AP would mean nothing."""
    for role, features in (("database", database), ("queries", queries)):
        if not features.has_labels:
            raise LattqeError(
                f"{name}: the {role} in {features.uri} have no labels: import them with labels, or "
                "give a ground truth file as truth"
            )
    truth = label_truth(database, queries, rows)
    if not truth.counts.any():
        raise LattqeError(
            f"{name}: no query has a label that is in the database: do the labels of {database.uri} and "
            f"{queries.uri} belong together?"
        )
    return truth


def _check_rows(name: str, gnd: RevisitedSet, database: FeatureSet, queries: FeatureSet) -> None:
    """Refuse features that are not those of imlist and qimlist; ids tell what is missing, where there are any."""
    if database.rows > gnd.database_rows:
        raise LattqeError(
            f"{name}: the database has {database.rows} rows, but imlist of the ground truth "
            f"{gnd.database_rows}: distractors belong into [[distractors]]"
        )
    try:
        gnd.check_database(database.ids(), f"the database {database.uri}")
        gnd.check_queries(queries.ids(), f"the queries {queries.uri}")
    except LattqeError as error:
        raise LattqeError(f"{name}: {error}") from None


def finished_graphs(
    uris: Sequence[str], inputs: Mapping[str, OpenedDataset], distractors: Mapping[tuple[str, str], FeatureSet], k: int
) -> dict[tuple[str, ...], NeighborGraph]:
    """The graphs that a run names, by the digests of the sets whose rows they are of, one after the other.

    A graph of these rows in their adapted space has ADAPTED before the digests. A graph of no set of the run, and one
    of fewer than k neighbors are refused, and so is an approximate one of distractors, into which sets are merged.
    """
    alone = {each.database.digest: each.database for each in inputs.values()}
    alone |= {each.digest: each for each in distractors.values()}
    pairs = [[inputs[dataset].database, each] for (dataset, _), each in distractors.items()]
    merged_into = {(each.digest,) for each in distractors.values()}
    found = {}
    for uri in uris:
        graph = NeighborGraph.open(uri)
        of = _rows_of_graph(graph, alone, pairs)
        if of is None:
            raise LattqeError(
                f"graphs: {uri} is the graph of no data set of this run, of no distractors, and of no data set with "
                "its distractors after it: leave it out"
            )
        if graph.k < min(k, graph.rows - 1):
            raise LattqeError(
                f"graphs: {uri} has {graph.k} neighbors per row, this run needs {k}: leave it out, or compute a "
                f"longer one with `lattqe neighbors -k {k}`"
            )
        if graph.manifest.approximation is not None and of in merged_into:
            raise LattqeError(
                f"graphs: {uri} is an approximate graph of distractors alone: give an exact one, or one of a data "
                "set with its distractors after it"
            )
        found[of] = graph
    return found


def _rows_of_graph(
    graph: NeighborGraph, alone: Mapping[str, FeatureSet], pairs: Sequence[Sequence[FeatureSet]]
) -> tuple[str, ...] | None:
    """The digests of the sets whose rows a graph is of: by what it was made of, or by the rows of that."""
    inputs = graph.manifest.inputs
    made_of = tuple(inputs[name]["digest"] for name in ("features", "against") if name in inputs)
    digests = [tuple(each.digest for each in pair) for pair in pairs]
    if made_of in digests or (len(made_of) == 1 and made_of[0] in alone):
        return made_of
    sizes = {each.rows for each in alone.values()} | {sum(each.rows for each in pair) for pair in pairs}
    if len(made_of) > 1 or graph.rows not in sizes:
        return None
    rows = FeatureSet.open(inputs["features"]["uri"])
    if rows.digest != made_of[0]:
        return None
    space: tuple[str, ...] = ()
    if adaptation.KIND in rows.manifest.inputs:  # then what matters are the rows before, if they were learned from
        before, learned = rows.manifest.inputs["features"], rows.manifest.inputs[adaptation.KIND]
        rows = FeatureSet.open(before["uri"])
        if {before["digest"], read_manifest(open_place(learned["uri"])).inputs["features"]["digest"]} != {rows.digest}:
            return None
        if rows.digest in alone:
            return ADAPTED, rows.digest
        space = (ADAPTED,)
    # A user joined both sets, with labels perhaps: then the vectors must be the same, and are looked at.
    return next((space + of for of, pair in zip(digests, pairs) if _is_joined(rows, pair)), None)


def _is_joined(joined: FeatureSet, sets: Sequence[FeatureSet]) -> bool:
    """Whether the vectors of `joined` are those of some sets, one after the other."""
    if joined.rows != sum(each.rows for each in sets):
        return False
    first = 0
    for each in sets:
        if (each.dim, each.dtype) != (joined.dim, joined.dtype):
            return False
        for start, block in each.blocks(COMPARED_ROWS):
            if not np.array_equal(joined.read(first + start, first + start + len(block)), block):
                return False
        first += each.rows
    return True


@dataclass(frozen=True)
class Cell:
    """What is measured. `dba` and `qe` are None where the database, or the query, is used as it is.

    `rank` is None where rows are ranked by their products with the query.
    """

    dataset: str
    distractors: str | None
    dba: Setting | None
    qe: Setting | None
    rank: Setting | None = None

    @property
    def pipeline(self) -> Pipeline:
        """How its rows and queries are treated."""
        return Pipeline(self.dba, self.qe, self.rank)

    @property
    def adapted(self) -> bool:
        """Whether its rows and queries are in the space that is adapted to the rows."""
        return any(step is not None and bool(dict(step.params).get("adapt")) for step in (self.dba, self.rank))

    def key(self, digests: Mapping[str, str], models: Mapping[str, str]) -> str:
        """A name for the cell's result: of its settings and of the content of all its inputs, not of their places.

        digests: of the rows, the queries and the ground truth; models: digest of each model by its address.
        """
        content = {
            "format": FORMAT,
            "inputs": dict(digests),
            "dba": _portable(self.dba, models),
            "qe": _portable(self.qe, models),
        } | ({} if self.rank is None else {"rank": self.rank.to_dict()})
        return xxhash.xxh3_128_hexdigest(canonical_json(content))


def _portable(setting: Setting | None, models: Mapping[str, str]) -> dict[str, Any] | None:
    """A setting with its model named by digest."""
    if setting is None:
        return None
    content = setting.to_dict()
    return {**content, "model": models[content["model"]]} if "model" in content else content


@dataclass(frozen=True)
class Measured:
    """A cell's result: one Scores for each setup, weights by rank where requested, and what it took.

    One without any scores was not measured, because its rows are too many for its method.
    """

    scores: tuple[Scores, ...]
    weights: dict[str, Any] | None
    seconds: dict[str, float]
    peak_bytes: int

    def to_bytes(self, cell: Cell, key: str) -> bytes:
        """JSON with the cell's key and a checksum of itself; floats come back to the last bit."""
        named = {
            name: setting.to_dict() if setting else None
            for name, setting in (("dba", cell.dba), ("qe", cell.qe), ("rank", cell.rank))
        }
        content = {
            "key": key,
            "cell": {"dataset": cell.dataset, "distractors": cell.distractors, **named},
            "scores": [one.to_dict() for one in self.scores],
            "weights": self.weights,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }
        return canonical_json({**content, "checksum": _checksum(content)})

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> "Measured":
        """What `to_bytes` wrote; ValueError where it was changed, cut or damaged, or is another cell's result."""
        content = json.loads(data)
        if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
            raise ValueError("the checksum does not fit")
        if content.get("key", key) != key:  # those of earlier versions have none
            raise ValueError("the result of another cell")
        if not content["scores"]:
            raise ValueError("no scores")
        return cls(
            tuple(Scores.from_dict(one) for one in content["scores"]),
            content["weights"],
            content["seconds"],
            content["peak_bytes"],
        )


NOT_MEASURED = Measured((), None, {}, 0)


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(dict(content)))


def measure(
    index: Index,
    xq: np.ndarray,
    truth: GroundTruth,
    pipelines: Sequence[Pipeline],
    on_done: Callable[[Pipeline, Measured], None],
    exclude: np.ndarray | None = None,
) -> None:
    """Measure several ways of asking the same queries xq (nq, D) of one index; one search serves them all.

    The pipelines differ in `qe` and `rank`. exclude (nq,): the row of each query that is itself in the database.
    """
    depth = deepest(pipelines)
    started = time.perf_counter()
    found = nearest(index, xq, min(depth, candidates(index, exclude)), exclude) if depth else None
    searching = time.perf_counter() - started
    rows: GraphRows | None = None
    for pipeline in pipelines:
        seconds = {"search": searching if pipeline.qe is not None else 0.0}
        started = time.perf_counter()
        expanded, weights = xq, None
        if pipeline.qe is not None and found is not None:
            expanded, weights = _expand(index, xq, found, pipeline.qe, truth, exclude)
        seconds["expand"] = time.perf_counter() - started
        if pipeline.rank is not None:
            rows = rows or GraphRows(index.gather(np.arange(index.rows)))
            scores = _ranked(rows, expanded, pipeline.rank, truth, exclude, seconds)
        else:
            started = time.perf_counter()
            scores = tuple(evaluate(index, expanded, truth).values())
            seconds["evaluate"] = time.perf_counter() - started
        on_done(pipeline, Measured(scores, weights, seconds, peak_bytes()))


def deepest(pipelines: Iterable[Pipeline]) -> int:
    """The longest list that one of them looks at to expand a query; 0: none is expanded."""
    settings = [each.qe for each in pipelines if each.qe is not None]
    return max((method_of(setting).depth(setting.k) for setting in settings), default=0)


def _ranked(
    rows: GraphRows,
    xq: np.ndarray,
    setting: Setting,
    truth: GroundTruth,
    exclude: np.ndarray | None,
    seconds: dict[str, float],
) -> tuple[Scores, ...]:
    """Scores of a ranking that is not by products; adds what its parts took."""
    ranker = graph_method(setting)
    preparing = ranker.prepare(rows)
    started = time.perf_counter()
    rankings = [block.astype(np.int32) for block in ranker.rankings(rows, xq, exclude)]
    ranked = time.perf_counter()
    scores = tuple(score_ranking(np.concatenate(rankings), truth).values())
    seconds |= {
        "graph": rows.took["graph"],
        "prepare": preparing,
        "rank": ranked - started,
        "evaluate": time.perf_counter() - ranked,
    }
    return scores


def method_of(setting: Setting, dba: bool = False) -> Method:
    """The method of a setting, for queries or for database rows; hops and the space are not the method's concern."""
    params = tuple(pair for pair in setting.params if pair[0] not in ("hops", "hop_alpha", "adapt"))
    return _method(setting.method, params, dba and bool(METHODS[setting.method].row_params))


@lru_cache(maxsize=4)  # the settings of a grid share a network, and a large one takes a while to load
def _method(name: str, params: Params, dba: bool) -> Method:
    return create(name, **dict(params), **(METHODS[name].row_params if dba else {}))


def largest_k(setting: Setting) -> int | None:
    """The most neighbors that the setting's method can weigh; None: any number."""
    return method_of(setting).largest_k


def _expand(
    index: Index, xq: np.ndarray, found: Found, setting: Setting, truth: GroundTruth, exclude: np.ndarray | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Expanded queries (nq, D), and the weights by rank and relevance."""
    method = method_of(setting)
    done = expand_queries(index, xq, method, setting.k, found=found, exclude=exclude)
    k = min(setting.k, candidates(index, exclude))
    profiles = weights_by_rank(done.weights, done.rows[:, 1 : 1 + k], truth)
    return done.vectors, {name: profile.to_dict() for name, profile in profiles.items()}


def augmentation_of(features: FeatureSet, dba: Setting, to: str) -> Augmentation:
    """What a setting makes of some rows; their graph is yet to be named."""
    params = dict(dba.params) | METHODS[dba.method].row_params
    hops, alpha, adapted = params.pop("hops", 1), params.pop("hop_alpha", None), params.pop("adapt", False)
    alpha = method_of(dba, dba=True).hop_alpha(features.rows) if alpha is None else alpha
    return Augmentation(features.uri, "", to, dba.method, dba.k, params, hops=hops, hop_alpha=alpha, adapt=adapted)
