"""A fault campaign over the whole pipeline: whatever strikes, the same command again ends in the same bytes.

    python tests/faults/campaign.py --seed 1 2 3 --rounds 30

A head and two worker nodes of Ray and a real S3 server run on this machine. Import, neighbors, train, augment with and
without hops, append, search, extract and benchmark follow each other, again and again, each on what those before have
made. In every round some faults strike the running command, each at a request to storage that the seed draws; then the
same command runs until it ends with 0, its result is verified and compared with that of an undisturbed run, and what it
left behind is counted. With --log a campaign goes on where it ended.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from campaign_faults import ALONE, ENDS_THE_COMMAND, Fault, Faults, Target, kinds_for
from campaign_pipeline import STAGES, Pass, Stage, fingerprint, write_given
from campaign_world import World
from s3_server import BUCKET

MAX_TRIES = 6
COMMAND_SECONDS = 600.0  # a command that takes longer hangs
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Struck:
    """One fault of a round."""

    kind: str
    at: int  # request to storage
    injected: bool
    detail: str

    def __str__(self) -> str:
        detail, late = f" ({self.detail})" if self.detail else "", "" if self.injected else ": too late"
        return f"{self.kind}{detail} at {self.at}{late}"


@dataclass
class Round:
    """What came of one command and the faults that struck it."""

    number: int
    stage: str
    passed: int = 0  # the pass through the pipeline that it belongs to
    faults: list[Struck] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)  # of the command, try by try; None: it hung
    tracebacks: list[str] = field(default_factory=list)  # where a try ended in one instead of a line
    seconds: float = 0.0
    problem: str = ""  # what was lost or different
    left: dict[str, int] = field(default_factory=dict)  # behind, a minute later: processes, files in shared memory, ...

    @property
    def injected(self) -> int:
        return sum(fault.injected for fault in self.faults)

    def line(self) -> str:
        again = f", run again after {self.codes[:-1]}" if len(self.codes) > 1 else ""
        return (
            f"{self.number:4d}  {self.stage:<14} {self.seconds:4.0f} s  {'; '.join(map(str, self.faults))}: "
            f"{self.problem or 'survived'}{again}{f', left {self.left}' if self.left else ''}"
        )


@dataclass(frozen=True)
class Undisturbed:
    """What a stage makes and how many requests it sends when nothing happens."""

    fingerprint: list[list[str | int]]
    requests: int


class Campaign:
    """Rounds of faults in one world."""

    def __init__(self, world: World, stages: tuple[Stage, ...], at_once: int) -> None:
        self.world, self.stages, self.at_once, self.rng = world, stages, at_once, random.Random()
        os.environ.update(world.server.environment)  # without the proxy
        self.given = f"s3://{BUCKET}/campaign/given"
        write_given(self.given)
        self.undisturbed: dict[str, Undisturbed] = {}
        self.rival_code: int | str | None = None  # of the last round's second driver

    def run_undisturbed(self) -> None:
        """One pass without faults."""
        run = Pass(self.given, f"s3://{BUCKET}/campaign/undisturbed", self.world.folder)
        for stage in self.stages:
            none, started, to = Faults([]), time.monotonic(), run.place_for(stage.makes)
            if self._run(stage, run, to, none) != 0:
                raise RuntimeError(f"{stage.verb} fails by itself: {self.world.told()[-2000:]}")
            self.world.end_driver()
            run.made[stage.makes] = to
            self.undisturbed[stage.makes] = Undisturbed(fingerprint(to), none.requests)
            seconds = time.monotonic() - started
            print(f"undisturbed  {stage.name:<14} {none.requests} requests, {seconds:.0f} s", flush=True)

    def learn_undisturbed(self, known: Path | None) -> None:
        """Read what an undisturbed pass makes, or make one."""
        if known is not None and known.exists():
            self.undisturbed = {name: Undisturbed(**each) for name, each in json.loads(known.read_text()).items()}
            return
        self.run_undisturbed()
        if known is not None:
            known.write_text(json.dumps({name: asdict(each) for name, each in self.undisturbed.items()}))

    def rounds(self, seed: int, first: int = 1, number: int = 0) -> Iterator[Round]:
        """Pass after pass through the pipeline, faults in each stage, as the seed and the pass draw them.

        first: number of the first pass; number: of rounds that were there before.
        """
        for passed in itertools.count(first):
            self.rng = random.Random(f"{seed}-{passed}")
            self.world.tidy()
            run = Pass(self.given, f"s3://{BUCKET}/campaign/seed-{seed}-{passed}", self.world.folder)
            for stage in self.stages:
                number += 1
                result = self.round(number, stage, run)
                result.passed = passed
                yield result
                if result.problem:  # the next pass starts from its own import
                    break

    def round(self, number: int, stage: Stage, run: Pass) -> Round:
        """Some faults, then the same command until it ends well, then the comparison."""
        to = run.place_for(stage.makes)
        words = [stage.verb, *stage.words(run)]
        target = Target([*words, "--to", to], [*words, *stage.other, "--to", to], to, stage.reads(run))
        faults = self.draw(stage, target)
        result, started = Round(number, stage.name), time.monotonic()
        if any(fault.kind == "disk full" for fault in faults):
            to = f"{self.world.disk.folder}/{run.base.rpartition('/')[2]}/{stage.makes}"
        for attempt in range(MAX_TRIES):
            result.codes.append(self._run(stage, run, to, Faults(faults if attempt == 0 else [])))
            told = self.world.told()
            if result.codes[-1] == 1 or (result.codes[-1] != 0 and TRACEBACK in told):  # a line to the user goes with 2
                result.tracebacks.append(told[-1500:])
            if attempt == 0 and self.rival_code not in (None, 0) and TRACEBACK in self.world.told("rival.log"):
                result.tracebacks.append(self.world.told("rival.log")[-1500:])
            if result.codes[-1] != 0:
                self.world.end_driver()
            self.world.repair()
            if result.codes[-1] in (0, None):
                break
        if self.rival_code is not None:
            faults[0].detail = f"which ended with {self.rival_code}"
        result.faults = [Struck(fault.kind, fault.at, fault.injected, fault.detail) for fault in faults]
        result.problem = self.compare(stage, to, result)
        left = self.world.leftovers()
        self.world.end_driver()
        result.left = {what: len(names) for what, names in left.items()}
        if left:
            print(f"left behind: {left}", flush=True)
            self.world.sweep()
        result.seconds = time.monotonic() - started
        run.made[stage.makes] = to
        return result

    def draw(self, stage: Stage, target: Target) -> list[Fault]:
        """Faults for a stage, of different kinds; one that ends the command is the last, some strike alone."""
        possible = kinds_for(self.world, stage)
        kinds = [self.rng.choice(possible)]
        if kinds[0] not in ALONE:
            others = [kind for kind in possible if kind not in (*kinds, *ALONE)]
            kinds += self.rng.sample(others, self.rng.randint((self.at_once + 1) // 2, self.at_once) - 1)
            ends = [kind for kind in kinds if kind in ENDS_THE_COMMAND][:1]
            kinds = [kind for kind in kinds if kind not in ENDS_THE_COMMAND] + ends
        requests = self.undisturbed[stage.makes].requests
        if "disk full" in kinds:
            requests = max(requests // 4, 1)  # what goes to that disk is no request
        moments = sorted(self.rng.randint(1, requests) for _ in kinds)
        if kinds[0].startswith("input"):
            moments = [0]
        return [
            Fault(self.world, kind, at, random.Random(self.rng.random()), target) for kind, at in zip(kinds, moments)
        ]

    def compare(self, stage: Stage, to: str, result: Round) -> str:
        """What is wrong with the outcome; nothing, one hopes."""
        last_words = " ".join(self.world.told()[-600:].split())
        if result.codes[-1] is None:
            return f"LOST: hung for {COMMAND_SECONDS:.0f} s: {last_words}"
        if result.codes[-1] != 0:
            return f"LOST: does not end well: {last_words}"
        if not result.injected and len(result.codes) > 1:
            return f"LOST: failed though nothing had happened: {last_words}"
        if self.rival_code == "hung":
            return f"LOST: a second driver hung for {COMMAND_SECONDS:.0f} s: {self.world.told('rival.log')[-600:]}"
        if self.rival_code == 0 and any("other settings" in fault.kind for fault in result.faults):
            return "LOST: a second driver with other settings ended well on the same destination"
        try:
            same = fingerprint(to) == self.undisturbed[stage.makes].fingerprint
        except Exception as error:
            return f"LOST: not sound: {error}"
        return "" if same else "LOST: the bytes differ"

    def _run(self, stage: Stage, run: Pass, to: str, faults: Faults) -> int | None:
        """Run a stage's command to its end; its exit code, None where it hangs."""
        faults.before()
        self.world.proxy.fault = faults.on_request
        self.world.start([stage.verb, *stage.words(run), "--to", to])
        try:
            code = self.world.wait(COMMAND_SECONDS, faults.poll)
            if faults.faults:
                self.rival_code = self.world.wait_for_rival(COMMAND_SECONDS)
            return code
        finally:
            faults.end()


