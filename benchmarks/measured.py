"""Commands run one after the other, killed on request and continued, and what each took, seen from outside.

Processor time and memory are those of all processes of a command's session, looked at four times a second: the driver,
Ray's workers (`ray::…`), and Ray itself. Bytes and requests are what the S3 server counted. What the time was spent on
comes from the command's own `--json` summary and `--log-file`. All of it is kept in `measured.json` after each attempt.
A command that fails is given again, as a user would do on a machine that is too busy to start Ray.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from killing import end_session, session_of
from s3_server import S3Server

LOOK_SECONDS = 0.25
MOST_FAILURES, REST_SECONDS = 8, 30.0  # of one stage: on a crowded machine Ray may not come up in time
TICKS = os.sysconf("SC_CLK_TCK")
UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


@dataclass(frozen=True)
class Stage:
    """One command: its words after `lattqe`, the rows it is about, and whether a kill may hit it.

    cpu_seconds: what it is expected to take at least; moments of kills are shares of it.
    """

    name: str
    words: list[str]
    rows: int
    json: bool = True
    cpu_seconds: float = 0.0


@dataclass
class Seen:
    """What the processes of a command took: by process (role, CPU seconds, most bytes)."""

    processes: dict[int, tuple[str, float, int]] = field(default_factory=dict)

    def look(self, process: subprocess.Popen[str]) -> None:
        """Look at all processes of the command's session once."""
        for pid in session_of(process):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:  # it has ended meanwhile
                continue
            name, values = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
            role = "driver" if pid == process.pid else "workers" if name.startswith("ray::") else "ray"
            peak = re.search(r"VmHWM:\s+(\d+)", status)
            before = self.processes.get(pid, (role, 0.0, 0))[2]  # a process that has just ended shows no memory
            most = max(int(peak[1]) << 10 if peak else 0, before)
            self.processes[pid] = role, (int(values[11]) + int(values[12])) / TICKS, most

    def cpu(self, *roles: str) -> float:
        """CPU seconds of some roles, or of all."""
        return sum(cpu for role, cpu, _ in self.processes.values() if not roles or role in roles)

    def peak(self, role: str) -> int:
        """The most bytes that a process of this role had, mapped files included."""
        return max((peak for each, _, peak in self.processes.values() if each == role), default=0)


class Runner:
    """Runs stages below a folder; those that are finished are not run again, whatever happened in between."""

    def __init__(self, folder: Path, settings: dict[str, Any], kills: list[tuple[str, float]]) -> None:
        self.folder, self.file = folder, folder / "measured.json"
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        ports = folder / "ports.json"
        fresh = {
            "settings": settings, "stages": {},
            "kills": [{"stage": stage, "share": share, "done": None} for stage, share in kills],
        }  # fmt: skip
        self.found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else fresh
        if self.found["settings"] != settings:
            sys.exit(f"error: {folder} is of a run with {self.found['settings']}: choose another folder, or the same")
        self._end_what_a_killed_run_left()
        self.server = S3Server(folder / "s3", ports=json.loads(ports.read_text()) if ports.exists() else None)
        ports.write_text(json.dumps(self.server.ports))

    def __enter__(self) -> "Runner":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that command and server are ended
        self.server.start()
        os.environ.update(self.server.environment)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.kill()

    def _end_what_a_killed_run_left(self) -> None:
        """A run that was killed itself leaves its server and its command; both name this folder as an argument."""
        mark = f"{self.folder}/"
        for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if any(mark in word for word in words) and {"mini", "--log-file"} & set(words):
                    for one in (*session_of(SimpleNamespace(pid=pid)), pid):  # the server has a session of its own
                        os.kill(one, signal.SIGKILL)
            except OSError:  # it has ended meanwhile
                continue

    def save(self) -> None:
        """Keep what was found, whole or not at all."""
        unfinished = self.file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.found, indent=1))
        unfinished.replace(self.file)

    def run(self, stage: Stage) -> dict[str, Any]:
        """Run a stage to its end, with the kills that are due in it; what it took."""
        entry = self.found["stages"].setdefault(stage.name, {"rows": stage.rows, "attempts": [], "done": False})
        while not entry["done"]:
            used = sum(sum(attempt["cpu_seconds"].values()) for attempt in entry["attempts"])
            kill = self._next_kill(stage)
            limit = None if kill is None else max(kill["share"] * stage.cpu_seconds - used, 0.5)
            attempt = self._attempt(stage, limit)
            entry["attempts"].append(attempt)
            if attempt["killed"] and kill is not None:
                kill["done"] = {
                    "stage": stage.name,
                    "after_cpu_seconds": round(used + sum(attempt["cpu_seconds"].values()), 1),
                }
            entry["done"] = not attempt["killed"] and not attempt["failed"]
            self.save()
            became = "killed" if attempt["killed"] else "failed" if attempt["failed"] else "done"
            print(f"{stage.name}: {became} after {attempt['seconds']:.0f} s", flush=True)
            if attempt["failed"]:
                self._continue_or_end(stage, entry)
        return entry

    def _continue_or_end(self, stage: Stage, entry: dict[str, Any]) -> None:
        """A command that failed is given again, as a user would; not for ever."""
        if sum(each["failed"] for each in entry["attempts"]) >= MOST_FAILURES:
            sys.exit(f"error: `lattqe {' '.join(stage.words)}` keeps failing: see {self._log_base(stage)}.screen")
        time.sleep(REST_SECONDS)

    def _log_base(self, stage: Stage) -> Path:
        return self.folder / "logs" / stage.name.replace(" ", "-")

    def _next_kill(self, stage: Stage) -> dict[str, Any] | None:
        """The kill that is due in a stage: one drawn for it, or one whose stage was faster than the kill."""
        if not stage.cpu_seconds:
            return None
        due = [kill for kill in self.found["kills"] if kill["done"] is None]
        over = [name for name, other in self.found["stages"].items() if other["done"]]
        mine = [kill for kill in due if kill["stage"] == stage.name or kill["stage"] in over]
        return min(mine, key=lambda kill: kill["share"], default=None)

    def _attempt(self, stage: Stage, limit: float | None) -> dict[str, Any]:
        """Start the command and wait; killed with all of its session where it has used `limit` CPU seconds."""
        base = self._log_base(stage)
        words = [str(Path(sys.executable).with_name("lattqe")), *stage.words, "--log-file", f"{base}.jsonl"]
        before, started, seen = self.server.traffic(), time.monotonic(), Seen()
        skip = Path(f"{base}.jsonl").stat().st_size if Path(f"{base}.jsonl").exists() else 0
        with open(f"{base}.out", "w") as out, open(f"{base}.screen", "a") as screen:
            process = subprocess.Popen(
                words + ["--json"] * stage.json, stdout=out, stderr=screen, text=True, start_new_session=True
            )
            killed = False
            try:
                while process.poll() is None:
                    seen.look(process)
                    killed = limit is not None and seen.cpu() >= limit
                    if killed:
                        process.kill()
                        break
                    time.sleep(LOOK_SECONDS)
            finally:
                end_session(process)
        failed = bool(process.returncode) and not killed
        seconds, after = time.monotonic() - started, self.server.traffic()
        with open(f"{base}.jsonl", "rb") as file:
            file.seek(skip)
            log = [json.loads(line) for line in file.read().decode().splitlines()]
        text = Path(f"{base}.out").read_text()
        return {
            "command": "lattqe " + " ".join(stage.words),
            "killed": killed,
            "failed": failed,
            "seconds": round(seconds, 2),
            "cpu_seconds": {role: round(seen.cpu(role), 2) for role in ("driver", "workers", "ray")},
            "peak_bytes": {role: seen.peak(role) for role in ("driver", "workers")},
            "planned_worker_bytes": planned_bytes(log),
            **dict(zip(("bytes_read", "bytes_written", "requests"), (b - a for a, b in zip(before, after)))),
            "phases": phases(log),
            "summary": json.loads(text) if stage.json and not killed and not failed and text.strip() else None,
        }


