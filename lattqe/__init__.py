"""Learned query expansion and database-side augmentation for image retrieval."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lattqe.expansion.arrays import augment, expand

__version__ = "0.1.0"
__all__ = ["augment", "expand"]


def __getattr__(name: str) -> Any:
    """`lattqe.expand` and `lattqe.augment`, imported when first used: torch takes seconds."""
    if name in __all__:
        from lattqe.expansion import arrays

        return getattr(arrays, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
