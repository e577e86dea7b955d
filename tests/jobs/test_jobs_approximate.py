"""`lattqe neighbors --approximate` and every job after it: what is promised, measured, kept and shown."""

import json
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
from killing import killed_midway

import jobs.augment
import jobs.benchmark
import jobs.lists
import jobs.neighbors
import jobs.search
from jobs.artifacts import export_app, info_app, verify_app
from jobs.console import guarded
from jobs.lists import evaluate_app, gallery_app
from lattqe.cost import rows as row_costs
from lattqe.search import approximate, knn_graph, stored
from lattqe.search.approximate import approximate_graph, shares_found
from lattqe.search.stored import ClusterWorker, GraphTask, begin_graph, build_approximate
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph

K = 8


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """1,500 labelled rows around 30 centres, in several parts, and their first 20 as queries."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("features")
    labels = rng.integers(0, 30, 1500)
    x = rng.standard_normal((30, 16))[labels] + 0.7 * rng.standard_normal((1500, 16))
    for name, rows in (("rows", slice(None)), ("queries", slice(20)), ("more", slice(20, 30))):
        with FeatureWriter(str(folder / name), 16, labels=True, part_bytes=20_000) as writer:
            noise = 0 if name == "rows" else 0.01 * rng.standard_normal(x[rows].shape)
            writer.append(x[rows] + noise, [f"{name}-{i}" for i in range(len(x[rows]))], labels=labels[rows])
    return folder


@pytest.fixture
def small(monkeypatch):
    """Sets of some thousand rows are approximated too, and graphs have several parts."""
    monkeypatch.setattr(approximate, "LEAST_ROWS", 500)
    monkeypatch.setattr(approximate, "MEASURED_ROWS", 200)
    monkeypatch.setattr(stored, "part_row_counts", lambda rows, size: [600, 600, rows - 1200])


@pytest.fixture
def run(capsys):
    """Call a job in this process as the command line would: (exit code, stdout, stderr on one line)."""

    def call(app, *arguments):
        code = 0
        try:
            guarded(app, args=[str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return call


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_from_the_graph_to_the_report(small, run, features, tmp_path):
    """The manifest says what was measured, and every job that uses the graph, or what was made of it, says so too."""
    rows, graph, index = features / "rows", tmp_path / "graph", tmp_path / "index"
    words = [rows, "-k", K, "--to", graph, "--approximate", "--recall", 0.9, "--json"]
    code, out, err = run(jobs.neighbors.app, *words)
    assert code == 0, err
    facts, config = json.loads(out), NeighborGraph.open(str(graph)).manifest.config
    assert facts["exact"] is config["exact"] is False
    assert config["recall"] == 0.9
    assert config["measured"]["kept"]
    assert config["measured"]["rows"] == 200
    assert "0.9 kept: a row searches" in facts["promise"]
    assert "recall@8" in facts["recall"]
    I, D = NeighborGraph.open(str(graph)).read()
    x = FeatureSet.open(str(rows)).read()
    expected = approximate_graph(x, K, 0.9)
    np.testing.assert_array_equal(I, expected[0])
    np.testing.assert_array_equal(D, expected[1])
    true = shares_found(I, knn_graph(x, K)[0]).mean()
    assert config["measured"]["low"] <= true <= config["measured"]["high"]
    assert not (graph / "_work").exists()

    code, out, err = run(jobs.neighbors.app, *words)
    assert code == 0
    assert "already up to date" in err
    assert json.loads(out)["promise"] == facts["promise"]
    code, _, err = run(jobs.neighbors.app, rows, "-k", K, "--to", graph)
    assert (code, "config.exact" in err) == (2, True), "an exact graph is another artifact"

    told = f"an approximate graph: {facts['recall']}"
    ranks = tmp_path / "ranks"
    page, photos = tmp_path / "gallery.html", tmp_path / "photos"
    photos.mkdir()
    make = (jobs.augment.app, rows, "--method", "aqewd", "-k", 5, "--neighbors", graph, "--to", index)
    search = (jobs.search.app, index, features / "queries", "-k", 9, "--to", ranks)
    for job, *arguments in [
        (*make, "--plan"),
        make,
        (jobs.augment.append_app, index, features / "more", "--to", tmp_path / "grown"),
        (*search, "--plan"),
        search,
        (evaluate_app, ranks),
        (gallery_app, ranks, "--images", photos, "--to", page),
        (jobs.lists.duplicates_app, rows, "--graph", graph),
        (export_app, graph, "--to", tmp_path / "graph.npz"),
        *((info_app, one) for one in (graph, index, ranks, tmp_path / "grown" / "neighbors")),
    ]:
        code, out, err = run(job, *arguments)
        said = f"{' '.join(out.split())} {err}"  # info tells it in its answer
        assert (code, told in said) == (0, True), (arguments, said)
    assert told in page.read_text()
    for one in (graph, index, tmp_path / "grown"):
        code, _, err = run(verify_app, one)
        assert code == 0, err
        for words in ("sound", "not exact", told):
            assert words in err
    spec = tmp_path / "run.toml"
    spec.write_text(
        f'[[dataset]]\nname = "towns"\ndatabase = "{index}"\nqueries = "{features / "queries"}"\n'
        '[[method]]\nmethod = "aqe"\nnqe = 3\n'
    )
    code, _, err = run(jobs.benchmark.app, spec, "--to", tmp_path / "bench")
    assert code == 0, err
    assert f"warning: the rows of towns are based on {told}" in err
    assert told.replace(" ", "") in (tmp_path / "bench" / "report.html").read_text().replace(" ", "")


def test_interrupted_and_continued(small, features, tmp_path):
    """One part of one process, the others of a second: the bytes of an undisturbed run, with the same clusters."""
    digests = []
    for name in ("whole", "broken"):
        task = GraphTask(str(features / "rows"), str(tmp_path / name), K, recall=0.9)
        pending = begin_graph(task)
        if name == "broken":
            ClusterWorker(task).run(1)
            assert pending.missing() == [0, 2]
            before = (tmp_path / name / stored.CLUSTERS).stat().st_mtime_ns
        made = build_approximate(task)
        if name == "broken":
            assert (tmp_path / name / stored.CLUSTERS).stat().st_mtime_ns == before
        manifest = pending.finish(made.measured)
        digests.append((manifest.digest, manifest.config))
    assert digests[0] == digests[1]


@pytest.mark.kill
def test_killed_when_clusters_are_there_and_continued(tmp_path):
    """The real command on as few rows as it approximates: the bytes and the promise of an undisturbed run."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 16))[rng.integers(0, 200, 20_000)] + 0.7 * rng.standard_normal((20_000, 16))
    with FeatureWriter(str(tmp_path / "rows"), 16) as writer:
        writer.append(x, [str(row) for row in range(len(x))])

    def start(to):
        words = [sys.executable, "-m", "jobs.neighbors", f"{tmp_path}/rows", "-k", "32", "--to", str(to)]
        return subprocess.Popen(
            [*words, "--approximate"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    killed = killed_midway(start, tmp_path, lambda to: (to / stored.CLUSTERS).exists())
    before = (killed / stored.CLUSTERS).stat().st_mtime_ns
    while_running = []
    again, whole = start(killed), start(tmp_path / "whole")
    while again.poll() is None:
        if (killed / stored.CLUSTERS).exists():
            with suppress(FileNotFoundError):
                while_running.append((killed / stored.CLUSTERS).stat().st_mtime_ns)
        time.sleep(0.05)
    for process in (again, whole):
        _, shown = process.communicate()
        assert process.returncode == 0, shown
    assert set(while_running) == {before}, "clusters are found once"
    manifests = [NeighborGraph.open(str(to)).manifest for to in (killed, tmp_path / "whole")]
    assert manifests[0].digest == manifests[1].digest
    assert manifests[0].config == manifests[1].config


def test_a_run_begun_by_a_version_that_clustered_otherwise_is_not_continued(
    small, run, features, tmp_path, monkeypatch
):
    words = [features / "rows", "-k", K, "--to", tmp_path / "graph", "--approximate", "--recall", 0.9]
    with monkeypatch.context() as earlier:
        earlier.setattr(stored, "SEARCHES", "rows in several clusters")
        begin_graph(GraphTask(str(features / "rows"), str(tmp_path / "graph"), K, recall=0.9))
    code, _, err = run(jobs.neighbors.app, *words)
    assert (code, "config.searches" in err) == (2, True), err


def test_a_plan_says_what_it_assumes(small, run, features, tmp_path, monkeypatch):
    words = [features / "rows", "-k", K, "--to", tmp_path / "graph", "--approximate", "--recall", 0.9, "--json"]
    code, out, err = run(jobs.neighbors.app, *words, "--plan")
    assert code == 0, err
    assert "a row is assumed to search 14 of them" in json.loads(out)["stages"][0]["not exact"]
    assert not (tmp_path / "graph").exists()
    code, made, err = run(jobs.neighbors.app, *words)
    assert code == 0, err
    searched = NeighborGraph.open(str(tmp_path / "graph")).manifest.config["measured"]["searched"]
    monkeypatch.setattr(row_costs, "ASSUMED_SEARCHED", searched)
    code, out, _ = run(jobs.neighbors.app, *words, "--plan", "--assume", "nodes=2,gpus=1")
    stage = json.loads(out)["stages"][0]
    clusters = approximate.cluster_count(1500, K)
    finding = 1500 * (clusters + 256 + 1000) + clusters * 6 * min(32 * clusters, 1500)
    # Clusters are of unequal size: by how much is assumed too.
    assert stage["products"] - finding == pytest.approx(json.loads(made)["products"], rel=0.35)


def test_few_rows_are_searched_exactly(run, features, tmp_path):
    code, out, err = run(
        jobs.neighbors.app, features / "rows", "-k", K, "--to", tmp_path / "graph", "--approximate", "--json"
    )
    assert code == 0
    assert "1,500 rows are too few to approximate" in err
    manifest = NeighborGraph.open(str(tmp_path / "graph")).manifest
    assert "exact" not in manifest.config
    assert manifest.approximation is None
    assert "recall" not in json.loads(out)


def test_a_missed_promise_is_told(small, run, features, tmp_path, monkeypatch):
    monkeypatch.setattr(approximate, "_affordable", lambda ranked, sizes: 2)
    code, out, err = run(
        jobs.neighbors.app,
        *(features / "rows", "-k", K, "--to", tmp_path / "graph", "--approximate", "--recall", 0.999, "--json"),
    )
    facts = json.loads(out)
    assert code == 0, err
    assert "0.999 MISSED" in facts["promise"]
    assert "below the target of 0.999" in facts["recall"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recall", 0.9], "--recall needs --approximate"),
        (["--approximate", "--recall", 1], "recall 1 is not possible"),
        (["--approximate", "--recall", 0], "recall 0 is not possible"),
        (["--approximate", "--recall", "nan"], "recall nan is not possible"),
        (["--approximate", "-k", 300], "k = 300 is too large to approximate the graph of 1500 rows"),
        (["--approximate", "--engine", "faiss"], "--engine faiss applies to exact graphs only"),
        (["--approximate", "--block-rows", 9], "--block-rows applies to exact graphs only"),
        (["--approximate", "--against", "x", "--into", "y"], "--against applies to exact graphs only"),
    ],
)
def test_refusals_are_one_line(small, run, features, tmp_path, options, message):
    code, _, err = run(jobs.neighbors.app, features / "rows", "--to", tmp_path / "graph", *options)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "graph").exists()
