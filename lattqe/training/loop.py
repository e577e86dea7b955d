"""The whole training on one worker: both stages, validation, checkpoints, the choice of nQE and nDBA, the model.

Its course is kept for the eye: a figure, and TensorBoard events.
"""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.model import LAttQE
from lattqe.model.encoder import Head
from lattqe.store import open_place
from lattqe.store.local import scratch_folder
from lattqe.training import validation
from lattqe.training.checkpoint import Checkpoints, State, Team, Tensors
from lattqe.training.config import TrainingConfig
from lattqe.training.densities import DensitySampler
from lattqe.training.plan import TrainingData, TrainingPlan, load
from lattqe.training.sampling import Sampler, Stream, TupleSampler, WorldSampler, prefetched, torch_seed
from lattqe.training.stage import NotFiniteError, TrainingStage

History = list[dict[str, Any]]

SAMPLERS: dict[str, Callable[[TrainingData, TrainingConfig], Sampler]] = {
    "tuples": TupleSampler,
    "worlds": WorldSampler,
    "densities": DensitySampler,
}
EVENTS, CURVE = "tensorboard/events.out.tfevents.lattqe", "learning_curve.svg"


@dataclass(frozen=True)
class TrainingProgress:
    """What the leading worker tells: updates done out of all, a line about loss and mAP, and its checkpoint."""

    step: int
    total: int
    note: str


# Called after each update; where it returns True, the training saves its state and stops.
OnTrainingProgress = Callable[[TrainingProgress], bool | None]


class StoppedError(LattqeError):
    """The training was asked to stop and has saved where it stands."""


def new_network(plan: TrainingPlan) -> LAttQE:
    """The network as it starts: a function of the seed, or what another training has made."""
    if plan.config.start:
        network = LAttQE(plan.config.network)
        network.load_state_dict(LAttQE.load(plan.config.start).state_dict())
        return network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(plan.config.seed, Stream.START, 0))
        return LAttQE(plan.config.network)


def make_sampler(training: TrainingData, config: TrainingConfig) -> Sampler:
    """The sampler that the configuration names."""
    return SAMPLERS[config.sampler](training, config)


