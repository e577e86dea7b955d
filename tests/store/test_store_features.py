"""Feature sets: whatever goes in comes out, however it is cut; what cannot be stored is named."""

import resource
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store import FeatureSet, FeatureWriter, features_table, open_place
from lattqe.store.artifacts import verify_artifact
from lattqe.store.features import IdRegister, normalised


def write(uri, x, ids=None, step=None, **options) -> FeatureSet:
    ids = ids if ids is not None else [f"row-{i}" for i in range(len(x))]
    with FeatureWriter(str(uri), x.shape[1], **options) as writer:
        for start in range(0, len(x), step or len(x)):
            writer.append(x[start : start + (step or len(x))], ids[start : start + (step or len(x))])
    return writer.close()


matrices = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.float64]),
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=30),
    elements=st.floats(-1000, 1000, width=16),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    x=matrices,
    dtype=st.sampled_from(["float16", "float32"]),
    part_bytes=st.integers(1, 4000),
    step=st.integers(1, 50),
    size=st.integers(1, 50),
)
def test_any_matrix_comes_out(tmp_path_factory, data, x, dtype, part_bytes, step, size):
    x[:, 0] = 1  # no row is all zeros
    uri = tmp_path_factory.mktemp("any") / "set"
    features = write(uri, x, step=step, dtype=dtype, part_bytes=part_bytes)
    exact = x.astype(np.float64)
    expected = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(dtype)
    whole = FeatureSet.open(features.uri).read()
    assert whole.dtype == dtype
    # Two ways to compute one quotient may differ in the last place.
    np.testing.assert_allclose(
        whole.astype(np.float64),
        expected.astype(np.float64),
        rtol=2 * np.finfo(dtype).eps,
        atol=np.finfo(dtype).smallest_subnormal,
    )
    start = data.draw(st.integers(0, len(x)))
    stop = data.draw(st.integers(start, len(x)))
    np.testing.assert_array_equal(features.read(start, stop), whole[start:stop])
    assert features.ids(start, stop) == [f"row-{i}" for i in range(start, stop)]
    assert features.table(start, stop).num_rows == stop - start
    rows = np.array(data.draw(st.lists(st.integers(0, len(x) - 1), max_size=20)), dtype=int)
    np.testing.assert_array_equal(features.gather(rows), whole[rows])
    blocks = list(features.blocks(size))
    assert [start for start, _ in blocks] == list(range(0, len(x), size))
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), whole)
    verify_artifact(features.uri)


def test_parts_depend_on_the_rows_alone(tmp_path):
    """The same rows give the same bytes, however they were appended; another row gives another digest."""
    x = np.random.default_rng(0).standard_normal((500, 8))
    ids = [f"{'long-' * (i % 7)}{i}" for i in range(500)]
    sets = [write(tmp_path / str(step), x, ids, step=step, part_bytes=3000) for step in (1, 7, 500)]
    assert len(sets[0].manifest.parts) > 3
    assert sets[0].manifest == sets[1].manifest == sets[2].manifest
    assert all(part.bytes < 3000 + 2000 for part in sets[0].manifest.parts)  # rows, and some Arrow headers
    x[499] *= -1
    assert write(tmp_path / "other", x, ids, part_bytes=3000).digest != sets[0].digest


def test_local_reads_are_views(tmp_path):
    features = write(tmp_path / "set", np.eye(64), part_bytes=1 << 20)
    view = features.read(3, 9)
    assert not view.flags.owndata
    assert not view.flags.writeable
    assert np.shares_memory(view, features.read())


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_normalisation_of_very_large_and_small_vectors(scale):
    x = np.random.default_rng(0).standard_normal((5, 7))
    stored, good = normalised(x * scale, "float32")
    assert good.all()
    np.testing.assert_allclose(stored, x / np.linalg.norm(x, axis=1, keepdims=True), rtol=1e-6)


def test_a_row_is_normalised_the_same_in_any_company():
    x = np.random.default_rng(0).standard_normal((40, 33)).astype(np.float32)
    together, _ = normalised(x, "float32")
    np.testing.assert_array_equal(together, np.vstack([normalised(row[None], "float32")[0] for row in x]))


def test_whole_numbers_are_vectors_too(tmp_path):
    features = write(tmp_path / "set", np.array([[3, 4], [0, 255]], dtype=np.uint8), dtype="float32")
    np.testing.assert_allclose(features.read(), [[0.6, 0.8], [0, 1]], rtol=1e-6)


@pytest.mark.parametrize(("value", "what"), [(0.0, "is all zeros"), (np.nan, "holds NaN"), (np.inf, "holds NaN")])
def test_bad_vector_is_refused_by_name_or_skipped(tmp_path, value, what):
    x = np.ones((10, 4), np.float32)
    x[7] = value
    with pytest.raises(LattqeError, match=rf"'row-7' \(row 7\) {what}"):
        write(tmp_path / "refused", x, step=5)
    assert not (tmp_path / "refused").exists()
    with FeatureWriter(str(tmp_path / "set"), 4, skip_bad=True) as writer:
        writer.append(x, [f"row-{i}" for i in range(10)])
    assert (writer.skipped, writer.rows) == (1, 9)
    assert writer.close().ids() == [f"row-{i}" for i in range(10) if i != 7]


