"""`lattqe duplicates`: groups against a slow twin, leakage between sets, and the warning of `train`."""

import csv
import json
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from jobs.train import warn_of_leakage
from lattqe.duplicates import find_groups, find_leakage, leakage_warnings
from lattqe.errors import LattqeError
from lattqe.search import knn_graph, topk
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, Pending, neighbors_table, open_place, ranks_table

DIM = 16


@pytest.fixture
def run(call_lattqe):
    """Call `lattqe duplicates` in this process: (exit code, stdout, stderr)."""
    return partial(call_lattqe, "duplicates")


def write(uri, x, ids=None, labels=None, part_bytes=1500):
    with FeatureWriter(str(uri), x.shape[1], "float32", labels=labels is not None, part_bytes=part_bytes) as writer:
        writer.append(x, ids or [f"row-{n}" for n in range(len(x))], labels)
    return FeatureSet.open(str(uri))


def write_graph(uri, features, k):
    rows, scores = knn_graph(features.read(), k)
    pending = Pending.begin(str(uri), "neighbors", {"k": k}, [features.rows], inputs={"features": features.as_input()})
    pending.publish(0, neighbors_table(rows, scores))
    pending.finish()
    return NeighborGraph.open(str(uri))


def vectors(seed=0, n=200):
    """Random rows; 12 groups of 2 to 7 near-copies, and a chain whose ends are far apart."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, DIM))
    places = rng.permutation(n)
    start = 0
    for size in (7, 6, 5, 4, 4, 3, 3, 2, 2, 2, 2, 2):
        rows = places[start : start + size]
        x[rows] = x[rows[0]] + 0.03 * rng.normal(size=(size, DIM))
        start += size
    chain = places[start : start + 6]
    a, b = np.eye(DIM)[:2]
    x[chain] = [np.cos(0.25 * step) * a + np.sin(0.25 * step) * b for step in range(6)]
    return x


@pytest.fixture
def world(tmp_path):
    features = write(tmp_path / "features", vectors(), labels=np.arange(200, dtype=np.int32) % 9)
    return features, write_graph(tmp_path / "graph", features, 12)


def slow_groups(x, threshold):
    """All pairs, joined one after the other."""
    x = x.astype(np.float64)
    group = list(range(len(x)))
    for i in range(len(x)):
        for j in range(i):
            if x[i] @ x[j] >= threshold:
                old, new = group[i], group[j]
                group = [new if one == old else one for one in group]
    sets = {}
    for row, number in enumerate(group):
        sets.setdefault(number, set()).add(row)
    return {frozenset(rows) for rows in sets.values() if len(rows) > 1}


@pytest.mark.parametrize("threshold", [0.9, 0.95, 0.999, 1.0])
def test_groups_against_all_pairs(world, threshold):
    features, graph = world
    groups = find_groups(features, graph, threshold)
    found = {frozenset(groups.rows[groups.group == number].tolist()) for number in range(len(groups.sizes))}
    assert found == slow_groups(features.read(), threshold)
    assert groups.sizes.tolist() == sorted(groups.sizes, reverse=True)
    assert [groups.representative[groups.group == number].sum() for number in range(len(groups.sizes))] == [1] * len(
        groups.sizes
    )
    x = features.read().astype(np.float64)
    chosen = {groups.group[at]: groups.rows[at] for at in np.flatnonzero(groups.representative)}
    np.testing.assert_allclose(
        groups.similarity, [x[row] @ x[chosen[group]] for row, group in zip(groups.rows, groups.group)], atol=1e-6
    )
    if threshold == 0.95:
        assert len(found) == 13, "twelve groups and a chain"
        assert groups.similarity.min() < 0.95, "the chain's end is not like its representative"


def test_the_middle_of_a_star_represents_it(tmp_path):
    """Five rows around one that is near to all of them, while they are not near to each other."""
    centre = np.eye(DIM)[0]
    x = np.stack([*(centre + 0.3 * np.eye(DIM)[number] for number in range(1, 6)), centre])
    features = write(tmp_path / "features", x)
    groups = find_groups(features, write_graph(tmp_path / "graph", features, 5), 0.95)
    assert groups.rows[groups.representative].tolist() == [5]
    assert groups.redundant.tolist() == [0, 1, 2, 3, 4]


def test_files_and_shares(world, run, tmp_path):
    features, graph = world
    code, out, err = run(features.uri, "--graph", graph.uri, "--to", tmp_path / "out", "--json")
    assert code == 0, err
    told = json.loads(out)
    groups = find_groups(features, graph, 0.95)
    assert (told["groups"], told["rows_in_groups"]) == (13, len(groups.rows))
    assert told["share_in_groups"] == pytest.approx(len(groups.rows) / 200)
    assert told["largest_group"] == 7
    table = pa.ipc.open_file(str(tmp_path / "out" / "duplicates.arrow")).read_all()
    with (tmp_path / "out" / "duplicates.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert table.column_names == ["group", "row", "id", "representative", "similarity", "label"]
    assert [(int(line["group"]), int(line["row"]), line["id"]) for line in lines] == list(
        zip(*(table.column(name).to_pylist() for name in ("group", "row", "id")))
    )
    assert table.column("id").to_pylist() == [f"row-{row}" for row in groups.rows]
    assert table.column("label").to_pylist() == (groups.rows % 9).tolist()
    assert (tmp_path / "out" / "redundant.txt").read_text().split() == [f"row-{row}" for row in groups.redundant]
    assert len(groups.redundant) == len(groups.rows) - 13


def test_lists_that_are_full_are_told(tmp_path, run):
    x = np.concatenate([np.tile(np.eye(DIM)[0], (6, 1)), np.eye(DIM)[1:5]])
    features = write(tmp_path / "features", x)
    write_graph(tmp_path / "graph", features, 3)
    code, _, err = run(features.uri, "--graph", tmp_path / "graph")
    assert code == 0
    assert "note: 6 rows have 3 near-duplicates or more" in " ".join(err.split())


def test_nothing_alike_is_no_groups(tmp_path, run):
    features = write(tmp_path / "features", np.eye(DIM))
    write_graph(tmp_path / "graph", features, 3)
    code, out, err = run(features.uri, "--graph", tmp_path / "graph", "--to", tmp_path / "out", "--json")
    assert code == 0, err
    assert json.loads(out)["groups"] == 0
    assert (tmp_path / "out" / "duplicates.csv").read_text() == "group,row,id,representative,similarity\n"


def leaky(tmp_path):
    """Two sets, of which the second has five rows of the first, one under a name that looks like a formula."""
    rng = np.random.default_rng(5)
    x, other = rng.normal(size=(60, DIM)), rng.normal(size=(40, DIM))
    copied = [3, 11, 12, 30, 39]
    other[copied] = x[[50, 7, 8, 0, 59]] + 0.02 * rng.normal(size=(5, DIM))
    names = [f"other-{n}" for n in range(40)]
    names[3] = "=1+2"
    return write(tmp_path / "features", x), write(tmp_path / "other", other, names), copied


@pytest.mark.parametrize("where", ["disk", pytest.param("s3", marks=pytest.mark.s3)])
def test_leakage_between_sets(tmp_path, run, where, request):
    features, other, copied = leaky(tmp_path)
    best = other.read().astype(np.float64) @ features.read().astype(np.float64).T
    assert np.flatnonzero(best.max(axis=1) >= 0.95).tolist() == copied
    to = f"{request.getfixturevalue('s3_uri')}/out" if where == "s3" else str(tmp_path / "out")
    code, out, err = run(features.uri, "--against", other.uri, "--to", to, "--json")
    assert code == 0, err
    assert (json.loads(out)["leaked"], json.loads(out)["share_leaked"]) == (5, 5 / 40)
    lines = list(csv.DictReader(open_place(to).read("duplicates.csv").decode().splitlines()))
    assert [int(line["row"]) for line in lines] == copied
    assert [int(line["found_row"]) for line in lines] == best.argmax(axis=1)[copied].tolist()
    assert lines[0]["id"] == "'=1+2", "no spreadsheet may compute it"


def test_leakage_from_ranks_is_the_same_and_other_ranks_are_refused(tmp_path, run):
    features, other, _ = leaky(tmp_path)
    scores, rows = topk(other.read(), features.read(), 3)
    for name, expand in (("ranks", None), ("expanded", {"method": "aqe", "k": 2, "params": {}})):
        pending = Pending.begin(
            str(tmp_path / name),
            "ranks",
            {"k": 3},
            [40],
            config={"expand": expand},
            inputs={"database": features.as_input(), "queries": other.as_input()},
        )
        pending.publish(0, ranks_table(other.ids(), rows, scores))
        pending.finish()
    code, out, err = run(features.uri, "--against", other.uri, "--graph", tmp_path / "ranks", "--json")
    assert code == 0, err
    assert json.loads(out) == find_leakage(features, other).summary()
    for arguments in (
        (features.uri, "--against", other.uri, "--graph", tmp_path / "expanded"),
        (other.uri, "--against", features.uri, "--graph", tmp_path / "ranks"),
    ):
        code, _, err = run(*arguments)
        assert (code, "is not a plain search of" in " ".join(err.split())) == (2, True)


def test_training_warns_with_the_count(tmp_path, capsys, monkeypatch):
    features, other, copied = leaky(tmp_path)
    apart = write(tmp_path / "apart", np.random.default_rng(9).normal(size=(30, DIM)))
    assert leakage_warnings([apart], [other]) == []
    warn_of_leakage([apart.uri, features.uri], [other.uri, apart.uri])
    told = " ".join(capsys.readouterr().err.split())
    assert f"warning: {len(copied)} of 40 rows of {other.uri} have a near-duplicate" in told
    assert f"{apart.uri} have" in told, "a set against itself is all duplicates"
    monkeypatch.setattr("lattqe.duplicates.QUICK_SEARCH", 2.0 * 60 * DIM * 10)  # ten rows may be looked at
    (line,) = leakage_warnings([features], [other])
    assert "of 10 sampled rows" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FEATURES"], "give --graph"),
        (["FEATURES", "--graph", "GRAPH", "--threshold", "1.5"], "threshold 1.5 is not a cosine"),
        (["OTHER", "--graph", "GRAPH"], "is not the graph of"),
        (["FEATURES", "--graph", "FEATURES"], "features"),
        (["FEATURES", "--against", "NARROW"], "dimensions"),
        (["FEATURES", "--graph", "GRAPH", "--to", "FEATURES"], "holds a stored artifact"),
    ],
)
def test_mistakes_are_one_line(world, run, tmp_path, arguments, message):
    features, graph = world
    other = write(tmp_path / "other", vectors(1))
    narrow = write(tmp_path / "narrow", np.eye(4))
    known = {"FEATURES": features.uri, "GRAPH": graph.uri, "OTHER": other.uri, "NARROW": narrow.uri}
    code, out, err = run(*[known.get(word, word) for word in arguments])
    assert (code, out, err.count("error:")) == (2, "", 1)
    assert message in " ".join(err.split())


def test_too_much_to_search_here_names_the_command(tmp_path, monkeypatch):
    features, other, _ = leaky(tmp_path)
    monkeypatch.setattr("lattqe.duplicates.LARGEST_SEARCH", 100.0)
    with pytest.raises(LattqeError, match=r"lattqe search .* -k 1 --to RANKS"):
        find_leakage(features, other)
