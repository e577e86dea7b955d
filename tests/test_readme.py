"""Every example of the README is executed, as it stands there, in one folder."""

import re
from pathlib import Path

import faiss
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"<!-- executed by tests/test_readme.py -->\n```(bash|python)\n(.*?)```", README, re.S)
# A shorter training than a user would want; everything else is typed as it stands.
SHORTER = {"--preset demo": "--preset demo --set steps=6 --set temperature_steps=2 --set validate_every=3"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a user of the README is, and the files that are there: clustered descriptors with labels."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, 32))

    def write(name, labels_name, classes, count):
        labels = rng.integers(*classes, count).astype(np.int32)
        x = centres[labels] + 0.8 * rng.standard_normal((count, 32))
        np.save(name, x.astype(np.float32))
        np.save(labels_name, labels)

    write("database.npy", "labels.npy", (0, 25), 600)
    write("queries.npy", "query-labels.npy", (0, 25), 20)
    write("new.npy", "new-labels.npy", (0, 25), 10)
    write("held.npy", "held-labels.npy", (25, 40), 200)
    return tmp_path


def test_the_readme_has_examples():
    assert [kind for kind, _ in EXAMPLES] == ["bash", "bash", "bash", "python"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(2700)  # many commands; a busy machine is not a failure
@pytest.mark.usefixtures("local_ray")
def test_the_examples_work(folder, call_lattqe):
    """In this process, whose Ray all commands use: `tests/test_cli.py` and the tests with kills start processes."""
    lines = ["lattqe import held.npy --labels held-labels.npy --to held-out"]
    for kind, text in EXAMPLES:
        lines += text.strip().splitlines() if kind == "bash" else []
    for line in lines:
        for plain, short in SHORTER.items():
            line = line.replace(plain, short)
        name, *words = line.split()
        assert name == "lattqe"
        code, _, err = call_lattqe(*words)
        assert code == 0, f"{line}\n{err[-2000:]}"
        assert "Traceback" not in err
    index = faiss.read_index(str(folder / "index2.faiss"))
    assert index.ntotal == 610
    x = np.load(folder / "database.npy")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    python = next(text for kind, text in EXAMPLES if kind == "python").replace('"model"', repr(str(folder / "model")))
    labels = np.load(folder / "labels.npy")
    names = {"xq": x[:5], "xb": x[5:105], "query_labels": labels[:5], "labels": labels[5:105]}
    exec(python, names)
    assert names["expanded"].shape == (5, 32)
    assert names["augmented"].shape == (100, 32)
    assert (folder / "found.csv").read_text().startswith("query,rank,id")
    assert names["scores"]["label"].ap.shape == (5,)
    assert names["graph"].I.shape == (600, 64)
    assert names["features"].x.shape == (600, 32)
    assert np.isfinite(names["augmented"]).all()