class Training:
    """One training as one worker sees it."""

    def __init__(self, plan: TrainingPlan, team: Team, report: OnTrainingProgress = lambda progress: None) -> None:
        self.plan, self.config, self.team, self.report = plan, plan.config, team, report
        self.place = open_place(plan.destination)
        self.checkpoints = Checkpoints(self.place)
        self.state = self.checkpoints.load()
        config = self.config
        self.training = load(plan.features, plan.graphs, config.graph_k, config.shared_labels, plan.cache, team)
        self.sampler = make_sampler(self.training, config)
        self.sets = [validation.load_set(*pair, cache=plan.cache, device=team.gpu) for pair in plan.validation]
        self.rows = min(len(one.xb) for one in self.sets)  # of the smallest, before any is cut
        self.to_augment = self.sets  # what takes long: where there are several spaces, the first will do
        if config.validate_densities:
            spaces = self._spaces()
            self.to_augment, self.sets = spaces[0], [one for space in spaces for one in space]
        self.total = config.steps + config.temperature_steps
        self.started = time.monotonic() - self.state.seconds

    def _spaces(self) -> list[list[validation.ValidationSet]]:
        """The validation sets of every density: for each width, and shifted at the first one."""
        config = self.config
        widths = [min(width, self.training.dim) for width in config.validate_widths] or [self.training.dim]
        spaces = [(width, 0.0) for width in widths] + [(widths[0], config.validate_shift)] * (config.validate_shift > 0)
        return [
            validation.density_sets(self.sets, config.validate_densities, width, config.validate_queries, shift)
            for width, shift in spaces
        ]

    def run(self) -> None:
        """Do what is not done yet, and publish the model."""
        network = new_network(self.plan)
        if self.state.stage == "network":
            following = "choice" if self.config.network.gated else "temperature"
            self._run_stage(TrainingStage(network, self.config, self.team), self.config.steps, following)
            self._agree()
        self._put_back(network.load_state_dict, "best")
        if not self.config.network.gated:  # gates of rows are trained with the rest
            self._run_temperature(network)
        self._publish(network, self._choose(network))

    def _run_temperature(self, network: LAttQE) -> None:
        """Do what is not done of the second stage."""
        stage = TrainingStage(network, self.config, self.team, dba=True)
        if self.config.temperature_on == "worlds":  # smaller ones: all of their rows are expanded in each update
            self.sampler = make_sampler(self.training, replace(self.config, world_rows=self.config.temperature_rows))
        if self.state.stage == "temperature":
            self._run_stage(stage, self.total, "choice")
        else:
            self._put_back(stage.restore, "last")

    def _put_back(self, put: Callable[[Tensors], object], role: str) -> None:
        """Give a checkpoint's tensors to what they belong to."""
        tensors = self.checkpoints.tensors(self.state, role)
        try:
            put(tensors)
        except (RuntimeError, KeyError):  # names or shapes
            raise CorruptDataError(
                f"the {role} checkpoint in {self.place.uri}/_work is of another network: delete {self.place.uri} and "
                "train again"
            ) from None

    def _agree(self) -> None:
        """Wait until the leader has written, and read it: only the leader knows the names of its files."""
        self.team.total(torch.zeros(1))
        self.state = self.checkpoints.load()

    def _run_stage(self, stage: TrainingStage, stop: int, following: str) -> None:
        """Train one stage up to update number `stop`, from wherever its last checkpoint is."""
        state = self.state
        if state.history and state.history[-1]["stage"] == state.stage:
            self._put_back(stage.restore, "last")
        slots = stage.masks.slots
        each = self.config.batch // self.config.slots
        part = slice(slots.start * each, slots.stop * each)
        sums, since, told = torch.zeros(len(stage.loss_names())), 0, state.stage
        with prefetched(self.sampler, range(state.step, stop), part, self.team.device) as batches:
            for step, batch in zip(range(state.step, stop), batches):
                try:
                    values = stage.update(step, batch.to(self.team.device))
                except NotFiniteError as error:
                    raise NotFiniteError(
                        f"{error}: stopped; the last good checkpoint (step {state.step}) is kept in "
                        f"{self.place.uri}/_work; lower learning_rate and use a new destination"
                    ) from None
                for losses in values if step + 1 < stop else torch.cat([values, stage.rest()]):
                    sums, since, told = sums + losses, since + 1, f"{state.stage} · loss {losses[0].item():.4f}"
                stopping = self._tell(step + 1, told) and step + 1 < stop
                stopping = stopping and (step + 1) % self.config.accumulate == 0  # half an update cannot be saved
                if stopping or self._due(step + 1, stop):
                    self._record(
                        stage,
                        step + 1,
                        dict(zip(stage.loss_names(), (sums / since).tolist())),
                        following if step + 1 == stop else state.stage,
                    )
                    sums, since = torch.zeros_like(sums), 0
                if stopping:
                    raise StoppedError(f"stopped after update {step + 1:,}; the same command continues there")
        if state.step == stop and state.stage != following:  # a stage of no updates
            self._record(stage, stop, {}, following)

    def _due(self, step: int, stop: int) -> bool:
        """Whether a checkpoint is written after so many updates."""
        return step == stop or step % self.config.checkpoint_every == 0 or step % self.config.validate_every == 0

    def _record(self, stage: TrainingStage, step: int, losses: dict[str, float], following: str) -> None:
        """Validate if it is time, and save where we stand."""
        state = self.state
        last = step == (self.total if stage.dba else self.config.steps)
        entry: dict[str, Any] = {
            "step": step,
            "stage": state.stage,
            "time": time.time(),
            **losses,
            **_learned(stage.network),
        }
        roles = {}
        if not stage.dba and (last or step % self.config.validate_every == 0):
            entry["map"] = validation.validate(stage.kept, self.sets, self.config.validate_k, self.team)
            best = max(found["mean"] for found in entry["map"].values())
            if state.best is None or best > state.best["map"]:
                state.best = {"step": step, "map": best}
                roles["best"] = stage.kept.state_dict()
        entry["seconds"] = state.seconds = time.monotonic() - self.started
        state.history.append(entry)
        state.step, state.stage = step, following
        if self.team.leads:
            self.checkpoints.save(state, last=stage.tensors(), **roles)
            self.place.write(EVENTS, tensorboard_events(state.history))

    def _tell(self, step: int, doing: str) -> bool:
        """Report, as the leader; whether to stop."""
        if not self.team.leads:
            return False
        best = "" if self.state.best is None else f" · best validation mAP {self.state.best['map']:.2f}"
        return bool(self.report(TrainingProgress(step, self.total, f"{doing}{best}")))

    def _choose(self, network: LAttQE) -> dict[str, Any]:
        """Find nQE alone, and nDBA, hops and nQE together, that are best on the mean of the validation sets."""
        qe, dba = self.config.choices(self.rows)
        self._tell(self.total, f"choosing nQE among {len(qe)}")
        alone = validation.validate(network, self.sets, qe, self.team)
        hops = self.config.choose_hops
        self._tell(self.total, f"choosing nDBA among {len(dba)} and hops among {len(hops)} with nQE among {len(qe)}")
        with_dba = validation.validate_dba(network, self.to_augment, dba, qe, self.team, hops, adapt=self.config.adapt)
        n_qe = max(alone, key=lambda k: alone[k]["mean"])
        _, n_dba, n_hops, n_qe_dba = max(
            (with_dba[validation.setting_name(m, h)][str(k)], m, h, k) for m in dba for h in hops for k in qe
        )
        chosen = {"nqe": int(n_qe), "ndba": int(n_dba), "nqe_with_dba": int(n_qe_dba)}
        if hops != (1,):
            chosen["hops"] = n_hops
        if self.config.adapt:
            chosen["adapt"] = True
        return {
            **chosen,
            "chosen": chosen,
            "validation": {
                "none": {one.name: validation.mean_ap(one, one.xq, one.index, self.team) for one in self.sets},
                "qe": alone,
                "dba": with_dba,
            },
        }

    def _publish(self, network: LAttQE, chosen: dict[str, Any]) -> None:
        """Write curve, events and model; the manifest comes last and takes `_work` away."""
        if not self.team.leads:
            return
        state = self.state
        metrics = {
            **chosen,
            "best": state.best,
            **_learned(network),
            "seconds": time.monotonic() - self.started,
            "device": self.team.device.type,  # the weights depend on its kind
            "images": self.training.rows,
            "classes": len(self.training.class_sizes),
            "classes_of_one_image": self.training.skipped,
            "history": state.history,
        }
        self.place.write(CURVE, learning_curve(state.history))
        network.save(self.plan.destination, metrics, training=self.plan.training, inputs=self.plan.inputs)


