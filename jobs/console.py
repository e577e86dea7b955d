"""What every job prints: a plan, a progress bar, a summary; and how it ends when something is wrong."""

import atexit
import errno
import functools
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from jobs.arguments import PlainCommand
from jobs.log_file import logged
from lattqe.errors import LattqeError, event


class Screen(Console):
    """A console on which nothing that is shown can move the cursor or change colours, wherever it comes from."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of what is printed; all but rich's own control codes without control characters."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=printable(piece.text, keep="\n"))


# What was asked for goes to stdout, so that it can be piped; plans, progress and summaries of work go to stderr.
screen = Screen(stderr=True, highlight=False)
answers = Screen(highlight=False)
EXIT_BAD_INPUT = 2
# typer bundles its own click or uses the installed one: only this subclass has a public name.
USAGE_ERROR: Any = typer.BadParameter.__base__
EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143
LEFT_BEHIND = ("ray-train", "ray-shutdown")  # threads of an abandoned training, or of a cluster that is gone
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")]
APPROXIMATE_GRAPH = "an approximate graph"
LINE_SECONDS = 10.0  # between two lines about the progress, in the log file and where there is no terminal


def show_table(title: str, rows: dict[str, Any], plan: bool = False, to: Console = screen) -> None:
    """Print a two-column table: the plan before the work, the summary after it; the log file gets both.

    to: `answers` for the table that a command was called for.
    """
    event("plan" if plan or title == "plan" else "summary", title=title, table=rows)
    _print_table(title, rows, to)


def show_facts(title: str, facts: dict[str, Any]) -> None:
    """Print what `--json` gives a script for people, as a table; the log file gets it as scripts do."""
    event("summary", title=title, table=facts)
    _print_table(title, _spaced(facts), screen)


def _print_table(title: str, rows: dict[str, Any], to: Console) -> None:
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(readable(value, name)))
    to.print(table)


def _spaced(value: Any, name: str = "") -> Any:
    """Facts with their names in words, which are ours; those of sets are not, and stay as they are in `show_table`."""
    if isinstance(value, dict):
        return {each.replace("_", " "): _spaced(one, each) for each, one in value.items()}
    return readable(value, name)


def readable(value: Any, name: str = "") -> str:
    """A fact on one line: whole numbers with commas or, by their name, as bytes; several facts one after the other."""
    if isinstance(value, dict):
        return ", ".join(f"{each} {readable(one, each)}" for each, one in value.items())
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return human_bytes(value) if name.endswith("_bytes") or name.startswith("bytes_") else f"{value:,}"


def note_approximate(*used: Any) -> None:
    """Say which of the artifacts used lack neighbors: approximate graphs, and what was made of them."""
    for artifact in used:
        lacks = artifact.manifest.approximation
        if lacks is not None:
            screen.print(
                f"note: {artifact.place.uri} is based on {APPROXIMATE_GRAPH}: {lacks}", markup=False, soft_wrap=True
            )
            event("approximate", uri=artifact.place.uri, recall=lacks)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, for scripts."""
    print(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


class ProgressBar:
    """A bar with rate and ETA on a terminal, a line every few seconds elsewhere (CI, `ray job submit` logs)."""

    def __init__(
        self, progress: bars.Progress | None, task: bars.TaskID | None, title: str, total: int, done: int = 0
    ) -> None:
        self._progress, self._task, self._title, self._total = progress, task, title, total
        self._done, self._before = done, done
        self._started = self._last_line = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Say that `amount` more units are done; `note` stands beside the bar (a loss, a rate)."""
        self._done += amount
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=amount, note=note)
        now = time.monotonic()
        if now - self._last_line < LINE_SECONDS:
            return
        self._last_line = now
        event("progress", phase=self._title, done=self._done, total=self._total, note=note)
        if self._progress is None:
            here = self._done - self._before  # what an earlier run has finished says nothing about this speed
            remaining = (now - self._started) * (self._total - self._done) / max(here, 1)
            expected = f", about {remaining:,.0f} s to go" if here else ""
            screen.print(f"{self._title}: {self._done:,} of {self._total:,}{expected} {note}".rstrip(), markup=False)

    def __str__(self) -> str:
        return f"{self._title} {self._done:,} of {self._total:,}"


@contextmanager
def progress_bar(title: str, total: int, done: int = 0) -> Iterator[ProgressBar]:
    """Show progress of `total` units, `done` of which were finished by an earlier run."""
    started = time.monotonic()
    event("phase", phase=title, total=total, done=done)
    with _bar(title, total, done) as bar:
        try:
            yield bar
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(str(bar))
            raise
    event("phase done", phase=title, seconds=round(time.monotonic() - started, 3))


@contextmanager
def _bar(title: str, total: int, done: int) -> Iterator[ProgressBar]:
    """A bar on a terminal, lines elsewhere."""
    if not screen.is_terminal:
        yield ProgressBar(None, None, title, total, done)
        return
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("ETA"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}", markup=False),
    )
    with bars.Progress(*columns, console=screen, transient=False) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")
        yield ProgressBar(progress, task, title, total, done)


def guarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a job; an error the user can fix becomes one line and exit code 2, never a traceback."""
    try:
        return function(*args, **kwargs)
    except LattqeError as error:
        screen.print(f"[red]error:[/red] {escape(' '.join(str(error).split()))}", soft_wrap=True)
        raise SystemExit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt as interrupt:
        raise SystemExit(tell_interrupted(interrupt)) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_FAILED) from None
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # that of temporary files, for one
            where = f" for {escape(str(error.filename))}" if error.filename else ""
            screen.print(f"[red]error:[/red] the disk{where} is full: free some space, or set TMPDIR", soft_wrap=True)
            raise SystemExit(EXIT_BAD_INPUT) from None
        if not is_lack_of_memory(error):
            raise
        what = " ".join(str(error).split())[:200] or "an allocation was refused"
        remedy = "close other programs, raise the limit (ulimit -v, or the container's), or use a larger machine"
        try:
            screen.print(f"[red]error:[/red] out of memory ({escape(what)}): {remedy}", soft_wrap=True)
        except (MemoryError, ImportError, OSError):  # nor is there any for colours
            os.write(2, f"error: out of memory: {remedy}\n".encode())
        raise SystemExit(EXIT_BAD_INPUT) from None


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether memory was refused; the dynamic loader, the system and torch each report it differently."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = ("failed to map segment", "annot allocate memory", "can't allocate memory", "std::bad_alloc")
    return isinstance(error, MemoryError) or any(text in str(error) for text in said)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers and `timeout` send, ends a job as Ctrl-C does, with its own exit code."""

    signal = "SIGTERM"  # for the log file


def tell_interrupted(interrupt: KeyboardInterrupt) -> int:
    """Say in one line how far a job got before Ctrl-C or SIGTERM, and how to continue; returns the exit code."""
    # A second, impatient Ctrl-C must not end in a traceback from Ray or Python shutting down.
    for number in (signal.SIGINT, signal.SIGTERM):
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_IGN)
    reached = "; ".join(reversed(getattr(interrupt, "__notes__", ())))
    where = f"{escape(reached)}; " if reached else ""
    what, code = (
        ("terminated", EXIT_TERMINATED) if isinstance(interrupt, Terminated) else ("interrupted", EXIT_INTERRUPTED)
    )
    screen.print(f"{what}: {where}finished work is kept; run the same command again to continue", soft_wrap=True)
    return code


def _terminate(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise Terminated


class _NoPandas:
    """A finder of modules that finds no pandas."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def leave_pandas_out() -> None:
    """Let pyarrow look for pandas once, in vain: it would import it with the first array, half a second in every verb,
    only to ask whether the array is one of pandas'. What converts to pandas still imports it.
    """
    import pyarrow as pa

    hidden: Any = _NoPandas()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(hidden)


