"""Run files: the shipped example is read as it says, and every mistake is refused by name."""

import json
from pathlib import Path

import pytest

from lattqe.benchmark.runfile import load_run, parse_run
from lattqe.benchmark.spec import Pipeline, Setting
from lattqe.errors import LattqeError
from lattqe.store import save_model

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "run.toml"
DATASET = {"name": "a", "database": "db", "queries": "q"}
AQE = {"method": "aqe", "nqe": 4}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that looks like a model and says what its training chose."""
    import numpy as np

    save_model(
        str(tmp_path / "model"),
        {"x": np.zeros(1, np.float32)},
        {"network": {"max_k": 128}},
        {"chosen": {"nqe": 32, "ndba": 16, "nqe_with_dba": 24}},
    )
    return str(tmp_path / "model")


def test_the_example_is_a_valid_run(tmp_path: Path, model: str) -> None:
    text = EXAMPLE.read_text()
    (tmp_path / "run.toml").write_text(text)
    for name in ("no-attention", "no-position"):
        (tmp_path / name).symlink_to(model)
    run = load_run(tmp_path / "run.toml")
    assert [dataset.role for dataset in run.datasets] == ["test", "test", "validation"]
    assert run.datasets[0].database == str(tmp_path / "roxford5k")
    assert run.distractors_of("roxford5k")[0].features.startswith("s3://")
    assert [method.choose for method in run.methods] == ["test", "validation", "test", "fixed", "model"]
    assert (run.methods[-1].nqe, run.methods[-1].ndba, run.methods[-1].nqe_with_dba) == ((32,), (16,), (24,))
    assert [each.nqe for each in run.ablations] == [32, 32]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"dataset": [DATASET]}, "no \\[\\[method\\]\\]"),
        ({"method": [AQE]}, "no \\[\\[dataset\\]\\] with role 'test'"),
        ({"dataset": [DATASET], "method": [AQE], "metods": 1}, "unknown key 'metods'"),
        ({"dataset": DATASET, "method": [AQE]}, "write each dataset as a table"),
        ({"dataset": [DATASET | {"rôle": "test"}], "method": [AQE]}, "dataset 1: unknown key 'rôle'"),
        ({"dataset": [DATASET | {"role": "train"}], "method": [AQE]}, "role is 'train'"),
        ({"dataset": [{"name": "a", "database": "db"}], "method": [AQE]}, "queries must be a string"),
        ({"dataset": [DATASET, DATASET], "method": [AQE]}, "two entries of \\[\\[dataset\\]\\] are called 'a'"),
        ({"dataset": [DATASET], "method": [AQE, AQE]}, "two entries of \\[\\[method\\]\\] are called 'AQE'"),
        ({"dataset": [DATASET], "method": [{"method": "aqee", "nqe": 4}]}, "method is 'aqee': use one of aqe"),
        ({"dataset": [DATASET], "method": [{"method": "aqe"}]}, "needs nqe"),
        ({"dataset": [DATASET], "method": [AQE | {"nqe": [2, 4]}]}, "fixed but has several settings"),
        ({"dataset": [DATASET], "method": [AQE | {"nqe": 0}]}, "whole numbers from 1, not 0"),
        ({"dataset": [DATASET], "method": [AQE | {"nqe": []}]}, "empty list"),
        ({"dataset": [DATASET], "method": [AQE | {"alpha": 3}]}, "unknown key 'alpha'"),
        (
            {"dataset": [DATASET], "method": [{"method": "alphaqe", "nqe": 4, "alpha": "3"}]},
            "alpha must be float numbers",
        ),
        ({"dataset": [DATASET], "method": [AQE | {"choose": "oracle"}]}, "choose is 'oracle'"),
        ({"dataset": [DATASET], "method": [AQE | {"choose": "validation", "nqe": [2, 4]}]}, "no .* role 'validation'"),
        (
            {"dataset": [DATASET], "method": [AQE], "distractors": [{"name": "d", "features": "x", "of": "b"}]},
            "belong to 'b'",
        ),
        ({"dataset": [DATASET], "method": [AQE], "graphs": "graph"}, "graphs must be a list of addresses, not 'graph'"),
        ({"dataset": [DATASET], "method": [AQE], "graphs": [1]}, "graphs must be a string, not 1"),
        ({"dataset": [DATASET], "method": [AQE], "published": "yes"}, "published must be true or false"),
        ({"dataset": [DATASET], "method": [{"method": "lattqe", "model": "m", "ndba": 4}]}, "ndba without nqe"),
    ],
)
def test_mistakes_are_refused_by_name(content: dict[str, object], words: str) -> None:
    with pytest.raises(LattqeError, match=words) as caught:
        parse_run(content, Path("."), "run.toml")
    assert "run.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("named", [{}, {"model": "universal"}, {"nqe": 8}])
def test_the_model_that_ships_needs_no_address(named: dict[str, object]) -> None:
    content = {"dataset": [DATASET], "method": [{"method": "lattqe", **named}]}
    run = parse_run(content, Path("elsewhere"), "run.toml")
    (method,) = run.methods
    assert method.params["model"] == ("lattqe://universal",)
    assert method.choose == ("fixed" if "nqe" in named else "model")
    hopping = [dict(each.pipelines[0].dba.params) for each in run.graph_methods if each.pipelines[0].dba]
    assert [each["hops"] for each in hopping] == ([] if "nqe" in named else [8]), "what `lattqe augment` would do"


def test_two_labels_of_one_model_are_two_rows_each() -> None:
    content = {"dataset": [DATASET], "method": [{"method": "lattqe"}, {"method": "lattqe", "label": "ours"}]}
    run = parse_run(content, Path("elsewhere"), "run.toml")
    assert [each.label for each in run.entries] == ["LAttQE", "ours", "LAttDBA, 8 hops + LAttQE", "ours, 8 hops"]


def test_a_model_that_chose_nothing_must_be_told_what_to_use(tmp_path: Path) -> None:
    import numpy as np

    save_model(str(tmp_path / "model"), {"x": np.zeros(1, np.float32)}, {}, {})
    content = {"dataset": [DATASET], "method": [{"method": "lattqe", "model": "model"}]}
    with pytest.raises(LattqeError, match="give nqe, ndba"):
        parse_run(content, tmp_path, "run.toml")


def test_the_variants_of_a_finished_ablation_make_table_2(tmp_path: Path, model: str) -> None:
    made = tmp_path / "ablations"
    made.mkdir()
    (made / "full").symlink_to(model)
    (made / "no-attention").symlink_to(model)
    (made / "ablations.json").write_text(json.dumps({"full": {"nqe": 5}, "no-attention": {}, "../evil": {}}))
    content = {"dataset": [DATASET], "method": [{"method": "aqe", "nqe": 4}], "ablations": "ablations"}
    found = parse_run(content, tmp_path, "run.toml").ablations
    assert [(each.label, each.model, each.nqe) for each in found] == [
        (f"{name}, nQE {k}", str(made / name), k) for name in ("full", "no-attention") for k in (64, 32)
    ]
    for text, words in ((None, "has no ablations.json"), ("{", "not valid JSON")):
        (made / "ablations.json").unlink()
        if text is not None:
            (made / "ablations.json").write_text(text)
        with pytest.raises(LattqeError, match=words):
            parse_run(content, tmp_path, "run.toml")
        (made / "ablations.json").touch()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("bootstrap = " + "9" * 5_000, "not valid TOML"),
        ("bootstrap = " + "9" * 400, "a number beyond 64 bits"),
        ("title = 0x" + "f" * 9_000, "a number beyond 64 bits"),
        ("title" + ".a" * 9_000 + " = 1", "nested too deeply"),
        ("x" * 70 + " . y" * 70 + " = 1", "nested too deeply"),
        ("title = " + "x" * 1_000_000, "not valid TOML"),  # hours, where a word is searched from each of its letters
        ("bootstrap = nan", "has nan where a number is needed"),
        ("# " + "x" * (1 << 20), "more than 1,048,576 bytes"),
        ('title = "\\u0000"\nbootstrap = 1_000_000_000_000', "bootstrap is 1e\\+12: use at most 1,000,000"),
        ('[[method]]\nmethod = "aqe"\nnqe = 2_000_000', "nqe is 2e\\+06: use at most 1,000,000"),
    ],
)
def test_hostile_files_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(LattqeError, match=words) as caught:
        load_run(tmp_path / "run.toml")
    assert "\n" not in str(caught.value)


GRAPH = {"method": "diffusion"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (GRAPH | {"kq": [5, 10]}, "fixed but has several settings"),
        (GRAPH | {"hops": 3}, "unknown key 'hops'"),
        (GRAPH | {"alpha": 1.0}, "alpha is 1.0: use a share from 0 to below 1"),
        (GRAPH | {"kq": 0}, "kq is 0"),
        (GRAPH | {"nqe": 4}, "ndba and nqe of diffusion need before"),
        (GRAPH | {"before": "aqe"}, "before needs ndba or nqe"),
        (GRAPH | {"before": "lattqe", "nqe": 4}, "before is 'lattqe': use one of aqe, aqewd"),
        ({"method": "propagation", "hops": 1000}, "hops is 1000|1000 hops"),
        ({"method": "alphaqe", "nqe": 4, "alpha": -1}, "alpha is -1.0"),
    ],
)
def test_mistakes_in_graph_methods_are_refused_by_name(entry: dict[str, object], words: str) -> None:
    with pytest.raises(LattqeError, match=words) as caught:
        parse_run({"dataset": [DATASET], "method": [entry]}, Path("."), "run.toml")
    assert "run.toml, method 1" in str(caught.value)


def test_a_graph_method_comes_after_what_is_done_before(tmp_path: Path) -> None:
    entry = GRAPH | {"before": "aqewd", "ndba": 12, "nqe": 8, "kq": [10, 20], "gamma": 6, "choose": "test"}
    hopping = {"method": "propagation", "before": "aqewd", "nqe": 12}
    run = parse_run({"dataset": [DATASET], "method": [AQE, entry, hopping]}, tmp_path, "run.toml")
    assert [method.label for method in run.entries] == ["AQE", "diffusion", "propagation"]
    first, second = run.graph_methods[0].pipelines
    assert (first.dba, first.qe) == (Setting("aqewd", 12), Setting("aqewd", 8))
    assert [each.rank.k for each in (first, second)] == [10, 20]  # type: ignore[union-attr]
    assert dict(first.rank.params) == {"alpha": 0.99, "gamma": 6.0, "kd": 20}  # type: ignore[union-attr]
    (only,) = run.graph_methods[1].pipelines
    assert (only.dba.method, only.dba.k, only.qe) == ("propagation", 10, Setting("aqewd", 12))  # type: ignore[union-attr]


AUGMENTED = {"method": "alphaqe", "nqe": 4, "ndba": 6, "hops": 4}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (AUGMENTED | {"hops": 0}, "hops must be whole numbers from 1, not 0"),
        (AUGMENTED | {"hops": "4"}, "hops must be whole numbers from 1, not '4'"),
        (AUGMENTED | {"hops": 1}, "hops is 1, which ndba alone measures already: use 2 or more"),
        (AUGMENTED | {"hops": 65}, "hops is 65: use a whole number from 1 .* to 64"),
        (AUGMENTED | {"hops": [2, 4]}, "method 'αQE' is fixed but has several settings"),
        (AUGMENTED | {"hop_alpha": [0.8, 0.9]}, "method 'αQE' is fixed but has several settings"),
        (AUGMENTED | {"hop_alpha": 1.0}, "hop_alpha: the share of the neighbors is 1.0: use a number between 0 and 1"),
        (AUGMENTED | {"hop_alpha": "much"}, "hop_alpha must be float numbers, not 'much'"),
        ({"method": "alphaqe", "nqe": 4, "hops": 4}, "hops need ndba"),
        ({"method": "alphaqe", "nqe": 4, "ndba": 6, "hop_alpha": 0.9}, "hop_alpha needs hops"),
        ({"method": "lattqe", "hops": 4}, "hops without nqe"),
    ],
)
def test_mistakes_in_hops_are_refused_by_name(entry: dict[str, object], words: str) -> None:
    with pytest.raises(LattqeError, match=words) as caught:
        parse_run({"dataset": [DATASET], "method": [entry]}, Path("."), "run.toml")
    assert "run.toml, method 1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_method_can_hop() -> None:
    """One more line for each entry, over all of its values; that of a trained model is in the space it was made for."""
    names = ("aqe", "aqewd", "alphaqe", "dqe", "lattqe")
    entries = [{"method": name, "nqe": 4, "ndba": 6, "hops": 4, "hop_alpha": 0.8} for name in names]
    entries.append({"method": "alphaqe", "label": "mine", "choose": "test", "nqe": 4, "ndba": [5, 6], "hops": [2, 3]})
    run = parse_run({"dataset": [DATASET], "method": entries}, Path("."), "run.toml")
    assert [each.label for each in run.graph_methods] == [
        "ADBA, 4 hops + AQE",
        "ADBAwD, 4 hops + AQEwD",
        "αDBA, 4 hops + αQE",
        "DDBA, 4 hops + DQE",
        "LAttDBA, 4 hops + LAttQE",
        "αDBA, 2 or 3 hops + mine",
    ]
    (first,) = run.graph_methods[0].pipelines
    assert first == Pipeline(Setting("aqe", 6, (("hop_alpha", 0.8), ("hops", 4))), Setting("aqe", 4))
    (learned,) = run.graph_methods[4].pipelines
    assert dict(learned.dba.params) == {  # type: ignore[union-attr]
        "adapt": True, "hop_alpha": 0.8, "hops": 4, "model": "lattqe://universal",
    }  # fmt: skip
    grid = run.graph_methods[5]
    assert (grid.choose, len(grid.pipelines)) == ("test", 4)
    assert {(each.dba.k, *each.dba.params) for each in grid.pipelines} == {  # type: ignore[union-attr]
        (k, ("hops", hops)) for k in (5, 6) for hops in (2, 3)
    }


def test_files_that_are_no_toml_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(LattqeError, match="cannot read"):
        load_run(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("title = ")
    with pytest.raises(LattqeError, match="not valid TOML"):
        load_run(tmp_path / "bad.toml")
