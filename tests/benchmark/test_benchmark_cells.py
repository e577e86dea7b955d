"""The stored result of a cell is that cell's, whatever name it has been given."""

import json

import pytest

from lattqe.benchmark.cells import Cell, Measured
from lattqe.evaluation import Scores
from lattqe.store.manifest import canonical_json, checksum


@pytest.fixture
def measured() -> Measured:
    scores = Scores.from_dict({"setup": "hard", "ks": [1], "ap": [0.5], "precision": [[1.0]], "positives": [2]})
    return Measured((scores,), None, {"search": 0.1}, 10)


def test_a_result_under_the_name_of_another_is_refused(measured: Measured) -> None:
    data = measured.to_bytes(Cell("a", None, None, None), "mine")
    assert Measured.from_bytes(data, "mine").seconds == {"search": 0.1}
    with pytest.raises(ValueError, match="another cell"):
        Measured.from_bytes(data, "yours")


def test_a_result_of_an_earlier_version_is_read(measured: Measured) -> None:
    content = json.loads(measured.to_bytes(Cell("a", None, None, None), "mine"))
    del content["key"], content["checksum"]
    content["checksum"] = checksum(canonical_json(content))
    assert Measured.from_bytes(canonical_json(content), "any").peak_bytes == 10