def interruptible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Ctrl-C end a job with one line and exit code 130, SIGTERM with 143.

    Typer, which would say "Aborted!", never sees them.
    """

    @functools.wraps(function)
    def job(*args: Any, **kwargs: Any) -> Any:
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, _terminate) if main else None
        try:
            leave_pandas_out()
            return function(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            before = None  # it stays ignored until the process has ended
            raise SystemExit(tell_interrupted(interrupt)) from None
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    return job


def command(function: Callable[..., Any]) -> typer.Typer:
    """Make the typer application of one job out of its typed function: the verb's name, or a module's `main`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    verb = None if function.__name__ == "main" else function.__name__
    app.command(cls=PlainCommand)(interruptible(logged(function, verb)))
    return app


def group(verb: str, line: str) -> tuple[typer.Typer, Callable[[Callable[..., Any]], Any]]:
    """The application of a verb that has several commands, and what makes a function one of them, by its name."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", help=line, no_args_is_help=True
    )

    def add(function: Callable[..., Any]) -> Any:
        name = function.__name__.replace("_", "-")
        return app.command(name, cls=PlainCommand)(interruptible(logged(function, f"{verb} {name}")))

    return app, add


def run(app: typer.Typer, arguments: list[str] | None = None, name: str | None = None) -> None:
    """Run one job as a program: the verb `name`, or `python -m jobs.augment ...` and the like."""
    # torch alone brings half a million objects, all of which live as long as the process: searching them for cycles
    # again and again while they are imported, and once more at the end, is half a second of a command of two.
    gc.set_threshold(20_000)
    atexit.register(gc.freeze)
    try:
        guarded(_unwrapped, app, arguments, name)
    except SystemExit as end:
        if any(thread.name in LEFT_BEHIND for thread in threading.enumerate()):
            _leave(end.code)
        raise


def _leave(code: Any) -> None:
    """End this process without taking Python apart, which has crashed under a thread that waits inside Ray."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as where the caller has closed it
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else EXIT_FAILED)