def test_rows_are_counted_in_the_source_when_bad_ones_are_skipped(tmp_path):
    x = np.ones((4, 2))
    x[0] = 0
    with FeatureWriter(str(tmp_path / "set"), 2, skip_bad=True) as writer:
        writer.append(x, list("abcd"))
        with pytest.raises(LattqeError, match="row 5"):
            writer.append(x[1:], ["e", "", "g"])


def test_repeated_ids_are_named(tmp_path):
    ids = [f"row-{i}" for i in range(300)]
    ids[250], ids[270], ids[299] = "row-3", "row-200", "row-3"
    with pytest.raises(LattqeError, match=r"'row-3' \(rows 3, 250, 299\), 'row-200' \(rows 200, 270\)"):
        write(tmp_path / "set", np.ones((300, 4)), ids, part_bytes=500)
    assert not (tmp_path / "set").exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(min_size=1, max_size=3), max_size=60))
def test_duplicates_are_those_a_dictionary_finds(ids):
    register = IdRegister()
    for start in range(0, len(ids), 7):
        register.add(pa.array([text.encode() for text in ids[start : start + 7]], pa.binary()))
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(ids):
        rows.setdefault(text, []).append(row)
    expected = [found[:4] for found in rows.values() if len(found) > 1]
    assert register.duplicates(limit=100) == expected
    with patch("lattqe.store.features.SORTED_AT_ONCE", 5):
        assert register.duplicates(limit=100) == expected
        assert register.duplicates(limit=2) == expected[:2]


def test_rows_are_found_by_id(tmp_path):
    ids = [f"r{i}" for i in range(300)]
    stored = write(tmp_path / "set", np.ones((300, 4)), ids, part_bytes=500)
    assert len(stored.manifest.parts) > 3
    asked = ["r7", "r299", "nothing", "r7", "r0"]
    np.testing.assert_array_equal(stored.find_ids(asked), [7, 299, -1, 7, 0])
    np.testing.assert_array_equal(stored.find_ids(stored.id_column(5, 290)), np.arange(5, 290))
    assert stored.find_ids([]).shape == (0,)


@pytest.mark.parametrize(
    ("x", "ids", "match"),
    [
        (np.ones((2, 4)), ["a", ""], "id of row 1 is empty"),
        (np.ones((2, 4)), ["a", "b\nc"], "line break"),
        (np.ones((2, 4)), ["a", None], "id of row 1"),
        (np.ones((2, 4)), ["a", 5], "ids must be strings"),
        (np.ones((2, 4)), ["a", "\ud800"], "ids must be strings"),
        (np.ones((2, 4)), ["a"], "2 vectors came with 1 ids"),
        (np.ones((2, 5)), ["a", "b"], r"shape \(2, 5\), \(n, 4\) is needed"),
        (np.ones(4), ["a"], "shape"),
        (np.array([["x"] * 4]), ["a"], "vectors are numbers"),
    ],
)
def test_rows_that_cannot_be_stored(tmp_path, x, ids, match):
    with pytest.raises(LattqeError, match=match), FeatureWriter(str(tmp_path / "set"), 4) as writer:
        writer.append(x, ids)
    assert not (tmp_path / "set").exists()


def test_nothing_to_store(tmp_path):
    with pytest.raises(LattqeError, match="no rows were given"), FeatureWriter(str(tmp_path / "set"), 4):
        pass
    with (
        pytest.raises(LattqeError, match="3 bad ones were skipped"),
        FeatureWriter(str(tmp_path / "set"), 4, skip_bad=True) as writer,
    ):
        writer.append(np.zeros((3, 4)), list("abc"))
    assert not (tmp_path / "set").exists()


def test_labels_and_other_columns_are_carried_along(tmp_path):
    extra = [pa.field("url", pa.string()), pa.field("boxes", pa.list_(pa.int32()))]
    urls, boxes = ["u0", None, "u2"], [[1, 2], [], None]
    with FeatureWriter(str(tmp_path / "set"), 2, labels=True, extra=extra, part_bytes=1) as writer:
        writer.append(
            np.ones((3, 2)),
            list("abc"),
            labels=[7, -1, 2**31 - 1],
            extra={"url": pa.array(urls), "boxes": pa.array(boxes, extra[1].type)},
        )
    features = writer.close()
    assert features.columns == ["id", "vector", "label", "url", "boxes"]
    assert features.labels().tolist() == [7, -1, 2**31 - 1]
    assert features.table().select(["url", "boxes"]).to_pydict() == {"url": urls, "boxes": boxes}
    verify_artifact(features.uri)


