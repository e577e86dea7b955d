"""A resumable map of blocks over Ray actors: retries, spare copies of stragglers, first finished result wins.

The blocks' results must not depend on who computes them, and computing one twice must do no harm: an actor publishes
its part with an atomic write of bytes that are the same for everyone. So this map may repeat any block at any time,
and what survives the driver is in storage, not here.
"""

import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from cluster.monitor import Tally, Watch
from lattqe.errors import LattqeError
from lattqe.store import Pending

BlockId = TypeVar("BlockId", bound=Hashable)  # what names a block: a number, or a tuple such as (part, start, stop)


# How Ray says that an actor is gone: one that its memory monitor has killed has its own error.
ACTOR_LOST = (RayActorError, OutOfMemoryError)


def user_error(error: Exception) -> LattqeError | None:
    """Find the LattqeError that an actor raised, in a method or in its constructor (where Ray keeps only the text)."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, LattqeError):
        return cause
    last_line = str(error).strip().rsplit("\n", 1)[-1].strip()
    kind, separator, message = last_line.partition(": ")
    module, _, name = kind.rpartition(".")
    found = getattr(sys.modules.get(module), name, None) if separator else None
    return found(message) if isinstance(found, type) and issubclass(found, LattqeError) else None


@dataclass(frozen=True)
class BlockPolicy:
    """How patient the map is."""

    window: int = 2  # blocks queued at one actor: the second hides the round trip to the driver
    max_failures: int = 3  # of one block; a block that kills its actor more often than that is poison
    straggler_factor: float = 3.0  # times the median block's seconds before a spare copy is started elsewhere
    straggler_seconds: float = 20.0  # never sooner than this: short blocks vary a lot
    room_seconds: float = 5.0  # between looks at whether the cluster has grown
    start_timeout: float = 900.0  # for the first actor to come up (importing torch on a crowded node takes minutes)
    late_seconds: float = 120.0  # for another one, before it is started again; twice as long each time


@dataclass
class BlockSummary:
    """What happened: for the job's summary table."""

    blocks: int = 0
    seconds: float = 0.0
    retries: int = 0  # blocks asked again after a failure
    actors_lost: int = 0
    spare_copies: int = 0  # stragglers that were started a second time
    blocks_by_worker: Counter[int] = field(default_factory=Counter)


@dataclass
class _Flight(Generic[BlockId]):
    """One block on its way through one actor."""

    block: BlockId
    worker: int
    actor: Any
    started: float


