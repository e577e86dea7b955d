"""What every job shows on the screen: a plan, a progress bar, a summary; how it ends when something is wrong; its log.

`--log-file`: every job appends what it does to a file, one JSON object a line, beside what the screen shows.
"""

import atexit
import copy
import errno
import functools
import gc
import inspect
import json
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from lattqe.errors import LattqeError, event

LogFile = Annotated[
    str | None,
    typer.Option("--log-file", metavar="FILE", help="Append what happens to this file, one JSON object a line."),
]
# Nothing we write holds these; should a library's message ever do, it ends here.
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "RAY_AUTH_TOKEN")
SHORTEST_SECRET = 6  # shorter ones are words of every other line
USER = re.compile(r"(\w+://)[^\s\"]*@")  # a secret key may have a slash
OPTIONS = re.compile(r"(s3://[^\s\"?]*\?)[^\s\"]*")
# Results go to stdout where scripts read them; everything for people's eyes goes to stderr.
screen = Console(stderr=True, highlight=False)
EXIT_BAD_INPUT = 2
# Its name is public, that of its parent is not: typer has a click of its own, or the one that is installed.
USAGE_ERROR: Any = typer.BadParameter.__base__
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")]
APPROXIMATE_GRAPH = "an approximate graph"
LINE_SECONDS = 10.0  # between two lines about the progress, in the log file and where there is no terminal


def redacted(text: str) -> str:
    """The text without the credentials of this process, and without those in addresses."""
    for name in SECRETS:
        value = os.environ.get(name, "")
        if len(value) >= SHORTEST_SECRET:
            text = text.replace(value, f"<{name}>")
    return OPTIONS.sub(r"\1<hidden>", USER.sub(r"\1<hidden>@", text))


class JsonLines(logging.Handler):
    """Appends each record as one line in one write, so that several jobs may share a file."""

    def __init__(self, path: str, job: str) -> None:
        super().__init__()
        self.path, self.always = path, {"job": job, "run": secrets.token_hex(4)}
        try:
            self.file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise LattqeError(
                f"cannot write the log file {path} ({error.strerror}): --log-file wants a local file in "
                "a folder that exists"
            ) from error

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; a full disk ends the log with one line on the screen, never the job."""
        if self.file is None:
            return
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = getattr(record, "fields", None)
        line = {
            "time": moment,
            "level": record.levelname.lower(),
            "event": "message" if fields is None else record.msg,
            **self.always,
        }
        line |= {"logger": record.name, "message": record.getMessage()} if fields is None else fields
        try:
            os.write(self.file, f"{redacted(_json(line))}\n".encode())
        except OSError as error:
            print(
                f"the log file {self.path} cannot be written ({error.strerror}): going on without it", file=sys.stderr
            )
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            os.close(self.file)
        self.file = None
        super().close()


def _json(line: dict[str, Any]) -> str:
    try:
        return json.dumps(line, default=str, allow_nan=False, ensure_ascii=False)
    except ValueError:  # NaN and infinity are no JSON
        return json.dumps({name: str(value) for name, value in line.items()}, ensure_ascii=False)


@contextmanager
def logging_to(path: str | None, job: str, arguments: dict[str, Any]) -> Iterator[None]:
    """Log the body, from `start` to `finish`, `error` or `interrupted`; without a path nothing happens."""
    if path is None:
        yield
        return
    logger, lines, shown = logging.getLogger("lattqe"), JsonLines(path, job), logging.StreamHandler()
    # Warnings without fields are shown on the screen, as they are without a log file; events never are.
    shown.setLevel(logging.WARNING)
    shown.addFilter(lambda record: not hasattr(record, "fields"))
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    logger.addHandler(shown)
    started = time.monotonic()
    try:
        event("start", arguments={name: value for name, value in arguments.items() if value not in (None, [], False)})
        try:
            yield
        except BaseException as error:
            _tell_end(error, round(time.monotonic() - started, 3))
            raise
        event("finish", exit_code=0, seconds=round(time.monotonic() - started, 3))
    finally:
        logger.removeHandler(lines)
        logger.removeHandler(shown)
        logger.setLevel(level)
        lines.close()


def _tell_end(error: BaseException, seconds: float) -> None:
    """Log how a job ended that did not end by itself."""
    if isinstance(error, SystemExit):  # how doctor and submit return what they found
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        event("finish", logging.WARNING if code else logging.INFO, exit_code=code, seconds=seconds)
    elif isinstance(error, KeyboardInterrupt):
        event("interrupted", logging.WARNING, signal=getattr(error, "signal", "SIGINT"), seconds=seconds)
    elif isinstance(error, LattqeError):
        event("error", logging.ERROR, error=type(error).__name__, message=str(error), seconds=seconds)
    else:  # a bug: the file keeps what the screen shows
        event(
            "error",
            logging.CRITICAL,
            error=type(error).__name__,
            message=str(error),
            seconds=seconds,
            traceback="".join(traceback.format_exception(error)),
        )


def _job_name(function: Callable[..., Any]) -> str:
    """`jobs.import_.main` is the job "import"."""
    module = function.__module__
    if module == "__main__":  # python -m jobs.augment
        module = getattr(sys.modules["__main__"].__spec__, "name", "job")
    return module.rsplit(".", 1)[-1].rstrip("_")


def logged(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Give a job's function the option `--log-file`, as its last one; the file calls it `name`, or as its module."""
    name = name or _job_name(function)

    @functools.wraps(function)
    def job(log_file: str | None = None, **arguments: Any) -> Any:
        with logging_to(log_file, name, arguments):
            return function(**arguments)

    signature = inspect.signature(function)
    option = inspect.Parameter("log_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=LogFile)
    job.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    job.__annotations__ = {**function.__annotations__, "log_file": LogFile}
    return job


def show_table(title: str, rows: dict[str, Any], plan: bool = False) -> None:
    """Print a two-column table: the plan before the work, the summary after it; the log file gets both."""
    event("plan" if plan or title == "plan" else "summary", title=title, table=rows)
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(str(value)))
    screen.print(table)


