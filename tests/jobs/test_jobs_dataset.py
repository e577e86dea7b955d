"""`lattqe dataset`: files of the published structure filled with synthetic descriptors, on disk and on S3."""

import json
import pickle
import shutil

import numpy as np
import pytest
import scipy.io

from lattqe.datasets.revisited import load_gnd, published_scores
from lattqe.evaluation import score_ranking
from lattqe.store import FeatureSet, open_place

DIM = 24


@pytest.fixture
def run(call_lattqe):
    """Call `lattqe dataset` in this process: (exit code, stdout, stderr)."""
    return call_lattqe


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def descriptors(gnd, seed=0):
    """Database (n, D) and queries (nq, D) in which relevant rows lie near their query, hard ones farther."""
    rng = np.random.default_rng(seed)
    xq, xb = rng.normal(size=(gnd.queries, DIM)), rng.normal(size=(gnd.database_rows, DIM))
    for query, lists in zip(xq, gnd.gnd):
        for grade, weight in (("hard", 0.6), ("easy", 1.5)):
            rows = np.array(lists[grade], dtype=int)
            xb[rows] += weight * query
    return unit(xb), unit(xq)


def plain_map(xb, xq, gnd):
    ranking = np.argsort(
        -(xq.astype(np.float16).astype(np.float64) @ xb.astype(np.float16).T.astype(np.float64)), axis=1, kind="stable"
    )
    return {name: scores.mean_ap for name, scores in score_ranking(ranking, gnd.truth).items()}


@pytest.fixture(scope="module")
def oxford(revisited_folder):
    gnd = load_gnd(revisited_folder / "gnd_roxford5k.pkl")
    return gnd, *descriptors(gnd)


def write_revisited(folder, revisited_folder, name, layout, xb, xq):
    """The published ground truth, and descriptors in one of the layouts that people have."""
    folder.mkdir(exist_ok=True)
    shutil.copy(revisited_folder / f"gnd_{name}.pkl", folder)
    if layout == "mat":
        scipy.io.savemat(folder / f"{name}_resnet_rsfm120k_gem.mat", {"X": xb.T, "Q": xq.T})
    elif layout == "pickle":
        (folder / f"{name}.pkl").write_bytes(pickle.dumps({"vecs": xb.T, "qvecs": xq.T}))
    elif layout == "columns":
        np.save(folder / f"{name}.npy", xb.T)
        np.save(folder / f"{name}_q.npy", xq.T)
    else:
        np.save(folder / f"{name}-vectors.npy", xb)
        np.save(folder / f"{name}-queries.npy", xq)


@pytest.mark.parametrize("layout", ["mat", "pickle", "columns", "rows"])
def test_revisited_from_every_layout(tmp_path, run, revisited_folder, oxford, layout):
    gnd, xb, xq = oxford
    write_revisited(tmp_path / "published", revisited_folder, "roxford5k", layout, xb, xq)
    code, out, err = run("dataset", "revisited", tmp_path / "published", "--to", tmp_path / "data", "--json")
    assert code == 0, err
    database, queries = (FeatureSet.open(str(tmp_path / "data" / name)) for name in ("roxford5k", "roxford5k-queries"))
    assert (database.ids(), queries.ids()) == (list(gnd.imlist), list(gnd.qimlist))
    np.testing.assert_allclose(database.read().astype(np.float32), xb, atol=1e-3)
    np.testing.assert_allclose(queries.read().astype(np.float32), xq, atol=1e-3)
    told = json.loads(out)
    assert told["golden"] == {"roxford5k": False}, "random descriptors are not the paper's"
    for setup, expected in plain_map(xb, xq, gnd).items():
        assert told["scores"]["roxford5k"][setup]["map"] == pytest.approx(expected, abs=2e-3)
    assert any("rparis6k is not there" in note for note in told["notes"])
    assert "these are not the paper's features" in err
    assert load_gnd(tmp_path / "data" / "gnd_roxford5k.pkl").imlist == gnd.imlist
    before = (tmp_path / "data" / "roxford5k" / "manifest.json").stat().st_mtime_ns
    assert run("dataset", "revisited", tmp_path / "published", "--to", tmp_path / "data")[0] == 0
    assert (tmp_path / "data" / "roxford5k" / "manifest.json").stat().st_mtime_ns == before


