"""One cell of a run: one data set, with or without distractors and DBA, under one way of expanding its queries."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from lattqe.benchmark.spec import Params, Setting
from lattqe.evaluation import GroundTruth, Scores, evaluate, weights_by_rank
from lattqe.expansion import Method, create
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.rows import expand_queries
from lattqe.search import Index
from lattqe.store.manifest import canonical_json

FORMAT = 1  # of a stored cell; raised when the same key would hold other numbers


@dataclass(frozen=True)
class Cell:
    """What is measured. `dba` and `qe` are None where the database, or the query, is used as it is."""

    dataset: str
    distractors: str | None
    dba: Setting | None
    qe: Setting | None

    def key(self, digests: Mapping[str, str], models: Mapping[str, str]) -> str:
        """A name for the cell's result: of its settings and of the content of all its inputs, not of their places.

        digests: of the rows, the queries and the ground truth; models: digest of each model by its address.
        """
        content = {"format": FORMAT, "inputs": dict(digests), "dba": _portable(self.dba, models),
                   "qe": _portable(self.qe, models)}
        return xxhash.xxh3_128_hexdigest(canonical_json(content))


def _portable(setting: Setting | None, models: Mapping[str, str]) -> dict[str, Any] | None:
    """A setting with its model named by digest."""
    if setting is None:
        return None
    content = setting.to_dict()
    return {**content, "model": models[content["model"]]} if "model" in content else content


@dataclass(frozen=True)
class Measured:
    """A cell's result: one Scores for each setup, weights by rank where asked for, and what it took."""

    scores: tuple[Scores, ...]
    weights: dict[str, Any] | None
    seconds: dict[str, float]
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """JSON-able; floats come back to the last bit."""
        return {"scores": [one.to_dict() for one in self.scores], "weights": self.weights, "seconds": self.seconds,
                "peak_bytes": self.peak_bytes}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Measured":
        """What `to_json` wrote."""
        return cls(tuple(Scores.from_dict(one) for one in content["scores"]), content["weights"], content["seconds"],
                   content["peak_bytes"])


def measure(index: Index, xq: np.ndarray, truth: GroundTruth, settings: Sequence[Setting | None],
            on_done: Callable[[Setting | None, Measured], None]) -> None:
    """Measure several ways of expanding the same queries xq (nq, D) over one index; one search serves them all."""
    depth = max((method_of(setting).depth(setting.k) for setting in settings if setting is not None), default=0)
    started = time.perf_counter()
    D, I = index.search(xq, min(depth, index.rows)) if depth else (None, None)  # noqa: E741
    searching = time.perf_counter() - started
    for setting in settings:
        started = time.perf_counter()
        expanded, weights = xq, None
        if setting is not None and I is not None and D is not None:
            expanded, weights = _expand(index, xq, I, D, setting, truth)
        expanding = time.perf_counter() - started
        started = time.perf_counter()
        scores = tuple(evaluate(index, expanded, truth).values())
        seconds = {"search": searching if setting is not None else 0.0, "expand": expanding,
                   "evaluate": time.perf_counter() - started}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        on_done(setting, Measured(scores, weights, seconds, peak))


def method_of(setting: Setting, dba: bool = False) -> Method:
    """The method of a setting, for queries or for database rows."""
    return _method(setting.method, setting.params, dba and setting.method == "lattqe")


@lru_cache(maxsize=4)  # the settings of a grid share a network, and a large one takes a while to load
def _method(name: str, params: Params, dba: bool) -> Method:
    return create(name, **dict(params), **({"dba": True} if dba else {}))


def largest_k(setting: Setting) -> int | None:
    """The most neighbors that the setting's method can weigh; None: any number."""
    method = method_of(setting)
    return method.fast.config.max_k if isinstance(method, AttentionExpansion) else None


def _expand(index: Index, xq: np.ndarray, I: np.ndarray, D: np.ndarray, setting: Setting,  # noqa: E741
            truth: GroundTruth) -> tuple[np.ndarray, dict[str, Any]]:
    """Expanded queries (nq, D), and how the weights lie by rank and relevance."""
    method = method_of(setting)
    done = expand_queries(index, xq, method, setting.k, found=(D, I))
    k = min(setting.k, index.rows)
    profiles = weights_by_rank(done.weights, done.rows[:, 1 : 1 + k], truth)
    return done.vectors, {name: profile.to_dict() for name, profile in profiles.items()}
