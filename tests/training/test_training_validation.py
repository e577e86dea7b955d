"""Validation by a team: who searches, on which device, and that all workers get the same numbers."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_sets import DIM, clusters, plan_for

from lattqe.model import LAttQE
from lattqe.search import FlatIndex
from lattqe.search.index import SmallIndex
from lattqe.training import Team, TrainingConfig, validation
from lattqe.training.checkpoint import CPU
from lattqe.training.loop import Training
from lattqe.training.plan import load
from lattqe.training.validation import ValidationSet, ranking_index, validate, validate_dba

GPU = torch.device("cuda")


@dataclass
class Meeting:
    """Where the ranks of a team in one process add up; between two sums one of them runs at a time."""

    size: int
    sums: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turn, self.everyone = threading.Lock(), threading.Barrier(self.size)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        self.sums.append(values)
        self.turn.release()
        self.everyone.wait()
        self.turn.acquire()
        found = torch.stack(self.sums[-self.size :]).sum(0, dtype=values.dtype)
        self.turn.release()
        self.everyone.wait()  # none adds to the next sum before all have read this one
        self.turn.acquire()
        return found


@dataclass(frozen=True)
class Rank(Team):
    """One worker of a team whose workers are threads."""

    meeting: Meeting | None = None

    def total(self, values: torch.Tensor) -> torch.Tensor:
        assert self.meeting is not None
        return self.meeting.total(values)


def in_ranks(size: int, work: Callable[[Team], Any]) -> list[Any]:
    """What `work` gives on each rank of a team."""
    meeting, found = Meeting(size), {}

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                found[rank] = work(Rank(rank, size, CPU, meeting))
            except BaseException:
                meeting.everyone.abort()  # or the others would wait for this rank
                raise

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


@pytest.fixture
def one() -> ValidationSet:
    """A set of 150 rows, more than one unit that ranks share, and enough to be adapted; ten queries."""
    x, labels = clusters(5, 8, 20)
    return ValidationSet("one", x[10:], labels[10:], x[:10], labels[:10])


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The threads that call what only the leader should."""
    called: dict[str, list[str]] = {}

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            called.setdefault(name, []).append(threading.current_thread().name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    watch(FlatIndex, "search")
    watch(SmallIndex, "count_above")
    watch(validation, "knn_graph")
    watch(validation, "adapt_to")
    watch(validation, "hop")
    watch(ValidationSet, "mean_ap")
    return called


def test_the_leader_alone_searches_and_all_get_the_same_numbers(
    one: ValidationSet, callers: dict[str, list[str]], tiny: TrainingConfig
) -> None:
    torch.manual_seed(0)
    network = LAttQE(tiny.network).eval()

    def work(team: Team) -> Any:
        alone = validate(network, [one], (4, 8), team)
        return alone, validate_dba(network, [one], (2, 4), (4,), team, hops=(1, 2), adapt=True)

    first, second = in_ranks(2, work)
    assert first == second == work(Team()), "to the last digit"
    assert set(callers) == {"search", "count_above", "knn_graph", "adapt_to", "hop", "mean_ap"}
    for name, threads in callers.items():
        assert set(threads) == {"rank-0", "MainThread"}, name


def test_the_leader_alone_makes_the_graph_of_the_training_rows(
    sets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[str] = []
    original = validation.knn_graph

    def noting(*args: Any, **kwargs: Any) -> Any:
        graphs.append(threading.current_thread().name)
        return original(*args, **kwargs)

    monkeypatch.setattr("lattqe.search.knn_graph", noting)
    first, second = in_ranks(2, lambda team: load([sets["a"], sets["b"]], [], 5, team=team).neighbors)
    assert graphs == ["rank-0", "rank-0"], "of two sets"
    expected = load([sets["a"], sets["b"]], [], 5).neighbors
    for found in (first, second):
        np.testing.assert_array_equal(found, expected)


def test_searches_run_on_the_device_of_the_team(
    sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: TrainingConfig
) -> None:
    """Every index and every graph is given the GPU, here one that exists in name only."""
    seen: list[tuple[str, torch.device | None]] = []

    def on_cpu(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(x: np.ndarray, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
            seen.append((name, device))
            return original(x, *args, **kwargs)

        return noting

    monkeypatch.setattr("lattqe.search.knn_graph", on_cpu("training", validation.knn_graph))
    monkeypatch.setattr(validation, "knn_graph", on_cpu("graph", validation.knn_graph))
    monkeypatch.setattr(validation, "SmallIndex", lambda xb, device: on_cpu("index", SmallIndex)(xb, device=device))
    monkeypatch.setattr(validation, "room_on", lambda device: 1 << 40)
    training = Training(plan_for(sets, tmp_path / "model"), Team(device=GPU))
    network = LAttQE(tiny.network).eval()
    validate(network, training.sets, (4,), Team())
    validate_dba(network, training.sets, (2,), (4,), Team(), hops=(1, 2))
    assert seen == [("training", GPU)] * 2 + [("index", GPU), ("graph", GPU)] + [("index", GPU)] * 2
    seen.clear()
    monkeypatch.setattr(validation, "room_on", lambda device: 99)
    ranking_index(np.ones((2, DIM), np.float32), GPU)
    assert seen == [("index", None)], "a GPU that has no room for the rows"
