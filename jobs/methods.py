"""The options by which a job names an expansion method: derived from what the methods say of themselves."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from lattqe.errors import LattqeError
from lattqe.expansion import METHODS
from lattqe.expansion.base import Parameter
from lattqe.store.artifacts import model_address

NAMES = ", ".join(METHODS)


def owners() -> dict[str, dict[str, Parameter]]:
    """Every parameter of every method: {parameter: {method: Parameter}}."""
    found: dict[str, dict[str, Parameter]] = {}
    for name, method in METHODS.items():
        for parameter in method.parameters().values():
            found.setdefault(parameter.name, {})[name] = parameter
    return found


def method_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a job one option for each parameter of the methods, in place of its argument `params`.

    The job gets those that were given, by name.
    """
    options = {name: _option(of) for name, of in owners().items()}

    @functools.wraps(function)
    def job(**arguments: Any) -> Any:
        given = {name: arguments.pop(name, None) for name in options}
        return function(**arguments, params={name: value for name, value in given.items() if value is not None})

    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    for each in signature.parameters.values():
        parameters += (
            [each]
            if each.name != "params"
            else [
                inspect.Parameter(name, each.kind, default=None, annotation=option) for name, option in options.items()
            ]
        )
    job.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    job.__annotations__ = {name: kind for name, kind in function.__annotations__.items() if name != "params"} | options
    return job


def _option(of: Mapping[str, Parameter]) -> Any:
    """The option of a parameter; its help says what it means to each method that has it."""
    meanings: dict[str, list[str]] = {}
    for method, parameter in of.items():
        default = parameter.default
        default = "" if default is None else f": {default}" if isinstance(default, str) else f": {default:g}"
        meanings.setdefault(parameter.help, []).append(f"{method}{default}")
    text = "; ".join(f"{help} ({', '.join(methods)})" for help, methods in meanings.items())
    first = next(iter(of.values()))
    return Annotated[first.kind | None, typer.Option(first.option, help=f"{text}.")]


def method_params(name: str, given: Mapping[str, Any], dba: bool = False) -> dict[str, Any]:
    """The parameters of a method, for queries or for database rows; one that it does not have is refused by name."""
    if name not in METHODS:
        raise LattqeError(f"unknown method {name!r}: use one of {NAMES}")
    method, known = METHODS[name], owners()
    for key in given:
        if name not in known[key]:
            raise LattqeError(
                f"{next(iter(known[key].values())).option} belongs to {', '.join(known[key])}, not to "
                f"{name}: leave it out"
            )
    model = {"model": model_address(given.get("model"))} if method.learned else {}
    return {**given, **model, **(method.row_params if dba else {})}
