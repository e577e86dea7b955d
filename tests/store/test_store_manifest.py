"""Manifests are read strictly: any change to one is refused, or changes nothing that is read."""

import contextlib
import copy
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store import FeatureSet, FeatureWriter, Manifest, NeighborGraph, Part, check_input_kind, open_artifact
from lattqe.store.manifest import (
    MAX_BYTES,
    canonical_json,
    checksum,
    parse_manifest,
    plain_json,
    seal_bytes,
    seal_json,
    unseal_bytes,
    unseal_json,
)

MANIFEST = Manifest(
    "features",
    5,
    (Part("part-00000.arrow", 3, 100, "ab"), Part("part-00001.arrow", 2, 90, "cd")),
    {"dim": 4, "dtype": "float16"},
    {"k": 1.5},
    {"source": {"uri": "u", "digest": "d", "kind": "x"}},
)


def signed(body: dict) -> bytes:
    """A manifest's text with a valid checksum, so that the checks behind it are reached."""
    body = {key: value for key, value in body.items() if key != "checksum"}
    return json.dumps({**body, "checksum": checksum(canonical_json(body))}).encode()


def test_round_trip():
    assert parse_manifest(MANIFEST.to_json(), "here") == MANIFEST
    assert MANIFEST.total_bytes == 190


def test_digest_is_of_the_content_alone():
    other = Manifest("features", 5, MANIFEST.parts, MANIFEST.fields, {"k": 2}, {}, "9.9")
    assert other.digest == MANIFEST.digest
    assert Manifest("features", 5, MANIFEST.parts[::-1], MANIFEST.fields).digest != MANIFEST.digest
    assert Manifest("ranks", 5, MANIFEST.parts, MANIFEST.fields).digest != MANIFEST.digest
    assert Manifest("features", 5, MANIFEST.parts, {"dim": 5}).digest != MANIFEST.digest


def changed(**changes) -> bytes:
    return signed({**json.loads(MANIFEST.to_json()), **changes})


def with_part(**changes) -> bytes:
    body = json.loads(MANIFEST.to_json())
    body["parts"][1] = {key: value for key, value in {**body["parts"][1], **changes}.items() if value is not ...}
    return signed(body)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not valid"),
        (b'{"a": NaN}', "NaN is not allowed"),
        (b"{}", "not a lattqe manifest"),
        (changed(format="other"), "not a lattqe manifest"),
        (changed(format_version="1"), "not a lattqe manifest"),
        (changed(format_version=True), "not a lattqe manifest"),
        (changed(format_version=0), "not a lattqe manifest"),
        (MANIFEST.to_json().replace(b"1.5", b"1e999"), "damaged or edited"),
        (MANIFEST.to_json().replace(b"1.5", b"1.6"), "damaged or edited"),
        (changed(kind=5), "'kind' is not a valid str"),
        (changed(rows=5.0), "'rows' is not a valid int"),
        (changed(rows=True), "'rows' is not"),
        (changed(parts={}), "'parts' is not a valid list"),
        (changed(surplus=1), "unknown keys: .'surplus'"),
        (changed(rows=6), "do not add up to 6"),
        (changed(rows=-5), "do not add up"),
        (changed(digest="0"), "digest does not match"),
        (changed(inputs={"a": {"uri": 5}}), "input 'a'"),
        (changed(inputs={"a": "b"}), "input 'a'"),
        (changed(inputs={"a": {"uri": "b"}}), "input 'a' lacks its address .uri. or its digest"),
        (changed(inputs={"a": {"digest": "b"}}), "input 'a' lacks its address"),
        (changed(parts=[5]), "exactly name, rows"),
        (with_part(name=...), "exactly name, rows"),
        (with_part(rows="2"), "'rows' is not a valid int"),
        (with_part(rows=-2), "negative"),
        (with_part(bytes=-1), "negative"),
        (with_part(name="part-00000.arrow"), "twice"),
        (with_part(name="../x"), "refused file name"),
        (with_part(name="/etc/passwd"), "refused file name"),
    ],
)
def test_malformed_manifests_are_refused_in_one_line(data, match):
    with pytest.raises(LattqeError, match=match) as caught:
        parse_manifest(data, "here/manifest.json")
    assert "\n" not in str(caught.value)


def test_missing_key():
    body = json.loads(MANIFEST.to_json())
    del body["config"]
    with pytest.raises(CorruptDataError, match="missing or unknown keys"):
        parse_manifest(signed(body), "here")


