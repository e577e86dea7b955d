"""The benchmark of a million rows: its options, its distractors, and how it counts; the run itself takes too long."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import distractors
from benchmarks.measured import phases, planned_bytes, table
from benchmarks.million import parser
from benchmarks.whole import drawn_kills
from lattqe.datasets.labelled import PHOTO_SETS, load_photos


@pytest.fixture(scope="module")
def sets(photos_folder: Path) -> list[distractors.Donors]:
    return distractors.donors(photos_folder, 128)


def test_options_of_both_modes():
    assert not parser().parse_args(["--to", "x", "--sample", "7"]).whole
    whole = parser().parse_args(["--whole", "--to", "x", "--rows", "30000", "--kills", "3", "--check", "50"])
    assert (whole.rows, whole.kills, whole.check) == (30_000, 3, 50)


def test_kills_are_drawn_by_the_seed():
    assert drawn_kills(3, 0) == drawn_kills(3, 0) != drawn_kills(3, 1)
    assert all(stage in ("neighbors", "augment", "benchmark") and 0 < share < 1 for stage, share in drawn_kills(50, 0))


@pytest.mark.slow
def test_distractors_look_like_the_photographs(photos_folder: Path, sets: list[distractors.Donors], tmp_path: Path):
    splits = [load_photos(name, "test", photos_folder, columns=128) for name in PHOTO_SETS]
    real = (np.concatenate([each.xb for each in splits]), np.concatenate([each.labels for each in splits]))
    blocks = list(distractors.draw(sets, len(real[0])))
    drawn = (np.concatenate([rows for rows, _ in blocks]), np.concatenate([labels for _, labels in blocks]))
    assert drawn[0].shape == real[0].shape
    np.testing.assert_allclose(np.linalg.norm(drawn[0], axis=1), 1, atol=1e-5)
    compared = distractors.compare(real, drawn)
    for name, tolerance in (
        ("first neighbor's similarity", 0.03),
        ("first neighbor of the same class", 0.06),
        ("norm of class means", 0.11),
    ):
        np.testing.assert_allclose(compared["distractors"][name], compared["real rows"][name], atol=tolerance)
    assert json.loads(json.dumps(distractors.without_drawn(compared)))["real rows"]["rows"] == len(real[0])
    distractors.figure(compared, tmp_path / "distractors.svg")
    drawing = (tmp_path / "distractors.svg").read_text()
    assert len(drawing) < 100_000
    for panel in ("similarity of the first neighbor", "norm of a class's mean", "rows of a class"):
        assert panel in drawing
    assert drawing.count("real rows") >= 2


def test_a_class_is_a_function_of_its_number_and_keeps_its_donors_shape(sets: list[distractors.Donors]):
    np.testing.assert_array_equal(distractors.draw_class(sets, 0, 40), distractors.draw_class(sets, 0, 40))
    later = [rows for rows, labels in distractors.draw(sets, 5000) if labels[0] == 40]
    np.testing.assert_array_equal(later[0], distractors.draw_class(sets, 0, 40))
    # Before rows are normalised, products of mirrored residuals are those of the donor: slow twin of the mirroring.
    one, signs = sets[0], np.random.default_rng(0).choice((-1.0, 1.0), 128)
    plain = one.residuals[3] @ one.axes.T
    mirrored = (one.residuals[3] * signs) @ one.axes.T
    np.testing.assert_allclose(mirrored @ mirrored.T, plain @ plain.T, atol=1e-10)


def test_attempts_are_added_up():
    log = [
        {"event": "plan", "table": {"memory of a worker": "1.5 GiB", "workers": "2"}},
        {"event": "summary", "table": {"memory of a worker": "512.0 MiB"}},
        {"event": "phase done", "phase": "augment", "seconds": 1.5},
        {"event": "phase done", "phase": "augment", "seconds": 2.0},
    ]
    assert planned_bytes(log) == 3 << 29
    assert phases(log) == {"augment": 3.5}
    attempt = {
        "killed": True, "failed": False, "seconds": 4.0, "cpu_seconds": {"driver": 1.0, "workers": 2.0, "ray": 3.0},
        "peak_bytes": {"driver": 1 << 20, "workers": 2 << 20}, "planned_worker_bytes": 3 << 20,
        "bytes_read": 10**6, "bytes_written": 2 * 10**6, "requests": 5, "phases": {}, "summary": None,
    }  # fmt: skip
    last = {**attempt, "killed": False, "summary": {"worker_seconds": {"waiting": 0.5, "products": 1.0}}}
    text = table({"stages": {"neighbors": {"rows": 800, "attempts": [attempt, last], "done": True}}})
    row = "| neighbors (killed 1×) | 800 | 8 | 100 | 2 + 4 + 6 | 1, 2 (3) | 2.0, 4.0 | 10 | 0.5 | products 1.0 |"
    assert text.splitlines()[2] == row
    last["summary"] |= {"predicted_worker_bytes": 1 << 20, "predicted_hop_worker_bytes": 7 << 20}
    assert ", 2 (7) |" in table({"stages": {"augment": {"rows": 800, "attempts": [attempt, last], "done": True}}})
