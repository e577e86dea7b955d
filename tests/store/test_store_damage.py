"""Damage is found before it is used: every reader and `verify` name the part; broken invariants are told."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store import (
    FeatureSet,
    FeatureWriter,
    Manifest,
    NeighborGraph,
    Part,
    Pending,
    features_table,
    load_model,
    neighbors_table,
    open_artifact,
    ranks_table,
    save_model,
)
from lattqe.store.artifacts import verify_artifact
from lattqe.store.manifest import checksum, schema_columns
from lattqe.store.parts import encode_part


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A feature set of three parts."""
    uri = tmp_path_factory.mktemp("sound") / "set"
    with FeatureWriter(str(uri), 8, labels=True, part_bytes=1000) as writer:
        writer.append(
            np.random.default_rng(0).standard_normal((100, 8)), [f"row-{i}" for i in range(100)], labels=np.arange(100)
        )
    assert len(writer.close().manifest.parts) >= 3
    return uri


@pytest.fixture
def copy(sound, tmp_path) -> Path:
    shutil.copytree(sound, tmp_path / "copy")
    return tmp_path / "copy"


READERS = {
    "read": lambda features: features.read(),
    "one row": lambda features: features.read(50, 51),
    "gather": lambda features: features.gather(np.array([50])),
    "pieces": lambda features: features.pieces(),
    "blocks": lambda features: list(features.blocks(10)),
    "ids": lambda features: features.ids(),
    "labels": lambda features: features.labels(),
    "table": lambda features: features.table(),
    "verify": lambda features: features.verify(),
}


def refuse(uri: Path, match: str) -> None:
    for name, reader in READERS.items():
        with pytest.raises(CorruptDataError, match=match):
            print(name, reader(FeatureSet.open(str(uri))))


def part_of_row_50(uri: Path) -> Path:
    features = FeatureSet.open(str(uri))
    number = int(np.searchsorted(features.parts.starts, 50, side="right")) - 1
    return uri / features.manifest.parts[number].name


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_any_flipped_byte_of_a_part(sound, tmp_path_factory, position, mask):
    uri = tmp_path_factory.mktemp("flip") / "set"
    shutil.copytree(sound, uri)
    path = part_of_row_50(uri)
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= mask
    path.write_bytes(data)
    refuse(uri, f"{path.name} does not match its checksum")


def test_a_part_is_checked_again_when_its_file_changed(copy):
    features = FeatureSet.open(str(copy))
    features.read()
    path = part_of_row_50(copy)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.unlink()  # as a copy tool would replace it; the old file stays mapped by `features`
    path.write_bytes(data)
    refuse(copy, "does not match its checksum")


def test_truncated_missing_and_longer_parts(copy):
    path = part_of_row_50(copy)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refuse(copy, f"{path.name} has {len(whole) - 1} bytes, its manifest says {len(whole)}")
    path.write_bytes(whole + b"x")
    refuse(copy, f"{path.name} has {len(whole) + 1} bytes")
    path.write_bytes(b"")
    refuse(copy, f"{path.name} has 0 bytes")
    path.unlink()
    refuse(copy, f"{path.name} is missing, though its manifest names it")
    path.mkdir()
    with pytest.raises(LattqeError, match=path.name):
        FeatureSet.open(str(copy)).read()


def test_other_parts_can_still_be_read(copy):
    part_of_row_50(copy).unlink()
    assert FeatureSet.open(str(copy)).read(0, 5).shape == (5, 8)


def test_unreadable_paths(copy):
    part = part_of_row_50(copy)
    part.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)  # root may read everything
    try:
        with pytest.raises(LattqeError, match="permission denied"):
            FeatureSet.open(str(copy)).read()
        with pytest.raises(LattqeError, match="permission denied"):
            FeatureWriter("/proc/1/fd/new" if user else str(copy.parent / "new"), 4)
    finally:
        os.seteuid(user)


def forge(uri: Path, kind: str, fields: dict, table: pa.Table) -> str:
    """An artifact of one part with right checksums, whatever is in it."""
    uri.mkdir()
    data = encode_part(table, table.schema)
    (uri / "part-00000.arrow").write_bytes(data)
    part = Part("part-00000.arrow", table.num_rows, data.size, checksum(data))
    fields = {**fields, "columns": schema_columns(table.schema)}
    (uri / "manifest.json").write_bytes(Manifest(kind, table.num_rows, (part,), fields).to_json())
    return str(uri)


