"""Fuzz every reader with damaged files: each is accepted and right, or refused with one line.

    python tests/faults/fuzz_readers.py --count 100000 --seed 1

An input is its number under a seed: `--only NUMBER` repeats it and shows the traceback. Inputs run in worker processes
under a limit of memory, so that a crash of a library, a hang or a huge allocation is one more failure, not the end.
"""

import argparse
import json
import multiprocessing
import multiprocessing.sharedctypes
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_targets import make_targets, try_target

MAX_SECONDS = 5.0  # of processor time for one input: on a busy machine the clock says little
MAX_WAITING_SECONDS = 600.0  # asleep, each time one looks; what is stopped, or ready but gets no processor, is not
MAX_RESIDENT = 1 << 30  # bytes that one input may make the process hold
MAX_RESERVED = 4 << 30  # bytes that it may ask for; more is refused to it, as a machine without so much would
TOO_MUCH_MEMORY = 77  # exit code of a worker
OUTCOMES = ("accepted", "refused", "failed")


@dataclass
class Result:
    """Counts by target and outcome, and the failures as (input number, target, what happened)."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(sum(outcomes.values()) for outcomes in self.counts.values())


def choose(targets: list, seed: int, number: int) -> tuple[Any, random.Random]:
    """The target and the random numbers of one input."""
    rng = random.Random(f"{seed}-{number}")
    return rng.choice(targets), rng


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Let this process take `extra` bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Worker:
    """A process that runs every n-th input; what it is at, and what it had spent before, stand in shared memory."""

    def __init__(self, targets: list, seed: int, folder: Path, numbers: range) -> None:
        self.targets, self.seed, self.folder, self.numbers = targets, seed, folder, numbers
        self.current = multiprocessing.sharedctypes.RawValue("q", numbers.start)
        self.started = multiprocessing.sharedctypes.RawValue("d", 0.0)  # its processor time when this input began
        self.counts = multiprocessing.sharedctypes.RawArray("q", len(targets) * len(OUTCOMES))
        self.failures: multiprocessing.SimpleQueue = multiprocessing.get_context("fork").SimpleQueue()
        self.process = self._start()

    def _start(self) -> Any:
        self.started.value = 0.0
        self.seen, self.awake = self.current.value, time.monotonic()  # what it was at when last seen awake, and when
        process = multiprocessing.get_context("fork").Process(target=self._work, daemon=True)
        process.start()
        return process

    def _work(self) -> None:
        before = _peak_memory()
        for number in self.numbers[self.numbers.index(self.current.value) :] if self.current.value >= 0 else ():
            self.current.value = number
            self.started.value = time.process_time()
            target, rng = choose(self.targets, self.seed, number)
            with memory_limit(MAX_RESERVED):
                outcome, message = try_target(target, self.folder, rng)
            if _peak_memory() - before > MAX_RESIDENT:
                os._exit(TOO_MUCH_MEMORY)
            self.count(number, outcome)
            if outcome == "failed":
                self.failures.put((number, target.name, message[:500]))
        self.current.value = -1

    def count(self, number: int, outcome: str) -> None:
        target = self.targets.index(choose(self.targets, self.seed, number)[0])
        self.counts[target * len(OUTCOMES) + OUTCOMES.index(outcome)] += 1

    def watch(self) -> str | None:
        """Return what went wrong with the process, if anything, after ending it."""
        if not self.process.is_alive():
            if self.current.value < 0:
                return None
            code = self.process.exitcode
            return f"held more than {MAX_RESIDENT:,} bytes" if code == TOO_MUCH_MEMORY else f"crashed, exit code {code}"
        state, spent = _state(self.process.pid)
        if state != "S" or self.seen != self.current.value:
            self.seen, self.awake = self.current.value, time.monotonic()
        seconds = spent - self.started.value
        if seconds < MAX_SECONDS and time.monotonic() - self.awake < MAX_WAITING_SECONDS:
            return None
        self.process.kill()
        self.process.join()
        return f"hung for {seconds:.1f} s of processor time"

    def go_on(self) -> None:
        """Start a new process with the input after the one that went wrong."""
        rest = self.numbers[self.numbers.index(self.current.value) + 1 :]
        self.current.value = rest.start if rest else -1
        if rest:
            self.process = self._start()


def _peak_memory() -> int:
    """The most bytes this process has held; it never falls, so a process above the limit is replaced."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _state(pid: int) -> tuple[str, float]:
    """What a process does, as `ps` says it (S: it sleeps), and the seconds of processor time it has had."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(count: int, seed: int, workers: int = 2, first: int = 0, reader: str = "") -> Result:
    """Run the inputs first .. first + count and return what became of them."""
    started = time.monotonic()
    shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    result = Result()
    with tempfile.TemporaryDirectory(prefix="lattqe-fuzz-", dir=shared_memory) as name:
        targets = [target for target in make_targets(Path(name)) if reader in target.name]
        crew = [
            Worker(targets, seed, Path(name, str(number)), range(first + number, first + count, workers))
            for number in range(min(workers, count))
        ]
        try:
            _watch(crew, targets, seed, result)
        finally:
            for worker in crew:
                worker.process.kill()
        for number, target in enumerate(targets):
            totals = [sum(worker.counts[number * len(OUTCOMES) + i] for worker in crew) for i in range(len(OUTCOMES))]
            result.counts[target.name] = dict(zip(OUTCOMES, totals))
    result.failures.sort()
    result.seconds = time.monotonic() - started
    return result


def _watch(crew: list[Worker], targets: list, seed: int, result: Result) -> None:
    while True:
        busy = False
        for worker in crew:
            trouble = worker.watch()
            while not worker.failures.empty():
                result.failures.append(worker.failures.get())
            if trouble:
                number = worker.current.value
                result.failures.append((number, choose(targets, seed, number)[0].name, trouble))
                worker.count(number, "failed")
                worker.go_on()
            busy |= worker.current.value >= 0 or worker.process.is_alive()
        if not busy:
            return
        time.sleep(0.05)


def repeat(seed: int, number: int, reader: str, keep: Path | None) -> None:
    """Run one input in this process, without catching anything."""
    with tempfile.TemporaryDirectory(prefix="lattqe-fuzz-") as name:
        targets = [target for target in make_targets(Path(name)) if reader in target.name]
        target, rng = choose(targets, seed, number)
        folder = Path(name, "input")
        folder.mkdir()
        print(f"input {number} of seed {seed}: {target.name}", flush=True)
        try:
            target.run(folder, rng)
        finally:
            if keep:
                shutil.copytree(folder, keep, dirs_exist_ok=True)
    print("accepted")


def report(result: Result, seed: int, first: int) -> None:
    print(f"{'reader':<22}{'accepted':>10}{'refused':>10}{'failed':>10}")
    for name, outcomes in result.counts.items():
        print(f"{name:<22}" + "".join(f"{outcomes[outcome]:>10,}" for outcome in OUTCOMES))
    for number, target, what in result.failures[:50]:
        print(f"FAILED input {number} ({target}): {what}")
    print(f"{result.total:,} inputs (seed {seed}, from {first}) in {result.seconds:.0f} s, "
          f"{result.total / result.seconds:.0f} a second: {len(result.failures)} failures")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="how many inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reader", default="", help="only readers with this in their name, such as .mat")
    parser.add_argument("--only", type=int, help="run this one input and show what happens")
    parser.add_argument("--keep", type=Path, help="with --only: copy the damaged file to this folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    if options.only is not None:
        repeat(options.seed, options.only, options.reader, options.keep)
        return 0
    result = fuzz(options.count, options.seed, options.workers, options.first, options.reader)
    if options.json:
        print(json.dumps({"counts": result.counts, "failures": result.failures, "seconds": result.seconds}))
    else:
        report(result, options.seed, options.first)
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
