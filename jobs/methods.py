"""The options by which a job names an expansion method, and what they resolve to."""

from typing import Any

from lattqe.errors import LattqeError


def method_params(name: str, *, alpha: float | None = None, c: float | None = None, negatives: int | None = None,
                  model: str | None = None, dba: bool = False) -> dict[str, Any]:
    """Collect the parameters that were given; one that the method does not have is refused by its option's name."""
    from lattqe.expansion import METHODS

    if name not in METHODS:
        raise LattqeError(f"unknown method {name!r}: use one of {', '.join(METHODS)}")
    options = {"alpha": ("--alpha", alpha, "alphaqe"), "C": ("--C", c, "dqe"),
               "negatives": ("--negatives", negatives, "dqe"), "model": ("--model", model, "lattqe")}
    params = {}
    for key, (option, value, owner) in options.items():
        if value is None:
            continue
        if owner != name:
            raise LattqeError(f"{option} belongs to {owner}, not to {name}: leave it out")
        params[key] = value
    if name == "lattqe":
        if model is None:
            raise LattqeError("lattqe needs --model: the folder or s3:// address that `lattqe train` wrote")
        params["dba"] = dba
    return params
