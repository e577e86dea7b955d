"""`lattqe augment --adapt`, and every verb that meets an index in an adapted space."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import jobs.augment
import lattqe
from lattqe.adaptation import Adaptation
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.store import FeatureSet, FeatureWriter, Ranks
from lattqe.whitening import whiten_features

ROWS, QUERIES, DIM, K, LISTED = 700, 40, 24, 6, 20  # two centres
ALPHA = ("--method", "alphaqe", "--alpha", 2, "-k", K)


def write(uri, x, name):
    with FeatureWriter(str(uri), DIM, "float32") as writer:
        writer.append(x, [f"{name}-{row}" for row in range(len(x))])
    return FeatureSet.open(str(uri))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A database of classes whose images differ in a few directions; queries and newcomers; an adapted index of it."""
    folder, rng = tmp_path_factory.mktemp("adapted"), np.random.default_rng(3)
    centres, few = rng.normal(size=(35, DIM)), rng.normal(size=(3, DIM))
    for name, rows in (("database", ROWS), ("queries", QUERIES), ("newcomers", 12), ("others", 50)):
        of = rng.integers(0, 35, rows)
        x = centres[of] + 0.4 * rng.normal(size=(rows, DIM)) + 0.8 * rng.normal(size=(rows, 3)) @ few
        write(folder / name, x, name)
    jobs.augment.app(
        [*map(str, (folder / "database", *ALPHA, "--adapt", "--to", folder / "index"))], standalone_mode=False
    )
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A gated network that was trained for adapted collections, as its metrics say."""
    torch.manual_seed(0)
    reads = {"relational": True, "relation_bias": True, "gated": True, "visual": False, "background": 16}
    network = LAttQE(LAttQEConfig(dim=DIM, width=8, heads=2, layers=1, max_k=16, **reads)).eval()
    with torch.no_grad():
        for parameter in network.head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    uri = str(tmp_path_factory.mktemp("model") / "model")
    network.save(uri, {"nqe": K, "ndba": K, "nqe_with_dba": K, "adapt": True})
    return uri


def rows_of(world, name):
    return FeatureSet.open(str(world / name)).read()


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def ranks(call_lattqe, index, queries, to, *more):
    code, _, err = call_lattqe("search", index, queries, "-k", LISTED, "--to", to, *more)
    assert code == 0, err
    return Ranks.open(str(to)).read()


def refused(call_lattqe, *words):
    """The one line that a command is refused with."""
    code, out, err = call_lattqe(*words)
    assert (code, out) == (2, ""), err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    return line


def test_a_model_trained_for_it_adapts_and_search_is_the_python_api(world, model, tmp_path, call_lattqe):
    index = tmp_path / "index"
    code, _, err = call_lattqe("augment", world / "database", "--model", model, "--to", index)
    assert code == 0, err
    assert "without labels" in err
    opened = FeatureSet.open(str(index))
    assert opened.manifest.config["adapt"] is True
    space = lattqe.adapt(rows_of(world, "database"))
    np.testing.assert_array_equal(Adaptation.load(f"{index}/adaptation")[0].maps, space.maps)
    xb, xq = (space.apply(rows_of(world, name)) for name in ("database", "queries"))
    np.testing.assert_allclose(FeatureSet.open(f"{index}/adapted").read(), xb, atol=1e-6)
    augmented = lattqe.augment(xb, "lattqe", K, model=model)
    np.testing.assert_allclose(opened.read(), augmented, atol=1e-4)
    found, scores = ranks(
        call_lattqe, index, world / "queries", tmp_path / "ranks", "--expand", "lattqe", "--model", model
    )
    expected = lattqe.search(xq, augmented, LISTED, expand="lattqe", nqe=K, model=model)
    np.testing.assert_array_equal(found, expected.I)
    np.testing.assert_allclose(scores, expected.D, atol=1e-4)
    for queries in (rows_of(world, "queries"), str(world / "queries")):
        there = lattqe.search(queries, str(index), LISTED, expand="lattqe", model=model)
        np.testing.assert_array_equal(there.I, found)
    assert call_lattqe("verify", index, "--recompute", 100)[0] == 0


def test_without_it_or_with_a_graph_a_model_does_not_adapt(world, model, tmp_path, call_lattqe):
    assert call_lattqe("neighbors", world / "database", "-k", 64, "--to", tmp_path / "graph")[0] == 0
    graph = ("--neighbors", tmp_path / "graph")
    assert call_lattqe("augment", world / "database", "--model", model, *graph, "--to", tmp_path / "with-graph")[0] == 0
    assert call_lattqe("augment", world / "database", *ALPHA, "--to", tmp_path / "plain")[0] == 0
    for name in ("with-graph", "plain"):
        index = FeatureSet.open(str(tmp_path / name))
        assert "adapt" not in index.manifest.config
        assert not (tmp_path / name / "adaptation").exists()
    line = refused(call_lattqe, "augment", world / "database", *ALPHA, *graph, "--adapt", "--to", tmp_path / "none")
    assert "leave --neighbors out" in line
    assert not (tmp_path / "none").exists()


def test_the_same_command_again_finds_it_done_and_another_is_refused(world, call_lattqe, monkeypatch):
    before, command = files_of(world / "index"), ("augment", world / "database", *ALPHA, "--to", world / "index")
    monkeypatch.setattr("jobs.augment.on_ray", None)  # a call would fail
    for more in ((), ("--workers", 2)):
        code, _, err = call_lattqe(*command, "--adapt", *more)
        assert code == 0, err
        assert "is already up to date" in err
    assert "config.adapt: true there, null here" in refused(call_lattqe, *command, "--no-adapt")
    other = ("augment", world / "others", *ALPHA, "--adapt", "--to", world / "index")
    assert "is of other features" in refused(call_lattqe, *other)
    assert files_of(world / "index") == before, "nothing new, nothing left"


def test_a_space_is_not_adapted_twice(world, model, tmp_path, call_lattqe):
    adapted = world / "index" / "adapted"
    line = refused(call_lattqe, "augment", adapted, *ALPHA, "--adapt", "--to", tmp_path / "twice")
    assert "is adapted to its collection already: leave --adapt out" in line
    assert not (tmp_path / "twice").exists()
    assert call_lattqe("augment", adapted, "--model", model, "--to", tmp_path / "once")[0] == 0
    assert call_lattqe("augment", adapted, *ALPHA, "--to", tmp_path / "index")[0] == 0
    assert not (tmp_path / "once" / "adaptation").exists()
    # Queries of an index of adapted rows go through their adaptation, wherever it is; so do newcomers.
    found = ranks(call_lattqe, tmp_path / "index", world / "queries", tmp_path / "ranks")
    expected = ranks(call_lattqe, world / "index", world / "queries", tmp_path / "expected")
    np.testing.assert_array_equal(found[0], expected[0])
    assert call_lattqe("append", tmp_path / "index", world / "newcomers", "--to", tmp_path / "grown")[0] == 0
    space = Adaptation.load(f"{tmp_path}/grown/adaptation")[0]
    joined = FeatureSet.open(f"{tmp_path}/grown/originals").read(ROWS, ROWS + 12)
    np.testing.assert_allclose(joined, space.apply(rows_of(world, "newcomers")), atol=1e-6)


def test_queries_may_be_adapted_before_but_not_to_another_collection(world, tmp_path, call_lattqe):
    index, plain = world / "index", ranks(call_lattqe, world / "index", world / "queries", tmp_path / "plain")
    apply = ("whiten", "apply", world / "queries", "--whitening", index / "adaptation", "--to", tmp_path / "queries")
    assert call_lattqe(*apply)[0] == 0
    found = ranks(call_lattqe, index, tmp_path / "queries", tmp_path / "ranks")
    np.testing.assert_array_equal(found[0], plain[0])
    np.testing.assert_array_equal(found[0], lattqe.search(str(tmp_path / "queries"), str(index), LISTED).I)

    lattqe.adapt(rows_of(world, "others")).save(str(tmp_path / "elsewhere"))
    whiten_features(FeatureSet.open(str(world / "queries")), str(tmp_path / "elsewhere"), str(tmp_path / "foreign"))
    line = refused(call_lattqe, "search", index, tmp_path / "foreign", "--to", tmp_path / "none")
    assert "was adapted to another collection than" in line
    line = refused(call_lattqe, "search", world / "database", tmp_path / "queries", "--to", tmp_path / "none")
    assert "was adapted to another collection than" in line
    for joining in ((index, tmp_path / "foreign"), (tmp_path / "plain-index", tmp_path / "queries")):
        call_lattqe("augment", world / "database", *ALPHA, "--to", tmp_path / "plain-index")
        assert "was adapted to another" in refused(call_lattqe, "append", *joining, "--to", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_distractors_must_be_adapted(world, tmp_path, call_lattqe):
    search = ("search", world / "index", world / "queries", "-k", LISTED, "--to", tmp_path / "ranks", "--distractors")
    line = refused(call_lattqe, *search, world / "others")
    remedy = f"lattqe whiten apply {world}/others --whitening {world}/index/adaptation --to …"
    assert remedy in line
    assert not (tmp_path / "ranks").exists()
    assert call_lattqe(*remedy.split()[1:-1], tmp_path / "adapted")[0] == 0
    assert call_lattqe(*search, tmp_path / "adapted")[0] == 0
    space = Adaptation.load(f"{world}/index/adaptation")[0]
    rows = np.concatenate([rows_of(world, "index"), space.apply(rows_of(world, "others"))])
    expected = lattqe.search(space.apply(rows_of(world, "queries")), rows, LISTED)
    np.testing.assert_array_equal(Ranks.open(str(tmp_path / "ranks")).read()[0], expected.I)


def test_a_grown_index_needs_nothing_of_the_old_one(world, tmp_path, call_lattqe):
    shutil.copytree(world / "index", tmp_path / "old")
    (tmp_path / "gone.txt").write_text("database-5\ndatabase-77\n")
    grow = ("append", tmp_path / "old", world / "newcomers", "--remove", tmp_path / "gone.txt")
    code, _, err = call_lattqe(*grow, "--to", tmp_path / "grown")
    assert code == 0, err
    before = ranks(call_lattqe, tmp_path / "grown", world / "queries", tmp_path / "before")
    shutil.rmtree(tmp_path / "old")
    (tmp_path / "grown").rename(tmp_path / "moved")
    code, _, err = call_lattqe("verify", tmp_path / "moved", "--recompute", 200)
    assert code == 0, err
    after = ranks(call_lattqe, tmp_path / "moved", world / "queries", tmp_path / "after")
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1], after[1])
    space = Adaptation.load(f"{tmp_path}/moved/adaptation")[0]
    assert FeatureSet.open(str(tmp_path / "moved")).ids()[-12:] == [f"newcomers-{row}" for row in range(12)]
    rows = np.concatenate([np.delete(rows_of(world, "database"), [5, 77], axis=0), rows_of(world, "newcomers")])
    expected = lattqe.augment(space.apply(rows), "alphaqe", K, alpha=2.0)
    np.testing.assert_allclose(rows_of(tmp_path, "moved"), expected, atol=1e-5)


def test_a_moved_index_finds_its_adaptation_inside(world, tmp_path, call_lattqe):
    before = ranks(call_lattqe, world / "index", world / "queries", tmp_path / "before")
    shutil.copytree(world / "index", tmp_path / "elsewhere")
    (world / "index").rename(world / "hidden")
    try:
        after = ranks(call_lattqe, tmp_path / "elsewhere", world / "queries", tmp_path / "after")
        assert call_lattqe("verify", tmp_path / "elsewhere", "--recompute", 50)[0] == 0
    finally:
        (world / "hidden").rename(world / "index")
    np.testing.assert_array_equal(before[0], after[0])
    shutil.rmtree(tmp_path / "elsewhere" / "adaptation")
    shutil.copytree(world / "newcomers", tmp_path / "elsewhere" / "adaptation")
    assert ranks(call_lattqe, tmp_path / "elsewhere", world / "queries", tmp_path / "recorded")[0].tolist() == (
        before[0].tolist()
    ), "what has another digest is passed over for where it was"


def test_info_and_export_say_that_the_space_is_adapted(world, tmp_path, call_lattqe):
    code, out, _ = call_lattqe("info", world / "index")
    assert code == 0
    assert "with adapt" in out
    assert "from adaptation" in out
    for uri in (world / "index", world / "index" / "adapted"):
        code, _, err = call_lattqe("export", uri, "--to", tmp_path / f"{uri.name}.npy")
        assert code == 0
        assert err.count("note:") == 1
        assert f"`lattqe whiten apply QUERIES --whitening {world}/index/adaptation --to …`" in err
    assert "note:" not in call_lattqe("export", world / "database", "--to", tmp_path / "plain.npy")[2]
    assert call_lattqe("verify", world / "index" / "adaptation")[0] == 0


@pytest.mark.parametrize("kept", [["adaptation"], ["adaptation", "adapted"], ["adaptation", "adapted", "neighbors"]])
def test_whatever_was_finished_the_same_command_ends_in_the_same_bytes(world, tmp_path, call_lattqe, kept):
    command = ("augment", world / "others", *ALPHA, "--adapt", "--to", tmp_path / "index")
    assert call_lattqe(*command)[0] == 0
    whole = files_of(tmp_path / "index")
    for path in (tmp_path / "index").iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert call_lattqe(*command)[0] == 0
    assert files_of(tmp_path / "index") == whole


def test_killed_while_rows_are_adapted_it_goes_on(world, tmp_path, call_lattqe, monkeypatch):
    command = ("augment", world / "others", *ALPHA, "--adapt", "--to", tmp_path / "index")

    def dying(*_):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("lattqe.whitening._whiten_rows", dying)
        with pytest.raises(RuntimeError):
            call_lattqe(*command)
    assert not (tmp_path / "index" / "adapted" / "manifest.json").exists()
    assert call_lattqe(*command)[0] == 0
    resumed = files_of(tmp_path / "index")
    shutil.rmtree(tmp_path / "index")
    assert call_lattqe(*command)[0] == 0
    assert files_of(tmp_path / "index") == resumed


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_few_rows_are_an_index_too(world, tmp_path, call_lattqe, rows):
    write(tmp_path / "few", rows_of(world, "others")[:rows], "few")
    assert call_lattqe("augment", tmp_path / "few", *ALPHA, "--adapt", "--to", tmp_path / "index")[0] == 0
    assert ranks(call_lattqe, tmp_path / "index", world / "queries", tmp_path / "ranks")[0].shape == (QUERIES, LISTED)
