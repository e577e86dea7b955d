"""More neighbors than a network weighs are refused in one line by whatever is asked, before anything is made.

None of it weighs fewer than were asked for, none finds out after an hour.
"""

import numpy as np
import pytest
import torch

import lattqe
from lattqe.errors import LattqeError
from lattqe.expansion import create
from lattqe.expansion.base import Method
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.store import FeatureWriter

DIM, MOST = 16, 8
TOO_MANY = f"{MOST + 1} neighbors, but this network was made for {MOST}: use {MOST} or fewer"
RELATIONAL = {"width": 16, "relational": True, "background": 12}
NETWORKS = {
    "content": {"heads": 2},
    "relational": {**RELATIONAL, "heads": 2},
    "gated": {**RELATIONAL, "heads": 2, "relation_bias": True, "gated": True, "visual": False},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A database, queries, more rows, and networks for eight neighbors."""
    folder, rng = tmp_path_factory.mktemp("world"), np.random.default_rng(0)
    for name, rows in (("database", 60), ("queries", 5), ("more", 3)):
        with FeatureWriter(str(folder / name), DIM, "float32", labels=True) as writer:
            writer.append(rng.normal(size=(rows, DIM)), [f"{name}-{row}" for row in range(rows)], np.arange(rows) % 4)
    torch.manual_seed(0)
    for name, settings in NETWORKS.items():
        LAttQE(LAttQEConfig(dim=DIM, layers=1, max_k=MOST, **settings)).save(str(folder / name))
    return folder


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "words",
    [
        ("search", "database", "queries", "--expand", "lattqe", "--nqe", MOST + 1),
        ("search", "database", "queries", "--expand", "lattqe", "--nqe", MOST + 1, "--plan"),
        ("augment", "database", "-k", MOST + 1),
        ("augment", "database", "-k", MOST + 1, "--plan"),
    ],
)
def test_by_search_and_augment(world, tmp_path, call_lattqe, network, words):
    here = [world / word if word in ("database", "queries") else word for word in words]
    code, _, err = call_lattqe(*here, "--model", world / network, "--to", tmp_path / "to")
    assert (code, err) == (2, f"error: lattqe: {TOO_MANY}\n")
    assert not (tmp_path / "to").exists()


def test_by_append_to_an_index_of_an_earlier_version(world, tmp_path, call_lattqe, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(Method, "check_k", lambda *_: None)
        words = ("--model", world / "gated", "-k", MOST + 1, "--to", tmp_path / "index")
        assert call_lattqe("augment", world / "database", *words)[0] == 0
    for plan in ((), ("--plan",)):
        words = (tmp_path / "index", world / "more", "--to", tmp_path / "to", *plan)
        code, _, err = call_lattqe("append", *words)
        assert (code, err) == (2, f"error: {tmp_path / 'index'}: {TOO_MANY}\n")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("number", ["nqe", "ndba", "nqe_with_dba", "hops"])
def test_by_a_run_file(world, tmp_path, call_lattqe, network, number):
    numbers = {"nqe": 4, "ndba": 4, "nqe_with_dba": 4}
    numbers |= {"hops": 2, "ndba": MOST + 1} if number == "hops" else {number: MOST + 1}
    (tmp_path / "run.toml").write_text(
        f'[[dataset]]\nname = "one"\ndatabase = "{world / "database"}"\nqueries = "{world / "queries"}"\n'
        f'[[method]]\nmethod = "lattqe"\nmodel = "{world / network}"\n'
        + "".join(f"{key} = {value}\n" for key, value in numbers.items())
    )
    code, _, err = call_lattqe("benchmark", tmp_path / "run.toml", "--to", tmp_path / "to")
    assert (code, err) == (2, f"error: lattqe: {TOO_MANY}\n")
    assert not any((tmp_path / "to").rglob("*.*"))


@pytest.mark.parametrize("network", NETWORKS)
def test_from_python(world, network):
    xq, xb = (lattqe.load(world / name).x for name in ("queries", "database"))
    model = {"model": str(world / network)}
    for refused in (
        lambda k: lattqe.expand(xq, xb, "lattqe", k, **model),
        lambda k: lattqe.search(xq, xb, 3, "lattqe", k, **model),
        lambda k: lattqe.augment(xb, "lattqe", k, **model),
        lambda k: create("lattqe", **model).expand(xq, xb[None, :20].repeat(5, 0), np.ones((5, 20), np.float32), k=k),
    ):
        with pytest.raises(LattqeError, match=f"lattqe: {TOO_MANY}"):
            refused(MOST + 1)
    with pytest.raises(LattqeError, match=f"{MOST + 1} neighbors, but this network"):
        LAttQE.load(model["model"])(torch.tensor(xb[None, : MOST + 2]), k=MOST + 1)
