"""The `lattqe` command: every verb is there, runs by itself, and says what is wrong in one line."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer.main

from jobs import cli
from jobs.console import guarded, progress_bar
from lattqe import __version__
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.store import FeatureWriter

PROJECT = Path(__file__).resolve().parent.parent


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lattqe", *arguments])
    cli.main()


def test_help_shows_every_verb_with_line_and_example(monkeypatch, capsys):
    call(monkeypatch, "--help")
    shown = capsys.readouterr().out
    for verb in cli.VERBS:
        assert verb.line in shown
        assert verb.example in shown


def test_help_is_shown_in_any_encoding(monkeypatch):
    """In a process of its own; and that of a verb, which would import torch there, in this one."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    whole = [sys.executable, "-m", "jobs.cli", "--help"]
    done = subprocess.run(whole, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: lattqe" in done.stdout
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    call(monkeypatch, "search", "--help")
    sys.stdout.flush()
    assert b"Usage: lattqe search" in sys.stdout.buffer.getvalue()


def test_version(monkeypatch, capsys):
    call(monkeypatch, "--version")
    assert capsys.readouterr().out.strip() == f"lattqe {__version__}"


def test_an_unknown_verb_is_refused_with_a_hint(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "agument")
    assert ended.value.code == 2
    assert "did you mean 'augment'?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS, ids=lambda verb: verb.name)
def test_examples_are_understood(verb):
    command = typer.main.get_command(verb.load())
    assert command.help
    _, name, *arguments = verb.example.split()
    assert name == verb.name
    command.make_context(name, arguments)


@pytest.mark.parametrize("words", [["jobs.cli", "info", "nowhere"], ["jobs.import_", "nowhere.npy", "--to", "index"]])
def test_a_verb_runs_as_a_module(words):
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error:")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_brackets_in_a_message_are_text(capsys):
    from jobs.console import guarded, show_table
    from lattqe.errors import LattqeError

    def fail():
        raise LattqeError("cannot read [/x] of [red]file[/red]")

    show_table("[/title]", {"[/name]": "[/value]"})
    with pytest.raises(SystemExit):
        guarded(fail)
    shown = capsys.readouterr().err
    assert "cannot read [/x] of [red]file[/red]" in shown
    assert "[/value]" in shown


def test_brackets_in_a_help_text_are_shown():
    done = subprocess.run(
        [sys.executable, "-m", "jobs.demo", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert "A running Ray cluster. [default: $RAY_ADDRESS, or this machine]" in " ".join(done.stdout.split())


def test_lines_of_progress_expect_what_this_run_has_shown(monkeypatch, capsys):
    """What an earlier run has finished took none of this one's time; before anything is done, nothing is expected."""
    now = [100.0]
    monkeypatch.setattr("jobs.console.time.monotonic", lambda: now[0])
    with progress_bar("rows", 4000, done=1000) as bar:
        for second, amount in ((110.0, 0), (120.0, 500)):
            now[0] = second
            bar.advance(amount)
    assert capsys.readouterr().err.splitlines() == ["rows: 1,000 of 4,000", "rows: 1,500 of 4,000, about 100 s to go"]


SLEEPER = """
import time
from jobs.console import command, progress_bar, run
def main():
    with progress_bar("sleep", 9) as bar:
        bar.advance(2)
        print("ready", flush=True)
        while True:
            time.sleep(1)
run(command(main))
"""


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_a_job_with_one_line_and_its_code(number, code, word, tmp_path):
    job = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, "--log-file", str(tmp_path / "log")],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.Signals[number])
    _, shown = job.communicate()
    assert job.returncode == code
    assert shown == f"{word}: sleep 2 of 9; finished work is kept; run the same command again to continue\n"
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert (last["event"], last["signal"]) == ("interrupted", number)


FRAGILE = """
import atexit, os, sys, threading, time
from jobs.console import command, run
class Crashes:
    def __del__(self, abort=os.abort):
        abort()
sys.kept = Crashes()
def main():
    threading.Thread(target=time.sleep, args=(600,), name={name!r}, daemon=True).start()
    atexit.register(print, "cleaned up")
    raise SystemExit({raised})
run(command(main))
"""


@pytest.mark.parametrize(
    ("name", "raised", "code"),
    [("ray-train", 143, 143), ("ray-shutdown", 2, 2), ("ray-train", None, 0), ("harmless", 143, -signal.SIGABRT)],
)
def test_python_is_not_taken_apart_under_a_thread_that_waits_in_ray(name, raised, code):
    """It has ended in a segmentation fault; the other name shows that this test would see one."""
    done = subprocess.run(
        [sys.executable, "-c", FRAGILE.format(name=name, raised=raised)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (code, "cleaned up\n")


def test_the_list_of_verbs_needs_no_heavy_library():
    """`lattqe --help` takes 0.2 s of CPU because none of these is imported for it."""
    code = "import sys, jobs.cli; print(sorted({'numpy', 'torch', 'ray', 'pyarrow', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["neighbors", "f", "-k", "0", "--to", "g"], "error: Invalid value for '-k'"),
        (["import", "x.npy"], "error: Missing option '--to': see lattqe import --help"),
        (["search", "--foo"], "error: No such option: --foo"),
    ],
)
def test_wrong_usage_is_one_line(words, said, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *words)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(said)


@pytest.mark.parametrize(
    ("module", "calls"),
    [("search", ["", "--expand lattqe", "--expand lattqe --model paper", "--expand aqe --nqe 1"]), ("import_", [""])],
)
def test_a_small_verb_imports_neither_ray_nor_what_only_other_verbs_need(module, calls, tmp_path):
    """One process for all calls of a verb: what none of them has imported is missing after the last one."""
    with FeatureWriter(str(tmp_path / "rows"), 4) as writer:
        writer.append(np.eye(4, dtype=np.float32), list("abcd"))
    np.save(tmp_path / "rows.npy", np.eye(4, dtype=np.float32))
    LAttQE(LAttQEConfig(dim=4, heads=1, layers=1, max_k=4)).save(str(tmp_path / "paper"))
    code = (
        f"import json, os, sys; from jobs.{module} import app\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    app(words, standalone_mode=False)\n"
        "print(sorted({'ray', 'scipy', 'sympy', 'pandas', 'boto3'} & set(sys.modules)), os.environ['GOMP_SPINCOUNT'])"
    )
    given = ["rows", "rows", "-k", "2"] if module == "search" else ["rows.npy"]
    words = [[*given, *options.split(), "--to", f"made-{number}"] for number, options in enumerate(calls)]
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment["PYTHONPATH"] = str(PROJECT)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.strip() == "[] 1000"
    assert {path.name for path in tmp_path.glob("made-*")} == {f"made-{number}" for number in range(len(calls))}


def test_ranks_are_evaluated_without_torch():
    """It would be three quarters of the time."""
    code = "import sys, jobs.lists, lattqe.evaluation.analysis; print({'ray', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_too_little_memory_is_one_line(capsys):
    """A real refusal, by numpy: what libraries map differs by machine, so a limit might not bite."""
    with pytest.raises(SystemExit) as ended:
        guarded(np.empty, 1 << 60, np.uint8)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: out of memory \(.*\): .*raise the limit.*\n", said), said


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),  # torch, while it is imported
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("anything else"), False),
        (ImportError("No module named 'x'"), False),
    ],
)
def test_only_a_lack_of_memory_is_taken_for_one(error, is_lack, capsys):
    def fail():
        raise error

    with pytest.raises(SystemExit if is_lack else type(error)):
        guarded(fail)
    assert capsys.readouterr().err.startswith("error: out of memory (") == is_lack


def test_a_full_disk_for_temporary_files_is_one_line(capsys):
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device", "/full/lattqe-import-x")

    with pytest.raises(SystemExit) as ended:
        guarded(fail)
    assert ended.value.code == 2
    said = "error: the disk for /full/lattqe-import-x is full: free some space, or set TMPDIR\n"
    assert capsys.readouterr().err == said
