"""The faults of a campaign. Each strikes once, while a command runs, at the n-th request that it sends to storage."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from campaign_pipeline import Stage
from campaign_world import MEMORY_BYTES, World
from ray_nodes import Namespaces

from lattqe.store import open_place, read_manifest

# What the proxy is told, and how it reads in the table.
STORAGE = {
    "S3 answers 500": "fail",
    "S3 answers 503": "throttle",
    "S3 does not answer": "stall",
    "S3 hangs up": "hang up",
    "S3's answer is lost": "lose the answer",
    "S3's answer is cut": "cut short",
    "S3's answer is damaged": "corrupt",
    "S3 answers as before a write": "answer as before",
}
WITH_ACTORS = ("actor killed", "actor stopped for a while")
WITH_NODES = (
    "head killed",
    "node agent killed",
    "node killed",
    "node stopped for a while",
    "node cut off for a while",
    "node's clock jumps",
    "node out of memory",
    "node without GPU joins",
)
BETWEEN = ("input part deleted", "input part replaced")  # two commands
SERVER = "S3 server"
RIVALS = ("second driver", "second driver with other settings")
ANYWHERE = (
    "driver killed",
    "driver stopped for a while",
    "S3 server killed",
    "S3 server stopped for a while",
    "disk full",
    "clock jumps",
    *STORAGE,
)
ONLY_CONTENT = ("S3's answer is cut", "S3's answer is damaged", "S3 answers as before a write")
ENDS_THE_COMMAND = ("driver killed", "head killed", "disk full", "clock jumps", *BETWEEN)
JUMPS = (-86_400.0, -3600.0, 3600.0, 86_400.0, 400 * 86_400.0)
STRIKE_SECONDS = 0.2  # between two attempts to strike where there is nothing yet to strike
LONG_SECONDS = (17.0, 20.0)  # longer than a command keeps trying (`campaign_world.HURRY`)
LONG_OUTAGES = 0.1  # of all


def kinds_for(world: World, stage: Stage) -> list[str]:
    """The faults that can strike a stage here."""
    kinds = [kind for kind in ANYWHERE if kind != "disk full" or world.disk.available]
    if stage.on_ray:
        kinds += WITH_ACTORS
    if stage.on_ray and world.nodes:
        impossible = {"node cut off for a while": not isinstance(world.network, Namespaces)}
        impossible |= {"node out of memory": not world.can_run_short}
        kinds += [kind for kind in WITH_NODES if not impossible.get(kind)]
    if stage.reads:
        kinds += BETWEEN
    if stage.verb != "benchmark":  # whose cells are measured by the driver that comes first
        kinds.append("second driver")
    if stage.other:
        kinds.append("second driver with other settings")
    return sorted(kinds)


@dataclass
class Target:
    """What a fault can reach of a command: its words and those of a rival with other settings, both without --to, its
    destination, what it reads.
    """

    words: list[str]
    other: list[str]
    to: str
    reads: list[str]


class Fault:
    """One fault that is to strike at request number `at`; `injected` once it has. It may last for a while."""

    def __init__(self, world: World, kind: str, at: int, rng: random.Random, target: Target | None = None) -> None:
        self.world, self.kind, self.at, self.rng, self.target = world, kind, at, rng, target
        self.injected, self.detail, self.after = False, "", 0.0
        self._left = rng.randint(1, 5)  # requests that S3 misbehaves for
        self._struck = threading.Event()
        self._undo: tuple[float, Callable[[], None]] | None = None
        self._before, self._next, self._began = 0, 0.0, 0.0

    def begin(self) -> None:
        """The command that it shall strike starts."""
        self._began = time.monotonic()
        self._before = self.world.proxy.happened[STORAGE.get(self.kind, self.kind)]
        if self.at == 0:
            self.poll(0)

    @property
    def part(self) -> str:
        """What it strikes: of each part only one fault lasts at a time."""
        return SERVER if self.kind.startswith(SERVER) else self.kind.split()[0]

    @property
    def lasts(self) -> bool:
        """Whether something is to be undone."""
        return self._undo is not None

    def at_request(self, number: int, method: str) -> str | None:
        """What the proxy shall do to a request, if this is the fault; the one it strikes at waits until it has."""
        if number < self.at:
            return None
        if self.kind in STORAGE:
            fitting = self._left > 0 and (method == "GET" or self.kind not in ONLY_CONTENT)
            if self.kind == "S3 answers as before a write":  # once, when there is something else to answer
                self._left = int(self.world.proxy.happened[STORAGE[self.kind]] == self._before)
            else:
                self._left -= fitting
            return STORAGE[self.kind] if fitting else None
        if number == self.at:
            self._struck.wait(1)
        return None

    def poll(self, requests: int) -> None:
        """Strike when it is time, undo when it is time."""
        if self.kind in STORAGE:
            self.injected = self.world.proxy.happened[STORAGE[self.kind]] > self._before
        elif requests >= self.at and not self.injected and time.monotonic() >= self._next:
            self._next = time.monotonic() + STRIKE_SECONDS
            self.injected = self._strike()
            self._struck.set()
        if self.injected and not self.after:
            self.after = round(time.monotonic() - self._began, 1)
        if self._undo is not None and time.monotonic() >= self._undo[0]:
            self.end()

    def end(self) -> None:
        """Undo what is still to be undone."""
        self._struck.set()
        if self._undo is not None:
            undo, self._undo = self._undo[1], None
            undo()

    def _later(self, least: float, most: float, undo: Callable[[], None]) -> None:
        self._undo = (time.monotonic() + self.rng.uniform(least, most), undo)

    def _strike(self) -> bool:
        """Do it; False where there is nothing yet to do it to."""
        what, _, how = self.kind.partition(" ")
        if self.kind in WITH_ACTORS:
            actors = self.world.actors()
            return bool(actors) and self._strike_process(*self.rng.choice(actors), how)
        if what == "driver":
            return self._strike_driver(how)
        if self.kind in WITH_NODES:
            return self.world.nodes[0].running and self._strike_node(how)
        if self.kind.startswith(SERVER):
            return self._strike_server("killed" in how)
        if self.kind in (*BETWEEN, *RIVALS) and self.target is not None:
            return self._start_rival(self.target) if what == "second" else self._tamper(self.target)
        if self.kind == "disk full":
            self.world.disk.fill()
        else:
            self.detail = f"by {self.rng.choice(JUMPS):+.0f} s"
            self.world.clock.write_text(self.detail.split()[1])
        return True

    def _tamper(self, target: Target) -> bool:
        """Take away or replace a part of an input, until the command has ended."""
        place = open_place(self.rng.choice(target.reads))
        parts = read_manifest(place).parts
        part = self.rng.choice(parts)
        self.detail = f"{place.uri.rpartition('/')[2]}/{part.name}"
        sound = place.read(part.name)
        if self.kind == "input part deleted":
            place.delete(part.name)
        else:  # by another, or by itself with one byte changed
            other = place.read(self.rng.choice(parts).name)
            changed = bytes([sound[0] ^ 1]) + sound[1:]
            place.write(part.name, changed if other == sound or self.rng.random() < 0.5 else other)
        self._undo = (float("inf"), lambda: place.write(part.name, sound))
        return True

    def _start_rival(self, target: Target) -> bool:
        """A second driver on the same destination; one with other settings once the first has claimed it."""
        other = "other settings" in self.kind
        names = open_place(target.to).list() if other else []
        if other and ("_work/plan.json" not in names or "manifest.json" in names):
            return False
        self.world.start_rival([*(target.other if other else target.words), "--to", target.to])
        return True

    def _strike_driver(self, how: str) -> bool:
        """The command's, or that of its rival."""
        running = {"the driver": self.world.driver, "the second driver": self.world.rival}
        drivers = [(driver.pid, title) for title, driver in running.items() if driver and driver.poll() is None]
        return bool(drivers) and self._strike_process(*self.rng.choice(drivers), how)

    def _strike_process(self, pid: int, title: str, how: str) -> bool:
        self.detail = title
        try:
            os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        except ProcessLookupError:
            return False

        def go_on() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        if how != "killed":
            self._later(0.3, 2.5, go_on)
        return True

    def _strike_node(self, how: str) -> bool:
        if self.kind == "head killed":
            self.detail = self.world.nodes[0].address
            self.world.nodes[0].kill()
            return True
        if self.kind == "node without GPU joins" and self.world.spare is not None:
            self.detail = self.world.spare.address
            self.world.spare.begin()
            return True
        node = self.rng.choice(self.world.nodes[1:])
        if not node.counted_as_alive():
            return False
        self.detail = node.address
        if self.kind == "node's clock jumps":
            jump = self.rng.choice(JUMPS)
            self.detail = f"{node.address} by {jump:+.0f} s"
            self.world.node_clock(node.number).write_text(str(jump))
            return True
        if self.kind == "node out of memory":  # until Ray's monitor has seen it
            memory = self.world.memories[node.number]
            memory.use(MEMORY_BYTES)
            self._later(0.5, 2, lambda: memory.use(MEMORY_BYTES // 8))
            return True
        if self.kind == "node agent killed":  # the node ends with it, and is started again
            agents = [pid for pid, title in node.processes() if title.startswith("ray::DashboardAgent")]
            return bool(agents) and self._strike_process(agents[0], f"the agent of {node.address}", "killed")
        self.world.away.add(node.number)
        if how == "killed":
            node.kill()
            self._later(0.5, 3, lambda: self.world.away.discard(node.number))
        elif how.startswith("stopped"):
            node.send(signal.SIGSTOP)
            self._later(0.5, 6, lambda: (node.send(signal.SIGCONT), self.world.away.discard(node.number)))
        else:
            node.cut_off()
            self._later(0.5, 6, lambda: (node.end_cut(), self.world.away.discard(node.number)))
        return True

    def _strike_server(self, killed: bool) -> bool:
        server, long = self.world.server, self.rng.random() < LONG_OUTAGES
        if killed:
            server.kill()
            self._later(*(LONG_SECONDS if long else (0.3, 2)), server.start)
        else:
            server.send(signal.SIGSTOP)
            self._later(*(LONG_SECONDS if long else (0.3, 4)), lambda: server.send(signal.SIGCONT))
        return True


class Faults:
    """The faults of one command, and the count of its requests to storage.

    One that lasts is over before the next one strikes the same part of the world.
    """

    def __init__(self, faults: list[Fault]) -> None:
        self.faults, self.requests = faults, 0
        self._lock = threading.Lock()

    def on_request(self, method: str, path: str) -> str | None:
        """For the proxy."""
        with self._lock:
            self.requests += 1
            number = self.requests
        latest_first = reversed(self.faults)
        return next((what for fault in latest_first if (what := fault.at_request(number, method))), None)

    def begin(self) -> None:
        """The command is about to start."""
        for fault in self.faults:
            fault.begin()

    def poll(self) -> None:
        """For the one who waits for the command."""
        for fault in self.faults:
            parts = {other.part for other in self.faults if other.lasts}
            must_wait = fault.part in parts or (fault.kind in RIVALS and SERVER in parts)  # a rival looks at storage
            if fault.lasts or not must_wait:
                fault.poll(self.requests)

    def end(self) -> None:
        """The command has ended."""
        for fault in reversed(self.faults):  # an input is repaired when storage answers again
            fault.end()
        for fault in self.faults:
            fault.poll(0)
