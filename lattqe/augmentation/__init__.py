"""Augmented indexes: building one, what made it, whether it is what that makes, and what changes when it grows."""

from lattqe.augmentation.growth import GrowthCost
from lattqe.augmentation.index import AugmentWorker, begin_index, build_index, piece_name
from lattqe.augmentation.recipe import (
    ADAPTATION,
    ADAPTED,
    GRAPH,
    ORIGINALS,
    Augmentation,
    AugmentSummary,
    Recipe,
    adapt,
    adaptation_for,
    adaptation_of,
    adapted_rows,
    describe,
    is_augmented,
    recompute,
)

__all__ = [
    "ADAPTATION",
    "ADAPTED",
    "GRAPH",
    "ORIGINALS",
    "AugmentSummary",
    "AugmentWorker",
    "Augmentation",
    "GrowthCost",
    "Recipe",
    "adapt",
    "adaptation_for",
    "adaptation_of",
    "adapted_rows",
    "begin_index",
    "build_index",
    "describe",
    "is_augmented",
    "piece_name",
    "recompute",
]
