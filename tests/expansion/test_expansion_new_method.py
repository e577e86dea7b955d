"""The documentation's example of a new method is run as it stands there."""

import re
from pathlib import Path

import numpy as np
import pytest
from test_expansion_weights import random_lists

from lattqe.errors import LattqeError
from lattqe.expansion import METHODS, create

DOCS = Path(__file__).parents[2] / "docs" / "methods.md"


def test_a_new_method_is_one_file_and_one_line(monkeypatch):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "class " in block)
    space: dict = {"__name__": "lattqe.expansion.threshold"}
    exec(code, space)
    monkeypatch.setitem(METHODS, "threshold", space["ThresholdExpansion"])
    method = create("threshold", threshold=0.6)
    x, neighbors, scores, _ = random_lists(5, 4, 0, 16)
    result = method.expand(x, neighbors, scores)
    np.testing.assert_allclose(result.weights[:, 1:], np.maximum(scores - 0.6, 0), atol=1e-6)
    assert method.params == {"threshold": 0.6}
    with pytest.raises(LattqeError, match="treshold"):
        create("threshold", treshold=0.6)


def test_the_documented_defaults_are_the_defaults():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) / (\d+) \|$", DOCS.read_text(), re.M)
    assert {name: (int(k), int(k_dba)) for name, k, k_dba in rows} == {
        name: (method.default_k, method.default_k_dba) for name, method in METHODS.items()
    }