def _learned(network: LAttQE) -> dict[str, float]:
    """The one number that says how database rows are treated: the softmax's temperature, or a hop's α."""
    if isinstance(network.head, Head):
        return {"temperature": network.head.temperature.item()}
    return {"alpha": network.alpha.item()}


def train(plan: TrainingPlan, team: Team | None = None, report: OnTrainingProgress = lambda progress: None) -> None:
    """Train on this worker, continuing an earlier run on the same destination; the leader publishes the model."""
    with _repeatable():
        Training(plan, team or Team(), report).run()


@contextmanager
def _repeatable() -> Iterator[None]:
    """Let torch add in one order what several threads would add in any: the gradients of rows that are indexed.

    By two threads at once, one in four of such gradients had another last bit than the time before, and so had the
    weights. Where a device has no such order, torch warns and the weights of two runs may differ in their last bits.
    """
    before = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic  # a module with a property, which types cannot say
    filling = memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports torch's compiler, for seconds
    memory.fill_uninitialized_memory = False  # for finding bugs; it costs time
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = filling


__all__ = ["State", "Training", "TrainingProgress", "new_network", "train"]


def learning_curve(history: History) -> bytes:
    """An SVG of the loss and of each validation set's mAP over the updates of the first stage."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    entries = [entry for entry in history if entry["stage"] == "network" and "loss" in entry]
    # A fixed salt and no date: equal curves are equal files.
    with matplotlib.rc_context({"svg.hashsalt": "lattqe", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot([e["step"] for e in entries], [e["loss"] for e in entries], color="#444444")
        left.set(xlabel="updates", ylabel="loss", title="training loss")
        validated = [entry for entry in history if "map" in entry]
        for k in validated[-1]["map"] if validated else ():
            points = [(entry["step"], entry["map"][k]["mean"]) for entry in validated if k in entry["map"]]
            right.plot(*zip(*points), marker="o", markersize=3, label=f"{k} neighbors")
        right.set(xlabel="updates", ylabel="mAP (%)", title="validation, mean of the sets")
        if validated:
            right.legend(frameon=False)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
        buffer = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return buffer.getvalue()


def tensorboard_events(history: History) -> bytes:
    """A TensorBoard event file of the whole history; a longer history gives a file that begins with the shorter's."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    started = history[0]["time"] if history else 0.0
    with scratch_folder("events") as folder:
        path = folder / "events"
        with path.open("wb") as file:
            writer = RecordWriter(file)
            writer.write(Event(wall_time=started, file_version="brain.Event:2").SerializeToString())
            for entry in history:
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(entry)])
                event = Event(wall_time=entry["time"], step=entry["step"], summary=summary)
                writer.write(event.SerializeToString())
            writer.flush()
        return path.read_bytes()


def _scalars(entry: dict[str, Any]) -> list[tuple[str, float]]:
    """The numbers of one entry by tag."""
    outside = ("step", "stage", "time", "seconds", "map")
    scalars = [(f"train/{name}", value) for name, value in entry.items() if name not in outside]
    for k, found in entry.get("map", {}).items():
        scalars += [(f"validation@{k}/{name}", value) for name, value in found.items()]
    return scalars
