"""Learned query expansion and database-side augmentation for image retrieval."""

import importlib
from typing import TYPE_CHECKING, Any

from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from lattqe.api import adapt, augment, evaluate, expand, load, neighbors, search

__version__ = "0.2.0"
__all__ = ["LattqeError", "adapt", "augment", "evaluate", "expand", "load", "neighbors", "search"]


def __getattr__(name: str) -> Any:
    """The functions of `lattqe.api`, imported when first used: torch takes seconds."""
    if name == "search":  # a package, and a function: see there
        return importlib.import_module("lattqe.search")
    if name in __all__:
        from lattqe import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The API first: completion shows what is not imported yet, too."""
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