UNIT = np.eye(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("vectors", "ids", "match"),
    [
        (UNIT * 2, list("abcd"), "part-00000.arrow: the vector of row 0 has norm 2, not 1"),
        (np.where(UNIT, np.nan, 0).astype(np.float32), list("abcd"), "row 0 has norm nan"),
        (np.vstack([UNIT[:3], 0 * UNIT[:1]]), list("abcd"), "row 3 has norm 0"),
        (UNIT, ["a", "b", "", "d"], "part-00000.arrow: the id of row 2 is empty or"),
        (UNIT, ["a", "b", "c", "b"], "part-00000.arrow: the id of row 3, 'b', is that of row 1 too"),
    ],
)
def test_verify_finds_broken_features(tmp_path, vectors, ids, match):
    uri = forge(tmp_path / "set", "features", {"dim": 4, "dtype": "float32"}, features_table(ids, vectors))
    with pytest.raises(CorruptDataError, match=match):
        verify_artifact(uri)


GOOD_I = np.array([[1, 2, -1], [0, 2, 3], [3, 1, 0], [-1, -1, -1]])
GOOD_D = np.float32([[0.9, 0.8, 0], [0.9, 0.9, -0.5], [0.7, 0.2, 0.1], [0, 0, 0]])


def altered(array: np.ndarray, row: int, column: int, value: float) -> np.ndarray:
    array = array.copy()
    array[row, column] = value
    return array


@pytest.mark.parametrize(
    ("I", "D", "match"),
    [
        (altered(GOOD_I, 1, 2, 4), GOOD_D, "row 1 names a row beyond the 4 there are"),
        (altered(GOOD_I, 1, 2, -2), GOOD_D, "row 1 names a row below -1"),
        (altered(GOOD_I, 1, 2, 1), GOOD_D, "row 1 is its own neighbor"),
        (altered(GOOD_I, 1, 2, 0), GOOD_D, "row 1 names a neighbor twice"),
        (altered(GOOD_I, 1, 0, -1), altered(GOOD_D, 1, 0, 0), "row 1 has a neighbor after its padding"),
        (GOOD_I, altered(GOOD_D, 2, 1, 0.05), "row 2 has scores that are not sorted"),
        (GOOD_I, altered(GOOD_D, 2, 1, np.nan), "row 2 has a score that is not finite"),
        (GOOD_I, altered(GOOD_D, 0, 2, -1), "row 0 has a score other than 0 in its padding"),
    ],
)
def test_verify_finds_broken_graphs(tmp_path, I, D, match):
    verify_artifact(forge(tmp_path / "good", "neighbors", {"k": 3}, neighbors_table(GOOD_I, GOOD_D)))
    with pytest.raises(CorruptDataError, match=f"part-00000.arrow: {match}"):
        verify_artifact(forge(tmp_path / "bad", "neighbors", {"k": 3}, neighbors_table(I, D)))


def test_ranks_may_name_any_row_of_their_database(tmp_path):
    I, D = altered(GOOD_I, 1, 2, 1), GOOD_D
    table = ranks_table(list("abcd"), I, D)
    verify_artifact(forge(tmp_path / "open", "ranks", {"k": 3}, table))
    verify_artifact(forge(tmp_path / "within", "ranks", {"k": 3, "database_rows": 4}, table))
    with pytest.raises(CorruptDataError, match="beyond the 3 there are"):
        verify_artifact(forge(tmp_path / "beyond", "ranks", {"k": 3, "database_rows": 3}, table))
    with pytest.raises(CorruptDataError, match="id of row 1 is empty"):
        verify_artifact(forge(tmp_path / "ids", "ranks", {"k": 3}, ranks_table(["a", "", "c", "d"], I, D)))


def test_parts_that_are_not_what_the_manifest_says(tmp_path):
    table = features_table(list("abcd"), UNIT)
    other = features_table(list("abcd"), UNIT.astype(np.float16))
    uri = Path(forge(tmp_path / "set", "features", {"dim": 4, "dtype": "float32"}, table))
    manifest = json.loads((uri / "manifest.json").read_bytes())

    def replace(data: bytes, rows: int = 4) -> None:
        part = Part("part-00000.arrow", rows, len(data), checksum(data))
        (uri / part.name).write_bytes(data)
        (uri / "manifest.json").write_bytes(Manifest("features", rows, (part,), manifest["fields"]).to_json())

    replace(encode_part(other, other.schema).to_pybytes() + bytes(100))
    with pytest.raises(CorruptDataError, match="not a readable Arrow file"):
        FeatureSet.open(str(uri)).read()
    replace(encode_part(table, table.schema).to_pybytes(), rows=3)
    with pytest.raises(CorruptDataError, match="does not hold one batch of 3 rows"):
        FeatureSet.open(str(uri)).read()
    holes = pa.table({"id": ["a", None, "c", "d"], "vector": table.column("vector")}).cast(
        pa.schema([pa.field("id", pa.string()), table.schema.field("vector")])
    )
    replace(encode_part(holes, holes.schema).to_pybytes())
    with pytest.raises(CorruptDataError, match="id of row 1 is empty"):
        verify_artifact(str(uri))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    replace(sink.getvalue().to_pybytes())
    with pytest.raises(CorruptDataError, match="is compressed, which no part is"):
        FeatureSet.open(str(uri)).read()
    wide = features_table(list("abcd"), np.eye(4, 8, dtype=np.float32))
    replace(encode_part(wide, wide.schema).to_pybytes())
    with pytest.raises(CorruptDataError, match="other columns than its manifest"):
        FeatureSet.open(str(uri)).read()


