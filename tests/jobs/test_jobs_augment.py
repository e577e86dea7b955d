"""`lattqe augment` and `lattqe append`: in this process, on a real Ray, on disk and on a real S3 server."""

import json

import numpy as np
import pytest
import torch

import lattqe
from jobs.artifacts import verify_app as verify
from jobs.augment import app as augment
from jobs.augment import append_app as append
from jobs.console import guarded
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, open_place

ROWS, DIM, K = 2500, 24, 8


def call(app, *arguments):
    """Run a job in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        guarded(app, args=[str(argument) for argument in arguments], prog_name="lattqe")
    return ended.value.code or 0


def write(uri, x, first=0):
    with FeatureWriter(str(uri), DIM, labels=True) as writer:
        writer.append(x, [f"r{first + i}" for i in range(len(x))], np.arange(len(x)) % 5)
    return FeatureSet.open(str(uri))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((150, DIM))
    return (centres[rng.integers(0, 150, ROWS + 40)] + 0.6 * rng.standard_normal((ROWS + 40, DIM))).astype(np.float32)


@pytest.fixture(scope="module")
def features(tmp_path_factory, data):
    return write(tmp_path_factory.mktemp("rows") / "features", data[:ROWS])


@pytest.fixture(scope="module")
def graph(tmp_path_factory, features):
    return publish_graph(features, 2 * K, str(tmp_path_factory.mktemp("graph") / "graph"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    uri = str(tmp_path_factory.mktemp("model") / "model")
    LAttQE(LAttQEConfig(dim=DIM, heads=2, layers=1, max_k=16)).save(uri)
    return uri


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_lattqe_equals_in_memory_and_knows_its_inputs(features, model, s3_uri, capsys):
    to = f"{s3_uri}/index"
    assert call(augment, features.uri, "--model", model, "-k", K, "--to", to, "--workers", 2, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    index = FeatureSet.open(to)
    expected = lattqe.augment(features.read(), "lattqe", model=model, k=K)
    np.testing.assert_allclose(index.read().astype(np.float32), expected, atol=2e-3)
    assert np.mean(index.read() == expected.astype(np.float16)) > 0.999, "the same but for rare last bits of float16"
    assert (index.ids(), index.dtype) == (features.ids(), features.dtype)
    np.testing.assert_array_equal(index.labels(), features.labels())
    inputs = index.manifest.inputs
    assert inputs["features"]["digest"] == features.digest
    assert inputs["neighbors"]["digest"] == NeighborGraph.open(f"{to}/neighbors").digest
    assert inputs["model"]["kind"] == "model"
    assert told["digest"] == index.digest
    assert told["rows"] == told["expanded_rows"] == ROWS
    assert told["reach"] == "map"
    assert "GFLOP saved" in told["shared_products"]
    assert call(verify, to, "--recompute", 200) == 0


def test_a_second_run_finds_it_done_and_another_setting_is_refused(features, graph, tmp_path, capsys):
    arguments = [features.uri, "--method", "alphaqe", "-k", K, "--neighbors", graph.uri, "--to", tmp_path / "index"]
    assert call(augment, *arguments, "--alpha", 3) == 0
    digest = FeatureSet.open(str(tmp_path / "index")).digest
    assert call(augment, *arguments, "--alpha", 3) == 0
    assert FeatureSet.open(str(tmp_path / "index")).digest == digest
    capsys.readouterr()
    assert call(augment, *arguments, "--alpha", 2) == 2
    assert "alpha: 3.0 there, 2.0 here" in capsys.readouterr().err


@pytest.mark.parametrize("hops", [1, 2])
def test_a_finished_index_is_up_to_date_without_a_cluster(features, tmp_path, capsys, monkeypatch, hops):
    to = tmp_path / "index"
    arguments = [features.uri, "--method", "alphaqe", "-k", K, "--hops", hops, "--to", to]
    assert call(augment, *arguments) == 0
    files = {path: path.read_bytes() for path in to.rglob("*") if path.is_file()}
    assert "already up to date" not in capsys.readouterr().err
    monkeypatch.setattr("jobs.augment.on_ray", None)  # a call would fail
    assert call(augment, *arguments, "--workers", 2) == 0
    assert f"{to} is already up to date" in capsys.readouterr().err.replace("\n", "")
    assert {path: path.read_bytes() for path in to.rglob("*") if path.is_file()} == files, "nothing new, nothing left"


def test_more_neighbors_than_rows_are_noted(data, tmp_path, capsys):
    few = write(tmp_path / "few", data[:20])
    assert call(augment, few.uri, "--method", "alphaqe", "-k", 30, "--to", tmp_path / "index") == 0
    assert "note: 20 rows have only 19 neighbors each: all of them are used, not 30" in capsys.readouterr().err


def test_a_model_of_another_width_is_refused_before_anything_is_computed(model, tmp_path, capsys):
    with FeatureWriter(str(tmp_path / "narrow"), 10) as writer:
        writer.append(np.eye(10, dtype=np.float32), [f"n{i}" for i in range(10)])
    assert call(augment, tmp_path / "narrow", "--model", model, "-k", 3, "--to", tmp_path / "index") == 2
    shown = capsys.readouterr().err
    assert f"the model {model} does not fit the features in {tmp_path / 'narrow'}: vectors of 10 columns" in shown
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "aqe", "-k", 20], "has 16 neighbors per row, but 20 are needed"),
        (["--method", "alphaqe", "--C", 1], "--C belongs to dqe"),
        (["--method", "nothing"], "unknown method 'nothing'"),
        (["--method", "aqe", "-k", 3_000_000_000], "k is 3,000,000,000, far more than the"),
        (["--method", "aqe", "--factory", "Flat"], "--factory needs --faiss"),
        (["--method", "aqe", "--faiss", "index.npy"], "--faiss index.npy: the name must end in one of .faiss, .index"),
        (["--method", "aqe", "--faiss", "i.faiss", "--factory", "X"], "faiss does not know the factory string 'X'"),
        (["--method", "aqe", "--reach", "far"], "--reach is 'far': use one of auto, map, shards"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(features, graph, tmp_path, capsys, arguments, message):
    to = tmp_path / "index"
    assert call(augment, features.uri, "--neighbors", graph.uri, "--to", to, *arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1
    assert not to.exists()


def test_a_destination_of_another_artifact_is_refused_before_a_graph_is_put_there(features, data, tmp_path, capsys):
    other = write(tmp_path / "other", data[:50])
    for to in (features.uri, other.uri):  # the features themselves, and other ones
        before = open_place(to).list()
        assert call(augment, features.uri, "--method", "aqe", "-k", K, "--to", to) == 2
        assert 'a finished artifact that differs: config.job: null there, "augment" here' in capsys.readouterr().err
        assert open_place(to).list() == before


def test_a_graph_of_other_features_is_refused_by_digest(data, graph, tmp_path, capsys):
    other = write(tmp_path / "other", data[:50])
    assert call(augment, other.uri, "--method", "aqe", "-k", 4, "--neighbors", graph.uri, "--to", tmp_path / "i") == 2
    assert other.digest[:12] in capsys.readouterr().err


def test_faiss_reads_what_augment_exports(features, graph, tmp_path):
    import faiss

    target = tmp_path / "index.faiss"
    assert (
        call(
            augment,
            features.uri,
            "--method",
            "aqe",
            "-k",
            4,
            "--neighbors",
            graph.uri,
            "--to",
            tmp_path / "index",
            "--faiss",
            target,
            "--factory",
            "IVF16,Flat",
        )
        == 0
    )
    assert faiss.read_index(str(target)).ntotal == ROWS


@pytest.mark.parametrize("method", ["lattqe", "alphaqe"])
def test_appending_equals_from_scratch_at_the_cost_of_what_changed(
    features, graph, model, data, tmp_path, method, capsys
):
    more = ["--model", model] if method == "lattqe" else ["--alpha", 3]
    base = ["--method", method, "-k", K, *more]
    assert call(augment, features.uri, *base, "--neighbors", graph.uri, "--to", tmp_path / "index") == 0
    arrivals = write(tmp_path / "arrivals", data[ROWS : ROWS + 10], first=ROWS)
    missing = tmp_path / "missing.txt"
    assert call(append, tmp_path / "index", "--remove", missing, "--to", tmp_path / "grown") == 2
    assert f"cannot read the ids to remove from {missing}: No such file or directory" in capsys.readouterr().err
    (tmp_path / "gone.txt").write_text("r7\nr99\n")
    assert (
        call(
            append,
            tmp_path / "index",
            arrivals.uri,
            "--remove",
            tmp_path / "gone.txt",
            "--to",
            tmp_path / "grown",
            "--json",
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    grown = FeatureSet.open(str(tmp_path / "grown"))
    joined = write(tmp_path / "joined", np.delete(data[: ROWS + 10], [7, 99], axis=0))
    assert grown.ids()[-10:] == arrivals.ids()
    np.testing.assert_array_equal(FeatureSet.open(str(tmp_path / "grown" / "originals")).read(), joined.read())
    assert call(augment, joined.uri, *base, "--to", tmp_path / "scratch") == 0
    scratch = FeatureSet.open(str(tmp_path / "scratch"))
    lists = [NeighborGraph.open(str(tmp_path / name / "neighbors")).read()[0][:, :K] for name in ("grown", "scratch")]
    np.testing.assert_array_equal(*lists)
    np.testing.assert_allclose(grown.read().astype(np.float32), scratch.read().astype(np.float32), atol=1e-3)
    assert np.mean(grown.read() == scratch.read()) > 0.999
    before = np.delete(graph.read()[0][:, :K], [7, 99], axis=0)
    kept = np.delete(np.arange(ROWS), [7, 99])
    now = np.where(lists[0] >= len(kept), -1, kept[np.minimum(lists[0], len(kept) - 1)])[: len(kept)]
    touched = int((before != now).any(axis=1).sum()) + 10
    assert told["expanded_rows"] == touched, "exactly the rows whose lists changed, and the new ones"
    assert told["rows_touched"] == touched < 0.2 * ROWS
    assert 10 * (ROWS - 2) < told["products"] < 0.1 * told["products_from_scratch"]


def test_appending_refuses_what_cannot_be(features, graph, data, tmp_path, capsys):
    assert call(append, features.uri, features.uri, "--to", tmp_path / "x") == 2
    assert "was not made by `lattqe augment`" in capsys.readouterr().err
    assert call(append, features.uri, "--to", tmp_path / "x") == 2
    assert "nothing to add or remove" in capsys.readouterr().err
