"""DQE: the weight vector of a linear SVM, neighbors against low-ranked items (Arandjelović and Zisserman 2012)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lattqe.errors import LattqeError
from lattqe.expansion.base import Lists, Method, parameter
from lattqe.expansion.svm import solve_dual


@dataclass
class DiscriminativeExpansion(Method):
    """w_i = y_i a_i, with a the dual solution of a C-SVM on (item + neighbors: y = 1) against (negatives: y = -1).

    The SVM is that of LIBSVM, which the method was published with: hinge loss, an intercept that is not penalised,
    hence the constraint Σ y_i a_i = 0. The intercept shifts all scores alike, so ranking needs only Σ w_i d_i.
    Without a single valid negative there is nothing to tell apart: the row stays what it was.
    """

    name: ClassVar[str] = "dqe"
    default_k: ClassVar[int] = 4
    default_k_dba: ClassVar[int] = 4
    label: ClassVar[str] = "DQE"
    dba_label: ClassVar[str] = "DDBA"
    tries_k: ClassVar[tuple[int, ...]] = (2, 4, 8, 12)
    tries_dba: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((2, 4, 8), (2, 4, 8))
    # Defaults as tuned in the paper's comparison
    C: float = parameter(0.1, "The SVM's C, bound of each weight", tries=(0.1, 1.0))
    negatives: int = parameter(5, "Low-ranked negatives for each query or row", tries=(5, 50))

    def __post_init__(self) -> None:
        if not (math.isfinite(self.C) and self.C > 0):
            raise LattqeError(f"dqe: C is {self.C}: use a finite number above 0, such as 0.1")
        if isinstance(self.negatives, bool) or not isinstance(self.negatives, int) or self.negatives < 1:
            raise LattqeError(f"dqe: negatives is {self.negatives!r}: use a whole number from 1, such as 5")

    def weights(self, lists: Lists) -> torch.Tensor:
        """(n, 1 + k + m): in [0, C] for item and neighbors, in [-C, 0] for negatives."""
        items = lists.items.double()  # duplicates make the Gram matrix singular: float32 noise would make it indefinite
        gram = torch.bmm(items, items.transpose(1, 2))
        if not gram.isfinite().all():
            raise LattqeError("dqe: NaN or infinite values in the vectors: clean them")
        label = torch.ones_like(lists.valid, dtype=torch.float64)
        label[:, 1 + lists.k :] = -1
        return (label * solve_dual(gram, label, lists.valid, self.C)).float()
