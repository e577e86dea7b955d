"""Query expansion and database-side augmentation: one interface, one short file for each method."""

from lattqe.expansion.base import Expanded, Lists, Method, aggregate
from lattqe.expansion.registry import METHODS, create

__all__ = ["METHODS", "Expanded", "Lists", "Method", "aggregate", "create"]
