"""info, verify and export as a user meets them: what they print, and their exit codes."""

import json
import shutil

import faiss
import numpy as np
import pytest

from jobs.artifacts import export_app, info_app, verify_app
from jobs.console import guarded
from lattqe.store import FeatureSet, FeatureWriter, Pending, neighbors_table, open_artifact, ranks_table, save_model
from lattqe.store.manifest import Manifest


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A feature set of several parts, a graph, ranks and a model."""
    base = tmp_path_factory.mktemp("artifacts")
    source = {"source": {"uri": "vectors.npy", "digest": "d1", "kind": "file.npy"}}
    with FeatureWriter(
        str(base / "features"),
        8,
        labels=True,
        part_bytes=2000,
        inputs=source,
        config={"note": "[bold]not markup[/oops]"},
    ) as writer:
        writer.append(
            np.random.default_rng(0).standard_normal((300, 8)),
            [f"image {i}" for i in range(300)],
            labels=np.arange(300) // 10,
        )
    I, D = (np.arange(300)[:, None] + [[1, 2]]) % 300, np.tile(np.float32([0.5, 0.25]), (300, 1))
    for kind, table in (("neighbors", neighbors_table(I, D)), ("ranks", ranks_table(writer.close().ids(), I, D))):
        role = "database" if kind == "ranks" else "features"
        pending = Pending.begin(str(base / kind), kind, {"k": 2}, [300], inputs={role: writer.close().as_input()})
        pending.publish(0, table)
        pending.finish()
    save_model(str(base / "model"), {"w": np.ones((4, 5), np.float32)}, {"heads": 8}, {"map": 0.5})
    return base


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


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (
            "features",
            [
                "a feature set",
                "300 × 8 float16",
                "label: int32",
                "vectors.npy (file.npy, digest d1)",
                "image 2",
                "[bold]not markup[/oops]",
            ],
        ),
        ("neighbors", ["a neighbor graph", "300 × 2", "(features, digest", '"scores": [0.5, 0.25]']),
        ("ranks", ["a list of ranks", "300 × 2", '"id": "image 0", "neighbors": ["image 1", "image 2"]']),
        ("model", ["a model", "1, 20 parameters", '{"map": 0.5}', "heads"]),
    ],
)
def test_info_tells_what_an_artifact_is(run, artifacts, kind, shown):
    code, out, err = run(info_app, artifacts / kind)
    assert (code, err) == (0, ""), "what was asked for is on stdout, to be piped"
    out = " ".join(out.split())
    for text in shown:
        assert text in out


@pytest.mark.parametrize("kind", ["features", "neighbors", "ranks", "model"])
def test_info_for_programs(run, artifacts, kind):
    code, out, _ = run(info_app, artifacts / kind, "--json")
    facts = json.loads(out)
    assert (code, facts["kind"], facts["rows"]) == (0, kind, 0 if kind == "model" else 300)
    assert facts["digest"] == open_artifact(str(artifacts / kind)).manifest.digest
    assert len(facts["sample"]) == (1 if kind == "model" else 3)


@pytest.mark.parametrize("job", [info_app, verify_app])
def test_what_cannot_be_opened(run, tmp_path, job):
    code, out, err = run(job, tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no finished artifact at")
    (tmp_path / "file").write_text("x")
    code, _, err = run(job, tmp_path / "file")
    assert code == 2
    assert "is a file, not an artifact: import it first" in err
    (tmp_path / "my file.npy").write_text("x")
    code, _, err = run(job, tmp_path / "my file.npy")
    assert code == 2
    assert f"lattqe import '{tmp_path / 'my file.npy'}' --to FEATURES" in err, "ready to be pasted"


@pytest.mark.parametrize("kind", ["features", "neighbors", "ranks", "model"])
def test_verify_sound_artifacts(run, artifacts, kind):
    code, out, err = run(verify_app, artifacts / kind)
    assert (code, out) == (0, "")
    assert err.startswith("sound: a ")


def test_verify_names_the_damaged_part(run, artifacts, tmp_path):
    shutil.copytree(artifacts / "features", tmp_path / "copy")
    part = tmp_path / "copy" / "part-00001.arrow"
    data = bytearray(part.read_bytes())
    data[300] ^= 1
    part.write_bytes(data)
    code, _, err = run(verify_app, tmp_path / "copy")
    assert code == 1
    assert err.startswith("wrong: ")
    assert f"{part} does not match its checksum" in err
    code, _, err = run(export_app, tmp_path / "copy", "--to", tmp_path / "x.npy")
    assert (code, f"{part} does not match its checksum" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_verify_a_damaged_manifest_and_a_newer_one(run, artifacts, tmp_path):
    shutil.copytree(artifacts / "features", tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(text[:-10])
    assert run(verify_app, tmp_path / "copy")[0] == 1
    newer = FeatureSet.open(str(artifacts / "features")).manifest
    manifest.write_bytes(Manifest(**{**vars(newer), "format_version": 99}).to_json())
    code, _, err = run(verify_app, tmp_path / "copy")
    assert code == 2
    assert "format version 99" in err


def test_export_to_matrices(run, artifacts, tmp_path):
    features = FeatureSet.open(str(artifacts / "features"))
    assert run(export_app, features.uri, "--to", tmp_path / "x.npy")[0] == 0
    matrix = np.load(tmp_path / "x.npy")
    assert matrix.dtype == np.float16
    np.testing.assert_array_equal(matrix, features.read())
    assert (tmp_path / "x.npy.ids.txt").read_text().splitlines() == features.ids()
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "x.npy.labels.txt", dtype=int), features.labels())
    assert run(export_app, features.uri, "--to", tmp_path / "x.fvecs")[0] == 0
    rows = np.fromfile(tmp_path / "x.fvecs", np.int32).reshape(300, 9)
    assert (rows[:, 0] == 8).all()
    np.testing.assert_array_equal(rows[:, 1:].view(np.float32), features.read().astype(np.float32))


def test_export_to_faiss(run, artifacts, tmp_path):
    faiss.omp_set_num_threads(1)  # tiny work: threads would only wait for each other
    features = FeatureSet.open(str(artifacts / "features"))
    assert run(export_app, features.uri, "--to", tmp_path / "flat.faiss")[0] == 0
    x = features.read().astype(np.float32)
    index = faiss.read_index(str(tmp_path / "flat.faiss"))
    assert index.metric_type == faiss.METRIC_INNER_PRODUCT
    np.testing.assert_array_equal(index.reconstruct_n(0, 300), x)
    assert index.search(x[:50], 1)[1][:, 0].tolist() == list(range(50))
    for name in ("a.index", "b.index"):
        assert run(export_app, features.uri, "--to", tmp_path / name, "--factory", "IVF4,SQ8")[0] == 0
    assert faiss.read_index(str(tmp_path / "a.index")).ntotal == 300
    assert (tmp_path / "a.index").read_bytes() == (tmp_path / "b.index").read_bytes()


@pytest.mark.s3
def test_export_to_s3(run, artifacts, s3_uri):
    from lattqe.store import open_place

    code, _, _ = run(export_app, artifacts / "features", "--to", f"{s3_uri}/x.npy")
    assert code == 0
    assert open_place(s3_uri).list() == ["x.npy", "x.npy.export.json", "x.npy.ids.txt", "x.npy.labels.txt"]
    code, _, err = run(export_app, artifacts / "features", "--to", f"{s3_uri}/x.npy")
    assert (code, "already up to date" in err) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--to", "x.csv"], "must end in one of .npy"),
        (["--to", "x.npy", "--factory", "Flat"], "does not apply to a .npy file"),
        (["--to", "x.faiss", "--factory", "Nonsense7"], "does not know the factory string 'Nonsense7'"),
        (["--to", "x.faiss", "--factory", "IVF3000,Flat"], "cannot train 'IVF3000,Flat' on 300 rows"),
        (["--to", "taken.npy"], "taken.npy exists already"),
        (["--to", "taken.npy/x.npy"], "there is a file where a folder is needed"),
    ],
)
def test_exports_that_cannot_be(run, artifacts, tmp_path, monkeypatch, arguments, match):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.npy").write_text("mine")
    code, _, err = run(export_app, artifacts / "features", *arguments)
    assert code == 2
    assert match in err
    assert [path.name for path in tmp_path.iterdir()] == ["taken.npy"]


def test_info_of_a_graph_shows_hubs_and_similarities(run, artifacts, tmp_path):
    """Against slow twins; row 0 is in every list, two rows are in none, one has no neighbor."""
    I = np.array([[1, 2], [0, 2], [0, 1], [0, 1], [-1, -1]])
    D = np.array([[0.9, 0.5], [0.9, 0.4], [0.5, 0.4], [0.3, 0.1], [0, 0]], np.float32)
    pending = Pending.begin(str(tmp_path / "graph"), "neighbors", {"k": 2}, [5])
    pending.publish(0, neighbors_table(I, D))
    pending.finish()
    code, out, _ = run(info_app, tmp_path / "graph", "--json", "--figure", tmp_path / "graph.svg")
    assert code == 0
    found = json.loads(out)["graph"]
    degrees = [3, 3, 2, 0, 0]
    differences = sum(abs(a - b) for a in degrees for b in degrees)
    assert found["in_degree"]["gini"] == round(differences / (2 * 5 * sum(degrees)), 4)
    mean = sum(degrees) / 5
    moments = [sum((d - mean) ** power for d in degrees) / 5 for power in (2, 3)]
    assert found["in_degree"]["skewness"] == round(moments[1] / moments[0] ** 1.5, 4)
    assert (found["in_degree"]["largest"], found["rows_in_no_list"], found["rows_without_neighbors"]) == (3, 2, 1)
    assert (found["first_similarity"]["0%"], found["first_similarity"]["100%"]) == (0.3, 0.9)
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    code, out, _ = run(info_app, tmp_path / "graph")
    assert (code, "2 rows (40.0 %) are in no list, 1 have no neighbor" in " ".join(out.split())) == (0, True)
    code, _, err = run(info_app, tmp_path / "graph", "--figure", tmp_path / "graph.npz")
    assert (code, "give the name of an SVG file" in err) == (2, True)
    code, _, err = run(info_app, artifacts / "features", "--figure", tmp_path / "x.svg")
    assert (code, "--figure is only for neighbor graphs" in err) == (2, True)