def test_golden_numbers_come_out(tmp_path, run, revisited_folder, oxford, monkeypatch):
    """What is compared is what was measured: with golden numbers of these descriptors they come out."""
    gnd, xb, xq = oxford
    write_revisited(tmp_path / "published", revisited_folder, "roxford5k", "mat", xb, xq)
    mine = {setup: 100 * value for setup, value in plain_map(xb, xq, gnd).items() if setup != "easy"}
    monkeypatch.setitem(published_scores()["golden"]["map"], "roxford5k", mine)
    code, _, err = run("dataset", "revisited", tmp_path / "published", "--to", tmp_path / "data")
    assert code == 0
    assert "roxford5k: the paper's golden numbers are reproduced" in err


def test_benchmark_stops_after_the_golden_numbers(tmp_path, run, revisited_folder, monkeypatch, s3_uri):
    """`benchmark revisited --check`, here from S3: differences are one line and exit code 2."""
    mine = {}
    for name in ("roxford5k", "rparis6k"):
        gnd = load_gnd(revisited_folder / f"gnd_{name}.pkl")
        xb, xq = descriptors(gnd)
        write_revisited(tmp_path / "published", revisited_folder, name, "rows", xb, xq)
        mine[name] = {setup: 100 * value for setup, value in plain_map(xb, xq, gnd).items() if setup != "easy"}
    assert run("dataset", "revisited", tmp_path / "published", "--to", f"{s3_uri}/data")[0] == 0
    command = ("benchmark", "revisited", "--data", f"{s3_uri}/data", "--check", "--to", tmp_path / "results")
    code, _, err = run(*command)
    told = " ".join(err.split())
    assert (code, told.count("error:")) == (2, 1)
    assert "these are not the paper's features" in told
    assert "67.30 expected of the paper's features" in told
    for name, values in mine.items():
        monkeypatch.setitem(published_scores()["golden"]["map"], name, values)
    code, _, err = run(*command)
    assert code == 0, err
    assert "the paper's golden numbers are reproduced" in err
    assert not (tmp_path / "results").exists(), "nothing else was measured"


def test_rows_in_another_order_are_chance(tmp_path, run, revisited_folder, oxford):
    _, xb, xq = oxford
    shuffled = xb[np.random.default_rng(1).permutation(len(xb))]
    write_revisited(tmp_path / "published", revisited_folder, "roxford5k", "rows", shuffled, xq)
    code, _, err = run("dataset", "revisited", tmp_path / "published", "--to", tmp_path / "data")
    assert code == 0
    assert "is chance: are the rows in the order of imlist" in " ".join(err.split())


def test_ids_in_the_file_must_be_those_of_the_list(tmp_path, run, revisited_folder, oxford):
    gnd, xb, xq = oxford
    (tmp_path / "published").mkdir()
    shutil.copy(revisited_folder / "gnd_roxford5k.pkl", tmp_path / "published")
    named = dict(zip([f"jpg/{name}.jpg" for name in gnd.imlist], xb))
    (tmp_path / "published" / "roxford5k.pkl").write_bytes(pickle.dumps(named))
    np.save(tmp_path / "published" / "roxford5k_queries.npy", xq)
    assert run("dataset", "revisited", tmp_path / "published", "--to", tmp_path / "data")[0] == 0
    swapped = dict(zip([*list(named)[1::-1], *list(named)[2:]], xb))
    (tmp_path / "published" / "roxford5k.pkl").write_bytes(pickle.dumps(swapped))
    code, _, err = run("dataset", "revisited", tmp_path / "published", "--to", tmp_path / "other")
    assert code == 2
    assert "the same images in another order" in " ".join(err.split())
    assert not (tmp_path / "other" / "roxford5k" / "manifest.json").exists()


def test_on_s3(tmp_path, run, s3_uri, revisited_folder, oxford):
    gnd, xb, xq = oxford
    write_revisited(tmp_path / "published", revisited_folder, "roxford5k", "mat", xb, xq)
    place = open_place(f"{s3_uri}/published")
    for path in (tmp_path / "published").iterdir():
        place.write(path.name, path.read_bytes())
    code, _, err = run("dataset", "revisited", f"{s3_uri}/published", "--to", f"{s3_uri}/data")
    assert code == 0, err
    assert FeatureSet.open(f"{s3_uri}/data/roxford5k").ids() == list(gnd.imlist)
    assert open_place(f"{s3_uri}/data").read("gnd_roxford5k.pkl") == place.read("gnd_roxford5k.pkl")