class _BlockRun(Generic[BlockId]):
    """The state of one `run_blocks`: which actor has which block, and what is still to do."""

    def __init__(
        self,
        make_worker: Callable[[int], Any],
        workers: int,
        blocks: Iterable[BlockId],
        method: str,
        policy: BlockPolicy,
        work: Tally,
        most_at_once: int = 0,
    ) -> None:
        self.make_worker, self.method, self.policy, self.work = make_worker, method, policy, work
        self.watch = Watch(work.kind)
        self.queue = deque(blocks)
        self.remaining = set(self.queue)
        self.failures: Counter[BlockId] = Counter()
        self.suspects: set[BlockId] = set()  # an actor died with one of these; each runs alone until that is settled
        self.failed_starts = 0
        self.flights: dict[Any, _Flight[BlockId]] = {}
        self.durations: list[float] = []
        self.looked_for_room = time.monotonic()
        self.summary = BlockSummary()
        self.actors: dict[int, Any] = {}
        self.starting: dict[Any, int] = {}  # an actor gets blocks only when it is up: the cluster may have no room
        self.asked: dict[int, float] = {}  # when each worker was last started
        self.late_starts: Counter[int] = Counter()
        for worker in range(min(workers, max(len(self.queue), most_at_once)) if self.queue else 0):
            self.start(worker)

    def start(self, worker: int) -> None:
        self.actors[worker] = self.make_worker(worker)
        self.starting[self.actors[worker].__ray_ready__.remote()] = worker
        self.asked[worker] = time.monotonic()

    def grow(self, room: Callable[[int], int]) -> None:
        """Start further workers where nodes have joined and there is work for them."""
        if time.monotonic() - self.looked_for_room < self.policy.room_seconds or not self.remaining:
            return
        self.looked_for_room = time.monotonic()
        for worker in range(len(self.actors), room(len(self.remaining))):
            self.start(worker)

    def ready(self) -> list[int]:
        return [worker for worker in self.actors if worker not in self.starting.values()]

    def started(self, reference: Any) -> None:
        """An actor is up, or its constructor failed."""
        worker = self.starting.pop(reference)
        try:
            ray.get(reference)
        except RayError as error:
            self.failed_starts += 1
            fixable = user_error(error)
            if fixable is not None or self.failed_starts > self.policy.max_failures:
                raise fixable or error from None
            self.watch.lost(worker, error)
            self.start(worker)
        else:
            self.watch.started(worker)

    def check_start(self) -> None:
        """A cluster that cannot place any actor is an error, not a silent wait.

        Where others are up, one that is late may have been lost on its way: it is started again. Without that, a block
        that hangs on the only other actor would never get a spare copy.
        """
        now, timeout = time.monotonic(), self.policy.start_timeout
        if not self.ready() and now - max(self.asked.values()) >= timeout:
            raise LattqeError(
                f"no worker could start within {timeout:.0f} s: the cluster has "
                f"{ray.available_resources()} free; ask for fewer workers or wait for other jobs to end"
            )
        for reference, worker in list(self.starting.items()) if self.ready() else ():
            if now - self.asked[worker] >= self.policy.late_seconds * 2 ** self.late_starts[worker]:
                self.late_starts[worker] += 1
                del self.starting[reference]
                ray.kill(self.actors[worker])
                self.start(worker)

    def load(self, worker: int) -> int:
        return sum(flight.worker == worker for flight in self.flights.values())

    def has_room(self, worker: int, block: BlockId) -> bool:
        on_it = [flight.block for flight in self.flights.values() if flight.worker == worker]
        if block in self.suspects or self.suspects.intersection(on_it):
            return not on_it
        return len(on_it) < self.policy.window

    def send(self, block: BlockId, worker: int) -> None:
        actor = self.actors[worker]
        reference = getattr(actor, self.method).remote(block)
        self.flights[reference] = _Flight(block, worker, actor, time.monotonic())

    def fill(self) -> None:
        """Give every actor up to a window of blocks; when none are left, copy stragglers to idle actors."""
        for _ in range(self.policy.window):
            for worker in self.ready():
                if self.queue and self.has_room(worker, self.queue[0]):
                    self.send(self.queue.popleft(), worker)
        if not self.queue:
            self.copy_stragglers()

    def copy_stragglers(self) -> None:
        idle = [worker for worker in self.ready() if self.load(worker) == 0]
        if not idle:
            return
        typical = statistics.median(self.durations) if self.durations else 0.0
        patience = max(self.policy.straggler_seconds, self.policy.straggler_factor * typical)
        copies = Counter(flight.block for flight in self.flights.values())
        late = sorted(
            (flight.started, flight.block)
            for flight in self.flights.values()
            if flight.block in self.remaining
            and copies[flight.block] == 1
            and time.monotonic() - flight.started > patience
        )
        for worker, (_, block) in zip(idle, late):
            self.summary.spare_copies += 1
            self.watch.copied(self.work.label(block), worker)
            self.send(block, worker)

    def collect(self, reference: Any, on_done: Callable[[BlockId, Any], Iterable[BlockId] | None]) -> None:
        flight = self.flights.pop(reference)
        try:
            result = ray.get(reference)
        except RayError as error:
            fixable = user_error(error)
            if fixable is not None:
                raise fixable from None  # wrong input stays wrong: no retry, the one clear line reaches the user
            self.watch.failed(self.work.label(flight.block), flight.worker, error)
            if isinstance(error, ACTOR_LOST) and not self.bury(flight, error):
                self.requeue(flight)
            else:
                self.fail(flight, error)
        else:
            seconds = time.monotonic() - flight.started
            self.durations.append(seconds)
            if flight.block in self.remaining:
                self.remaining.discard(flight.block)
                self.suspects.discard(flight.block)
                self.summary.blocks += 1
                self.summary.blocks_by_worker[flight.worker] += 1
                self.watch.done(
                    self.work.label(flight.block),
                    flight.worker,
                    self.work.rows(flight.block),
                    seconds,
                    self.work.traffic(result),
                )
                more = list(on_done(flight.block, result) or ())
                self.remaining.update(more)
                self.queue.extendleft(reversed(more))

    def bury(self, flight: _Flight[BlockId], error: Exception) -> bool:
        """Replace a dead actor, once; tell whether it is certain that it died of this block.

        Only where it had no other: an answer that it had given just before it died may be lost too, so that the oldest
        of several blocks need not be the one. Several are asked for again, each alone.
        """
        together = [other for other in self.flights.values() if other.actor is flight.actor]
        first = self.actors[flight.worker] is flight.actor
        if first:
            self.summary.actors_lost += 1
            self.watch.lost(flight.worker, error)
            ray.kill(flight.actor)  # it may be only unreachable: it must not come back beside its replacement
            self.start(flight.worker)
        if first and not together:
            return True
        self.suspects.update(other.block for other in (flight, *together))
        return False

    def fail(self, flight: _Flight[BlockId], error: Exception) -> None:
        block = flight.block
        self.failures[block] += 1
        if self.failures[block] > self.policy.max_failures:
            if isinstance(error, RayTaskError):
                raise error
            reason = str(error).strip().splitlines()[0]
            raise LattqeError(
                f"block {block} failed {self.failures[block]} times, last with: {reason}: "
                "see the Ray logs of its node (often too little memory: use fewer workers)"
            )
        self.requeue(flight)

    def requeue(self, flight: _Flight[BlockId]) -> None:
        """Ask for a block again, unless it is done or another copy of it is still on its way."""
        block = flight.block
        if (
            block in self.remaining
            and block not in self.queue
            and all(flight.block != block for flight in self.flights.values())
        ):
            self.summary.retries += 1
            self.watch.retried(self.work.label(block), flight.worker)
            self.queue.append(block)

    def stop(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)
        self.watch.close()