def planned_bytes(log: list[dict[str, Any]]) -> int:
    """The largest memory of a worker that the plans in a log file speak of; 0 where none does."""
    texts = [line["table"].get("memory of a worker") for line in log if line["event"] in ("plan", "summary")]
    amounts = [
        text.split() for text in texts if isinstance(text, str) and text.split()[1:2] and text.split()[1] in UNITS
    ]
    return max((int(float(words[0]) * (1 << UNITS[words[1]])) for words in amounts), default=0)


def phases(log: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each phase that a log file tells of."""
    spent: dict[str, float] = defaultdict(float)
    for line in log:
        if line["event"] == "phase done":
            spent[line["phase"]] += line["seconds"]
    return {name: round(seconds, 2) for name, seconds in spent.items()}


def table(found: dict[str, Any]) -> str:
    """All stages as a markdown table; a stage's attempts are added up, its summary is that of the last."""
    heading = (
        "stage", "rows", "s", "rows/s", "CPU s: driver + workers + Ray", "peak MiB: driver, worker (planned)",
        "read, written MB", "requests", "waiting s", "what the workers' time was spent on, s",
    )  # fmt: skip
    lines = [heading, ("---",) * len(heading)]
    for name, stage in found["stages"].items():
        attempts, last = stage["attempts"], stage["attempts"][-1]
        seconds = sum(each["seconds"] for each in attempts)
        cpu = [sum(each["cpu_seconds"][role] for each in attempts) for role in ("driver", "workers", "ray")]
        driver, worker = (max(each["peak_bytes"][role] for each in attempts) / 2**20 for role in ("driver", "workers"))
        moved = [sum(each[key] for each in attempts) / 1e6 for key in ("bytes_read", "bytes_written")]
        summary = last["summary"] or {}
        # A plan shows two digits; where the summary repeats the prediction, it has all of them.
        exact = [summary.get(name) or 0 for name in ("predicted_worker_bytes", "predicted_hop_worker_bytes")]
        planned = (max(exact) or max(each["planned_worker_bytes"] for each in attempts)) / 2**20
        spent = dict(summary.get("worker_seconds") or summary.get("spent") or last["phases"])
        waiting = spent.pop("waiting", None)
        ends = {word: sum(each[word] for each in attempts) for word in ("killed", "failed")}
        lines.append((
            name + "".join(f" ({word} {count}×)" for word, count in ends.items() if count),
            f"{stage['rows']:,}", f"{seconds:.0f}",
            f"{stage['rows'] / seconds:,.0f}", " + ".join(f"{value:.0f}" for value in cpu),
            f"{driver:.0f}" + (f", {worker:.0f}" + f" ({planned:.0f})" * bool(planned)) * bool(worker),
            ", ".join(f"{value:,.1f}" for value in moved), f"{sum(each['requests'] for each in attempts):,}",
            "" if waiting is None else f"{waiting:.1f}",
            ", ".join(f"{what} {value:.1f}" for what, value in sorted(spent.items(), key=lambda item: -item[1])[:5]),
        ))  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