def test_what_is_missing_is_said_at_once(tmp_path, run, revisited_folder):
    (tmp_path / "published").mkdir()
    shutil.copy(revisited_folder / "gnd_roxford5k.pkl", tmp_path / "published")
    np.save(tmp_path / "published" / "rparis6k.npy", np.eye(4))
    code, _, err = run("dataset", "revisited", tmp_path / "published", "--to", tmp_path / "data")
    told = " ".join(err.split())
    assert (code, told.count("error:")) == (2, 1)
    for missing in ("gnd_rparis6k.pkl", "database images of roxford5k", "queries of roxford5k", "queries of rparis6k"):
        assert missing in told
    code, _, err = run("dataset", "revisited", tmp_path / "nothing", "--to", tmp_path / "data")
    assert code == 2
    assert "there are no files at" in err


def test_another_number_of_rows_is_refused(tmp_path, run, revisited_folder, oxford):
    _, xb, xq = oxford
    write_revisited(tmp_path / "published", revisited_folder, "roxford5k", "rows", xb[:-1], xq)
    code, _, err = run("dataset", "revisited", tmp_path / "published", "--to", tmp_path / "data")
    assert code == 2
    assert "holds 4,992 vectors of 24 numbers, but imlist of gnd_roxford5k.pkl names 4,993" in " ".join(err.split())


def test_import_takes_ids_from_a_ground_truth(tmp_path, run, revisited_folder, oxford):
    """The one list that has as many names as there are rows."""
    gnd, xb, xq = oxford
    for name, x, ids in (("database", xb, gnd.imlist), ("queries", xq, gnd.qimlist)):
        np.save(tmp_path / f"{name}.npy", x)
        code, _, err = run(
            "import", tmp_path / f"{name}.npy", "--ids", revisited_folder / "gnd_roxford5k.pkl", "--to", tmp_path / name
        )
        assert code == 0, err
        assert FeatureSet.open(str(tmp_path / name)).ids() == list(ids)
    np.save(tmp_path / "other.npy", xb[:100])
    code, _, err = run(
        "import", tmp_path / "other.npy", "--ids", revisited_folder / "gnd_roxford5k.pkl", "--to", tmp_path / "other"
    )
    assert code == 2
    assert "names 4,993 images (imlist) and 70 queries (qimlist), and there are 100 rows" in " ".join(err.split())