def test_damaged_models(tmp_path):
    uri = tmp_path / "model"
    save_model(str(uri), {"w": np.ones(50, np.float32), "b": np.float32(3)}, {"a": 1}, {"map": 0.5})
    tensors, *_ = load_model(str(uri))
    assert tensors["b"].shape == ()
    for name in ("model.safetensors", "config.json", "metrics.json"):
        whole = (uri / name).read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 1
        (uri / name).write_bytes(damaged)
        for action in (load_model, verify_artifact):
            with pytest.raises(CorruptDataError, match=f"{name} does not match its checksum"):
                action(str(uri))
        (uri / name).write_bytes(whole)
    for tensors in ({}, {"w": np.array([np.nan], np.float32)}):
        with pytest.raises(LattqeError, match="tensor"):
            save_model(str(tmp_path / "other"), tensors, {}, {})


def test_unknown_kinds_are_verified_by_their_checksums(tmp_path):
    (tmp_path / "page.html").write_bytes(b"hello")
    manifest = Manifest("report", 0, (Part("page.html", 0, 5, checksum(b"hello")),), {})
    (tmp_path / "manifest.json").write_bytes(manifest.to_json())
    assert open_artifact(str(tmp_path)).manifest == verify_artifact(str(tmp_path)) == manifest
    (tmp_path / "page.html").write_bytes(b"hellO")
    with pytest.raises(CorruptDataError, match=r"page\.html does not match"):
        verify_artifact(str(tmp_path))


def test_damaged_graph(tmp_path):
    pending = Pending.begin(str(tmp_path / "graph"), "neighbors", {"k": 3}, [4])
    pending.publish(0, neighbors_table(GOOD_I, GOOD_D))
    pending.finish()
    path = tmp_path / "graph" / "part-00000.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    for read in (
        lambda graph: graph.read(),
        lambda graph: graph.gather(np.array([0])),
        lambda graph: graph.verify(),
        lambda graph: list(graph.blocks(2)),
    ):
        with pytest.raises(CorruptDataError, match=r"part-00000\.arrow does not match"):
            read(NeighborGraph.open(str(tmp_path / "graph")))


@pytest.mark.parametrize(("row", "value", "norm"), [(0, 0, "0"), (3, 3, "3"), (2, np.nan, "nan"), (1, np.inf, "inf")])
def test_searching_refuses_vectors_of_another_length(tmp_path, row, value, norm):
    """Their checksums fit, so that only the values tell."""
    vectors = UNIT.copy()
    vectors[row, row] = value
    uri = forge(tmp_path / "set", "features", {"dim": 4, "dtype": "float32"}, features_table(list("abcd"), vectors))
    with pytest.raises(CorruptDataError, match=f"the vector of row {row} has norm {norm}, not 1: make the set again"):
        FeatureSet.open(uri).pieces()


@pytest.mark.parametrize(
    ("neighbors", "match"),
    [
        ([[1], [-7], [1]], "row 1 names a row below -1"),
        ([[1], [2], [2]], "row 2 is its own neighbor"),
        ([[3], [0], [1]], "row 0 names a row beyond the 3 there are"),
    ],
)
def test_readers_of_a_graph_refuse_rows_that_cannot_be(tmp_path, neighbors, match):
    table = neighbors_table(np.array(neighbors), np.full((3, 1), 0.5))
    graph = NeighborGraph.open(forge(tmp_path / "graph", "neighbors", {"k": 1}, table))
    for reader in (graph.read, lambda: graph.gather(np.array([0])), lambda: list(graph.blocks(2))):
        with pytest.raises(CorruptDataError, match=match):
            reader()


def test_a_manifest_without_parts_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_bytes(
        Manifest("features", 0, (), {"dim": 4, "dtype": "float32", "columns": []}).to_json()
    )
    for opened in (FeatureSet.open, open_artifact, verify_artifact):
        with pytest.raises(CorruptDataError, match="names no parts"):
            opened(str(tmp_path))
