"""`lattqe search`: ranks equal an exact search in memory, with and without expansion; resumed part by part."""

import numpy as np
import pytest
from typer.testing import CliRunner

import jobs.search
import lattqe
from lattqe.errors import LattqeError
from lattqe.expansion import create
from lattqe.expansion import rows as road
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search import FlatIndex
from lattqe.store import FeatureSet, FeatureWriter, Ranks, open_place


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A database, its distractors and queries, sharing some vectors."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1200, 20))
    x[900:950] = x[0]
    folder = tmp_path_factory.mktemp("sets")
    opened = {}
    for name, rows in (("database", x[:700]), ("distractors", x[700:]), ("queries", x[::13] + 0.1)):
        with FeatureWriter(str(folder / name), 20) as writer:
            writer.append(rows, [f"{name}-{i}" for i in range(len(rows))])
        opened[name] = FeatureSet.open(str(folder / name))
    return opened


def search(sets, to, *options):
    arguments = [sets["database"].uri, sets["queries"].uri, "--to", str(to), *map(str, options)]
    result = CliRunner().invoke(jobs.search.app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return Ranks.open(str(to))


def in_memory(sets, k, method=None, nqe=0, distractors=False):
    names = ("database", "distractors") if distractors else ("database",)
    xb = np.concatenate([sets[name].read() for name in names])
    index, xq = FlatIndex(xb), sets["queries"].read()
    if method is not None:
        xq = lattqe.expand(xq, xb, method, nqe)
    return index.search(xq, k)


WAYS = [
    (["--distractors"], {"distractors": True}),
    (
        ["--distractors", "--expand", "alphaqe", "--nqe", 12, "--alpha", 2],
        {"distractors": True, "method": ("alphaqe", {"alpha": 2.0}), "nqe": 12},
    ),
    (["--expand", "dqe", "--nqe", 4], {"method": ("dqe", {}), "nqe": 4}),
]


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--workers", 1], {}), *((["--workers", 2, *words], wanted) for words, wanted in WAYS[1:])],
)
def test_ranks_in_shards_are_those_of_an_exact_search(sets, tmp_path, options, expected):
    """Starting shards takes seconds: plain, with distractors and an expansion, with negatives."""
    check_ranks(sets, tmp_path, options, expected)


@pytest.mark.parametrize(("options", "expected"), [([], {}), *WAYS])
def test_ranks_in_this_process_are_those_of_an_exact_search(sets, tmp_path, options, expected):
    check_ranks(sets, tmp_path, options, expected)


def check_ranks(sets, tmp_path, options, expected):
    options = [
        item
        for option in options
        for item in ([option, sets["distractors"].uri] if option == "--distractors" else [option])
    ]
    if "method" in expected:
        name, params = expected["method"]
        expected = expected | {"method": create(name, **params)}
    ranks = search(sets, tmp_path / "ranks", "-k", 15, *options)
    scores, ids = in_memory(sets, 15, **expected)
    np.testing.assert_array_equal(ranks.read()[0], ids)
    np.testing.assert_array_equal(ranks.read()[1], scores)
    assert ranks.ids() == sets["queries"].ids()
    assert ranks.manifest.inputs["database"]["digest"] == sets["database"].digest


def test_a_stopped_search_goes_on(sets, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.search, "PART_QUERIES", 20)
    calls = []
    real = road.expand_queries

    def stopping(index, xq, *given, **more):
        calls.append(len(xq))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(index, xq, *given, **more)

    monkeypatch.setattr(road, "expand_queries", stopping)
    options = ("-k", 5, "--expand", "aqe", "--nqe", 3)
    with pytest.raises((KeyboardInterrupt, AssertionError)):
        search(sets, tmp_path / "ranks", *options)
    assert calls == [20, 20, 20]
    assert not open_place(str(tmp_path / "ranks")).exists("manifest.json")
    ranks = search(sets, tmp_path / "ranks", *options)
    assert calls == [20, 20, 20, 20, 20, 13], "two parts of five were there already"
    np.testing.assert_array_equal(ranks.read()[0], in_memory(sets, 5, create("aqe"), 3)[1])
    with pytest.raises(LattqeError, match="expand"):
        search(sets, tmp_path / "ranks", "-k", 5)


def test_more_neighbors_than_rows_are_told(sets, tmp_path, call_lattqe):
    words = ("search", sets["database"].uri, sets["queries"].uri, "--expand", "aqe", "--to", tmp_path / "ranks")
    code, _, err = call_lattqe(*words, "-k", 900, "--nqe", 1000)
    assert code == 0
    assert "note: k = 900 is more than the 700 rows: lists are padded\n" in err
    assert "note: nQE = 1,000 is more than the 700 rows: all of them are weighed\n" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nqe", 3], "--nqe needs --expand"),
        (["-k", 3_000_000_000], "k is 3,000,000,000, far more than the 700 rows"),
        (["--expand", "lattqe", "--model", "nowhere"], "nowhere .*: check the address, or leave it out"),
        (["--expand", "aqe", "--alpha", 3], "--alpha belongs to alphaqe"),
        (["--expand", "lattqe", "--model", "lattqe://nothing"], "no model of that name is part of lattqe"),
    ],
)
def test_refusals(sets, tmp_path, options, message):
    with pytest.raises(LattqeError, match=message):
        search(sets, tmp_path / "ranks", *options)


def test_a_model_of_another_width_is_refused_before_anything_is_claimed(sets, tmp_path):
    LAttQE(LAttQEConfig(dim=12, heads=2, layers=1, max_k=8)).save(str(tmp_path / "model"))
    with pytest.raises(LattqeError, match=r"the model .*model does not fit the features in .*database: .* 20 .* 12"):
        search(sets, tmp_path / "ranks", "--expand", "lattqe", "--model", str(tmp_path / "model"))
    assert not (tmp_path / "ranks").exists()