def test_newer_format_asks_for_a_newer_program():
    with pytest.raises(LattqeError, match=r"here has format version 2, this lattqe .* reads up to 1: install a newer"):
        parse_manifest(changed(format_version=2, unheard="of"), "here")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> FeatureSet:
    with FeatureWriter(str(tmp_path_factory.mktemp("stored") / "set"), 3, part_bytes=100) as writer:
        writer.append(np.random.default_rng(0).standard_normal((20, 3)), [str(i) for i in range(20)])
    return writer.close()


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_is_refused_or_right(stored, data):
    """Random edits of the JSON tree, with and without a new checksum: never a crash, never other rows."""
    body = json.loads(stored.manifest.to_json())
    expected = stored.read()
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(body, data)
    text = signed(body) if data.draw(st.booleans()) else json.dumps(body).encode()
    try:
        manifest = parse_manifest(text, "here")
        features = FeatureSet(stored.place, manifest)
        rows = features.read()
    except LattqeError:
        return
    np.testing.assert_array_equal(rows, expected)


def mutate(body: dict, data: st.DataObject) -> None:
    """Replace, remove or double one value somewhere in the tree."""
    node = body
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and data.draw(st.booleans()):
            node = node[key]
            continue
        action = data.draw(st.sampled_from(["replace", "remove", "copy"]))
        if action == "remove":
            del node[key]
        elif action == "copy" and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        else:
            node[key] = data.draw(st.sampled_from([0, -1, 1, 2**70, 1.5, True, None, "", "x", "../x", [], {}, [[]]]))
        return


@given(st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=80)
def test_any_flipped_bit_is_refused_or_right(stored, position, mask):
    data = bytearray(stored.manifest.to_json())
    data[position % len(data)] ^= mask
    with contextlib.suppress(LattqeError):
        assert parse_manifest(bytes(data), "here") == stored.manifest


def test_nothing_is_allocated_on_the_word_of_a_manifest(stored):
    fields = {
        **stored.manifest.fields,
        "dim": 1 << 19,
        "columns": [
            {"name": "id", "type": "string"},
            {"name": "vector", "type": f"fixed_size_list<item: halffloat not null>[{1 << 19}]"},
        ],
    }
    manifest = Manifest("features", 20, stored.manifest.parts, fields)
    with pytest.raises(CorruptDataError, match="bytes cannot hold"):
        FeatureSet(stored.place, manifest)


def test_oversized_manifest_is_not_read(tmp_path):
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(CorruptDataError, match="larger than any manifest"):
        FeatureSet.open(str(tmp_path))


def test_kinds_are_named(stored, tmp_path):
    with pytest.raises(LattqeError, match=r"is a feature set .kind 'features'., but a neighbor graph"):
        NeighborGraph.open(stored.uri)
    with pytest.raises(LattqeError, match=r"but a model .kind 'model'. is needed here"):
        check_input_kind(stored.uri, "model")
    assert check_input_kind(stored.uri, "features").digest == stored.digest
    with pytest.raises(LattqeError, match="there is no finished artifact at"):
        FeatureSet.open(str(tmp_path / "nowhere"))


def test_json_that_cannot_be():
    assert plain_json({"a": (1, 2)}, "it") == {"a": [1, 2]}
    for value in ({"a": float("inf")}, {"a": {1, 2}}, {"a": object()}):
        with pytest.raises(LattqeError, match="it cannot be stored as JSON"):
            plain_json(value, "it")


def test_a_raw_file_is_to_be_imported_first(tmp_path):
    np.save(tmp_path / "x.npy", np.eye(3))
    for opened in (FeatureSet.open, open_artifact):
        with pytest.raises(LattqeError, match=r"x\.npy is a file, not an artifact: import it first: lattqe"):
            opened(str(tmp_path / "x.npy"))
    with pytest.raises(LattqeError, match=r"is a file, not an artifact: a neighbor graph .* is needed here"):
        NeighborGraph.open(str(tmp_path / "x.npy"))


@given(data=st.binary(max_size=300), position=st.integers(0, 400))
def test_sealed_files_come_back_or_are_refused(data, position):
    """Of bytes and of Arrow's buffers, which view bytes as signed numbers."""
    sealed = seal_bytes(data)
    assert bytes(unseal_bytes(sealed, "here")) == data
    assert bytes(unseal_bytes(memoryview(pa.py_buffer(sealed)), "here")) == data
    damaged = bytearray(sealed)
    damaged[position % len(sealed)] ^= 1
    for wrong in (bytes(damaged), sealed[:-1], b""):
        with pytest.raises(CorruptDataError, match="here does not match its checksum"):
            unseal_bytes(wrong, "here")


def test_sealed_json():
    body = {"score": 0.5, "names": ["a"]}
    assert unseal_json(seal_json(body), "here") == body
    for wrong in (seal_json(body).replace(b"0.5", b"1.0"), b'{"score": 0.5}', b'{"score": 1e999, "seal": "x"}', b"[]"):
        with pytest.raises(CorruptDataError, match="here"):
            unseal_json(wrong, "here")
