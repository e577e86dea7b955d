"""Whitening of descriptors: PCA, half and full whitening, and the supervised whitening learned from labels."""

from lattqe.whitening.learn import METHODS, learn
from lattqe.whitening.model import Whitening

__all__ = ["METHODS", "Whitening", "learn"]
