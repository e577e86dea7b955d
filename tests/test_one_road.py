"""Every way of expanding gives the same answer: the Python API, the verbs, a benchmark cell, validation, verification.

The reference is a loop over single queries with a full float64 ranking that asks the method, or the network itself,
for the weights of one list: nothing of the road is in it.
"""

import json
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import jobs.augment
import jobs.benchmark
import jobs.search
import lattqe
from cluster.shards import ShardedIndex
from jobs.artifacts import verify_app
from jobs.lists import evaluate_app
from lattqe.benchmark.cells import OpenedDataset, measure
from lattqe.benchmark.spec import Dataset, Pipeline, Setting
from lattqe.evaluation import LabelTruth, evaluate
from lattqe.expansion import create
from lattqe.expansion.attention import load_network
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search import FlatIndex
from lattqe.search.index import SmallIndex
from lattqe.store import FeatureSet, FeatureWriter, NeighborGraph, Ranks, open_place, read_manifest
from lattqe.training.checkpoint import Team
from lattqe.training.validation import ValidationSet, load_set, validate, validate_dba

DIM, ROWS, QUERIES, K, LISTED = 24, 400, 40, 6, 15
BOUND = 1e-4  # of a network's vectors: what its fast inference promises
NETWORKS = ("content", "relational", "gated")  # the last was trained for spaces that are adapted to their rows
METHODS = ("aqe", "aqewd", "alphaqe", "dqe", *NETWORKS)
OPTIONS = {"alphaqe": {"alpha": 2.0}, "dqe": {"C": 0.5, "negatives": 7}}
# Queries of the set `mixed`: six are rows, one of them with duplicates; six only have ids of rows.
OWN = np.array([0, 7, 53, 120, 300, 399, -1, -1, -1, -1, -1, -1])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A labelled database with queries around the same centres, duplicates among the rows, queries that are rows, and
    three networks.
    """
    folder = tmp_path_factory.mktemp("road")
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(20, DIM))
    labels = {"database": rng.integers(0, 20, ROWS), "queries": rng.integers(0, 20, QUERIES)}
    for name, of in labels.items():
        x = centres[of] + 1.1 * rng.normal(size=(len(of), DIM))
        if name == "database":
            x[50:55] = x[0]
        with FeatureWriter(str(folder / name), DIM, "float32", labels=True) as writer:
            writer.append(x, [f"{name}-{row}" for row in range(len(x))], of.astype(np.int32))
    (xq, xb), inside = arrays(folder), OWN >= 0
    with FeatureWriter(str(folder / "mixed"), DIM, "float32", labels=True) as writer:
        x = np.where(inside[:, None], xb[OWN], xq[: len(OWN)])
        of = np.where(inside, labels["database"][OWN], labels["queries"][: len(OWN)]).astype(np.int32)
        writer.append(x, [f"database-{row if row >= 0 else 20 + place}" for place, row in enumerate(OWN)], of)
    torch.manual_seed(0)
    content = LAttQE(LAttQEConfig(dim=DIM, heads=4, layers=2, max_k=16, positional_start="small"))
    relational = LAttQE(LAttQEConfig(dim=DIM, width=16, heads=4, layers=1, max_k=16, relational=True, background=64))
    for layer in (relational.head.weight, relational.head.beta):
        torch.nn.init.normal_(layer.weight, std=0.5)
    reads = {"relational": True, "relation_bias": True, "gated": True, "visual": False, "background": 32}
    gated = LAttQE(LAttQEConfig(dim=DIM, width=16, heads=2, layers=1, max_k=16, **reads))
    with torch.no_grad():
        for parameter in gated.head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    for name, network in zip(NETWORKS, (content, relational, gated)):
        network.eval().save(str(folder / name), {"adapt": True} if name == "gated" else {})
    return folder


def arrays(world):
    return FeatureSet.open(str(world / "queries")).read(), FeatureSet.open(str(world / "database")).read()


def augmentable(world, name):
    """The rows as `lattqe augment` takes them: in a space adapted to them, where the method was trained for that."""
    xb = arrays(world)[1]
    return lattqe.adapt(xb).apply(xb) if name == "gated" else xb


def given(world, name):
    """The method's name and parameters; "shipped" is the model that comes with the package."""
    if name == "shipped":
        return "lattqe", {}
    if name in NETWORKS:
        return "lattqe", {"model": str(world / name)}
    return name, OPTIONS.get(name, {})


