"""`lattqe augment --hops`: edges in the index, the same bytes in this process and on Ray, grown, checked, refused."""

import json

import numpy as np
import pytest
import torch

import lattqe
from jobs.artifacts import info_app as info
from jobs.artifacts import verify_app as verify
from jobs.augment import app as augment
from jobs.augment import append_app as append
from jobs.console import guarded
from lattqe.augmentation import recipe
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search.stored import publish_graph
from lattqe.store import Edges, FeatureSet, FeatureWriter, Pending, edges_table

ROWS, DIM, K, HOPS = 900, 16, 6, 5


def call(app, *arguments):
    """Run a job in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        guarded(app, args=[str(argument) for argument in arguments], prog_name="lattqe")
    return ended.value.code or 0


def write(uri, x, first=0):
    with FeatureWriter(str(uri), DIM, labels=True, part_bytes=16_000) as writer:
        writer.append(x, [f"r{first + i}" for i in range(len(x))], np.arange(len(x)) % 5)
    return FeatureSet.open(str(uri))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, DIM))
    x = centres[rng.integers(0, 60, ROWS + 40)] + 0.6 * rng.standard_normal((ROWS + 40, DIM))
    x[10] = x[11]  # duplicates
    return x.astype(np.float32)


@pytest.fixture(scope="module")
def features(tmp_path_factory, data):
    return write(tmp_path_factory.mktemp("rows") / "features", data[:ROWS])


@pytest.fixture(scope="module")
def graph(tmp_path_factory, features):
    return publish_graph(features, 2 * K, str(tmp_path_factory.mktemp("graph") / "graph"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained network that asks for hops."""
    torch.manual_seed(0)
    uri = str(tmp_path_factory.mktemp("model") / "model")
    LAttQE(LAttQEConfig(dim=DIM, heads=2, layers=1, max_k=16)).save(uri, metrics={"hops": HOPS, "ndba": K})
    return uri


def hopped(features, graph, to, *more):
    return call(augment, features.uri, "--method", "alphaqe", "-k", K, "--neighbors", graph.uri, "--to", to, *more)


def test_hops_equal_the_python_call_and_know_their_inputs(features, graph, tmp_path, capsys):
    to = str(tmp_path / "index")
    assert hopped(features, graph, to, "--hops", HOPS, "--json") == 0
    told, shown = (lambda printed: (json.loads(printed.out), printed.err))(capsys.readouterr())
    index, edges = FeatureSet.open(to), Edges.open(f"{to}/edges")
    expected = lattqe.augment(features.read(), "alphaqe", K, hops=HOPS)
    assert index.read().tobytes() == expected.astype(features.dtype).tobytes()
    assert index.ids() == features.ids()
    assert index.manifest.inputs["edges"]["digest"] == edges.digest == told["edges_digest"]
    assert (index.manifest.config["hops"], index.manifest.config["hop_alpha"]) == (HOPS, 0.9)
    assert (told["hops"], told["expanded_rows"]) == (HOPS, ROWS)
    assert told["bytes_written_for_each_hop"] >= 4 * ROWS * DIM
    assert "moved per hop" in shown
    assert edges.k == K
    assert hopped(features, graph, to, "--hops", HOPS) == 0, "it is there already"
    assert FeatureSet.open(to).digest == index.digest
    assert call(verify, to, "--recompute", 100) == 0
    assert call(verify, f"{to}/edges") == 0
    assert call(info, to) == call(info, f"{to}/edges") == 0
    assert "a weighted graph" in capsys.readouterr().err
    assert not [name for name in index.place.list() if "_work" in name]


def test_one_hop_is_what_it_always_was(features, graph, tmp_path):
    assert hopped(features, graph, tmp_path / "one", "--hops", 1) == 0
    assert hopped(features, graph, tmp_path / "none") == 0
    one, none = (FeatureSet.open(str(tmp_path / name)) for name in ("one", "none"))
    assert one.manifest.to_json() == none.manifest.to_json()
    assert not (tmp_path / "one" / "edges").exists()
    expected = lattqe.augment(features.read(), "alphaqe", K).astype(features.dtype)
    assert np.mean(one.read() == expected) > 0.999, "the same but for rare last bits of float16"


def test_a_model_says_how_many_hops(features, graph, model, tmp_path):
    to = str(tmp_path / "index")
    assert call(augment, features.uri, "--model", model, "--neighbors", graph.uri, "--to", to) == 0
    assert FeatureSet.open(to).manifest.config["hops"] == HOPS
    assert call(verify, to, "--recompute", 50) == 0


