"""Augmented indexes: what made one, whether it is what that makes, and what changes when rows join or leave."""

from lattqe.augmentation.growth import GrowthCost, renumbered, reusable_rows
from lattqe.augmentation.provenance import GRAPH, ORIGINALS, Recipe, describe
from lattqe.augmentation.recompute import recompute

__all__ = ["GRAPH", "ORIGINALS", "GrowthCost", "Recipe", "describe", "recompute", "renumbered", "reusable_rows"]