def note_approximate(*used: Any) -> None:
    """Say which of the artifacts used lack neighbors: approximate graphs, and what was made of them."""
    for artifact in used:
        lacks = artifact.manifest.approximation
        if lacks is not None:
            screen.print(
                f"note: {artifact.place.uri} rests on {APPROXIMATE_GRAPH}: {lacks}", markup=False, soft_wrap=True
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

    def __init__(self, progress: bars.Progress | None, task: bars.TaskID | None, title: str, total: int) -> None:
        self._progress, self._task, self._title, self._total = progress, task, title, total
        self._done, self._started, self._last_line = 0, time.monotonic(), time.monotonic()

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
            remaining = (now - self._started) * (self._total - self._done) / max(self._done, 1)
            screen.print(f"{self._title}: {self._done}/{self._total}, about {remaining:.0f} s to go {note}".rstrip())

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
        bar = ProgressBar(None, None, title, total)
        bar._done = done
        yield bar
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("ETA"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}"),
    )
    with bars.Progress(*columns, console=screen, transient=False) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")
        bar = ProgressBar(progress, task, title, total)
        bar._done = done
        yield bar


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
        raise SystemExit(1) from None
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # that of temporary files, for one
            where = f" that {escape(str(error.filename))} would lie on" if error.filename else ""
            screen.print(f"[red]error:[/red] the disk{where} is full: free some, or set TMPDIR", soft_wrap=True)
            raise SystemExit(EXIT_BAD_INPUT) from None
        if not is_lack_of_memory(error):
            raise
        what = " ".join(str(error).split())[:200] or "an allocation was refused"
        remedy = "close other programs, raise the limit (ulimit -v, a container's), or take a larger machine"
        screen.print(f"[red]error:[/red] out of memory ({escape(what)}): {remedy}", soft_wrap=True)
        raise SystemExit(EXIT_BAD_INPUT) from None


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether memory was refused; the loader of libraries, the system and torch each have their own way to say it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = ("failed to map segment", "annot allocate memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in said)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers and `timeout` send, ends a job as Ctrl-C does, with its own exit code."""

    signal = "SIGTERM"  # for the log file


def tell_interrupted(interrupt: KeyboardInterrupt) -> int:
    """Say in one line how far a job came before Ctrl-C or SIGTERM, and how to go on; the exit code."""
    # Another one, out of impatience, must not end in a traceback of Ray's or Python's last breath.
    for number in (signal.SIGINT, signal.SIGTERM):
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_IGN)
    reached = "; ".join(reversed(getattr(interrupt, "__notes__", ())))
    where = f"{escape(reached)}; " if reached else ""
    what, code = (
        ("terminated", EXIT_TERMINATED) if isinstance(interrupt, Terminated) else ("interrupted", EXIT_INTERRUPTED)
    )
    screen.print(f"{what}: {where}what is finished is kept, run the same command again to go on", soft_wrap=True)
    return code


def _terminate(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise Terminated


def interruptible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Ctrl-C end a job with one line and exit code 130, SIGTERM with 143.

    Typer, which would say "Aborted!", never sees them.
    """

    @functools.wraps(function)
    def job(*args: Any, **kwargs: Any) -> Any:
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, _terminate) if main else None
        try:
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


class PlainCommand(TyperCommand):
    """A command whose help is text: what stands in [brackets] is shown, not taken for markup."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        plain = copy.copy(self)
        plain.help = escape(self.help) if self.help else self.help
        plain.params = [copy.copy(param) for param in self.params]
        for param in plain.params:
            if text := getattr(param, "help", None):
                setattr(param, "help", escape(text))  # noqa: B010 - arguments and options have one, their base has not
        TyperCommand.format_help(plain, ctx, formatter)


def run(app: typer.Typer, arguments: list[str] | None = None, name: str | None = None) -> None:
    """Run one job as a program: the verb `name`, or `python -m jobs.augment ...` and the like."""
    # torch alone brings half a million objects, all of which live as long as the process: searching them for cycles
    # again and again while they are imported, and once more at the end, is half a second of a command of two.
    gc.set_threshold(20_000)
    atexit.register(gc.freeze)
    guarded(_unwrapped, app, arguments, name)


def _unwrapped(app: typer.Typer, arguments: list[str] | None, name: str | None) -> None:
    """Call the application; what typer would say in a frame is an error as any other, one line."""
    try:
        code = app(args=arguments, prog_name=name, standalone_mode=False)
    except USAGE_ERROR as error:
        verb = error.ctx.command_path if error.ctx is not None else name
        raise LattqeError(f"{error.format_message().rstrip('.')}: see {verb} --help") from error
    if isinstance(code, int) and code:
        raise SystemExit(code)