def test_grown_with_hops_equals_from_scratch(features, graph, data, tmp_path, capsys):
    assert hopped(features, graph, tmp_path / "index", "--hops", HOPS, "--hop-alpha", 0.7) == 0
    new = write(tmp_path / "new", data[ROWS:], first=ROWS)
    (tmp_path / "leave").write_text("r5\nr800\n")
    capsys.readouterr()
    assert (
        call(append, tmp_path / "index", new.uri, "--remove", tmp_path / "leave", "--to", tmp_path / "grown", "--json")
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    grown = FeatureSet.open(str(tmp_path / "grown"))
    assert told["rows_touched"] == told["expanded_rows"] < ROWS / 2, "edges of the others were taken over"
    assert told["hops"] == HOPS
    assert told["hop_seconds"] > 0
    joined = FeatureSet.open(f"{grown.uri}/originals").read()
    expected = lattqe.augment(joined, "alphaqe", K, hops=HOPS, hop_alpha=0.7).astype(features.dtype)
    np.testing.assert_array_equal(grown.read(), expected)
    assert call(verify, grown.uri, "--recompute", 100) == 0


def test_spoilt_vectors_and_spoilt_edges_are_found(features, graph, tmp_path, capsys):
    to = str(tmp_path / "index")
    assert hopped(features, graph, to, "--hops", HOPS) == 0
    index = FeatureSet.open(to)
    table = index.table().combine_chunks()
    vectors = table.column("vector").combine_chunks()
    order = np.arange(ROWS)
    order[7] = 8
    spoilt = Pending.begin(
        str(tmp_path / "spoilt"),
        "features",
        index.content_fields(),
        [ROWS],
        schema=table.schema,
        config=index.manifest.config,
        inputs=index.manifest.inputs,
    )
    column = table.column_names.index("vector")
    spoilt.publish(0, table.set_column(column, table.schema.field(column), vectors.take(order)))
    spoilt.finish()
    assert call(verify, tmp_path / "spoilt", "--recompute", ROWS) == 1
    assert "row 7 of" in capsys.readouterr().err

    weights, rows = Edges.open(f"{to}/edges").read()
    weights[3, 2] *= 1.01
    wrong = Pending.begin(str(tmp_path / "edges"), "edges", {"k": K}, [ROWS])
    wrong.publish(0, edges_table(rows[:, 1:], weights))
    wrong.finish()
    entry = Edges.open(str(tmp_path / "edges")).as_input()
    other = Pending.begin(
        str(tmp_path / "other"),
        "features",
        index.content_fields(),
        [ROWS],
        schema=table.schema,
        config=index.manifest.config,
        inputs={**index.manifest.inputs, "edges": entry},
    )
    other.publish(0, table)
    other.finish()
    assert call(verify, tmp_path / "other", "--recompute", ROWS) == 1
    assert "the edges of row 3 in" in capsys.readouterr().err


def test_too_many_rows_to_hop_again_are_told(features, graph, tmp_path, capsys, monkeypatch):
    assert hopped(features, graph, tmp_path / "index", "--hops", 2) == 0
    monkeypatch.setattr(recipe, "MOST_HOPPED_AGAIN", ROWS - 1)
    capsys.readouterr()
    assert call(verify, tmp_path / "index", "--recompute", 20) == 0
    assert "its 2 hops were not recomputed: 900 rows are too many for one process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hops", 0], "hops is 0: use a whole number from 1"),
        (["--hops", 1000], "hops is 1000"),
        (["--hops", 4, "--hop-alpha", 0], "the share of the neighbors is 0.0: use a number between 0 and 1"),
        (["--hops", 4, "--hop-alpha", 1.5], "is 1.5"),
        (["--hop-alpha", 0.5], "--hop-alpha needs more than one hop"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(features, graph, tmp_path, capsys, options, said):
    assert hopped(features, graph, tmp_path / "index", *options) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.strip().splitlines()) == 1
    assert not (tmp_path / "index").exists()


def test_a_graph_of_other_features_other_hops_and_lost_edges_are_refused(features, graph, data, tmp_path, capsys):
    other = write(tmp_path / "other", data[:100])
    assert hopped(other, graph, tmp_path / "index", "--hops", 3) == 2
    assert "is the graph of other features" in capsys.readouterr().err
    assert hopped(features, graph, tmp_path / "index", "--hops", 3) == 0
    assert hopped(features, graph, tmp_path / "index", "--hops", 4) == 2
    assert "config.hops: 3 there, 4 here" in capsys.readouterr().err
    for path in (tmp_path / "index" / "edges").iterdir():
        path.unlink()
    assert call(verify, tmp_path / "index", "--recompute", 5) == 2
    assert "the edges that made" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("where", ["s3", "shards"])
def test_on_ray_the_same_bytes(features, graph, tmp_path, s3_uri, where, capsys):
    """With mapped rows to S3, and with rows in shards to the disk."""
    assert hopped(features, graph, tmp_path / "here", "--hops", HOPS) == 0
    to = f"{s3_uri}/index" if where == "s3" else str(tmp_path / "index")
    capsys.readouterr()
    reach = ["--reach", "shards"] if where == "shards" else []
    assert hopped(features, graph, to, "--hops", HOPS, "--workers", 2, "--json", *reach) == 0
    told = json.loads(capsys.readouterr().out)
    here, there = FeatureSet.open(str(tmp_path / "here")), FeatureSet.open(to)
    assert there.digest == here.digest
    assert Edges.open(f"{to}/edges").digest == Edges.open(f"{here.uri}/edges").digest
    assert told["peak_hop_worker_bytes"] <= told["predicted_hop_worker_bytes"]