def options(world, name):
    """The same for a verb."""
    return [word for key, value in given(world, name)[1].items() for word in (f"--{key}", str(value))]


def setting(world, name, k=K):
    method, params = given(world, name)
    return Setting(method, k, tuple(sorted(params.items())))


@cache
def network_of(world, name):
    return load_network(given(world, name)[1].get("model"))


def twin(world, name, x, xb, own=-1, dba=False):
    """Expand one item x (D,), a query or a row (dba), from its ranking of xb, without row `own`."""
    scores = xb.astype(np.float64) @ x.astype(np.float64)
    order = np.lexsort((np.arange(len(xb)), -scores))
    order = order[order != own]
    if name in (*NETWORKS, "shipped"):
        network = network_of(world, name)
        items = np.concatenate([x[None], xb[order[: network.depth(K)]]])
        with torch.no_grad():
            weights = network(torch.from_numpy(items[None]), dba=dba, k=K).weights[0].numpy()
        total = weights @ items
        return total / np.linalg.norm(total)
    method = create(name, **OPTIONS.get(name, {}))
    more = {}
    if method.negatives:
        rest = order[K:]  # the own row is no negative
        more = {"negatives": xb[rest[np.lexsort((rest, scores[rest]))][: method.negatives]][None]}
    return method.expand(x[None], xb[order[:K]][None], scores[order[:K]][None], **more).vectors[0]


@pytest.fixture(scope="module", params=METHODS)
def case(request, world):
    """A method, and what the loop gives for all queries and for every tenth row."""
    xq, xb = arrays(world)
    rows, adapted = np.arange(0, ROWS, 10), augmentable(world, request.param)
    return (
        request.param,
        np.stack([twin(world, request.param, x, xb) for x in xq]),
        rows,
        np.stack([twin(world, request.param, adapted[row], adapted, row, dba=True) for row in rows]),
    )


def test_the_python_api_is_the_loop(world, case):
    name, queries, rows, augmented = case
    xq, xb = arrays(world)
    method, params = given(world, name)
    np.testing.assert_allclose(lattqe.expand(xq, xb, method, K, **params), queries, atol=BOUND)
    rows_made = lattqe.augment(augmentable(world, name), method, K, **params)
    np.testing.assert_allclose(rows_made[rows], augmented, atol=BOUND)


def searched(world, name, to, queries="queries", k=LISTED):
    """What `lattqe search --expand` stores: I and D (nq, k)."""
    words = (world / "database", world / queries, "--to", to, "-k", k)
    call(jobs.search.app, *words, "--expand", given(world, name)[0], "--nqe", K, *options(world, name))
    return Ranks.open(str(to)).read()


@pytest.mark.ray
@pytest.mark.parametrize("shards", [1, 2])
def test_search_in_shards_is_the_python_api(world, shards, tmp_path, monkeypatch, local_ray):
    """All methods ask the same shards: starting them takes long. The whole verb: `tests/jobs/test_jobs_search.py`."""
    xb = arrays(world)[1]
    with ShardedIndex(str(world / "database"), shards, ids=True) as index:
        there = {"where": f"in {index.shards} shards"}
        monkeypatch.setattr(jobs.search, "open_index", lambda *_, **__: nullcontext((index, there)))
        for name in (*METHODS, "shipped"):
            method, params = given(world, name)
            ids, scores = searched(world, name, tmp_path / name, "mixed")
            expanded = lattqe.expand(world / "mixed", world / "database", method, K, **params)
            expected = FlatIndex(xb).search(expanded, LISTED)
            np.testing.assert_array_equal(ids, expected[1], name)
            np.testing.assert_array_equal(scores, expected[0], name)


