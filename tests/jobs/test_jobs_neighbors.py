"""`lattqe neighbors` as a command: plan and summary, refusals, and a driver killed in the middle."""

import json
import subprocess
import sys

import numpy as np
import pytest
from killing import killed_midway

from lattqe.search import knn_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1500, 16))
    x[500:700] = x[0]
    folder = tmp_path_factory.mktemp("features") / "rows"
    with FeatureWriter(str(folder), 16) as writer:
        writer.append(x, [f"row-{i}" for i in range(len(x))])
    return FeatureSet.open(str(folder))


@pytest.mark.ray
@pytest.mark.kill
def test_killed_driver_and_the_same_command_again(features, tmp_path, call_lattqe):
    """Kill -9 when a few lists are written; the second run continues, and gives the bytes of an undisturbed one."""

    words = ("-k", 9, "--workers", 2, "--block-rows", 40, "--json")

    def start(to):
        return subprocess.Popen(
            [sys.executable, "-m", "jobs.neighbors", features.uri, *map(str, words), "--to", str(to)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    to = killed_midway(start, tmp_path, lambda to: len(list((to / "_work" / "lists").glob("*"))) >= 20)
    code, out, err = call_lattqe("neighbors", features.uri, *words, "--to", to)
    assert code == 0, err
    assert "0 % of them done" not in err, err
    assert "expected time" in err
    facts = json.loads(out)
    assert facts["rows"] == 1500
    graph = NeighborGraph.open(str(to))
    ids, scores = knn_graph(features.read(), 9)
    np.testing.assert_array_equal(graph.read()[0], ids)
    np.testing.assert_array_equal(graph.read()[1], scores)
    graph.verify()
    assert graph.manifest.inputs["features"]["digest"] == features.digest
    code, out, err = call_lattqe("neighbors", features.uri, *words, "--to", to)
    assert code == 0, err
    assert json.loads(out)["digest"] == facts["digest"], "a finished graph is found, not made again"


def test_a_plan_names_the_kind_of_products_that_was_measured(features, tmp_path, call_lattqe, monkeypatch):
    monkeypatch.setattr("lattqe.search.stored.measure_products", lambda task: ("int8", 1e9))
    words = ("neighbors", features.uri, "-k", 9, "--to", tmp_path / "graph", "--plan", "--json")
    code, out, err = call_lattqe(*words)
    assert code == 0, err
    (stage,) = json.loads(out)["stages"]
    assert stage["kind of products"] == "int8, the fastest here"
    assert "int8, the fastest here" in err
    code, out, err = call_lattqe(*words, "--assume", "nodes=2")
    assert code == 0, err
    assert "kind of products" not in json.loads(out)["stages"][0], "other machines are not measured"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "FEATURES"], "--against and --into go together"),
        (["--against", "FEATURES", "--into", "FEATURES"], "but a neighbor graph (kind 'neighbors') is needed here"),
        (["-k", "0"], "Invalid value for '-k'"),
        (["-k", "3000000000"], "k is 3,000,000,000, far more than the"),
    ],
)
def test_refusals_are_one_line(features, tmp_path, options, message, call_lattqe):
    options = [features.uri if option == "FEATURES" else option for option in options]
    code, _, err = call_lattqe("neighbors", features.uri, "--to", tmp_path / "graph", *options)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / "graph").exists()
