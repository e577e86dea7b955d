"""Ground-truth files: the published ones are read, wrong ones are refused by name."""

import copy
import os
import pickle

import numpy as np
import pytest

from lattqe.datasets.revisited import from_gnd, load_gnd, save_gnd
from lattqe.errors import LattqeError

GOOD = {
    "imlist": ["a_1", "a_2", "b_1", "b_2"],
    "qimlist": ["q_1", "q_2"],
    "gnd": [
        {"easy": [0], "hard": [1], "junk": [], "bbx": [1, 2.5, 30, 40]},
        {"easy": [], "hard": np.array([3]), "junk": [2.0]},
    ],
}


def test_published_files(real_gnd):
    revisited = load_gnd(real_gnd)
    rows, easy_queries = {"gnd_roxford5k.pkl": (4993, 68), "gnd_rparis6k.pkl": (6322, 70)}[real_gnd.name]
    assert (revisited.database_rows, revisited.queries) == (rows, 70)
    assert sum(bool(lists["easy"]) for lists in revisited.gnd) == easy_queries
    assert all(box is not None for box in revisited.boxes)
    revisited.check_database([f"jpg/{name}.jpg" for name in revisited.imlist] + ["distractor_1"])
    revisited.check_queries(list(revisited.qimlist))
    revisited.check_queries([str(row) for row in range(70)])


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_reads_pickles_and_json_alike(tmp_path, protocol):
    (tmp_path / "gnd.pkl").write_bytes(pickle.dumps(GOOD, protocol=protocol))
    revisited = load_gnd(tmp_path / "gnd.pkl")
    assert revisited.gnd == ({"easy": [0], "hard": [1], "junk": []}, {"easy": [], "hard": [3], "junk": [2]})
    assert revisited.boxes == ((1.0, 2.5, 30.0, 40.0), None)
    save_gnd(tmp_path / "gnd.json", revisited)
    again = load_gnd(tmp_path / "gnd.json")
    assert (again.imlist, again.qimlist, again.gnd, again.boxes) == (
        revisited.imlist,
        revisited.qimlist,
        revisited.gnd,
        revisited.boxes,
    )
    np.testing.assert_array_equal(again.truth.graded.rows, [0, 1, 3, 2])


def broken(change):
    content = copy.deepcopy(GOOD)
    change(content)
    return content


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c.pop("qimlist"), "key 'qimlist' is missing"),
    (lambda c: c.update(imlist=[]), "imlist is empty"),
    (lambda c: c.update(imlist="a_1"), "imlist must be a list of names"),
    (lambda c: c.update(imlist=["a_1", "a_2", "a_1", "b_2"]), "imlist contains 'a_1' twice"),
    (lambda c: c["gnd"].pop(), "gnd has 1 entries for 2 names in qimlist"),
    (lambda c: c.update(gnd=3), "gnd has int entries"),
    (lambda c: c["gnd"][1].pop("junk"), r"query 1 \(q_2\): list 'junk' is missing"),
    (lambda c: c["gnd"].__setitem__(0, [1]), r"query 0 \(q_1\): expected a dict"),
    (lambda c: c["gnd"][0].update(hard=[4]), "query 0 names row 4, but the database has 4 rows"),
    (lambda c: c["gnd"][0].update(hard=[-1]), "query 0 names row -1"),
    (lambda c: c["gnd"][0].update(hard=[0]), "query 0 grades row 0 more than once"),
    (lambda c: c["gnd"][0].update(hard=[1, 1]), "query 0 grades row 1 more than once"),
    (lambda c: c["gnd"][0].update(easy=[0.5]), r"query 0 \(q_1\), easy: row numbers expected"),
    (lambda c: c["gnd"][0].update(easy=["a_1"]), "row numbers expected, found"),
    (lambda c: c["gnd"][0].update(easy=[[0], [1, 2]]), "row numbers expected"),
    (lambda c: c["gnd"][0].update(bbx=[1, 2, 3]), "bbx must be four numbers"),
    (lambda c: c["gnd"][0].update(bbx=[5, 2, 3, 4]), r"bbx \[5.0, 2.0, 3.0, 4.0\] is empty"),
    (lambda c: c["gnd"][0].update(bbx=[0, 0, float("nan"), 1]), "is empty"),
])  # fmt: skip
def test_wrong_files_are_refused_by_name(change, message, tmp_path):
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(broken(change)))
    with pytest.raises(LattqeError, match=message) as caught:
        load_gnd(tmp_path / "bad.pkl")
    assert "bad.pkl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(LattqeError, match=r"nothing.json does not exist"):
        load_gnd(tmp_path / "nothing.json")
    for name in ("pipe.json", "pipe.pkl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(LattqeError, match=rf"{name} is not a regular file"):  # nor waited for
            load_gnd(tmp_path / name)
    (tmp_path / "nested.json").write_text("[" * 100_000)
    with pytest.raises(LattqeError, match=r"nested.json is not JSON: .*recursion"):
        load_gnd(tmp_path / "nested.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(LattqeError, match=r"text.json is not JSON"):
        load_gnd(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(LattqeError, match=r"list.json: expected a dict .* found a list"):
        load_gnd(tmp_path / "list.json")


@pytest.mark.parametrize(("ids", "message"), [
    (["a_1", "a_2", "b_1"], r"database has 3 rows, but imlist of the ground truth 4 \(missing: b_2, and 0 more\)"),
    (["a_2", "a_1", "b_1", "b_2"], r"row 0 of database is 'a_2', but imlist says 'a_1': .*another order"),
    (["a_1", "a_2", "b_1", "c_9"], r"row 3 of database is 'c_9', but imlist says 'b_2': they are other images"),
    (["0", "1", "2", "4"], r"row 0 of database is '0'"),
])  # fmt: skip
def test_ids_that_do_not_fit_are_refused_by_name(ids, message):
    with pytest.raises(LattqeError, match=message):
        from_gnd(GOOD).check_database(ids)


def test_queries_must_be_all_there():
    revisited = from_gnd(GOOD)
    with pytest.raises(LattqeError, match=r"queries has 1 rows, but qimlist of the ground truth 2 \(missing: q_2"):
        revisited.check_queries(["q_1"])
    with pytest.raises(LattqeError, match="queries has 3 rows, but qimlist of the ground truth 2"):
        revisited.check_queries(["q_1", "q_2", "q_3"])
