"""`lattqe import`: what it stores, what it prints, and that whatever goes wrong is one line and leaves nothing."""

import errno
import functools
import json
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import scipy.io

from lattqe import store
from lattqe.store import FeatureSet, open_place
from lattqe.store.artifacts import verify_artifact

X = np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)


def unit(matrix, dtype=np.float16):
    matrix = matrix.astype(np.float64)
    return (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(dtype)


@pytest.fixture
def run(monkeypatch, call_lattqe, tmp_path):
    """Call `lattqe import` in this process, in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return partial(call_lattqe, "import")


def refusal(result):
    """The one line of a refused command."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert err.rstrip().endswith(line)
    return line


def test_a_matrix_with_ids_and_labels(run, tmp_path):
    np.save("x.npy", X)
    (tmp_path / "ids.txt").write_text("\n".join(f"image {row}" for row in range(40)))
    (tmp_path / "labels.csv").write_text("label\n" + "\n".join("ab"[row % 2] for row in range(40)))
    code, out, err = run("x.npy", "--ids", "ids.txt", "--labels", "labels.csv", "--to", "features", "--json")
    assert code == 0
    assert "40 × 6" in err
    result = json.loads(out)
    features = FeatureSet.open("features")
    verify_artifact("features")
    assert (result["rows"], result["dim"], result["dtype"], result["skipped"]) == (40, 6, "float16", 0)
    assert result["digest"] == features.digest
    np.testing.assert_array_equal(features.read(), unit(X))
    assert features.ids(3, 5) == ["image 3", "image 4"]
    assert features.labels().tolist() == [0, 1] * 20
    assert features.label_names == features.manifest.fields["label_names"] == ["a", "b"]
    assert set(features.manifest.inputs) == {"source-0", "ids", "labels"}


def test_splits_are_cut_out_of_one_file(run):
    split, query = np.arange(40) % 3, np.arange(40) % 4 == 0
    np.save("x.npy", X)
    np.save("split.npy", split.astype(np.int8))
    np.save("query.npy", query)
    options = ("--select", "split.npy=2", "--select", "query.npy=0", "--columns", 4, "--dtype", "float32")
    assert run("x.npy", "--to", "database", *options)[0] == 0
    features = FeatureSet.open("database")
    kept = (split == 2) & ~query
    np.testing.assert_array_equal(features.read(), unit(X[kept, :4], np.float32))
    assert features.ids() == [f"x-{row}" for row in np.flatnonzero(kept)]
    assert run("x.npy", "--to", "few", "--rows", "5:9")[0] == 0
    np.testing.assert_array_equal(FeatureSet.open("few").read(), unit(X[5:9]))


def test_sources_join_and_say_what_was_assumed(run):
    np.save("a.npy", X[:10])
    scipy.io.savemat("b.mat", {"X": X[10:].T, "Q": X[:3].T})
    code, out, err = run("a.npy", "b.mat", "--to", "joined", "--json")
    assert code == 0
    np.testing.assert_array_equal(FeatureSet.open("joined").read(), unit(X))
    (note,) = json.loads(out)["notes"]
    assert "reading 'X' of" in note
    assert f"note: {note}" in err


def test_bad_rows_are_left_out_when_asked(run):
    matrix = X.copy()
    matrix[3], matrix[7, 2], matrix[9, 0] = 0, np.nan, np.inf
    np.save("x.npy", matrix)
    assert "'x-3' (row 3) is all zeros" in refusal(run("x.npy", "--to", "features"))
    code, out, err = run("x.npy", "--to", "features", "--skip-bad", "--json")
    assert code == 0
    assert json.loads(out)["skipped"] == 3
    assert "3 bad rows left out" in err
    np.testing.assert_array_equal(FeatureSet.open("features").read(), unit(np.delete(X, [3, 7, 9], axis=0)))


def test_the_same_command_again_finds_it_done_and_another_is_refused(run):
    np.save("x.npy", X)
    assert run("x.npy", "--to", "features")[0] == 0
    before = open_place("features").read("manifest.json")
    code, out, _ = run("x.npy", "--to", "features", "--json")
    assert (code, json.loads(out)["reused"]) == (0, True)
    assert "config.columns" in refusal(run("x.npy", "--to", "features", "--columns", 3))
    np.save("x.npy", X + 1)
    assert "inputs.source-0.digest" in refusal(run("x.npy", "--to", "features"))
    assert open_place("features").read("manifest.json") == before


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def nan_at(row):
    matrix = X.copy()
    matrix[row, 1] = np.nan
    return matrix


BAD = {
    "nan": (nan_at(5), [], "'x-5' (row 5) holds NaN"),
    "zero": (X * (np.arange(40) != 6)[:, None], [], "'x-6' (row 6) is all zeros"),
    "one-dimensional": (X[0], [], "has shape (6,)"),
    "no rows": (X[:0], [], "is empty"),
    "complex": (X.astype(complex), [], "complex128"),
    "text": (X.astype(str), [], "real numbers are needed"),
    "duplicate ids": (X, ["--ids", "same.txt"], "'same' (rows 0, 1"),
    "too few ids": (X, ["--ids", "few.txt"], "holds 2 ids for 40 rows"),
    "absent labels": (X, ["--labels", "absent.txt"], "absent.txt does not exist"),
    "other dimensions": (X, ["wide.npy"], "x.npy has 6 dimensions and wide.npy has 9"),
    "unknown ending": (X, ["notes.docx"], "known are .npy .mat"),
    "absent file": (X, ["absent.npy"], "absent.npy does not exist"),
    "directory": (X, ["folder"], "is a directory"),
    "empty file": (X, ["empty.npy"], "is empty"),
    "unknown dtype": (X, ["--dtype", "int8"], "float16 and float32"),
    "too many columns": (X, ["--columns", "7"], "the vectors have 6"),
    "too few rows": (X, ["--rows", "100:"], "no row of 40"),
    "split without a value": (X, ["--select", "split.npy"], "=VALUE keeps one value"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, name):
    matrix, options, words = BAD[name]
    np.save("x.npy", matrix)
    np.save("wide.npy", np.ones((2, 9)))
    np.save("split.npy", np.arange(40) % 2)
    (tmp_path / "same.txt").write_text("same\n" * 40)
    (tmp_path / "few.txt").write_text("a\nb\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.npy").touch()
    before = files_below(tmp_path)
    assert words in refusal(run("x.npy", *options, "--to", "features"))
    assert files_below(tmp_path) == before
    assert not (tmp_path / "features").exists()


def test_destinations_that_cannot_be(run, tmp_path):
    np.save("x.npy", X)
    (tmp_path / "file").write_text("mine")
    refusal(run("x.npy", "--to", "file"))
    refusal(run("x.npy", "--to", "file/below"))
    refusal(run("x.npy", "--to", "ftp://host/x"))
    assert (tmp_path / "file").read_text() == "mine"
    assert run("x.npy")[0] == 2  # no --to
    assert run("--to", "features")[0] == 2  # no source


def test_no_space_left(run, tmp_path, monkeypatch):
    import lattqe.store.local as local

    np.save("x.npy", X)
    settle, calls = local._settle, []

    def full(file):
        calls.append(file)
        if len(calls) >= 2:  # the claim fits, the first part does not
            raise OSError(errno.ENOSPC, "No space left on device")
        return settle(file)

    monkeypatch.setattr(local, "_settle", full)
    assert "no space left" in refusal(run("x.npy", "--to", "features"))
    assert len(calls) >= 2
    assert files_below(tmp_path) == ["x.npy"]


# Runs the job with parts of 1 KiB and kills itself when the given number of files is there and one more would come.
KILLED = """
import functools, os, signal, sys
import lattqe.store as store
from lattqe.store.local import LocalPlace
limit, create = int(sys.argv.pop(1)), LocalPlace.create
store.FeatureWriter = functools.partial(store.FeatureWriter, part_bytes=1024)
def create_or_die(self, name, data):
    if sum(path.is_file() for path in self.path.rglob("*")) == limit:
        os.kill(os.getpid(), signal.SIGKILL)
    create(self, name, data)
LocalPlace.create = create_or_die
from jobs.cli import main
main()
"""


@pytest.mark.kill
def test_a_killed_import_finishes_with_the_same_bytes(run, tmp_path, monkeypatch):
    np.save("x.npy", np.vstack([X] * 4))
    monkeypatch.setattr(store, "FeatureWriter", functools.partial(store.FeatureWriter, part_bytes=1024))
    assert run("x.npy", "--to", "whole")[0] == 0
    whole = {name: (tmp_path / "whole" / name).read_bytes() for name in files_below(tmp_path / "whole")}
    assert len(whole) > 4
    for limit in (2, len(whole)):  # with the claim and one part; with the claim and all parts, but no manifest
        command = [sys.executable, "-c", KILLED, str(limit), "import", "x.npy", "--to", "killed"]
        killed = subprocess.run(command, capture_output=True, timeout=800, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert len(files_below(tmp_path / "killed")) == limit
    assert run("x.npy", "--to", "killed")[0] == 0
    assert {name: (tmp_path / "killed" / name).read_bytes() for name in files_below(tmp_path / "killed")} == whole


@pytest.mark.s3
def test_from_s3_to_s3(run, s3_uri, tmp_path):
    np.save("x.npy", X)
    np.save("mask.npy", np.arange(40) < 30)
    place = open_place(f"{s3_uri}/raw")
    for name in ("x.npy", "mask.npy"):
        place.write(name, (tmp_path / name).read_bytes())
    assert run(f"{place.uri}/x.npy", "--select", f"{place.uri}/mask.npy", "--to", f"{s3_uri}/features")[0] == 0
    features = FeatureSet.open(f"{s3_uri}/features")
    np.testing.assert_array_equal(features.read(), unit(X[:30]))
    assert features.ids(0, 2) == ["x-0", "x-1"]
    assert features.manifest.inputs["source-0"]["uri"] == f"{place.uri}/x.npy"
    place.write("bad.npy", b"nonsense")
    line = refusal(run(f"{place.uri}/bad.npy", "--to", f"{s3_uri}/other"))
    assert f"{place.uri}/bad.npy" in line
    assert "lattqe-scratch-" not in line
    refusal(run(f"{place.uri}/absent.npy", "--to", f"{s3_uri}/other"))
    assert open_place(f"{s3_uri}/other").list() == []