def sfm(folder, shuffle=False):
    """A database of the published structure: two halves, clusters, pairs, and descriptors in the order of cids."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    content = {}
    for half, size, first in (("train", 300, 0), ("val", 120, 1000)):
        cluster = rng.integers(0, size // 6, size=size)
        centers = rng.normal(size=(size, DIM))
        x = unit(centers[cluster] + 0.7 * rng.normal(size=(size, DIM)))
        pairs = [(q, p) for q in range(size) for p in np.flatnonzero(cluster == cluster[q])[:3] if p != q]
        content[half] = {
            "cids": [f"{half}{row:06d}" for row in range(size)],
            "cluster": (cluster + first).tolist(),
            "qidxs": [q for q, _ in pairs],
            "pidxs": [int(p) for _, p in pairs],
            "bbxs": [None] * size,
        }
        np.save(folder / f"{half}-gl18.npy", x[rng.permutation(size)] if shuffle and half == "val" else x)
    (folder / "retrieval-SfM-120k.pkl").write_bytes(pickle.dumps(content, protocol=2))
    return content


def test_sfm120k(tmp_path, run):
    content = sfm(tmp_path / "published")
    code, out, err = run("dataset", "sfm120k", tmp_path / "published", "--to", tmp_path / "data", "--json")
    assert code == 0, err
    assert set(json.loads(out)["sets"]) == {"sfm120k-train", "sfm120k-val", "sfm120k-val-queries"}
    for half in ("train", "val"):
        features = FeatureSet.open(str(tmp_path / "data" / f"sfm120k-{half}"))
        features.verify()
        assert features.ids() == content[half]["cids"]
        assert features.labels().tolist() == content[half]["cluster"]
        stored = features.table(0, features.rows).column("positives").to_pylist()
        pairs = {(q, features.ids().index(id)) for q, ids in enumerate(stored) for id in ids}
        assert pairs == set(zip(content[half]["qidxs"], content[half]["pidxs"]))
    queries = FeatureSet.open(str(tmp_path / "data" / "sfm120k-val-queries"))
    rows = sorted(set(content["val"]["qidxs"]))
    assert queries.ids() == [content["val"]["cids"][row] for row in rows]
    val = FeatureSet.open(str(tmp_path / "data" / "sfm120k-val"))
    np.testing.assert_array_equal(queries.read(), val.read()[rows])
    assert queries.labels().tolist() == [content["val"]["cluster"][row] for row in rows]


def test_sfm120k_in_another_order_or_incomplete_is_refused(tmp_path, run):
    sfm(tmp_path / "shuffled", shuffle=True)
    code, _, err = run("dataset", "sfm120k", tmp_path / "shuffled", "--to", tmp_path / "data")
    assert code == 2
    assert "its rows are not the images of cids in their order" in " ".join(err.split())
    (tmp_path / "shuffled" / "val-gl18.npy").unlink()
    code, _, err = run("dataset", "sfm120k", tmp_path / "shuffled", "--to", tmp_path / "data2")
    assert code == 2
    assert "descriptors of the half 'val'" in " ".join(err.split())


def test_r1m(tmp_path, run):
    x = unit(np.random.default_rng(0).normal(size=(50, DIM)))
    np.save(tmp_path / "a.npy", x[:30])
    np.save(tmp_path / "b.npy", x[30:])
    (tmp_path / "names.txt").write_text("\n".join(f"d{row}" for row in range(50)))
    code, out, err = run(
        "dataset",
        "r1m",
        tmp_path / "a.npy",
        tmp_path / "b.npy",
        "--ids",
        tmp_path / "names.txt",
        "--to",
        tmp_path / "data",
        "--json",
    )
    assert code == 0, err
    features = FeatureSet.open(str(tmp_path / "data" / "r1m"))
    assert features.ids() == [f"d{row}" for row in range(50)]
    np.testing.assert_allclose(features.read().astype(np.float32), x, atol=1e-3)
    assert json.loads(out)["notes"] == ["50 distractors, of 1,001,001 that were published"]


def test_synthetic(tmp_path, run):
    code, out, err = run(
        "dataset",
        "synthetic",
        "--to",
        tmp_path / "data",
        "--scale",
        "0.05",
        "--dim",
        "16",
        "--distractors",
        "64",
        "--json",
    )
    assert code == 0, err
    told = json.loads(out)["sets"]
    assert set(told) == {
        "train",
        "val",
        "val-queries",
        "oxford",
        "oxford-queries",
        "paris",
        "paris-queries",
        "distractors",
    }
    assert told["distractors"]["rows"] == 64
    gnd = load_gnd(tmp_path / "data" / "gnd_oxford.json")
    gnd.check_database(FeatureSet.open(str(tmp_path / "data" / "oxford")).ids())
    gnd.check_queries(FeatureSet.open(str(tmp_path / "data" / "oxford-queries")).ids())


@pytest.mark.parametrize("where", ["disk", pytest.param("s3", marks=pytest.mark.s3)])
def test_photos(tmp_path, run, request, where):
    """All splits of the sets that are there, from a folder or from S3."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    split = np.repeat([0, 1, 2], 20).astype(np.int8)
    isquery = (split > 0) & (np.arange(60) % 5 == 0)
    for name, array in (
        ("vectors", rng.normal(size=(60, 8)).astype(np.float16)),
        ("split", split),
        ("labels", rng.integers(0, 4, 60).astype(np.int32)),
        ("isquery", isquery),
    ):
        np.save(folder / f"cub200_{name}.npy", array)
    source = str(folder)
    if where == "s3":
        source = f"{request.getfixturevalue('s3_uri')}/photos"
        for path in folder.iterdir():
            open_place(source).write(path.name, path.read_bytes())
    code, out, err = run("dataset", "photos", source, "--columns", "4", "--to", tmp_path / "data", "--json")
    assert code == 0, err
    rows = {name: (made["rows"], made["dim"]) for name, made in json.loads(out)["sets"].items()}
    assert rows == {
        "cub200-train": (20, 4),
        "cub200-val": (16, 4),
        "cub200-val-queries": (4, 4),
        "cub200-test": (16, 4),
        "cub200-test-queries": (4, 4),
    }
    (folder / "cub200_split.npy").unlink()
    code, _, err = run("dataset", "photos", folder, "--to", tmp_path / "other")
    assert (code, "lacks cub200_split.npy" in " ".join(err.split())) == (2, True)
