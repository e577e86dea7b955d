"""Fixtures of the training tests."""

from collections.abc import Iterator

import pytest
import torch
from training_sets import DIM, TINY, write_sets

from lattqe.training import TrainingConfig, preset


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors of these sizes are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings within a test draw no learning curve, which takes longer than all their steps; those of fixtures do."""
    monkeypatch.setattr("lattqe.training.loop.learning_curve", lambda history: b"<svg/>")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two training sets and a validation database with queries of its classes."""
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture
def tiny() -> TrainingConfig:
    """The paper's training, tiny."""
    return preset("paper", DIM, TINY)
