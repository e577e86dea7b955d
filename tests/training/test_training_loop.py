"""The loop of one worker: what is trained when, what is kept, what a killed run leaves and how it continues."""

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from training_sets import plan_for, write_sets

from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.model import LAttQE
from lattqe.store import load_model, open_place
from lattqe.store.manifest import seal_json
from lattqe.training import Team, TrainingPlan, TrainingProgress, train
from lattqe.training.checkpoint import STATE, Checkpoints, State
from lattqe.training.config import RELATIONAL, TABLE_2
from lattqe.training.loop import Training, learning_curve, new_network
from lattqe.training.sampling import SlotDropout, SlotMasks
from lattqe.training.stage import NotFiniteError, TrainingStage

RECIPES = {
    "paper": [],
    "worlds": [
        "sampler=worlds",
        "contrastive=0",
        "smooth_ap=1",
        "positives=4",
        "listwise=0.3",
        "pull=0.5",
        "ema=0.9",
        "optimizer=adamw",
        "weight_decay=0.01",
        "schedule=cosine",
        "warmup=2",
        "clip=1.0",
    ],
    "relational": [
        "sampler=worlds",
        "contrastive=0",
        "smooth_ap=1",
        "auxiliary=0",
        "k_draw=log",
        "relation_rate=20",
        "optimizer=adamw",
        "temperature_on=worlds",
        "temperature_k=4",
        "network.relational=true",
        "network.relation_bias=true",
        "network.background=12",
        "network.visual=false",
        "network.width=8",
        "network.auxiliary=none",
    ],
}


class Killed(Exception):
    """Stands for the death of the process."""


def kill_at(step: int):
    def report(progress: TrainingProgress) -> None:
        if progress.step == step:
            raise Killed

    return report


def tensors(plan: TrainingPlan) -> dict[str, np.ndarray]:
    return load_model(plan.destination)[0]


