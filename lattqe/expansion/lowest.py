"""The negatives of DQE: the lowest-ranked rows, never one that is a neighbor."""

import numpy as np

from lattqe.search import Index


def lowest_outside(
    index: Index, x: np.ndarray, neighbors: np.ndarray, m: int, own: np.ndarray | None = None
) -> np.ndarray:
    """Row numbers (n, m) int32 of the m lowest-ranked rows of `index` for x (n, D), ascending by score, then row.

    Rows listed in `neighbors` (n, k), and the row itself where x are rows of the index (`own` (n,)), are left out:
    a small database, or one full of equal scores, would offer a positive as a negative. Fewer than m: -1.
    """
    taken = neighbors if own is None else np.concatenate([own[:, None], neighbors], axis=1)
    lowest = index.lowest(x, m)[1]
    clash = (lowest[:, :, None] == taken[:, None, :]).any(axis=2) & (lowest >= 0)
    for row in np.flatnonzero(clash.any(axis=1)):
        more = index.lowest(x[row : row + 1], min(m + taken.shape[1], index.rows))[1][0]
        kept = more[(more >= 0) & ~np.isin(more, taken[row])][:m]
        lowest[row] = -1
        lowest[row, : len(kept)] = kept
    return lowest