def test_columns_must_be_as_announced(tmp_path):
    for labels in (None, [1.5], [2**31]):
        with pytest.raises(LattqeError, match="label"), FeatureWriter(str(tmp_path / "set"), 2, labels=True) as writer:
            writer.append(np.ones((1, 2)), ["a"], labels=labels)
    with pytest.raises(LattqeError, match="reserved"):
        FeatureWriter(str(tmp_path / "set"), 2, extra=[pa.field("vector", pa.int8())])
    with pytest.raises(LattqeError, match="no labels"):
        write(tmp_path / "set", np.ones((1, 2))).labels()


def test_without_normalising_bits_are_kept_and_norms_checked(tmp_path):
    x, _ = normalised(np.random.default_rng(0).standard_normal((50, 16)), "float16")
    np.testing.assert_array_equal(write(tmp_path / "set", x, normalise=False).read(), x)
    with pytest.raises(LattqeError, match="row 3 has norm"):
        write(tmp_path / "other", np.vstack([x[:3], 2 * x[3:4]]), normalise=False)


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 0},
        {"dim": -1},
        {"dim": 1 << 21},
        {"dim": 4, "dtype": "float64"},
        {"dim": 4, "part_bytes": 0},
        {"dim": 4, "config": {"x": np.nan}},
        {"dim": 4, "inputs": {"a": {"uri": "x"}}},
    ],
)
def test_writers_that_cannot_be(tmp_path, options):
    with pytest.raises(LattqeError):
        FeatureWriter(str(tmp_path / "set"), **options)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 11), (5, 4)])
def test_rows_out_of_range(tmp_path, start, stop):
    features = write(tmp_path / "set", np.ones((10, 2)))
    for read in (features.read, features.ids, features.table):
        with pytest.raises(LattqeError, match="not within the 10 rows"):
            read(start, stop)
    for rows in ([10], [-1], [0.5], [[1]]):
        with pytest.raises(LattqeError, match="row"):
            features.gather(np.array(rows))
    with pytest.raises(LattqeError, match="at least one row"):
        next(features.blocks(0))


def test_a_finished_set_is_found_again_or_refused(tmp_path):
    features = write(tmp_path / "set", np.eye(3), config={"source": "a"})
    writer = FeatureWriter(features.uri, 3, config={"source": "a"})
    assert writer.finished.manifest == features.manifest
    with pytest.raises(AlreadyExistsError, match="finished already"):
        writer.append(np.eye(3), list("abc"))
    with pytest.raises(AlreadyExistsError, match=r'config\.source: "a" there, "b" here: choose another destination'):
        FeatureWriter(features.uri, 3, config={"source": "b"})
    with pytest.raises(AlreadyExistsError, match=r"fields\.dim: 3 there, 4 here"):
        FeatureWriter(features.uri, 4, config={"source": "a"})


def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    x = np.random.default_rng(0).standard_normal((400, 64))
    writer = FeatureWriter(str(tmp_path / "set"), 64, part_bytes=50_000)
    writer.append(x, [f"row-{i}" for i in range(400)])
    assert (tmp_path / "set" / "part-00000.arrow").exists()
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(LattqeError, match=r"cannot write .*part-00001\.arrow"), writer:
            writer.append(x, [f"new-{i}" for i in range(400)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(AlreadyExistsError, match=r"holds other files \(config.json\)"):
        FeatureWriter(str(tmp_path), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_two_writers_with_one_configuration_but_other_rows(tmp_path):
    """Nothing of the first is overwritten: the second is told, and the first still finishes."""
    first = FeatureWriter(str(tmp_path / "set"), 3, part_bytes=1)
    second = FeatureWriter(str(tmp_path / "set"), 3, part_bytes=1)
    first.append(np.eye(3)[:1], ["a"])
    with pytest.raises(AlreadyExistsError, match="holds other rows"):
        second.append(np.eye(3)[1:2], ["b"])
    first.append(np.eye(3)[1:], ["b", "c"])
    assert first.close().ids() == ["a", "b", "c"]
    verify_artifact(first.uri)


def test_tables_need_equal_lengths():
    with pytest.raises(LattqeError, match="differ in length"):
        features_table(["a"], np.ones((2, 2), np.float16))


def test_cancelled_writer_leaves_its_parts_for_the_next(tmp_path):
    uri = str(tmp_path / "set")
    x = np.random.default_rng(0).standard_normal((100, 4))
    ids = [f"row-{i}" for i in range(100)]
    writer = FeatureWriter(uri, 4, part_bytes=500)
    writer.append(x[:60], ids[:60])
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    kept = {name for name in open_place(uri).list() if name.startswith("part-")}
    assert kept
    with pytest.raises(LattqeError, match="not finished: run the command that was writing it again"):
        FeatureSet.open(uri)
    features = write(uri, x, ids, part_bytes=500)
    assert features.digest == write(tmp_path / "straight", x, ids, part_bytes=500).digest
    assert not any(name.startswith("_work") for name in open_place(uri).list())
