"""`lattqe ablate`: what it refuses, and that training one more variant keeps the others in the table."""

import json
from pathlib import Path

import pytest
from training_sets import TINY, write_sets
from typer.testing import CliRunner

from jobs.train import PRESET_NAMES, ablate_app, app, finished
from lattqe.errors import LattqeError
from lattqe.store import open_place
from lattqe.training import PRESETS, preset
from lattqe.training.config import variants


def arguments(folder: Path, *more: str) -> list[str]:
    sets = (
        write_sets(folder / "sets")
        if not (folder / "sets").exists()
        else {name: str(folder / "sets" / name) for name in ("a", "database", "queries")}
    )
    chosen = [part for setting in TINY for part in ("--set", setting)]
    return [
        sets["a"],
        "--val",
        sets["database"],
        "--queries",
        sets["queries"],
        "--to",
        str(folder / "to"),
        *chosen,
        *more,
    ]


def test_queries_must_be_as_many_as_databases(tmp_path: Path) -> None:
    done = CliRunner().invoke(ablate_app, arguments(tmp_path, "--val", str(tmp_path / "sets" / "database")))
    assert isinstance(done.exception, LattqeError)
    assert str(done.exception) == "1 --queries for 2 --val: give one for each, or none"


def test_a_variant_that_cannot_be_trained_is_refused_before_the_first_is(tmp_path: Path) -> None:
    """And before Ray starts: this test may not."""
    words = [*arguments(tmp_path, "--set", "choose_qe=16"), "--val", str(tmp_path / "sets" / "queries")]
    done = CliRunner().invoke(ablate_app, [*words, "--queries", str(tmp_path / "sets" / "queries")])
    assert isinstance(done.exception, LattqeError)
    assert "queries has 10 rows, too few to choose on" in str(done.exception)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", PRESETS)
def test_all_variants_of_a_preset_are_valid(name: str) -> None:
    for changes in variants(preset(name, 64)).values():
        preset(name, 64, changes)


def test_help_names_every_preset() -> None:
    assert PRESET_NAMES.replace(" or ", ", ").split(", ") == list(PRESETS)
    for command in (app, ablate_app):
        shown = CliRunner().invoke(command, ["--help"], terminal_width=200)
        assert PRESET_NAMES in " ".join(shown.output.split())


@pytest.mark.slow
def test_one_more_variant_keeps_the_others(tmp_path: Path) -> None:
    for variant in ("no-position", "no-attention"):
        done = CliRunner().invoke(ablate_app, arguments(tmp_path, "--only", variant))
        assert done.exit_code == 0, done.output + repr(done.exception)
    assert list(json.loads((tmp_path / "to" / "ablations.json").read_text())) == ["no-position", "no-attention"]


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not valid JSON"), ("[]", "is not the table"), ('{"full": 3}', "is not the table")]
)
def test_a_damaged_table_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "ablations.json").write_text(text)
    with pytest.raises(LattqeError, match=words):
        finished(open_place(str(tmp_path)))