def ask_actors(
    actors: Sequence[Any],
    method: str,
    requests: Iterable[Mapping[int, Sequence[Any]]],
    recover: Callable[[int, RayError], None],
    window: int = 1,
    watch: Watch | None = None,
) -> Iterator[dict[int, Any]]:
    """Call a method of some actors for each request, {number of an actor: arguments}, that changes nothing there; yield
    the answers {number: answer} of one request after the other, at most `window` of which are under way.

    recover(number, error): waits until an actor that failed can be asked again, or raises. It is called once for each
    death, however many answers were lost with it; all of them are asked for again.
    """
    flights: dict[Any, tuple[int, int, int]] = {}
    asking: dict[int, Mapping[int, Sequence[Any]]] = {}
    answers: dict[int, dict[int, Any]] = {}
    lives: Counter[int] = Counter()

    def send(request: int, actor: int) -> None:
        reference = getattr(actors[actor], method).remote(*asking[request][actor])
        flights[reference] = (request, actor, lives[actor])

    following, first = enumerate(requests), 0
    while True:
        while len(asking) < window and (more := next(following, None)) is not None:
            asking[more[0]], answers[more[0]] = more[1], {}
            for actor in more[1]:
                send(more[0], actor)
        if not asking:
            return
        while len(answers[first]) < len(asking[first]):
            for reference in ray.wait(list(flights), num_returns=1)[0]:
                request, actor, life = flights.pop(reference)
                try:
                    answers[request][actor] = ray.get(reference)
                except RayError as error:
                    if life == lives[actor]:
                        recover(actor, error)
                        lives[actor] += 1
                    if watch is not None:
                        watch.retried(f"{method} {request}", actor)
                    send(request, actor)
                else:
                    if watch is not None:
                        watch.count(actor)
        del asking[first]
        yield answers.pop(first)
        first += 1


def check_parts(pending: Pending) -> None:
    """Hold the parts that an earlier run has left against their receipts, once, in tasks on all nodes: after this,
    `pending.missing()` reads none of them.
    """
    numbers = pending.unchecked()
    tasks = min(len(numbers), max(int(ray.cluster_resources().get("CPU", 1)), 1))
    check = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_sound_parts)  # actors may hold all processors
    try:
        for sound in ray.get([check.remote(pending.uri, numbers[task::tasks]) for task in range(tasks)]):
            pending.trust(sound)
    except RayError as error:
        raise user_error(error) or error from None


def _sound_parts(uri: str, numbers: list[int]) -> list[int]:
    """Those of the parts that are what their receipts say; damaged ones are removed."""
    return Pending.attach(uri).check(numbers)


def run_blocks(
    make_worker: Callable[[int], Any],
    workers: int,
    blocks: Iterable[BlockId],
    *,
    method: str = "run",
    on_done: Callable[[BlockId, Any], Iterable[BlockId] | None],
    policy: BlockPolicy | None = None,
    work: Tally | None = None,
    room: Callable[[int], int] | None = None,
    most_at_once: int = 0,
) -> BlockSummary:
    """Run `method(block)` once, effectively, for every block over `workers` actors.

    `make_worker(number)` starts one actor (from URIs and numbers, never arrays) and is called again when one dies.
    `on_done(block, result)` is called in this process, exactly once for each block, in order of completion; it may
    return further blocks that have only now become possible (a part whose last piece has just arrived).
    `room(left)` says how many workers there shall be by now, with so many blocks left: where nodes have joined, more
    are started.
    `most_at_once`: how many blocks can be possible together later, where only few are now; no more workers start.
    `work` says how the blocks are called and counted in logs and metrics.
    Raises the actor's own LattqeError at once, and anything else after `policy.max_failures` retries of one block.
    """
    state = _BlockRun(make_worker, workers, blocks, method, policy or BlockPolicy(), work or Tally(), most_at_once)
    started = time.monotonic()
    try:
        while state.remaining:
            state.fill()
            done, _ = ray.wait([*state.starting, *state.flights], num_returns=1, timeout=1.0)
            for reference in done:
                if reference in state.starting:
                    state.started(reference)
                else:
                    state.collect(reference, on_done)
            state.check_start()
            if room is not None:
                state.grow(room)
    finally:
        state.stop()
    state.summary.seconds = time.monotonic() - started
    return state.summary
