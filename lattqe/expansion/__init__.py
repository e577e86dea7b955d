"""Query expansion and database-side augmentation: one interface, and which methods there are.

A new method is a new class and one line here; docs/methods.md shows it.
"""

import dataclasses
from typing import Any

from lattqe.errors import LattqeError
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.base import Expanded, Lists, Method, aggregate
from lattqe.expansion.classic import AlphaExpansion, AverageExpansion, DecayExpansion, DiscriminativeExpansion

__all__ = ["METHODS", "Expanded", "Lists", "Method", "aggregate", "create"]

METHODS: dict[str, type[Method]] = {
    "aqe": AverageExpansion,
    "aqewd": DecayExpansion,
    "alphaqe": AlphaExpansion,
    "dqe": DiscriminativeExpansion,
    "lattqe": AttentionExpansion,
}


def create(name: str, **params: Any) -> Method:
    """The method of that name with those parameters; unknown names are refused with the list of known ones."""
    if name not in METHODS:
        raise LattqeError(f"unknown expansion method {name!r}: use one of {', '.join(METHODS)}")
    method = METHODS[name]
    known = [f.name for f in dataclasses.fields(method) if f.init]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise LattqeError(f"{name} has no parameter {', '.join(unknown)}: it takes {', '.join(known)}")
    return method(**params)