def _unwrapped(app: typer.Typer, arguments: list[str] | None, name: str | None) -> None:
    """Call the application; what typer would say in a frame is an error as any other, one line."""
    try:
        code = app(args=arguments, prog_name=name, standalone_mode=False)
    except USAGE_ERROR as error:
        verb = error.ctx.command_path if error.ctx is not None else name
        raise LattqeError(f"{error.format_message().rstrip('.')}: see {verb} --help") from error
    if isinstance(code, int) and code:
        raise SystemExit(code)


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows of texts, the headings first: names to the left, numbers to the right."""
    table = Table(box=None, padding=(0, 1), header_style="bold", title=shown(title), title_justify="left")
    for number, name in enumerate(rows[0]):
        table.add_column(shown(name), justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows[1:]:
        table.add_row(*map(shown, row))
    screen.print(table)


def shown(text: str) -> str:
    """Text from users for the screen: brackets are not markup, and control characters do nothing."""
    return escape(printable(text))


def printable(text: str, keep: str = "") -> str:
    """Text without control characters, which could move the cursor or change colours, but for those to `keep`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else "\N{REPLACEMENT CHARACTER}" for letter in text)


def warn(warnings: list[str]) -> None:
    """Print warnings, one line each."""
    for warning in warnings:
        screen.print(f"warning: {warning}", markup=False, soft_wrap=True)


def show_memory(stages: dict[str, dict[str, int]]) -> None:
    """Print what the largest worker of each stage took that ran on Ray, beside what was predicted."""
    rows = {
        stage: f"{human_bytes(found['peak_worker_bytes'])}, predicted {human_bytes(found['predicted_worker_bytes'])}"
        for stage, found in stages.items()
    }
    if rows:
        show_table("memory of a worker", rows)
