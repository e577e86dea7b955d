"""The words of a command line, before typer sees them: what it would take without a word, and not as it was meant."""

import copy
from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from typer.core import TyperCommand

from lattqe.errors import LattqeError


class PlainCommand(TyperCommand):
    """A command whose help is text: what stands in [brackets] is shown, not taken for markup."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse words that would be dropped, or count as something else than they seem."""
        words = list(_in_pairs(self.params, args))
        if any(param.nargs == -1 for param in self.params):
            _refuse_stray(words)
        _refuse_replaced(words)
        _refuse_empty(words)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        plain = copy.copy(self)
        plain.help = escape(self.help) if self.help else self.help
        plain.params = [copy.copy(param) for param in self.params]
        for param in plain.params:
            if text := getattr(param, "help", None):
                setattr(param, "help", escape(text))  # noqa: B010 - arguments and options have one, their base has not
        TyperCommand.format_help(plain, ctx, formatter)


def _in_pairs(params: list[Any], args: list[str]) -> Iterator[tuple[Any, str, str]]:
    """Each option with its name and value (of a flag: its name), each other word with None; words after -- are free."""
    options = {name: param for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}
    words = iter(args[: args.index("--")] if "--" in args else args)
    for word in words:
        if not word.startswith("-"):
            yield None, "", word
            continue
        name, equals, value = word.partition("=")
        if name not in options and not word.startswith("--"):  # -k5
            name, equals, value = word[:2], "=", word[2:]
        option: Any = options.get(name)
        if option is not None:
            given = name if option.is_flag else value if equals else next(words, None)
            if given is not None:  # typer tells of an option without its value
                yield option, name, given


def _refuse_stray(words: list[tuple[Any, str, str]]) -> None:
    """Refuse `train A --val B C`, which many mean as two sets to validate on: C would be trained on."""
    seen, last = False, ""
    for option, name, value in words:
        if option is None:
            if last and seen:
                raise LattqeError(f"{last} takes one value, and {value!r} follows it: repeat {last} for every value")
            seen = True
        last = name if option is not None and option.multiple else ""


def _refuse_replaced(words: list[tuple[Any, str, str]]) -> None:
    """Refuse `--rows 0:3 --rows 5:9`, of which only the last would count."""
    given: dict[str, str] = {}
    for option, name, value in words:
        if option is None or option.multiple:
            continue
        before = given.setdefault(option.name, value)
        if before != value:
            what = (
                f"{before} and {value} contradict each other"
                if option.is_flag
                else (f"{name} is given twice, with {before!r} and {value!r}, and takes one value")
            )
            raise LattqeError(f"{what}: leave one of them out")


def _refuse_empty(words: list[tuple[Any, str, str]]) -> None:
    """Refuse `--labels "$LABELS"` where the shell's variable is not set: an empty name would mean this folder."""
    for option, name, value in words:
        if not value:
            what = f"{name} has an empty value" if option is not None else "an argument is empty"
            raise LattqeError(f"{what}: is a shell variable not set?")
