"""What is shown on the screen is text: no name and no value moves the cursor, changes colours or counts as markup."""

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from jobs import cli, console
from jobs.console import Screen, guarded, progress_bar, show_facts, show_table, warn
from lattqe.errors import LattqeError
from lattqe.store import FeatureWriter

# Escape, CSI of one byte, bell, right-to-left override, half a character (of a file name that is no UTF-8), markup.
HOSTILE = "a\x1b[2J\x9b2J\x07\u202e\udcff[/bold]z"
HARMLESS = "a\ufffd[2J\ufffd2J"


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal would get."""
    written = io.StringIO()
    for name in ("screen", "answers"):
        monkeypatch.setattr(console, name, Screen(file=written, width=200, highlight=False, force_terminal=True))
    return written


def fail() -> None:
    raise LattqeError(f"{HOSTILE} is wrong")


def plain(written: str) -> None:
    assert HARMLESS in written
    assert not {"\x9b", "\x07", "\u202e", "\udcff"} & set(written)
    assert "\x1b[2J" not in written
    assert "[/b" in written  # a table may cut its end: the widths are those before


def test_nothing_that_is_shown_controls_the_terminal(screens: io.StringIO) -> None:
    with pytest.raises(SystemExit):
        guarded(fail)
    plain(screens.getvalue())
    for show in (
        lambda: show_table(HOSTILE, {"name": HOSTILE}, to=console.screen),
        lambda: show_table("one", {HOSTILE: "two\nlines"}, to=console.answers),
        lambda: warn([HOSTILE]),
        lambda: console.print_table("one", [["a", HOSTILE], ["b", "c"]]),
    ):
        screens.truncate(screens.seek(0))
        show()
        plain(screens.getvalue())


def test_lines_stay_lines() -> None:
    written = io.StringIO()
    Screen(file=written).print("two\nlines", markup=False)
    assert written.getvalue() == "two\nlines\n"
    table = Table(box=None)
    table.add_row("two\nlines")
    Screen(file=written).print(table)
    assert [line.strip() for line in written.getvalue().splitlines()] == ["two", "lines", "", "two", "lines"]


def test_a_bar_shows_its_title_and_note_as_they_are(screens: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    with progress_bar(HOSTILE, 2) as bar:
        bar.advance(1, "[/note]")
    plain(screens.getvalue())
    assert "[/note]" in screens.getvalue()
    written = io.StringIO()
    monkeypatch.setattr(console, "screen", Screen(file=written, width=200))
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    with progress_bar(HOSTILE, 2) as bar:
        bar.advance(1, "[/note]")
    plain(written.getvalue())
    assert "[/note]" in written.getvalue()


def test_lack_of_memory_is_told_even_where_the_screen_has_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(console.screen, "print", refuse)
    with pytest.raises(SystemExit) as ended:
        guarded(refuse)
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("error: out of memory: close other programs, raise the limit")


LIMITED = """
import resource, sys
import lattqe.store.artifacts
from jobs import artifacts, cli

pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (32 << 20),) * 2)
sys.argv = ["lattqe", "verify", sys.argv[1]]
cli.main()
"""


def test_a_real_limit_of_memory_is_one_line(tmp_path: Path) -> None:
    """A part of 64 MiB, and 32 MiB that may still be mapped."""
    with FeatureWriter(str(tmp_path / "set"), 1024, "float32", part_bytes=1 << 27) as writer:
        writer.append(np.eye(1 << 14, 1024, dtype=np.float32) + 1, [str(row) for row in range(1 << 14)])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "set")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("verifying")]
    assert len(lines) == 1
    assert re.match("error: .*annot allocate memory", lines[0])


def test_an_unknown_verb_is_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lattqe", "[/bold]"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "there is no verb '[/bold]': see lattqe --help" in capsys.readouterr().err


def test_facts_for_scripts_are_shown_as_people_read_them_and_logged_as_they_are(screens, monkeypatch):
    logged = []
    monkeypatch.setattr(console, "event", lambda name, **fields: logged.append((name, fields)))
    facts = {"rows": 1_234_567, "peak_worker_bytes": 3 << 20, "exact": True, "recall": 0.5, "model": None, "to": "a_b"}
    facts |= {"graph": {"products_made": 4096, "worker_seconds": {"searching again": 0.25}}}
    show_facts("made", facts)
    shown = re.sub(r"\x1b\[[0-9;]*m| +(?=\n)", "", screens.getvalue())
    lines = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in shown.strip().splitlines()[1:])
    assert lines == {
        "rows": "1,234,567",
        "peak worker bytes": "3.0 MiB",
        "exact": "True",
        "recall": "0.5",
        "model": "None",
        "to": "a_b",  # a name of the user's
        "graph": "products made 4,096, worker seconds searching again 0.25",
    }
    assert logged == [("summary", {"title": "made", "table": facts})]


def test_names_of_sets_keep_their_underscores(screens):
    show_table("sets", {"cub_200": {"rows_read": 1234, "a_set": "x_y"}}, to=console.screen)
    assert "cub_200" in screens.getvalue()
    assert "rows_read 1,234, a_set x_y" in screens.getvalue()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train a b --val c d --to m", "--val takes one value, and 'd' follows it: repeat --val for every value"),
        ("train a --val c --queries q r --to m", "--queries takes one value, and 'r' follows it"),
        ("train a --set steps=1 seed=2 --val c --to m", "--set takes one value, and 'seed=2' follows it"),
        ("train a --val=c d --to m", "--val takes one value, and 'd' follows it"),
        ("train a --val c --to m --to n", "--to is given twice, with 'm' and 'n', and takes one value"),
        ("train a --val c --to m --to=n", "--to is given twice, with 'm' and 'n', and takes one value"),
        ("train a --val c --to m --to m", "/a (no manifest.json there)"),  # nothing is lost
        ("train a --val c --val d --to m", "/a (no manifest.json there)"),  # may be repeated
        ("train --val c a b --to m", "/a (no manifest.json there)"),  # the other way round
        ("train a --plan --val c --to m b", "/a (no manifest.json there)"),
        ("train a --val=c --to m", "/a (no manifest.json there)"),
        ("augment a --to i --adapt --no-adapt", "--adapt and --no-adapt contradict each other: leave one of them out"),
        (
            "augment a --to i -k 3 -k4",
            "-k is given twice, with '3' and '4', and takes one value: leave one of them out",
        ),
        ("augment a --to i -k4 -k 4", "/a (no manifest.json there)"),
        ("augment a --to i -k 4 -- -k", "unexpected extra argument"),
        ("import a.npy --to i --labels=", "--labels has an empty value: is a shell variable not set?"),
    ],
)
def test_no_word_is_dropped_or_taken_for_something_else(
    words: str, told: str, screens: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train A B --val C D` would train on D, and of `-k 3 -k 4` only the last would count, quietly."""
    verb, *rest = words.split()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        console.run(next(each for each in cli.VERBS if each.name == verb).load(), rest, f"lattqe {verb}")
    assert told in screens.getvalue().replace("\n", " ")