@pytest.fixture(scope="module", params=RECIPES)
def undisturbed(
    request: pytest.FixtureRequest, sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> TrainingPlan:
    """A finished training of each kind; the first draws its learning curve."""
    plan = plan_for(sets, tmp_path_factory.mktemp("model") / request.param, *RECIPES[request.param])
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "paper":
            patch.setattr("lattqe.training.loop.learning_curve", lambda history: b"<svg/>")
        train(plan)
    return plan


@pytest.mark.slow
# Before there is a checkpoint, after a validation, at a checkpoint, between the two stages, within the second.
@pytest.mark.parametrize("step", [1, 3, 4, 6, 8])
def test_killed_at_any_kind_of_step_and_continued_gives_the_same_weights(
    undisturbed: TrainingPlan, sets: dict[str, str], tmp_path: Path, step: int
) -> None:
    plan = plan_for(sets, tmp_path / "model", *RECIPES[Path(undisturbed.destination).name])
    with pytest.raises(Killed):
        train(plan, report=kill_at(step))
    train(plan)
    wanted = tensors(undisturbed)
    for name, found in tensors(plan).items():
        assert np.array_equal(found, wanted[name]), name


def test_the_model_is_complete_and_the_work_gone(undisturbed: TrainingPlan) -> None:
    assert set(open_place(undisturbed.destination).list()) == {
        "config.json",
        "learning_curve.svg",
        "manifest.json",
        "metrics.json",
        "model.safetensors",
        "tensorboard/events.out.tfevents.lattqe",
    }
    _, config, metrics, manifest = load_model(undisturbed.destination)
    assert config["training"]["batch"] == 8
    assert set(manifest.inputs) == {"features-0", "features-1", "validation-0-database", "validation-0-queries"}
    assert metrics["device"] == "cpu"
    assert metrics["nqe"] in (4, 8)
    assert metrics["ndba"] in (2, 4)
    assert [entry["step"] for entry in metrics["history"]] == [2, 3, 4, 6, 8, 9]
    assert [entry["step"] for entry in metrics["history"] if "map" in entry] == [3, 6]
    LAttQE.load(undisturbed.destination)


def test_the_best_validation_decides_what_is_kept(undisturbed: TrainingPlan) -> None:
    metrics = load_model(undisturbed.destination)[2]
    means = {
        entry["step"]: max(found["mean"] for found in entry["map"].values())
        for entry in metrics["history"]
        if "map" in entry
    }
    assert metrics["best"]["map"] == max(means.values())
    assert means[metrics["best"]["step"]] == metrics["best"]["map"]
    chosen = metrics["validation"]["qe"][str(metrics["nqe"])]["mean"]
    assert chosen == pytest.approx(max(means.values()))


@pytest.mark.parametrize("recipe", ["paper", "relational"])
def test_the_second_stage_changes_the_temperature_alone(sets: dict[str, str], tmp_path: Path, recipe: str) -> None:
    plan = plan_for(sets, tmp_path / "model", *RECIPES[recipe])
    with pytest.raises(Killed):
        train(plan, report=kill_at(7))
    checkpoints = Checkpoints(open_place(plan.destination))
    before = checkpoints.tensors(checkpoints.load(), "best")
    train(plan)
    after = tensors(plan)
    changed = [name for name, value in before.items() if not np.array_equal(value.numpy(), after[name])]
    assert changed == ["head.log_temperature"]


def test_sums_of_gradients_are_taken_in_one_order(sets: dict[str, str], tmp_path: Path) -> None:
    """Each update, and only there: with two threads, `world[near]` has another gradient every few times."""
    seen = []
    plan = plan_for(sets, tmp_path / "model")
    train(plan, report=lambda _: seen.append(torch.are_deterministic_algorithms_enabled()))
    assert len(seen) >= 9
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()


def test_two_threads_train_the_same_bits_each_time(sets: dict[str, str], tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        plan = plan_for(sets, tmp_path / name, *RECIPES["worlds"])
        torch.set_num_threads(2)
        try:
            train(plan)
        finally:
            torch.set_num_threads(1)
        found.append(tensors(plan))
    assert all(np.array_equal(value, found[1][name]) for name, value in found[0].items())


def test_the_first_stage_leaves_the_temperature(sets: dict[str, str], tmp_path: Path) -> None:
    plan = plan_for(sets, tmp_path / "model", "temperature_steps=0")
    train(plan)
    found = LAttQE.load(plan.destination)
    assert found.head.temperature.item() == pytest.approx(0.1)
    start = new_network(plan).state_dict()
    same = [name for name, value in found.state_dict().items() if torch.equal(value, start[name])]
    assert same == ["head.log_temperature"]


def test_a_training_starts_with_what_another_has_made(sets: dict[str, str], tmp_path: Path) -> None:
    made = plan_for(sets, tmp_path / "made", "temperature_steps=0")
    train(made)
    further = plan_for(sets, tmp_path / "further", "temperature_steps=0", f"start={tmp_path / 'made'}")
    start, weights = new_network(further).state_dict(), tensors(made)
    assert all(np.array_equal(start[name].numpy(), weights[name]) for name in weights)
    assert further.inputs["start"]["kind"] == "model"
    with pytest.raises(LattqeError, match=r"its network has ffn .* use the preset and settings that it was trained"):
        plan_for(sets, tmp_path / "other", f"start={tmp_path / 'made'}", "network.ffn=24")
    with pytest.raises(LattqeError, match=r"features.*model|model.*features"):
        plan_for(sets, tmp_path / "other", f"start={next(iter(sets.values()))}")
    with pytest.raises(LattqeError, match="nosuch"):
        plan_for(sets, tmp_path / "other", f"start={tmp_path / 'nosuch'}")


@pytest.mark.parametrize("sampling", [["k_for=batch", "distinct_negatives=false"], []], ids=["by labels", "published"])
def test_training_lowers_the_loss_and_raises_validation(
    sets: dict[str, str], tmp_path: Path, sampling: list[str]
) -> None:
    plan = plan_for(
        sets,
        tmp_path / "model",
        "steps=60",
        "validate_every=30",
        "checkpoint_every=10",
        "temperature_steps=0",
        *sampling,
    )
    train(plan)
    metrics = load_model(plan.destination)[2]
    losses = [entry["loss"] for entry in metrics["history"] if "loss" in entry]
    # The published sampling was seen to lower it to 0.83..0.84 of the first; why less than the other is not known.
    assert losses[-1] < (0.8 if sampling else 0.9) * losses[0]
    assert metrics["best"]["map"] > metrics["validation"]["none"]["database"]


@pytest.mark.s3
def test_a_training_on_s3_continues_there(s3_uri: str, tmp_path: Path) -> None:
    sets = write_sets(f"{s3_uri}/sets")
    plans = [plan_for(sets, f"{s3_uri}/model"), plan_for(write_sets(tmp_path), tmp_path / "model")]
    with pytest.raises(Killed):
        train(plans[0], report=kill_at(5))
    assert "_work/state.json" in open_place(plans[0].destination).list()
    for plan in plans:
        train(plan)
    found, wanted = (tensors(plan) for plan in plans)
    assert all(np.array_equal(found[name], value) for name, value in wanted.items())
    assert not [name for name in open_place(plans[0].destination).list() if name.startswith("_work")]


def test_nan_stops_at_its_step_and_keeps_the_last_good_checkpoint(
    sets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(sets, tmp_path / "model")
    training = Training(plan, Team())
    good = training.sampler.batch

    def poisoned(step, part):
        batch = good(step, part)
        return batch if step != 5 else dataclasses.replace(batch, items=batch.items * torch.nan)

    monkeypatch.setattr(training.sampler, "batch", poisoned)
    with pytest.raises(NotFiniteError, match=r"step 5 the loss became nan.*last good checkpoint \(step 4\)"):
        training.run()
    checkpoints = Checkpoints(open_place(plan.destination))
    state = checkpoints.load()
    assert state.step == 4
    assert all(torch.isfinite(value).all() for value in checkpoints.tensors(state, "last").values())


def test_another_configuration_is_refused_with_the_difference(sets: dict[str, str], tmp_path: Path) -> None:
    plan_for(sets, tmp_path / "model")
    with pytest.raises(AlreadyExistsError, match=r"config.training.steps: 6 there, 7 here"):
        plan_for(sets, tmp_path / "model", "steps=7")


def test_a_damaged_checkpoint_is_named(sets: dict[str, str], tmp_path: Path) -> None:
    plan = plan_for(sets, tmp_path / "model")
    with pytest.raises(Killed):
        train(plan, report=kill_at(3))
    place = open_place(plan.destination)
    name = Checkpoints(place).load().files["last"]["name"]
    data = bytearray(place.read(name))
    data[-1] ^= 1
    place.write(name, bytes(data))
    with pytest.raises(CorruptDataError, match=name):
        train(plan)


def test_a_checkpoint_that_is_damaged_on_its_way_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_place(str(tmp_path / "model"))
    state = State()
    Checkpoints(place).save(state, last={"weights": torch.arange(1000.0)})
    read, answers = type(place).read, iter([True, True, False])

    def damage(self: object, name: str) -> bytes:
        data = bytearray(read(place, name))
        data[len(data) // 2] ^= next(answers)
        return bytes(data)

    monkeypatch.setattr(type(place), "read", damage)
    assert torch.equal(Checkpoints(place).tensors(state, "last")["weights"], torch.arange(1000.0))


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    place = open_place(str(tmp_path))
    place.write(STATE, b'{"step": ')
    with pytest.raises(CorruptDataError, match=r"state\.json"):
        Checkpoints(place).load()


ENTRY = {"step": 2, "stage": "network", "time": 1.0, "seconds": 1.0, "loss": 0.5}


@pytest.mark.parametrize(
    "forged",
    [
        {"stage": "$x$"},
        {"step": -1},
        {"step": 10**400},
        {"seconds": "1"},
        {"history": [{"step": 1}]},
        {"history": [{**ENTRY, "loss": None}]},
        {"history": [{**ENTRY, "map": {"</text><script>": {"mean": 1.0}}}]},
        {"history": [{**ENTRY, "map": {"4": {}}}]},
        {"best": {"step": 1}},
        {"files": {"last": {"name": "../../x", "checksum": ""}}},
        {"more": 1},
    ],
)
def test_a_forged_state_is_refused(tmp_path: Path, forged: dict[str, object]) -> None:
    place = open_place(str(tmp_path))
    place.write(STATE, seal_json({**dataclasses.asdict(State()), **forged}))
    with pytest.raises(CorruptDataError, match=r"state\.json"):
        Checkpoints(place).load()


def test_a_state_does_not_forgive_a_changed_byte_but_one_without_a_seal_is_read(tmp_path: Path) -> None:
    place = open_place(str(tmp_path))
    state = State("network", 2, 1.0, [dict(ENTRY)])
    Checkpoints(place).save(state, last={"x": torch.zeros(2)})
    assert Checkpoints(place).load() == state
    data = place.read(STATE)
    place.write(STATE, data.replace(b'"loss":0.5', b'"loss":0.6'))
    with pytest.raises(CorruptDataError, match="checksum"):
        Checkpoints(place).load()
    place.write(STATE, json.dumps(dataclasses.asdict(state)).encode())  # as 0.1.0 wrote it
    assert Checkpoints(place).load() == state
    with pytest.raises(CorruptDataError, match="names no best weights"):
        Checkpoints(place).tensors(state, "best")


def test_a_checkpoint_of_another_network_is_refused(sets: dict[str, str], tmp_path: Path) -> None:
    plan = plan_for(sets, tmp_path / "model")
    with pytest.raises(Killed):
        train(plan, report=kill_at(3))
    checkpoints = Checkpoints(open_place(plan.destination))
    checkpoints.save(checkpoints.load(), last={"network.x": torch.zeros(2)})
    with pytest.raises(CorruptDataError, match="of another network"):
        train(plan)


def test_text_does_not_become_markup_in_the_learning_curve() -> None:
    history = [{**ENTRY, "map": {"</text><script>alert(1)</script>$x_{": {"mean": 1.0}}}]
    drawn = learning_curve(history).decode()
    assert "<script>" not in drawn
    ElementTree.fromstring(drawn)


def test_a_state_is_readable_json_and_old_tensors_go(tmp_path: Path) -> None:
    checkpoints, state = Checkpoints(open_place(str(tmp_path))), State()
    for step in (1, 2):
        state.step = step
        checkpoints.save(state, last={"x": torch.full((2,), float(step))})
    assert json.loads((tmp_path / STATE).read_bytes())["step"] == 2
    names = sorted(path.name for path in (tmp_path / "_work").iterdir())
    assert [name.rpartition("-")[0] for name in names] == ["last-00000002", ""]
    assert checkpoints.tensors(checkpoints.load(), "last")["x"].tolist() == [2.0, 2.0]


def test_a_run_that_is_overtaken_stops_and_leaves_the_other_state_intact(tmp_path: Path) -> None:
    """A worker that was frozen while another driver went on must not bring its older state back."""
    frozen, other = (Checkpoints(open_place(str(tmp_path))) for _ in range(2))
    frozen.save(State(step=1), last={"x": torch.ones(2)})
    state = other.load()
    for state.step in (2, 3):
        other.save(state, last={"x": torch.full((2,), float(state.step))})
    with pytest.raises(LattqeError, match="another run trains to"):
        frozen.save(State(step=2), last={"x": torch.zeros(2)})
    with pytest.raises(LattqeError, match="another run trains to"):
        Checkpoints(open_place(str(tmp_path))).save(State(), last={"x": torch.zeros(2)})
    found = other.load()
    assert found.step == 3
    assert other.tensors(found, "last")["x"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("recipe", "name"), [*(("paper", name) for name in TABLE_2), *(("relational", name) for name in RELATIONAL)]
)
def test_every_ablation_can_be_trained(sets: dict[str, str], tmp_path: Path, recipe: str, name: str) -> None:
    changes = (TABLE_2 if recipe == "paper" else RELATIONAL)[name]
    plan = plan_for(sets, tmp_path / "model", *RECIPES[recipe], *changes)
    stage = TrainingStage(new_network(plan), plan.config, Team())
    before = {name: value.clone() for name, value in stage.network.state_dict().items()}
    loss = stage.update(0, Training(plan, Team()).sampler.batch(0, slice(0, plan.config.batch)))
    assert torch.isfinite(loss).all()
    assert any(not torch.equal(before[name], value) for name, value in stage.network.state_dict().items())


def gradients(plan: TrainingPlan, size: int) -> dict[str, torch.Tensor]:
    """The sum over `size` workers of the gradients of their parts of the first batch, dropout on."""
    sampler, summed = Training(plan, Team()).sampler, {}
    config = dataclasses.replace(plan.config, clip=0.0)
    for rank in range(size):
        stage = TrainingStage(new_network(plan), config, Team())
        stage.masks = SlotMasks(config.seed, Team(rank, size).slots(config.slots), torch.device("cpu"))
        for module in stage.network.modules():
            if isinstance(module, SlotDropout):
                module.masks = stage.masks
        stage.optimizer.step = stage.optimizer.zero_grad = lambda *args, **kwargs: None  # type: ignore[method-assign]
        each = config.batch // config.slots
        stage.update(0, sampler.batch(0, slice(stage.masks.slots.start * each, stage.masks.slots.stop * each)))
        for parameter, name in stage.names.items():
            assert parameter.grad is not None, name
            summed[name] = summed.get(name, 0) + parameter.grad
    return summed


@pytest.mark.parametrize("size", [2, 4])
def test_the_workers_gradients_add_up_to_those_of_one(undisturbed: TrainingPlan, size: int) -> None:
    alone, together = gradients(undisturbed, 1), gradients(undisturbed, size)
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-7)


def test_masks_belong_to_the_place_in_the_global_batch() -> None:
    like = torch.ones(8, 5)
    whole = SlotMasks(3, range(4), torch.device("cpu"))
    half = SlotMasks(3, range(2, 4), torch.device("cpu"))
    for step in (0, 1):
        whole.begin(step)
        half.begin(step)
        first, second = whole.draw(like, 0.5), whole.draw(like, 0.5)
        assert torch.equal(first[4:], half.draw(like[4:], 0.5))
        assert torch.equal(second[4:], half.draw(like[4:], 0.5))
        assert not torch.equal(first, second)
        assert set(first.unique().tolist()) == {0.0, 2.0}


def test_workers_must_divide_the_slots() -> None:
    with pytest.raises(LattqeError, match="3 workers cannot share 8 slots"):
        Team(0, 3).slots(8)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_cover_everything_once(size: int) -> None:
    covered = [row for rank in range(size) for row in range(1000)[Team(rank, size).share(1000, 64)]]
    assert covered == list(range(1000))