def test_search_in_this_process_is_the_python_api(world, case, tmp_path):
    name, queries, _, _ = case
    xq, xb = arrays(world)
    method, params = given(world, name)
    ids, scores = searched(world, name, tmp_path / "ranks")
    expected = FlatIndex(xb).search(lattqe.expand(xq, xb, method, K, **params), LISTED)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(scores, expected[0])
    # The loop's ranking, up to rows whose scores are closer than the vectors are.
    of_loop = queries.astype(np.float64) @ xb.T.astype(np.float64)
    np.testing.assert_allclose(
        np.take_along_axis(of_loop, ids, axis=1), -np.sort(-of_loop, axis=1)[:, :LISTED], atol=10 * BOUND
    )


@pytest.mark.parametrize("name", [*METHODS, "shipped"])
def test_queries_that_are_rows_are_not_their_own_neighbors(world, name, tmp_path):
    """By the API with addresses and with arrays, by search and evaluate, by a benchmark cell, by validation."""
    method, params = given(world, name)
    xb, xq = arrays(world)[1], FeatureSet.open(str(world / "mixed")).read()
    expanded = lattqe.expand(world / "mixed", world / "database", method, K, **params)
    np.testing.assert_allclose(expanded, [twin(world, name, x, xb, own) for x, own in zip(xq, OWN)], atol=BOUND)
    np.testing.assert_array_equal(lattqe.expand(xq, xb, method, K, query_rows=OWN, **params), expanded)
    ids, scores = searched(world, name, tmp_path / "ranks", "mixed", ROWS)
    found = lattqe.search(world / "mixed", world / "database", ROWS, method, K, **params)
    np.testing.assert_array_equal(ids, found.I)
    np.testing.assert_array_equal(scores, found.D)
    assert (np.sort(ids, axis=1) == np.arange(ROWS)).all(), "each finds itself all the same"
    told = json.loads(call(evaluate_app, tmp_path / "ranks", "--json", stdout=True))["label"]["map"]
    inputs, measured = OpenedDataset.open(Dataset("mixed", str(world / "database"), str(world / "mixed"))), {}
    one = Pipeline(qe=setting(world, name))
    measure(FlatIndex(xb), xq, inputs.truth, [one], measured.__setitem__, inputs.exclude)
    assert measured[one].scores[0].mean_ap == pytest.approx(told, abs=1e-9)
    if method == "lattqe":
        held_out = load_set(str(world / "database"), str(world / "mixed"))
        validated = validate(network_of(world, name), [held_out], (K,), Team())
        assert validated[str(K)]["mean"] == pytest.approx(100 * told, abs=1e-6)


@pytest.mark.ray
@pytest.mark.parametrize("case", ["relational"], indirect=True)
def test_augment_on_ray_is_augment_in_this_process(world, case, tmp_path, local_ray):
    """The other methods: `tests/cluster/test_cluster_augmentation.py`."""
    method, words = given(world, case[0])[0], options(world, case[0])
    digests = []
    for to, more in (("here", []), ("ray", ["--workers", 2])):
        call(jobs.augment.app, world / "database", "--to", tmp_path / to, "--method", method, "-k", K, *more, *words)
        parts = read_manifest(open_place(str(tmp_path / to))).parts
        digests.append(([part.checksum for part in parts], NeighborGraph.open(str(tmp_path / to / "neighbors")).digest))
    assert digests[0] == digests[1]


def test_augment_is_the_python_api_and_verify_agrees(world, case, tmp_path):
    name = case[0]
    method, params = given(world, name)
    call(
        jobs.augment.app,
        world / "database",
        "--to",
        tmp_path / "index",
        "--method",
        method,
        "-k",
        K,
        *options(world, name),
    )
    index = FeatureSet.open(str(tmp_path / "index"))
    assert ("adaptation" in index.manifest.inputs) == (name == "gated")
    np.testing.assert_allclose(index.read(), lattqe.augment(augmentable(world, name), method, K, **params), atol=BOUND)
    assert "recomputed" in call(verify_app, tmp_path / "index", "--recompute", ROWS)


