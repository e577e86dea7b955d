"""Checking an index against its own recipe: random rows are computed again from the recorded inputs."""

import numpy as np

from lattqe.augmentation.provenance import Recipe
from lattqe.errors import CorruptDataError
from lattqe.expansion import create
from lattqe.expansion.rows import augment_rows
from lattqe.search.index import StoredIndex
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
    expected = augment_rows(StoredIndex([recipe.features]), rows, D, I, method, recipe.k).vectors
    deviation = np.abs(index.gather(rows).astype(np.float32) - expected).max(axis=1, initial=0.0)
    worst = int(deviation.argmax()) if len(rows) else 0
    if len(rows) and deviation[worst] > TOLERANCE + ROUNDING[index.dtype]:
        raise CorruptDataError(f"row {rows[worst]} of {index.uri} is not what its recipe gives: off by "
                               f"{deviation[worst]:.2g}")
    return float(deviation.max(initial=0.0))
