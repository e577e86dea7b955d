"""What came of the rounds of a fault campaign: their log, and the tables made of it."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Struck:
    """One fault of a round."""

    kind: str
    at: int  # request to storage
    injected: bool
    detail: str
    attempt: int = 0  # the try of the command that it was to strike
    after: float = 0.0  # seconds since that try began

    def __str__(self) -> str:
        detail, late = f" ({self.detail})" if self.detail else "", "" if self.injected else ": too late"
        again = f" of try {self.attempt + 1}" if self.attempt else ""
        return f"{self.kind}{detail} at {self.at}{again}{late}"


@dataclass
class Round:
    """What came of one command and the faults that struck it."""

    number: int
    stage: str
    passed: int = 0  # the pass through the pipeline that it belongs to
    faults: list[Struck] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)  # of the command, try by try; None: it hung
    durations: list[float] = field(default_factory=list)  # of the tries, repairs included
    tracebacks: list[str] = field(default_factory=list)  # where a try ended in one instead of a line
    shipped: bool = False  # with code and settings for its workers
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
    recovering = sum(fault.injected and fault.attempt > 0 for fault, _ in every)
    lines.append(
        f"\n{len(struck)} commands were struck: {sum(len(each.codes) == 1 for each in struck)} ended well by "
        f"themselves, {sum(len(each.codes) > 1 for each in struck)} when run again; {recovering} of the faults struck "
        f"one that was run again. {sum(len(each.tracebacks) for each in rounds)} tries ended in a traceback instead of "
        "a line. Left behind a "
        f"minute after a command: {_left(rounds)}. Half of the rounds took up to {seconds[len(seconds) // 2]:.0f} s."
    )
    return "\n".join(lines) + "\n"


def _left(rounds: list[Round]) -> str:
    total = Counter[str]()
    for each in rounds:
        total.update(each.left)
    return ", ".join(f"{what}: {count}" for what, count in sorted(total.items())) or "nothing"
