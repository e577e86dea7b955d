"""A fault campaign over the whole pipeline: whatever strikes, the same command again ends in the same bytes.

    python tests/faults/campaign.py --seed 1 2 3 --rounds 30

A head and two worker nodes of Ray and a real S3 server run on this machine. Import, neighbors, train, augment with and
without hops, append, search, extract and benchmark follow each other, again and again, each on what those before have
made. In every round some faults strike the running command, each at a request to storage that the seed draws; the same
command runs again, struck by others while it recovers and in the end undisturbed, until it ends with 0. Its result is
verified and compared with that of an undisturbed run, and what it left behind is counted. With --log a campaign goes on
where it ended.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import stale
from campaign_faults import BETWEEN, ENDS_THE_COMMAND, RIVALS, Fault, Faults, Target, kinds_for
from campaign_pipeline import STAGES, Pass, Stage, fingerprint, write_given
from campaign_plan import Bag, draw_tries
from campaign_report import Round, Struck, markdown, read_log, summary
from campaign_world import World
from s3_server import BUCKET

MAX_TRIES = 6
COMMAND_SECONDS = 600.0  # a command that takes longer hangs
SHIPPED = 0.1  # of the rounds in which commands are forked send code and settings to new workers
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Undisturbed:
    """What a stage makes and how many requests it sends when nothing happens."""

    fingerprint: list[list[str | int]]
    requests: int


class Campaign:
    """Rounds of faults in one world, up to `at_once` in each; `verbs`: strike no others, where there are some."""

    def __init__(self, world: World, stages: tuple[Stage, ...], at_once: int, verbs: tuple[str, ...] = ()) -> None:
        self.world, self.stages, self.at_once, self.verbs = world, stages, at_once, verbs
        self.rng, self.bags = random.Random(), dict[str, Bag]()
        os.environ.update(world.server.environment)  # without the proxy
        self.given = f"s3://{BUCKET}/campaign/given"
        write_given(self.given)
        self.undisturbed: dict[str, Undisturbed] = {}
        self.rival_code: int | str | None = None  # of the last round's second driver

    def run_undisturbed(self) -> None:
        """One pass without faults."""
        run = Pass(self.given, f"s3://{BUCKET}/campaign/undisturbed", self.world.folder)
        for stage in self.stages:
            started = time.monotonic()
            requests = self._make(stage, run)
            self.undisturbed[stage.makes] = Undisturbed(fingerprint(run.made[stage.makes]), requests)
            seconds = time.monotonic() - started
            print(f"undisturbed  {stage.name:<14} {requests} requests, {seconds:.0f} s", flush=True)

    def _make(self, stage: Stage, run: Pass) -> int:
        """One stage without faults; how many requests it sent."""
        none, to = Faults([]), run.place_for(stage.makes)
        if self._run(stage, run, to, none) != 0:
            raise RuntimeError(f"{stage.verb} fails by itself: {self.world.told()[-2000:]}")
        self.world.end_driver()
        run.made[stage.makes] = to
        return none.requests

    def learn_undisturbed(self, known: Path | None) -> None:
        """Read what an undisturbed pass makes, or make one."""
        if known is not None and known.exists():
            self.undisturbed = {name: Undisturbed(**each) for name, each in json.loads(known.read_text()).items()}
            return
        self.run_undisturbed()
        if known is not None:
            known.write_text(json.dumps({name: asdict(each) for name, each in self.undisturbed.items()}))

    def rounds(self, seed: int, before: Sequence[Round] = ()) -> Iterator[Round]:
        """Pass after pass through the pipeline, faults in each stage, as the seed and the pass draw them.

        before: the rounds that were there already.
        """
        number, first = len(before), 1 + max((each.passed for each in before), default=0)
        for stage in self.stages:
            drawn = sum(len(each.faults) for each in before if each.stage == stage.name)
            self.bags[stage.name] = Bag(kinds_for(self.world, stage), f"{seed}-{stage.name}", drawn)
        for passed in itertools.count(first):
            self.rng = random.Random(f"{seed}-{passed}")
            self.world.tidy()
            run = Pass(self.given, f"s3://{BUCKET}/campaign/seed-{seed}-{passed}", self.world.folder)
            for stage in self.stages:
                if self.verbs and stage.verb not in self.verbs:
                    self._make(stage, run)
                    continue
                number += 1
                result = self.round(number, stage, run)
                result.passed = passed
                yield result
                if result.problem:  # the next pass starts from its own import
                    break

    def round(self, number: int, stage: Stage, run: Pass) -> Round:
        """Some faults, then the same command until it ends well, then the comparison."""
        words = [stage.verb, *stage.words(run)]
        target = Target(
            words, [*words, *stage.other], run.place_for(stage.makes), [run.made[name] for name in stage.reads]
        )
        tries = self.draw(stage, target)
        result, started = Round(number, stage.name), time.monotonic()
        if any(fault.kind == "disk full" for faults in tries for fault in faults):
            target.to = f"{self.world.disk.folder}/{run.base.rpartition('/')[2]}/{stage.makes}"
        self.world.shipped = result.shipped = self.rng.random() < SHIPPED
        for attempt in range(MAX_TRIES):
            faults, began = tries[attempt] if attempt < len(tries) else [], time.monotonic()
            result.codes.append(self._run(stage, run, target.to, Faults(faults)))
            self._note(result, faults)
            if result.codes[-1] != 0:
                self.world.end_driver()
            self.world.repair()
            result.durations.append(round(time.monotonic() - began, 1))
            if result.codes[-1] in (0, None):
                break
        self.bags[stage.name].put_back(fault.kind for faults in tries[len(result.codes) :] for fault in faults)
        result.problem = result.problem or self.compare(stage, target.to, result)
        left = self.world.leftovers()
        self.world.end_driver()
        result.left = {what: len(names) for what, names in left.items()}
        if left:
            print(f"left behind: {left}", flush=True)
            self.world.sweep()
        result.seconds = time.monotonic() - started
        run.made[stage.makes] = target.to
        return result

    def _note(self, result: Round, faults: list[Fault]) -> None:
        """Keep what came of a try, and of a second driver beside it."""
        attempt, code, told = len(result.codes) - 1, result.codes[-1], self.world.told()
        if code == 1 or (code != 0 and TRACEBACK in told):  # a line to the user goes with 2
            result.tracebacks.append(told[-1500:])
        for fault in faults:
            if fault.kind in RIVALS and fault.injected:
                fault.detail = f"which ended with {self.rival_code}"
                told = self.world.told("rival.log")
                if self.rival_code not in (None, 0) and TRACEBACK in told:
                    result.tracebacks.append(told[-1500:])
                if self.rival_code == "hung":
                    result.problem = f"LOST: a second driver hung for {COMMAND_SECONDS:.0f} s: {told[-600:]}"
                if self.rival_code == 0 and "other settings" in fault.kind:
                    result.problem = "LOST: a second driver with other settings ended well on the same destination"
        result.faults += [
            Struck(fault.kind, fault.at, fault.injected, fault.detail, attempt, fault.after) for fault in faults
        ]

    def draw(self, stage: Stage, target: Target) -> list[list[Fault]]:
        """Faults for the tries of a stage."""
        count = self.rng.randint((self.at_once + 1) // 2, self.at_once)
        return [
            self._draw_moments(self.undisturbed[stage.makes].requests // (1 + attempt), kinds, target)
            for attempt, kinds in enumerate(draw_tries(self.bags[stage.name], count))
        ]

    def _draw_moments(self, requests: int, kinds: list[str], target: Target) -> list[Fault]:
        """Faults of these kinds within so many requests; one that ends the command strikes at any of them, the last."""
        if "disk full" in kinds:
            requests //= 4  # what goes to that disk is no request
        latest = self.rng.randint(1, max(requests, 1))
        within = latest if kinds[-1] in ENDS_THE_COMMAND else max(requests, 1)
        moments = sorted(self.rng.randint(1, within) for _ in kinds[1:])
        moments.append(0 if kinds[-1] in BETWEEN else latest)
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
        try:
            same = fingerprint(to) == self.undisturbed[stage.makes].fingerprint
        except Exception as error:
            return f"LOST: not sound: {error}"
        return "" if same else "LOST: the bytes differ"

    def _run(self, stage: Stage, run: Pass, to: str, faults: Faults) -> int | None:
        """Run a stage's command to its end; its exit code, None where it hangs."""
        faults.begin()
        self.world.proxy.fault = faults.on_request
        self.world.start([stage.verb, *stage.words(run), "--to", to])
        try:
            code = self.world.wait(COMMAND_SECONDS, faults.poll)
            self.rival_code = self.world.wait_for_rival(COMMAND_SECONDS, faults.poll)
            return code
        finally:
            faults.end()


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
    struck = tuple(verbs.split(",")) if verbs else ()
    last = max(number for number, stage in enumerate(STAGES) if not struck or stage.verb in struck)
    stages = STAGES[: last + 1]
    done: list[Round] = []
    # A short path: Ray has sockets in it. The environment is ours while we run: we look at the storage by ourselves.
    stale.remove()
    with tempfile.TemporaryDirectory(prefix=stale.prefix()) as folder, mock.patch.dict(os.environ):
        world = World(Path(folder), nodes, warm)
        try:
            show_plan(world, seeds, rounds, faults, [stage for stage in stages if not struck or stage.verb in struck])
            campaign, started = Campaign(world, stages, faults, struck), time.monotonic()
            campaign.learn_undisturbed(Path(reference) if reference else None)
            for seed in seeds:
                before = read_log(log, seed) if log and Path(log).exists() else []
                print(f"seed {seed}" + (f", {len(before)} rounds are done" if before else ""), flush=True)
                todo = max(0, rounds - len(before))
                for result in itertools.islice(campaign.rounds(seed, before), todo):
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


def show_plan(world: World, seeds: list[int], rounds: int, faults: int, stages: list[Stage]) -> None:
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
    parser.add_argument("--rounds", type=int, default=60, help="commands to strike, for each seed; 0: only --table")
    parser.add_argument("--faults", type=int, default=4, help="the most that strike one command")
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no round after that")
    parser.add_argument("--nodes", type=int, default=2, help="worker nodes; 0: each command starts its own Ray")
    parser.add_argument("--verbs", default="", help="strike only these stages, such as import,neighbors")
    parser.add_argument(
        "--reference",
        default="",
        help="keep what an undisturbed run makes in this file, or take it from there: for a campaign in several pieces",
    )
    parser.add_argument("--log", default="", help="append each round as a line of JSON to this file")
    parser.add_argument("--warm", action="store_true", help="fork commands and workers, and wait for seconds only")
    parser.add_argument("--table", default="", help="write the table of all rounds in --log to this Markdown file")
    arguments = parser.parse_args()
    table = vars(arguments).pop("table")
    if table and not arguments.log:
        parser.error("--table is made from --log")
    signal.signal(signal.SIGTERM, end)
    rounds = run_campaign(**vars(arguments)) if arguments.rounds else []
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
