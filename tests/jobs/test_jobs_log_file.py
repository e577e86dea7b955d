"""`--log-file` of every job: one JSON object a line, from start to end, and never a credential."""

import json
import logging
import os

import numpy as np
import pytest
import typer.main

from jobs import cli
from jobs.artifacts import info_app
from jobs.console import command, guarded, progress_bar, show_table
from jobs.import_ import app as import_
from jobs.import_ import dataset_app
from jobs.log_file import redacted
from jobs.train import whiten_app as whiten
from lattqe.errors import LattqeError, event


def call(app, *arguments):
    with pytest.raises(SystemExit) as ended:
        guarded(app, args=[str(argument) for argument in arguments], prog_name="lattqe")
    return ended.value.code or 0


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def commands():
    for verb in cli.VERBS:
        found = typer.main.get_command(verb.load())
        yield from getattr(found, "commands", {verb.name: found}).values()


def test_every_job_has_the_option():
    for found in commands():
        assert any("--log-file" in option.opts for option in found.params), found.name


def test_a_job_tells_its_plan_its_phases_and_its_end(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32))
    log = tmp_path / "run.jsonl"
    assert call(import_, tmp_path / "x.npy", "--to", tmp_path / "features", "--log-file", log) == 0
    shown = capsys.readouterr()
    lines = read(log)
    assert [line["event"] for line in lines] == ["start", "plan", "phase", "phase done", "finish"]
    assert {line["job"] for line in lines} == {"import"}
    assert len({line["run"] for line in lines}) == 1
    assert lines[0]["arguments"]["to"] == str(tmp_path / "features")
    assert lines[1]["table"]["rows × dimensions"] == "40 × 8"
    assert lines[2]["total"] == 40
    assert (lines[-1]["exit_code"], lines[-1]["level"]) == (0, "info")
    assert all(line["time"].endswith("+00:00") for line in lines)
    assert '"event"' not in shown.err + shown.out, "nothing of it on the screen"


def test_runs_append_and_errors_are_told(tmp_path):
    log = tmp_path / "run.jsonl"
    assert call(import_, tmp_path / "none.npy", "--to", tmp_path / "f", "--log-file", log) == 2
    assert call(whiten, "learn", tmp_path / "none", "--to", tmp_path / "w", "--log-file", log) == 2
    assert call(info_app, tmp_path / "none", "--log-file", log) == 2
    assert call(dataset_app, "r1m", tmp_path / "none", "--to", tmp_path / "d", "--log-file", log) == 2
    lines = read(log)
    assert [(line["job"], line["event"]) for line in lines] == [
        ("import", "start"),
        ("import", "error"),
        ("whiten learn", "start"),
        ("whiten learn", "error"),
        ("info", "start"),
        ("info", "error"),
        ("dataset r1m", "start"),
        ("dataset r1m", "error"),
    ]
    assert lines[1]["level"] == "error"
    assert "none.npy" in lines[1]["message"]


def test_any_name_is_one_line(tmp_path):
    """Of a file that is not UTF-8, with line ends of Unicode and of C1, beyond the first plane."""
    hostile = os.fsdecode(b"\xff") + "\u2028\u2029\x85\x9b\x7f\u202e\x1c\U000e0001 é"

    def main() -> None:
        event("named", name=hostile)

    log = tmp_path / "run.jsonl"
    assert call(command(main), "--log-file", log) == 0
    assert read(log)[1]["name"] == hostile
    assert not set(hostile[:-2]) & set(log.read_text())
    assert "é" in log.read_text()


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (KeyboardInterrupt(), {"event": "interrupted", "level": "warning"}),
        (SystemExit(3), {"event": "finish", "exit_code": 3, "level": "warning"}),
        (LattqeError("fix it"), {"event": "error", "message": "fix it", "error": "LattqeError"}),
        (ZeroDivisionError("a bug"), {"event": "error", "level": "critical", "error": "ZeroDivisionError"}),
    ],
)
def test_every_end_is_told(tmp_path, raised, told):
    def main() -> None:
        show_table("[plan]", {"loss": float("nan")}, plan=True)
        with progress_bar("work", 2) as bar:
            bar.advance()
            raise raised

    with pytest.raises((SystemExit, ZeroDivisionError)):
        guarded(command(main), args=["--log-file", str(tmp_path / "log")])
    lines = read(tmp_path / "log")
    assert [line["event"] for line in lines[:3]] == ["start", "plan", "phase"]
    assert told.items() <= lines[-1].items()
    assert ("traceback" in lines[-1]) == isinstance(raised, ZeroDivisionError)
    assert logging.getLogger("lattqe").handlers == [], "the handlers are gone afterwards"


def test_warnings_reach_file_and_screen_and_events_the_file_only(tmp_path, capfd):
    def main() -> None:
        logging.getLogger("lattqe.store").warning("cannot read %s: trying on", "s3://b/x")
        event("block failed", logging.WARNING, block=(1, 2), rows=3)

    guarded(command(main), args=["--log-file", str(tmp_path / "log")], standalone_mode=False)
    _, warning, failed, _ = read(tmp_path / "log")
    assert (warning["event"], warning["message"]) == ("message", "cannot read s3://b/x: trying on")
    assert (failed["event"], failed["block"], failed["rows"], failed["level"]) == ("block failed", [1, 2], 3, "warning")
    assert capfd.readouterr().err.strip() == "cannot read s3://b/x: trying on"
    event("block failed", logging.WARNING)
    assert capfd.readouterr().err == "", "without a log file there is no listener"


def test_a_log_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    assert call(import_, "x.npy", "--to", tmp_path / "f", "--log-file", tmp_path / "no" / "log") == 2
    assert "cannot write the log file" in capsys.readouterr().err

    def full(*_):
        raise OSError(28, "No space left on device")

    def main() -> None:
        monkeypatch.setattr(os, "write", full)
        for number in range(3):
            event("block done", block=number)

    guarded(command(main), args=["--log-file", str(tmp_path / "log")], standalone_mode=False)
    assert capsys.readouterr().err.count("No space left on device") == 1, "told once, and the job went on"


def test_credentials_are_taken_out(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    assert "wJalr" not in redacted("PUT with wJalrXUtnFEMI/K7MDENG failed")
    assert redacted("s3://AK:se/cret@bucket/x?token=abc") == "s3://<hidden>@bucket/x?<hidden>"
    plain = "s3://bucket/prefix: k = 3, user@example.org?"
    assert redacted(plain) == plain