@pytest.mark.parametrize("index", [FlatIndex, SmallIndex])
def test_a_benchmark_cell_is_the_python_api(world, case, index):
    name = case[0]
    method, params = given(world, name)
    xq, xb = arrays(world)
    truth = label_truth(world)
    measured = {}
    pipelines = [Pipeline(), *(Pipeline(qe=setting(world, name, k)) for k in (K, 2 * K))]
    measure(index(xb), xq, truth, pipelines, measured.__setitem__)
    for k in (K, 2 * K):
        (expected,) = evaluate(FlatIndex(xb), lattqe.expand(xq, xb, method, k, **params), truth).values()
        np.testing.assert_array_equal(measured[Pipeline(qe=setting(world, name, k))].scores[0].ap, expected.ap)


def test_queries_of_an_adapted_index_go_through_its_space(world, tmp_path):
    """Search by the verb, by the API from its address, and the loop in the adapted space: one ranking."""
    index, model = tmp_path / "index", str(world / "gated")
    call(jobs.augment.app, world / "database", "--to", index, "--model", model, "-k", K)
    expand = ("--expand", "lattqe", "--model", model, "--nqe", K)
    call(jobs.search.app, index, world / "queries", "-k", LISTED, "--to", tmp_path / "ranks", *expand)
    ids, scores = Ranks.open(str(tmp_path / "ranks")).read()
    xq, xb = arrays(world)
    there = lattqe.search(xq, str(index), LISTED, expand="lattqe", nqe=K, model=model)
    np.testing.assert_array_equal(ids, there.I)
    np.testing.assert_array_equal(scores, there.D)
    queries, rows = lattqe.adapt(xb).apply(xq), FeatureSet.open(str(index)).read()
    of_loop = np.stack([twin(world, "gated", x, rows) for x in queries]).astype(np.float64) @ rows.T.astype(np.float64)
    np.testing.assert_allclose(
        np.take_along_axis(of_loop, ids, axis=1), -np.sort(-of_loop, axis=1)[:, :LISTED], atol=10 * BOUND
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_a_run_file_measures_what_the_commands_give(world, tmp_path):
    """The model that ships, no option anywhere: augment, search and evaluate, or one run file, which names no more."""
    call(jobs.augment.app, world / "database", "--to", tmp_path / "index")
    ranks = tmp_path / "ranks"
    call(jobs.search.app, tmp_path / "index", world / "queries", "--expand", "lattqe", "-k", ROWS, "--to", ranks)
    told = call(evaluate_app, ranks, "--json")
    expected = json.loads(told[told.index("{") :])["label"]["map"]
    (tmp_path / "run.toml").write_text(
        "nqe_sweep = [8]\nbootstrap = 100\n"
        f'[[dataset]]\nname = "towns"\ndatabase = "{world / "database"}"\nqueries = "{world / "queries"}"\n'
        '[[method]]\nmethod = "lattqe"\n'
    )
    call(jobs.benchmark.app, tmp_path / "run.toml", "--to", tmp_path / "bench")
    rows = json.loads((tmp_path / "bench" / "results.json").read_text())["table3"]
    (found,) = (row["mean"] for row in rows if row["label"] == "LAttDBA, 8 hops + LAttQE")
    assert found == pytest.approx(100 * expected, abs=1e-9)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("name", ["aqe", "aqewd", "alphaqe", "dqe", "gated"])
def test_hops_of_a_run_file_are_those_of_the_commands(world, tmp_path, name):
    """`hops` and `hop_alpha` of any method: one line of a run file, or augment, search and evaluate.

    For two of them some queries are rows of the database, which one of them adapts.
    """
    queries = "mixed" if name in ("dqe", "gated") else "queries"
    method, words = given(world, name)[0], options(world, name)
    hops = ("--method", method, "-k", K, "--hops", 4, "--hop-alpha", 0.8)
    call(jobs.augment.app, world / "database", "--to", tmp_path / "index", *hops, *words)
    search = (tmp_path / "index", world / queries, "--expand", method, "--nqe", 3, "-k", ROWS)
    told = " ".join(call(jobs.search.app, *search, "--to", tmp_path / "ranks", *words).split())
    assert ("6 queries are rows of the database" in told) == (queries == "mixed")
    told = call(evaluate_app, tmp_path / "ranks", "--json")
    expected = json.loads(told[told.index("{") :])["label"]["map"]
    (tmp_path / "run.toml").write_text(
        "nqe_sweep = [8]\nbootstrap = 100\n"
        f'[[dataset]]\nname = "towns"\ndatabase = "{world / "database"}"\nqueries = "{world / queries}"\n'
        f'[[method]]\nmethod = "{method}"\nnqe = {K}\nndba = {K}\nnqe_with_dba = 3\nhops = 4\nhop_alpha = 0.8\n'
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in given(world, name)[1].items())
    )
    call(jobs.benchmark.app, tmp_path / "run.toml", "--to", tmp_path / "bench")
    results = json.loads((tmp_path / "bench" / "results.json").read_text())
    (row,) = (row for row in results["table3"] if "4 hops" in row["label"])
    assert row["mean"] == pytest.approx(100 * expected, abs=1e-9)
    assert row["mean"] != results["table3"][-2]["mean"], "the line without hops is another"
    text = (tmp_path / "bench" / "results.csv").read_text()
    assert "hops 4, hop α 0.8" in text


