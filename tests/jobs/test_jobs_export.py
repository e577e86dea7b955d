"""Exports: tables of ranks, sparse graphs, and files that appear whole, once, and of one artifact."""

import csv
import json
import threading

import numpy as np
import pytest
import scipy.sparse

from jobs.artifacts import export_app
from jobs.console import guarded
from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.search import knn_graph
from lattqe.store import (
    FeatureSet,
    FeatureWriter,
    NeighborGraph,
    Pending,
    Ranks,
    features_table,
    neighbors_table,
    ranks_table,
    save_model,
)
from lattqe.store.export import export_features, export_graph, export_ranks, plain_cell

ROWS, K = 60, 5
NAMES = ["=1+1", "bird, small", 'a "quoted" cat']


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A labelled set with awkward ids, its graph, and ranks of three queries, one of them with a short list."""
    base = tmp_path_factory.mktemp("artifacts")
    x = np.random.default_rng(0).standard_normal((ROWS, 8))
    with FeatureWriter(str(base / "features"), 8, labels=True, label_names=NAMES, part_bytes=900) as writer:
        writer.append(x, [f"@image {i}" if i % 7 == 0 else f"image {i}" for i in range(ROWS)], np.arange(ROWS) % 3)
    features = writer.close()
    I, D = knn_graph(features.read(), K)
    publish(base / "graph", "neighbors", neighbors_table(I, D), K, {"features": features.as_input()})
    found = np.array([[3, 7, 59], [0, 1, 2], [8, -1, -1]])
    scores = np.array([[0.1, 1 / 3, -0.25], [1, 0.5, 0.25], [0.5, 0, 0]], np.float32)
    publish(
        base / "ranks",
        "ranks",
        ranks_table(["q0", "=cmd()", "q,2"], found, scores),
        3,
        {"database": features.as_input(), "queries": features.as_input()},
    )
    return base


def publish(uri, kind, table, k, inputs):
    pending = Pending.begin(str(uri), kind, {"k": k}, [table.num_rows], inputs=inputs)
    pending.publish(0, table)
    pending.finish()


def run(capsys, *arguments):
    code = 0
    try:
        guarded(export_app, args=[str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, " ".join(captured.err.split())


def test_ranks_as_a_table(base, tmp_path, capsys):
    assert run(capsys, base / "ranks", "--to", tmp_path / "x.csv")[0] == 0
    with open(tmp_path / "x.csv", newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["query", "rank", "id", "score", "label"]
    assert lines[1] == ["q0", "1", "image 3", "0.1", "'=1+1"]
    assert lines[2] == ["q0", "2", "'@image 7", "0.33333334", "bird, small"]
    assert lines[3] == ["q0", "3", "image 59", "-0.25", 'a "quoted" cat']
    assert lines[4][:3] == ["'=cmd()", "1", "'@image 0"]
    assert len(lines) == 1 + 3 + 3 + 1
    assert run(capsys, base / "ranks", "--to", tmp_path / "x.json")[0] == 0
    first, second, third = json.loads((tmp_path / "x.json").read_text())
    assert first["query"] == "q0"
    assert first["results"][1] == {"rank": 2, "id": "@image 7", "score": 0.33333334, "label": "bird, small"}
    assert np.float32(first["results"][1]["score"]) == np.float32(1 / 3)
    assert second["query"] == "=cmd()"
    assert len(third["results"]) == 1


def test_ranks_whose_database_has_moved(base, tmp_path, capsys):
    import shutil

    shutil.copytree(base / "features", tmp_path / "features")
    features = FeatureSet.open(str(tmp_path / "features"))
    publish(
        tmp_path / "ranks",
        "ranks",
        ranks_table(["q"], np.array([[1, 2]]), np.array([[1, 0.5]])),
        2,
        {"database": features.as_input()},
    )
    (tmp_path / "features").rename(tmp_path / "moved")
    code, _, err = run(capsys, tmp_path / "ranks", "--to", tmp_path / "x.csv")
    assert code == 2
    assert "(give its address by --database)" in err
    assert not (tmp_path / "x.csv").exists()
    assert run(capsys, tmp_path / "ranks", "--to", tmp_path / "x.csv", "--database", tmp_path / "moved")[0] == 0
    with FeatureWriter(str(tmp_path / "other"), 8) as writer:
        writer.append(np.eye(8), [f"id {i}" for i in range(8)])
    with pytest.raises(LattqeError, match="is not the set that"):
        export_ranks(Ranks.open(str(tmp_path / "ranks")), str(tmp_path / "y.csv"), [str(tmp_path / "other")])


def test_ranks_beyond_their_database(base, tmp_path):
    """As only a forged store has them."""
    publish(
        tmp_path / "ranks",
        "ranks",
        ranks_table(["q"], np.array([[1, ROWS]]), np.array([[1, 0.5]])),
        2,
        {"database": FeatureSet.open(str(base / "features")).as_input()},
    )
    with pytest.raises(CorruptDataError, match=f"name rows beyond the {ROWS} that were searched"):
        export_ranks(Ranks.open(str(tmp_path / "ranks")), str(tmp_path / "x.csv"))
    assert [path.name for path in tmp_path.iterdir()] == ["ranks"]


def test_a_graph_for_scikit_learn(base, tmp_path, capsys):
    """The exported graph gives DBSCAN and nearest neighbors the same as the vectors themselves."""
    cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed: pip install scikit-learn")
    from sklearn.neighbors import NearestNeighbors

    assert run(capsys, base / "graph", "--to", tmp_path / "graph.npz")[0] == 0
    graph = scipy.sparse.load_npz(tmp_path / "graph.npz")
    assert (graph.shape, graph.nnz, graph.dtype) == ((ROWS, ROWS), ROWS * K, np.float32)
    x = FeatureSet.open(str(base / "features")).read().astype(np.float64)
    distances = 1 - x @ x.T
    np.testing.assert_allclose(graph.data, distances[graph.nonzero()[0], graph.indices], atol=1e-6)
    assert run(capsys, base / "graph", "--to", tmp_path / "with-self.npz", "--with-self")[0] == 0
    nearest = NearestNeighbors(n_neighbors=K, metric="precomputed")
    nearest.fit(scipy.sparse.load_npz(tmp_path / "with-self.npz"))
    truth = NearestNeighbors(n_neighbors=K, metric="precomputed").fit(np.maximum(distances, 0))
    np.testing.assert_array_equal(nearest.kneighbors(return_distance=False), truth.kneighbors(return_distance=False))
    eps = float(np.sort(graph.data.reshape(ROWS, K)[:, 2])[ROWS // 4])
    labels = cluster.DBSCAN(eps=eps, min_samples=3, metric="precomputed").fit_predict(graph)
    expected = cluster.DBSCAN(eps=eps, min_samples=3, metric="precomputed").fit_predict(np.maximum(distances, 0))
    np.testing.assert_array_equal(labels, expected)
    assert len(set(labels.tolist())) > 1


def test_a_graph_of_scores_and_short_lists(tmp_path):
    I, D = np.array([[1, 2], [0, -1], [-1, -1]]), np.array([[0.9, 0.5], [0.9, 0], [0, 0]], np.float32)
    publish(tmp_path / "graph", "neighbors", neighbors_table(I, D), 2, {})
    export_graph(NeighborGraph.open(str(tmp_path / "graph")), str(tmp_path / "g.npz"), similarities=True)
    expected = np.array([[0, 0.9, 0.5], [0.9, 0, 0], [0, 0, 0]], np.float32)
    np.testing.assert_array_equal(scipy.sparse.load_npz(tmp_path / "g.npz").toarray(), expected)


def test_the_same_export_again_is_up_to_date_and_another_is_refused(base, tmp_path, capsys):
    to = tmp_path / "x.npy"
    assert run(capsys, base / "features", "--to", to)[0] == 0
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    code, out, err = run(capsys, base / "features", "--to", to, "--json")
    assert (code, json.loads(out)["reused"], "already up to date" in err) == (0, True, True)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before
    with FeatureWriter(str(tmp_path / "other"), 8) as writer:
        writer.append(np.eye(8), [f"id {i}" for i in range(8)])
    code, _, err = run(capsys, tmp_path / "other", "--to", to)
    assert (code, "x.npy is another export (digest:" in err) == (2, True)
    (tmp_path / "x.npy.labels.txt").unlink()
    assert not export_features(FeatureSet.open(str(base / "features")), str(to)).reused
    assert (tmp_path / "x.npy.labels.txt").read_text().splitlines()[:3] == NAMES
    assert (tmp_path / "x.npy").read_bytes() == before["x.npy"][0]


def test_files_beside_that_are_not_ours_stay(base, tmp_path, capsys):
    """Neither overwritten, nor removed when the export fails."""
    mine = tmp_path / "x.npy.ids.txt"
    mine.write_text("mine")
    code, _, told = run(capsys, base / "features", "--to", tmp_path / "x.npy")
    assert code == 2
    assert "x.npy.ids.txt exists already: choose another name or delete it" in told
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy.ids.txt"]
    assert mine.read_text() == "mine"


def test_two_different_exports_at_once_never_mix(base, tmp_path):
    """One wins and its files belong together; the others are refused."""
    sets = []
    for number in range(6):
        with FeatureWriter(str(tmp_path / f"set{number}"), 4, config={"n": number}) as writer:
            writer.append(np.eye(4)[: 2 + number % 3], [f"{number}-{row}" for row in range(2 + number % 3)])
        sets.append(writer.close())
    outcomes: list[object] = [None] * len(sets)
    gate = threading.Barrier(len(sets))

    def export(number):
        gate.wait()
        try:
            export_features(sets[number], str(tmp_path / "x.npy"))
        except AlreadyExistsError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=export, args=(number,)) for number in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number, outcome in enumerate(outcomes) if outcome is None]
    assert (tmp_path / "x.npy.ids.txt").read_text().splitlines() == sets[winner].ids()
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), sets[winner].read())


def test_forged_sets_are_not_exported(tmp_path):
    """Checksums fit, values do not: NaN, and an id over two lines."""
    for name, ids, vectors, match in [
        ("nan", ["a", "b"], np.array([[1, 0], [np.nan, 0]], np.float32), "row 1 holds NaN or infinity"),
        ("lines", ["a", "b\nc"], np.eye(2, dtype=np.float32), "the id of row 1 is empty or holds a line break"),
    ]:
        pending = Pending.begin(str(tmp_path / name), "features", {"dim": 2, "dtype": "float32"}, [2])
        pending.publish(0, features_table(ids, vectors))
        pending.finish()
        for to in ("x.npy", "x.fvecs", "x.faiss"):
            with pytest.raises(CorruptDataError, match=match):
                export_features(FeatureSet.open(str(tmp_path / name)), str(tmp_path / to))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "nan"]


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("graph", ["--to", "x.npy"], "must end in one of .npz"),
        ("ranks", ["--to", "x.npy"], "must end in one of .csv, .json"),
        ("ranks", ["--to", "x.csv", "--factory", "Flat"], "--factory does not apply to"),
        ("features", ["--to", "x.npy", "--similarities"], "--similarities does not apply to"),
        ("model", ["--to", "x.npz"], "only feature sets, ranks and neighbor graphs can be exported"),
    ],
)
def test_exports_of_the_wrong_kind(base, tmp_path, capsys, monkeypatch, kind, arguments, words):
    monkeypatch.chdir(tmp_path)
    if kind == "model":
        save_model(str(base / "model"), {"w": np.ones(3, np.float32)}, {}, {})
    code, _, err = run(capsys, base / kind, *arguments)
    assert (code, words in err) == (2, True), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x"])
def test_no_cell_is_a_formula(text):
    assert plain_cell(text) == f"'{text}"
    assert plain_cell(f"x{text}") == f"x{text}"
    assert plain_cell(f"\t{text}\x1b[2J\n") == f"\ufffd{text}\ufffd[2J\ufffd"
