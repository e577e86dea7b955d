"""Training on Ray Train: N workers with the loop of `lattqe.training`, restarted from their checkpoint when one dies.

Checkpoints are ours, in the destination, because they must survive the cluster; of Ray Train we use the worker group,
the process group and the restarts. A board (one small actor) carries progress to the driver, and an error that a user
can fix, which must end the training rather than restart it.

One worker on this machine needs no group: it is a thread of this process (Ray Train's local mode), without a Ray that
starts eight processes one after the other first. What it writes is the same.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.blocks import ACTOR_LOST
from cluster.monitor import Watch, fitting_threads, require_resources
from cluster.session import GROW_SECONDS, worker_device
from lattqe.errors import LattqeError
from lattqe.store.local import scratch_folder

# lattqe.training is imported where it is used: Ray loads this module into processes that have no need for torch.
if TYPE_CHECKING:
    from lattqe.training import TrainingPlan, TrainingProgress

# A worker group is started again that many times before the training gives up; preempted nodes are not counted.
MAX_FAILURES = 10
# Ray Train waits a minute for a group to be placed, and by default asks again without end and without a word: where a
# node has died, as often as a cluster has minutes to grow.
MAX_STARTS = int(GROW_SECONDS / 60)
# The others wait while the leader searches for validation. A worker that has died is noticed at once, by Ray.
COLLECTIVE_SECONDS = 24 * 3600
POLL_SECONDS = 0.25
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PLACING_SECONDS = 60.0  # for nodes to come that have room for all workers
STOP_SECONDS = 6.0  # after Ctrl-C: for the update that runs and its checkpoint; then the last checkpoint must do
LEAVE_SECONDS = 3.0  # and for Ray Train to see that its workers have ended
LOST_SECONDS = 120.0  # for the same where the board is lost: a group that is just being started must find that out


@dataclass
class Standing:
    """What the board shows: updates done of all and a line about them, the workers' process ids by rank, how often the
    workers were started, an error that ended the training, and whether it was asked to stop.
    """

    step: int = 0
    total: int = 0
    note: str = ""
    pids: dict[int, int] = field(default_factory=dict)
    starts: int = 0
    error: str | None = None
    stopping: bool = False


class Board:
    """The one place where workers write what the driver reads."""

    def __init__(self) -> None:
        self.standing = Standing()

    def join(self, rank: int, pid: int) -> str | None:
        """Say that a worker has started; returns the error that ended the training, if one did."""
        self.standing.pids[rank] = pid
        self.standing.starts += rank == 0
        return self.standing.error

    def tell(self, step: int, total: int, note: str) -> bool:
        """Say how far the training is; returns whether it shall stop."""
        self.standing.step, self.standing.total, self.standing.note = step, total, note
        return self.standing.stopping

    def stop(self) -> None:
        """Ask the training to stop."""
        self.standing.stopping = True

    def fail(self, error: str) -> None:
        """Say that the training cannot continue."""
        self.standing.error = error

    def read(self) -> Standing:
        """All of it."""
        return self.standing


def run_worker(config: dict[str, Any]) -> None:
    """What each worker runs: train as long as there is a board; without one the driver has given up, and so do they."""
    with suppress(ActorDiedError):  # one that is only out of reach is asked again by workers that start anew
        _train_as_one_of_a_team(config)


def _train_as_one_of_a_team(config: dict[str, Any]) -> None:
    """Join the team, continue from the destination's checkpoint, train."""
    import ray.train.torch
    import torch

    from lattqe.training import Team, TrainingPlan, train
    from lattqe.training.loop import StoppedError
    from lattqe.training.stage import NotFiniteError

    torch.set_num_threads(config["threads"])
    # Without a GPU of its own a worker would be told the first that torch sees.
    device = ray.train.torch.get_device() if config["gpu"] else torch.device("cpu")
    board, team = config["board"], Team.joined(device)
    if ray.get(board.join.remote(team.rank, os.getpid())):
        return

    answers: list[Any] = []

    def tell(progress: "TrainingProgress") -> bool:
        """Tell without waiting; the answer to an earlier update says whether to stop."""
        answers.append(board.tell.remote(progress.step, progress.total, progress.note))
        ready, answers[:] = ray.wait(answers, num_returns=len(answers), timeout=0)
        return any(ray.get(ready))

    try:
        train(TrainingPlan.from_dict(config["plan"]), team, tell)
    except (NotFiniteError, StoppedError) as error:  # on all workers alike, or all of them are about to end
        ray.get(board.fail.remote(str(error)))
    except LattqeError as error:  # perhaps here alone: raise, so that the others do not wait forever
        ray.get(board.fail.remote(str(error)))
        raise


def train_here(
    plan: "TrainingPlan", threads: int | None = None, show: Callable[[Standing], None] = lambda standing: None
) -> None:
    """Train with one worker in this process, as `train_on_cluster` does with workers on Ray."""
    import torch
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from threadpoolctl import threadpool_limits

    from lattqe.device import pick_device, torch_threads
    from lattqe.training import Team, train

    if all(name in os.environ for name in TORCHRUN):  # Ray Train would join a group of processes that train the same
        raise LattqeError("torchrun does not start lattqe train: give --workers N, without torchrun")
    board, device = Board(), pick_device()

    def tell(progress: "TrainingProgress") -> bool:
        return board.tell(progress.step, progress.total, progress.note)

    def work() -> None:
        count = threads or torch.get_num_threads()
        with torch_threads(count), threadpool_limits(count):
            train(plan, Team(device=device), tell)

    logging.getLogger("ray.train").setLevel(logging.ERROR)  # which would announce its local mode
    trainer = TorchTrainer(work, scaling_config=ScalingConfig(num_workers=0), run_config=RunConfig(name="train"))
    fit = _in_background(trainer.fit)
    try:
        _follow(fit, board.read, show)
    except KeyboardInterrupt:
        board.stop()
        wait([fit], timeout=STOP_SECONDS)
        raise
    fit.result()


