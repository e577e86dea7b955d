"""An updated graph is the graph of the joined rows, row number for row number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lattqe.errors import LattqeError
from lattqe.search import knn_graph
from lattqe.search.update import update_graph


def vectors(rng, n, dim, duplicates):
    x = rng.standard_normal((n, dim)).astype(np.float32)
    if duplicates and n:
        x = x[rng.integers(0, max(1, n // 3), n)]
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    old=st.integers(1, 60),
    new=st.integers(0, 40),
    removed=st.integers(0, 20),
    k=st.integers(1, 12),
    dim=st.integers(1, 9),
    duplicates=st.booleans(),
    half=st.booleans(),
)
def test_equals_from_scratch(seed, old, new, removed, k, dim, duplicates, half):
    rng = np.random.default_rng(seed)
    everything = vectors(rng, old + new, dim, duplicates).astype(np.float16 if half else np.float32)
    keep = np.ones(old, dtype=bool)
    keep[rng.permutation(old)[: min(removed, old - 1)]] = False
    I, D = knn_graph(everything[:old], k)
    number = np.where(keep, np.cumsum(keep) - 1, -2)
    renumbered = np.where(I < 0, -1, number[np.maximum(I, 0)])[keep]
    stale = (renumbered == -2).any(axis=1)
    xb = np.concatenate([everything[:old][keep], everything[old:]])
    got = update_graph(xb, renumbered, D[keep], stale)
    expected = knn_graph(xb, k)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


def test_a_graph_of_more_rows_is_refused():
    with pytest.raises(LattqeError, match="5 rows cannot belong to 4"):
        update_graph(np.eye(4, dtype=np.float32), np.zeros((5, 2), np.int32), np.zeros((5, 2), np.float32))
