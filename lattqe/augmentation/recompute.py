"""Checking an index against its own recipe: random rows are computed again from the recorded inputs."""

import numpy as np

from lattqe.augmentation.provenance import Recipe
from lattqe.errors import CorruptDataError
from lattqe.expansion import create
from lattqe.expansion.rows import expand_rows
from lattqe.store import FeatureSet

# Between a vector computed again on another machine and the stored one, before the stored one's own rounding.
TOLERANCE = 2e-5
ROUNDING = {"float16": 2.0**-11, "float32": 2.0**-24}


def recompute(index: FeatureSet, count: int, seed: int = 0, cache: str | None = None) -> float:
    """Compute `count` random rows again; return the largest deviation, or raise CorruptDataError with the row."""
    recipe = Recipe.of(index, cache)
    method = create(recipe.method, **recipe.params)
    rows = np.sort(np.random.default_rng(seed).permutation(index.rows)[:count])
    I, D = recipe.graph.gather(rows)  # noqa: E741
    x = recipe.features.gather(rows)
    negatives = None
    if method.negatives:
        from lattqe.expansion.lowest import lowest_outside
        from lattqe.search import FlatIndex
        from lattqe.search.rows import in_one

        index_of_all = FlatIndex(in_one(recipe.features.pieces()))
        negatives = lowest_outside(index_of_all, x, I[:, :recipe.k], method.negatives, own=rows)
    depth = method.depth(recipe.k)
    expected = expand_rows(method, x, I[:, :depth], D[:, :depth], recipe.features.gather, negatives, k=recipe.k)
    deviation = np.abs(index.gather(rows).astype(np.float32) - expected).max(axis=1, initial=0.0)
    worst = int(deviation.argmax()) if len(rows) else 0
    if len(rows) and deviation[worst] > TOLERANCE + ROUNDING[index.dtype]:
        raise CorruptDataError(f"row {rows[worst]} of {index.uri} is not what its recipe gives: off by "
                               f"{deviation[worst]:.2g}")
    return float(deviation.max(initial=0.0))
