"""How often an update waits for its device, and that nothing is lost of the losses that it reads at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training_loop import RECIPES
from torch.overrides import TorchFunctionMode
from training_sets import plan_for

from lattqe.store import load_model
from lattqe.training import Team, train
from lattqe.training.loop import Training, new_network
from lattqe.training.stage import NotFiniteError, TrainingStage

NAMES = (
    "cpu",
    "item",
    "tolist",
    "numpy",
    "nonzero",
    "equal",
    "allclose",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)
READING = {getattr(torch.Tensor, name) for name in NAMES} | {torch.nonzero, torch.argwhere, torch.equal, torch.allclose}


class Host(torch.Tensor):
    """What has been read from the device: looking at it costs nothing more."""


class Reads(TorchFunctionMode):
    """Counts the calls after which a GPU would have been waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in READING and not isinstance(args[0], Host):
            self.names.append(func.__name__)
            return result.as_subclass(Host) if func is torch.Tensor.cpu else result
        return result


@pytest.mark.parametrize("dba", [False, True], ids=["network", "temperature"])
def test_an_update_reads_from_its_device_once(sets: dict[str, str], tmp_path: Path, dba: bool) -> None:
    settings = ("accumulate=3", "checkpoint_every=3")
    plan = plan_for(sets, tmp_path / "model", *RECIPES["relational"], *settings)
    stage, sampler = TrainingStage(new_network(plan), plan.config, Team(), dba), Training(plan, Team()).sampler
    batches = [sampler.batch(step, slice(0, plan.config.batch)) for step in range(6)]
    stage.optimizer.step = lambda *args, **kwargs: None  # type: ignore[method-assign]  # Adam's counts are on the CPU
    counts, returned = [], []
    for step, batch in enumerate(batches):
        with Reads() as reads:
            returned.append(len(stage.update(step, batch)))
        counts.append(reads.names)
    assert counts == [[], [], ["cpu"]] * 2
    assert returned == [0, 0, 3] * 2


def test_losses_of_all_batches_are_told(sets: dict[str, str], tmp_path: Path) -> None:
    """Also of a stage that ends before the last batch of an update; each is that of its batch alone."""
    settings = ("accumulate=2", "temperature_steps=3", "validate_every=2", "checkpoint_every=2")
    plan = plan_for(sets, tmp_path / "model", *settings)
    told: list[str] = []
    train(plan, report=lambda progress: told.append(progress.note))
    stage, sampler = TrainingStage(new_network(plan), plan.config, Team()), Training(plan, Team()).sampler
    batches = [sampler.batch(step, slice(0, plan.config.batch)) for step in range(2)]
    assert len(stage.update(0, batches[0])) == 0
    first, second = stage.update(1, batches[1])
    history = {entry["step"]: entry for entry in load_model(plan.destination)[2]["history"]}
    assert sorted(history) == [2, 4, 6, 8, 9]
    assert history[2]["loss"] == ((first + second) / 2)[0].item()
    assert history[9]["loss"] > 0, "of the batch whose update never came"
    assert told[0] == "network", "nothing is known yet"
    assert told[1] == f"network · loss {second[0].item():.4f}"
    assert told[2].startswith(told[1]), "the last one known"


def test_a_batch_that_is_not_finite_stops_the_update_it_belongs_to(sets: dict[str, str], tmp_path: Path) -> None:
    plan = plan_for(sets, tmp_path / "model", "accumulate=2", "validate_every=2")
    stage, sampler = TrainingStage(new_network(plan), plan.config, Team()), Training(plan, Team()).sampler
    good, bad = (sampler.batch(step, slice(0, plan.config.batch)) for step in range(2))
    bad.items.mul_(torch.nan)
    stage.update(0, bad)
    with pytest.raises(NotFiniteError, match="at step 1 the loss became nan, its gradient nan"):
        stage.update(1, good)
