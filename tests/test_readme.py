"""Every example of the README is executed, as it stands there, in one folder."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"<!-- executed by tests/test_readme.py -->\n```(bash|python)\n(.*?)```", README, re.S)
# A shorter training than a user would want; everything else is typed as it stands.
SHORTER = {"--preset demo": "--preset demo --set steps=6 --set temperature_steps=2 --set validate_every=3"}

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2700)]  # many commands


@pytest.fixture(scope="module")
def running_ray():
    """A cluster that all commands join, as on any machine with RAY_ADDRESS set: none has to start its own."""
    with pytest.MonkeyPatch.context() as patch:
        ray.shutdown()
        started = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        patch.setenv("RAY_ADDRESS", started.address_info["gcs_address"])
        yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, running_ray):
    """The files a user of the README has: clustered descriptors with labels."""
    folder = tmp_path_factory.mktemp("readme")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, 32))

    def write(name, labels_name, classes, count):
        labels = rng.integers(*classes, count).astype(np.int32)
        x = centres[labels] + 0.8 * rng.standard_normal((count, 32))
        np.save(folder / name, x.astype(np.float32))
        np.save(folder / labels_name, labels)

    write("database.npy", "labels.npy", (0, 25), 600)
    write("queries.npy", "query-labels.npy", (0, 25), 20)
    write("new.npy", "new-labels.npy", (0, 25), 10)
    write("held.npy", "held-labels.npy", (25, 40), 200)
    run(folder, "lattqe import held.npy --labels held-labels.npy --to held-out")
    return folder


def run(folder, line):
    for plain, short in SHORTER.items():
        line = line.replace(plain, short)
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *line.split()[1:]], cwd=folder, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr
    return done


def test_the_readme_has_examples():
    assert [kind for kind, _ in EXAMPLES] == ["bash", "bash", "bash", "python"]


def test_the_examples_work(folder, monkeypatch):
    for kind, text in EXAMPLES:
        if kind == "bash":
            for line in text.strip().splitlines():
                assert line.startswith("lattqe ")
                run(folder, line)
    import faiss

    index = faiss.read_index(str(folder / "index2.faiss"))
    assert index.ntotal == 610
    x = np.load(folder / "database.npy")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    python = next(text for kind, text in EXAMPLES if kind == "python").replace('"model"', repr(str(folder / "model")))
    labels = np.load(folder / "labels.npy")
    names = {"xq": x[:5], "xb": x[5:105], "query_labels": labels[:5], "labels": labels[5:105]}
    monkeypatch.chdir(folder)
    exec(python, names)
    assert names["expanded"].shape == (5, 32)
    assert names["augmented"].shape == (100, 32)
    assert (folder / "found.csv").read_text().startswith("query,rank,id")
    assert names["scores"]["label"].ap.shape == (5,)
    assert names["graph"].I.shape == (600, 64)
    assert names["features"].x.shape == (600, 32)
    assert np.isfinite(names["augmented"]).all()