@pytest.mark.parametrize("name", NETWORKS)
def test_validation_is_the_python_api(world, name):
    network = LAttQE.load(str(world / name))
    xq, xb = arrays(world)
    labels = {each: FeatureSet.open(str(world / each)).labels() for each in ("database", "queries")}
    one = ValidationSet("one", xb, labels["database"], xq, labels["queries"])
    truth = label_truth(world)

    def mean_ap(queries, rows):
        (scores,) = evaluate(FlatIndex(rows), queries, truth).values()
        return 100 * scores.mean_ap

    found = validate(network, [one], (K, 2 * K), Team())
    for k in (K, 2 * K):
        assert found[str(k)]["one"] == pytest.approx(mean_ap(lattqe.expand(xq, xb, "lattqe", k, model=network), xb))
    if name == "gated":
        space = lattqe.adapt(xb)
        xq, xb = space.apply(xq), space.apply(xb)
    index = lattqe.augment(xb, "lattqe", K, model=network)
    with_dba = validate_dba(network, [one], (K,), (4,), Team(), adapt=name == "gated")[str(K)]
    assert with_dba["0"] == pytest.approx(mean_ap(xq, index), abs=0.1)  # shared products move the last bits
    assert with_dba["4"] == pytest.approx(mean_ap(lattqe.expand(xq, index, "lattqe", 4, model=network), index), abs=0.1)


def label_truth(world):
    labels = {each: FeatureSet.open(str(world / each)).labels() for each in ("database", "queries")}
    return LabelTruth(labels["database"], query_labels=labels["queries"])


def call(app, *words, stdout=False):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout if stdout else result.output


def test_a_shorter_precision_is_chosen_on_the_command_line(world, tmp_path):
    def run(app, *arguments):
        return CliRunner().invoke(app, list(map(str, arguments)))

    def augmented(name, *more):
        asked = (world / "database", "--model", world / "content", "-k", K, "--to", tmp_path / name, *more)
        return run(jobs.augment.app, *asked)

    for name, more in (("float32", ()), ("int8", ("--precision", "int8"))):
        assert augmented(name, *more).exit_code == 0
    full, short = (FeatureSet.open(str(tmp_path / name)) for name in ("float32", "int8"))
    assert (full.manifest.config["params"], short.manifest.config["params"]["precision"]) == ({"dba": True}, "int8")
    assert full.digest != short.digest
    assert (full.read() * short.read()).sum(axis=1).min() > 0.999
    assert run(verify_app, tmp_path / "int8", "--recompute", 50).exit_code == 0

    refused = {"half": "needs a GPU", "float8": "unknown precision 'float8': use one of float32, int8, half"}
    for precision, told in refused.items():
        assert told in str(augmented(precision, "--precision", precision).exception)
        assert not (tmp_path / precision).exists()
    search = (world / "database", world / "queries", "--expand", "lattqe", "--to", tmp_path / "ranks")
    done = run(jobs.search.app, *search, "--precision", "int8")
    assert "leave --precision out" in str(done.exception), "the model that ships is relational"
    assert run(jobs.search.app, *search, "--model", world / "content", "--precision", "int8").exit_code == 0
