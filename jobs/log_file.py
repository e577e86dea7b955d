"""`--log-file`: every job appends what it does to a file, one JSON object a line, beside what the screen shows."""

import functools
import inspect
import json
import logging
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from lattqe.errors import LattqeError, event

LogFile = Annotated[
    str | None,
    typer.Option("--log-file", metavar="FILE", help="Append a log of events to this file, one JSON object per line."),
]
# Nothing we write holds these; should a library's message ever do, it ends here.
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "RAY_AUTH_TOKEN")
SHORTEST_SECRET = 6  # shorter ones are words of every other line
USER = re.compile(r"(\w+://)[^\s\"]*@")  # a secret key may have a slash
OPTIONS = re.compile(r"(s3://[^\s\"?]*\?)[^\s\"]*")


def redacted(text: str) -> str:
    """The text without the credentials of this process, and without those in addresses."""
    for name in SECRETS:
        value = os.environ.get(name, "")
        if len(value) >= SHORTEST_SECRET:
            text = text.replace(value, f"<{name}>")
    return OPTIONS.sub(r"\1<hidden>", USER.sub(r"\1<hidden>@", text))


class JsonLines(logging.Handler):
    """Appends each record as one line in one write, so that several jobs may share a file."""

    file: int | None = None  # of a file that could not be opened too: `logging` closes what it knows of at exit

    def __init__(self, path: str, job: str) -> None:
        super().__init__()
        self.path, self.always = path, {"job": job, "run": secrets.token_hex(4)}
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise LattqeError(
                f"cannot write the log file {path} ({error.strerror}): --log-file must be a local file in "
                "an existing folder"
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
            os.write(self.file, f"{_on_one_line(redacted(_json(line)))}\n".encode())
        except OSError as error:
            print(
                f"the log file {self.path} cannot be written ({error.strerror}): continuing without it", file=sys.stderr
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


def _on_one_line(document: str) -> str:
    """The same JSON without what ends a line for some readers, controls a terminal or is no UTF-8 (of file names)."""
    if document.isprintable():
        return document
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in document)


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
