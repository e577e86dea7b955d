"""The published SfM-120k database file: both halves, and what is refused."""

import pickle

import numpy as np
import pytest

from lattqe.datasets.labelled import load_sfm120k
from lattqe.errors import LattqeError
from lattqe.evaluation import score_ranking

VAL = {"cids": ["a", "b", "c", "d", "e"], "cluster": [7, 7, 9, 9, 7], "qidxs": [0, 3, 0], "pidxs": [1, 2, 4]}


def write(path, val):
    path.write_bytes(pickle.dumps({"train": {**VAL, "cids": list("vwxyz")}, "val": val}, protocol=2))
    return path


def test_both_halves(tmp_path):
    path = write(tmp_path / "retrieval-SfM-120k.pkl", {**VAL, "cluster": np.array(VAL["cluster"])})
    assert load_sfm120k(path, "train").ids == tuple("vwxyz")
    half = load_sfm120k(path, "val")
    assert half.labels.dtype == np.int32
    assert half.labels.tolist() == [7, 7, 9, 9, 7]
    assert (half.query_rows.tolist(), half.positive_rows.tolist()) == ([0, 3, 0], [1, 2, 4])
    # The distinct queries 0 and 3, each taken out of its own list: everything relevant comes first.
    scores = score_ranking(np.array([[0, 1, 4, 2, 3], [3, 2, 0, 1, 4]]), half.truth)["label"]
    assert scores.positives.tolist() == [2, 1]
    assert scores.mean_ap == 1.0


@pytest.mark.parametrize(("change", "message"), [
    ({"cids": None}, "key 'cids' is missing"),
    ({"cids": 5}, "cids must be a list of names, found 5"),
    ({"cids": np.array("a")}, "cids must be a list of names"),
    ({"cids": ["a", "b", "c", "d", "a"]}, "found 5 with 4 distinct"),
    ({"cluster": [1, 2]}, "2 clusters for 5 images"),
    ({"cluster": [-1, 2, 3, 4, 5]}, r"clusters must be 0 or more and fit int32, found -1..5"),
    ({"cluster": ["x"] * 5}, "cluster must be a list of whole numbers"),
    ({"cluster": 4}, "cluster must be a list of whole numbers"),
    ({"cluster": [1, [2, 3], 4, 5, 6]}, "cluster must be a list of whole numbers"),
    ({"qidxs": [0, 5, 1]}, "qidxs names row 5 of 5 images"),
    ({"pidxs": [-1, 0, 1]}, "pidxs names row -1"),
    ({"pidxs": [1]}, "3 qidxs for 1 pidxs"),
])  # fmt: skip
def test_wrong_files_are_refused_by_name(tmp_path, change, message):
    val = {key: value for key, value in {**VAL, **change}.items() if value is not None}
    with pytest.raises(LattqeError, match=message) as caught:
        load_sfm120k(write(tmp_path / "db.pkl", val), "val")
    assert "db.pkl, val:" in str(caught.value)


def test_halves_must_exist(tmp_path):
    with pytest.raises(LattqeError, match="unknown half 'test'"):
        load_sfm120k(write(tmp_path / "db.pkl", VAL), "test")
    (tmp_path / "other.pkl").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(LattqeError, match="has no half 'val'"):
        load_sfm120k(tmp_path / "other.pkl", "val")