def train_on_cluster(
    plan: "TrainingPlan",
    workers: int,
    threads: int | None = None,
    show: Callable[[Standing], None] = lambda standing: None,
    max_failures: int = MAX_FAILURES,
    placing_seconds: float = PLACING_SECONDS,
) -> None:
    """Train with that many workers on the connected Ray, calling `show` a few times a second.

    Returns when the model is published at the plan's destination, which must be claimed and reachable by all workers.
    """
    from lattqe.training import Team

    Team(0, workers).slots(plan.config.slots)  # refuses a number that does not fit, before anything starts
    threads = threads or threads_for(workers)
    resources = {"CPU": float(threads), **_gpus()}
    require_resources(resources, workers, placing_seconds)
    # With its driver, so that no other node's death takes it away.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
    with scratch_folder("train") as storage:  # Ray Train insists on one; nothing of ours goes there
        try:
            trainer = _trainer(plan, board, workers, threads, resources, str(storage), max_failures)
            fit = _in_background(trainer.fit)
            try:
                _follow(fit, lambda: ray.get(board.read.remote()), _counting(show, plan.config.batch))
                _end(fit, ray.get(board.read.remote()))
            except KeyboardInterrupt:
                _save_and_stop(board)
                wait([fit], timeout=LEAVE_SECONDS)  # a thread that still waits for Ray may crash where Ray has ended
                raise
            except ACTOR_LOST as error:
                wait([fit], timeout=LOST_SECONDS)
                raise LattqeError(
                    "the actor that carries the training's progress has died (often for lack of memory on the driver's "
                    "machine): the same command continues from the last checkpoint"
                ) from error
        finally:
            ray.kill(board)


def _in_background(function: Callable[[], Any]) -> "Future[Any]":
    """Call it in a thread that no exit waits for: in the main thread, Ray Train would swallow Ctrl-C.

    Where it is left behind, `jobs/console.py` knows it by its name.
    """
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="ray-train", daemon=True).start()
    return future


def _save_and_stop(board: Any) -> None:
    """Give the workers a moment to save where they stand; without an answer the last checkpoint must do."""
    try:
        ray.get(board.stop.remote(), timeout=STOP_SECONDS)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            standing = ray.get(board.read.remote(), timeout=STOP_SECONDS)
            if standing.error is not None or not 0 < standing.step < standing.total:
                return
            time.sleep(POLL_SECONDS / 5)
    except (KeyboardInterrupt, ray.exceptions.RayError):
        return


def threads_for(workers: int) -> int:
    """Threads of each worker: an equal share of the CPUs, but no more than fit on the nodes."""
    return fitting_threads(workers, _gpus())


def _gpus() -> dict[str, float]:
    """What each worker takes beside its CPUs: a GPU, where the workers' device is one."""
    return {"GPU": 1.0} if worker_device() == "cuda" else {}


def _trainer(
    plan: "TrainingPlan",
    board: Any,
    workers: int,
    threads: int,
    resources: dict[str, float],
    storage: str,
    max_failures: int,
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from cluster.process_group import torch_config

    use_gpu = "GPU" in resources
    return TorchTrainer(
        run_worker,
        train_loop_config={"plan": plan.to_dict(), "board": board, "threads": threads, "gpu": use_gpu},
        torch_config=torch_config("nccl" if use_gpu else "gloo", workers, storage, COLLECTIVE_SECONDS),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=RunConfig(
            name="train",
            storage_path=storage,
            failure_config=FailureConfig(max_failures, controller_failure_limit=MAX_STARTS),
        ),
    )


def _counting(show: Callable[[Standing], None], batch: int) -> Callable[[Standing], None]:
    """Show what the board says, and count it: updates are the blocks, queries the rows, restarts the lost actors."""
    watch, told, starts = Watch("train"), None, 1

    def shown(standing: Standing) -> None:
        nonlocal told, starts
        if standing.starts > starts:
            watch.lost(0, RuntimeError("a worker of the group died"))
            starts = standing.starts
        if told is not None and standing.step > told:
            watch.count(0, pieces=standing.step - told)
            watch.count_rows((standing.step - told) * batch)
        told = max(told or 0, standing.step) if standing.step else told  # a continued training begins where it was
        show(standing)

    return shown


def _follow(fit: "Future[Any]", read: Callable[[], Standing], show: Callable[[Standing], None]) -> None:
    """Show what the board says until the training has ended, however it ended."""
    while True:
        show(read())
        if wait([fit], timeout=POLL_SECONDS).done:
            show(read())
            return


def _end(fit: "Future[Any]", standing: Standing) -> None:
    """Raise what ended a training on Ray, if something did: one line for the user."""
    if standing.error is not None:
        raise LattqeError(standing.error)
    if (error := fit.exception()) is not None:
        raise LattqeError(f"{_reason(error)}; the same command continues from the last checkpoint") from error


def _reason(error: BaseException) -> str:
    """Why Ray Train gave up, in a few words: by its controller's error if that is what it was."""
    if type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError":
        return (
            f"the workers found no room on the nodes in {MAX_STARTS + 1} attempts: wait for other jobs to end or for "
            "nodes to come back, or ask for fewer --workers or --threads"
        )
    return f"the training workers failed repeatedly, last with: {' '.join(str(error).split())[-300:]}"
