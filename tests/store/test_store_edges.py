"""Edges in the store: written, read in any order, checked."""

import numpy as np
import pytest

from lattqe.errors import CorruptDataError
from lattqe.store import Edges, Pending, edges_table, open_artifact
from lattqe.store.artifacts import verify_artifact


def stored(folder, neighbors, weights):
    rows = len(neighbors)
    pending = Pending.begin(str(folder), "edges", {"k": neighbors.shape[1]}, [rows - 1, 1])
    for part, span in enumerate((slice(0, rows - 1), slice(rows - 1, rows))):
        pending.publish(part, edges_table(neighbors[span], weights[span]))
    pending.finish()
    return Edges.open(str(folder))


def lists():
    neighbors = np.array([[1, 2], [0, -1], [1, 0]], np.int32)
    return neighbors, np.array([[1, 0.5, -0.25], [0, 2, 0], [3, 4, 5]], np.float32)


def test_edges_come_back_with_the_row_itself_in_front(tmp_path):
    neighbors, weights = lists()
    edges = stored(tmp_path / "edges", neighbors, weights)
    read, rows = edges.read()
    np.testing.assert_array_equal(read, weights)
    np.testing.assert_array_equal(rows, [[0, 1, 2], [1, 0, -1], [2, 1, 0]])
    some, numbers = edges.gather(np.array([2, 0, 2]))
    np.testing.assert_array_equal(some, weights[[2, 0, 2]])
    np.testing.assert_array_equal(numbers[:, 0], [2, 0, 2])
    assert isinstance(open_artifact(edges.uri), Edges)
    assert verify_artifact(edges.uri).kind == "edges"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ((0, 0), 3, "row 0 names a row beyond the 3"),
        ((1, 0), 1, "row 1 is its own neighbor"),
        ((2, 0), -1, "row 2 has a weight other than 0 in its padding"),
    ],
)
def test_impossible_edges_are_found(tmp_path, place, value, said):
    neighbors, weights = lists()
    neighbors[place] = value
    with pytest.raises(CorruptDataError, match=said):
        stored(tmp_path / "edges", neighbors, weights).verify()


def test_weights_that_are_no_numbers_are_refused_when_read(tmp_path):
    neighbors, weights = lists()
    weights[1, 0] = np.inf
    with pytest.raises(CorruptDataError, match="row 1 has a weight that is not finite"):
        stored(tmp_path / "edges", neighbors, weights).read()
