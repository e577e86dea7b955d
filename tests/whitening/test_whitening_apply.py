"""A whole feature set through a whitening: all columns kept, part by part, killed and continued."""

import numpy as np
import pyarrow as pa
import pytest

from lattqe import whitening as module
from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store import FeatureSet, FeatureWriter, open_place
from lattqe.whitening import Whitening, whiten_features


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(
        module, "part_row_counts", lambda rows, _: [30] * (rows // 30) + ([rows % 30] if rows % 30 else [])
    )
    monkeypatch.setattr(module, "BLOCK_ROWS", 8)


@pytest.fixture
def whitening(tmp_path):
    rng = np.random.default_rng(1)
    made = Whitening(rng.normal(size=12) * 0.1, rng.normal(size=(5, 12)), {"method": "half"})
    made.save(str(tmp_path / "whitening"))
    return str(tmp_path / "whitening")


def write(uri, labels=True, dtype="float16"):
    rng = np.random.default_rng(0)
    with FeatureWriter(uri, 12, dtype, labels=labels) as writer:
        writer.append(
            rng.normal(size=(100, 12)),
            [f"id {n}" for n in range(100)],
            np.arange(100, dtype=np.int32) % 7 if labels else None,
        )
        writer.close()
    return FeatureSet.open(uri)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_rows_against_the_formula(tmp_path, small_parts, whitening, dtype):
    features = write(str(tmp_path / "features"))
    heard = []
    manifest = whiten_features(features, whitening, str(tmp_path / "out"), dtype, lambda rows, _: heard.append(rows))
    out = FeatureSet.open(str(tmp_path / "out"))
    out.verify()
    assert (out.dim, out.dtype) == (5, dtype or "float16")
    assert len(manifest.parts) == 4
    assert sum(heard) == 100
    assert out.ids() == features.ids()
    np.testing.assert_array_equal(out.labels(), features.labels())
    model, _ = Whitening.load(whitening)
    expected = (features.read().astype(np.float64) - model.mean) @ model.projection.astype(np.float64).T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(out.read(), expected, atol=1e-3 if out.dtype == "float16" else 1e-6)
    kinds = {name: entry["kind"] for name, entry in manifest.inputs.items()}
    assert kinds == {"features": "features", "whitening": "model"}


def test_killed_and_continued_to_the_same_bytes(tmp_path, small_parts, whitening, monkeypatch):
    features = write(str(tmp_path / "features"))
    whiten_features(features, whitening, str(tmp_path / "whole"))
    real = module._whiten_rows
    made = []

    def dying(features, whitening, start, *rest):
        if start >= 60 and len(made) == 2:
            raise KeyboardInterrupt
        made.append(start)
        return real(features, whitening, start, *rest)

    monkeypatch.setattr(module, "_whiten_rows", dying)
    with pytest.raises(KeyboardInterrupt):
        whiten_features(features, whitening, str(tmp_path / "killed"))
    made.append("second run")
    whiten_features(features, whitening, str(tmp_path / "killed"))
    assert made == [0, 30, "second run", 60, 90]
    for name in open_place(str(tmp_path / "whole")).list():
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_extra_columns_are_carried(tmp_path, whitening):
    height = pa.field("height", pa.int64(), nullable=False)
    with FeatureWriter(str(tmp_path / "features"), 12, extra=[height]) as writer:
        writer.append(np.eye(12), [str(n) for n in range(12)], extra={"height": np.arange(12)})
        writer.close()
    whiten_features(FeatureSet.open(str(tmp_path / "features")), whitening, str(tmp_path / "out"))
    out = FeatureSet.open(str(tmp_path / "out"))
    assert out.table().column("height").to_pylist() == list(range(12))


def test_on_s3(s3_uri, whitening, small_parts):
    features = write(f"{s3_uri}/features", labels=False)
    whiten_features(features, whitening, f"{s3_uri}/out")
    FeatureSet.open(f"{s3_uri}/out").verify()


def test_other_dimensions_and_other_things_are_refused(tmp_path, whitening):
    features = write(str(tmp_path / "features"))
    Whitening(np.zeros(3), np.eye(3), {}).save(str(tmp_path / "small"))
    with pytest.raises(LattqeError, match=r"small whitens 3-D vectors, .*features has 12-D"):
        whiten_features(features, str(tmp_path / "small"), str(tmp_path / "out"))
    with pytest.raises(LattqeError, match="feature set"):
        whiten_features(features, features.uri, str(tmp_path / "out"))
    whiten_features(features, whitening, str(tmp_path / "out"))
    with pytest.raises(AlreadyExistsError, match="dtype"):
        whiten_features(features, whitening, str(tmp_path / "out"), "float32")