def summary(rounds: list[Round]) -> str:
    """The table: faults by kind, and how the commands that they struck ended."""
    lines = ["", f"{'fault':<32}{'injected':>9}{'survived':>9}{'lost':>6}{'too late':>10}"]
    every = [(fault, each) for each in rounds for fault in each.faults]
    for kind in [*sorted({fault.kind for fault, _ in every}), "all"]:
        hit = [each for fault, each in every if kind in (fault.kind, "all") and fault.injected]
        late = sum(kind in (fault.kind, "all") and not fault.injected for fault, _ in every)
        lost = sum(bool(each.problem) for each in hit)
        lines.append(f"{kind:<32}{len(hit):>9}{len(hit) - lost:>9}{lost:>6}{late:>10}")
    struck = [each for each in rounds if each.injected]
    lines.append(
        f"{len(struck)} commands were struck: {sum(len(each.codes) == 1 for each in struck)} ended well by "
        f"themselves, {sum(len(each.codes) > 1 for each in struck)} were run again, "
        f"{sum(len(each.codes) - 1 for each in struck)} times in all; "
        f"{sum(len(each.tracebacks) for each in rounds)} tries ended in a traceback instead of a line"
    )
    return "\n".join(lines)


def read_log(path: str, seed: int | None = None) -> list[Round]:
    """The rounds that campaigns have appended to a log, of all seeds or of one."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [
        Round(**{**line, "faults": [Struck(**fault) for fault in line["faults"]]})
        for line in lines
        if line.pop("seed") == seed or seed is None
    ]


def markdown(rounds: list[Round]) -> str:
    """Faults by kind and by verb, for docs/results/."""
    verbs = list(dict.fromkeys(each.stage for each in rounds))
    every = [(fault, each) for each in rounds for fault in each.faults]
    lines = [
        f"| fault | {' | '.join(verbs)} | injected | survived | lost or different | too late |",
        f"|---|{'---|' * (len(verbs) + 4)}",
    ]
    for kind in [*sorted({fault.kind for fault, _ in every}), "all"]:
        fitting = [(fault, each) for fault, each in every if kind in (fault.kind, "all")]
        hit = [each for fault, each in fitting if fault.injected]
        lost = sum(bool(each.problem) for each in hit)
        counts = [sum(each.stage == verb for each in hit) for verb in verbs]
        counts += [len(hit), len(hit) - lost, lost, len(fitting) - len(hit)]
        bold = "**" if kind == "all" else ""
        lines.append(f"| {bold}{kind}{bold} | {' | '.join(f'{bold}{count}{bold}' for count in counts)} |")
    struck = [each for each in rounds if each.injected]
    seconds = sorted(each.seconds for each in rounds)
    lines.append(
        f"\n{len(struck)} commands were struck: {sum(len(each.codes) == 1 for each in struck)} ended well by "
        f"themselves, {sum(len(each.codes) > 1 for each in struck)} when run again; "
        f"{sum(len(each.tracebacks) for each in rounds)} tries ended in a traceback instead of a line. Left behind a "
        f"minute after a command: {_left(rounds)}. Half of the rounds took up to {seconds[len(seconds) // 2]:.0f} s."
    )
    return "\n".join(lines) + "\n"


def _left(rounds: list[Round]) -> str:
    total = Counter[str]()
    for each in rounds:
        total.update(each.left)
    return ", ".join(f"{what}: {count}" for what, count in sorted(total.items())) or "nothing"


def run_campaign(
    seeds: list[int],
    rounds: int,
    seconds: float,
    faults: int = 4,
    nodes: int = 2,
    verbs: str = "",
    log: str = "",
    reference: str = "",
    warm: bool = False,
) -> list[Round]:
    """Run so many rounds of each seed, or as many as begin within so many seconds."""
    stages = tuple(stage for stage in STAGES if not verbs or stage.verb in verbs.split(","))
    done: list[Round] = []
    # A short path: Ray has sockets in it. The environment is ours while we run: we look at the storage by ourselves.
    with tempfile.TemporaryDirectory(prefix="lq-") as folder, mock.patch.dict(os.environ):
        world = World(Path(folder), nodes, warm)
        try:
            show_plan(world, seeds, rounds, faults, stages)
            campaign, started = Campaign(world, stages, faults), time.monotonic()
            campaign.learn_undisturbed(Path(reference) if reference else None)
            for seed in seeds:
                before = read_log(log, seed) if log and Path(log).exists() else []
                print(f"seed {seed}" + (f", {len(before)} rounds are done" if before else ""), flush=True)
                first = 1 + max((each.passed for each in before), default=0)
                todo = max(0, rounds - len(before))
                for result in itertools.islice(campaign.rounds(seed, first, len(before)), todo):
                    done.append(result)
                    print(result.line(), flush=True)
                    if log:
                        with open(log, "a") as file:
                            file.write(json.dumps({"seed": seed} | asdict(result)) + "\n")
                    if time.monotonic() - started > seconds:
                        return done
        finally:
            world.close()
    return done


def show_plan(world: World, seeds: list[int], rounds: int, faults: int, stages: tuple[Stage, ...]) -> None:
    """Say what is going to happen, and by which means."""
    print(
        f"seeds {' '.join(map(str, seeds))}: {rounds} commands each ({', '.join(stage.name for stage in stages)}), "
        f"struck by up to {faults} faults each"
    )
    if world.nodes:
        print(f"Ray: a head and {len(world.nodes) - 1} worker nodes, {world.network.name}")
    else:
        print("Ray: each command starts its own, on one node")
    print(
        f"disk full: {'a tmpfs, filled to the last byte' if world.disk.available else 'none, mounting is refused'}\n"
        "clock jumps: the clock that the driver's, or one node's, Python sees\n"
        f"a node's memory: {'what Ray reads of its control group' if world.can_run_short else 'never short'}",
        flush=True,
    )


def end(number: int, frame: object) -> None:
    """End with all nodes and servers; a second signal must not interrupt that."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults strike the whole pipeline; nothing may be lost or differ.")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], dest="seeds")
    parser.add_argument("--rounds", type=int, default=60, help="commands to strike, for each seed")
    parser.add_argument("--faults", type=int, default=4, help="the most that strike one command")
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no round after that")
    parser.add_argument("--nodes", type=int, default=2, help="worker nodes; 0: each command starts its own Ray")
    parser.add_argument("--verbs", default="", help="only these stages, such as import,neighbors")
    parser.add_argument(
        "--reference",
        default="",
        help="keep what an undisturbed run makes in this file, or take it from there: for a campaign in several pieces",
    )
    parser.add_argument("--log", default="", help="append each round as a line of JSON to this file")
    parser.add_argument("--warm", action="store_true", help="fork commands from a process that has all imported")
    parser.add_argument("--table", default="", help="write the table of all rounds in --log to this Markdown file")
    arguments = parser.parse_args()
    table = vars(arguments).pop("table")
    if table and not arguments.log:
        parser.error("--table is made from --log")
    signal.signal(signal.SIGTERM, end)
    rounds = run_campaign(**vars(arguments))
    print(summary(rounds))
    if table:
        command = " ".join(["python", "tests/faults/campaign.py", *sys.argv[1:]])
        Path(table).write_text(
            f"# Fault campaign\n\nWritten by `{command}` and what went into its log before; see "
            f"[reliability](../reliability.md).\n\n{markdown(read_log(arguments.log))}"
        )
    return 1 if any(each.problem for each in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
