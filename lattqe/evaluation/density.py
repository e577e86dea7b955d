"""How many images are relevant decides what expansion does: test sets cut to a given number, among distractors."""

import numpy as np
from numpy.typing import NDArray


def keep_of_each(labels: NDArray[np.integer], m: int, seed: int = 0) -> NDArray[np.bool_]:
    """Which rows (n,) stay where each class of labels (n,) is cut to m images; a label below 0 belongs to no class.

    The images of a smaller cut are among those of a larger one.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    sizes = np.unique(labels, return_counts=True)[1]
    place = np.empty(len(labels), dtype=np.int64)  # of a row among the rows of its class, in random order
    place[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return (place < m) | (np.asarray(labels) < 0)
