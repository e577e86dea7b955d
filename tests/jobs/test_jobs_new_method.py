"""A method that is one file and one line of registration is known to every verb, to run files and to the report.

The package is copied, the documentation's example put into the copy, and the copy's own command line does the rest.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lattqe.store import FeatureSet, FeatureWriter

PROJECT = Path(__file__).parents[2]
RUN = """
bootstrap = 50
nqe_sweep = [2, 4]
[[dataset]]
name = "clusters"
database = "database"
queries = "queries"
[[method]]
method = "threshold"
nqe = [2, 4]
ndba = [2, 4]
threshold = [0.2, 0.6]
choose = "test"
[[method]]
method = "aqe"
nqe = 2
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the method of docs/methods.md: one new file, one new line."""
    folder = tmp_path_factory.mktemp("copy")
    for package in ("lattqe", "cluster", "jobs"):  # with what is compiled: only the two changed files are not
        shutil.copytree(PROJECT / package, folder / package)
    text = (PROJECT / "docs" / "methods.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class ThresholdExpansion" in block)
    (folder / "lattqe" / "expansion" / "threshold.py").write_text(code)
    registry = folder / "lattqe" / "expansion" / "__init__.py"
    content = registry.read_text()
    assert content.count("METHODS: dict[str, type[Method]] = {\n") == 1
    content = content.replace(
        "METHODS: dict[str, type[Method]] = {\n",
        'METHODS: dict[str, type[Method]] = {\n    "threshold": ThresholdExpansion,\n',
    )
    registry.write_text(
        content.replace(
            "from lattqe.errors import LattqeError\n",
            "from lattqe.errors import LattqeError\nfrom lattqe.expansion.threshold import ThresholdExpansion\n",
        )
    )
    return folder


# Runs commands one after the other in one process: starting one for each would take longer than all they do.
COMMANDS = """
import contextlib, io, json, sys
from jobs import cli

shown = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["lattqe", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main()
    shown.append(out.getvalue())
print(json.dumps(shown))
"""


def call(copied: Path, *commands: list[str]) -> list[str]:
    """What each of some commands of the copy prints."""
    environment = {**os.environ, "PYTHONPATH": str(copied), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=copied,
        env=environment,
        text=True,
        capture_output=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    shown: list[str] = json.loads(done.stdout)
    return shown


def write(folder: Path, name: str, seed: int, images: int) -> str:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(6, dtype=np.int32), images)
    x = np.random.default_rng(0).standard_normal((6, 12))[labels] + 0.7 * rng.standard_normal((len(labels), 12))
    with FeatureWriter(str(folder / name), 12, "float32", labels=True) as writer:
        writer.append(x.astype(np.float32), [f"{name}-{row}" for row in range(len(x))], labels)
    return str(folder / name)


@pytest.mark.slow
def test_a_new_method_goes_everywhere(copied: Path, tmp_path: Path) -> None:
    database, queries, new = (
        write(tmp_path, *each) for each in (("database", 1, 20), ("queries", 2, 3), ("new", 3, 2))
    )
    (tmp_path / "run.toml").write_text(RUN)
    index, grown, ranks, run = (str(tmp_path / name) for name in ("index", "grown", "ranks", "run"))
    expand = ["--expand", "threshold", "--threshold", "0.4", "--nqe", "3"]
    help_text, *_, results_text = call(
        copied,
        ["augment", "--help"],
        ["augment", database, "--method", "threshold", "--threshold", "0.3", "-k", "5", "--to", index],
        ["append", index, new, "--to", grown],
        ["search", grown, queries, "-k", "7", *expand, "--to", ranks],
        ["benchmark", str(tmp_path / "run.toml"), "--to", run, "--json"],
    )
    assert "--threshold" in help_text
    x = FeatureSet.open(database).read()
    scores = x @ x.T
    np.fill_diagonal(scores, -2)
    expected = x.copy()
    for row in range(len(x)):
        for near in np.argsort(-scores[row])[:5]:
            expected[row] += max(scores[row, near] - 0.3, 0) * x[near]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(FeatureSet.open(index).read(), expected, atol=1e-5)
    assert FeatureSet.open(grown).rows == len(x) + 12
    assert '"threshold": 0.4' in (tmp_path / "ranks" / "manifest.json").read_text()
    labels = [row["label"] for row in json.loads(results_text)["table3"]]
    assert labels == ["no expansion", "ThQE", "AQE", "ThDBA + ThQE"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "ThDBA + ThQE" in page
    assert re.search(r"nQE \d, θ 0\.\d", page), "the parameter goes by its symbol"
