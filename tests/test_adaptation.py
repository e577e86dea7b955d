"""Adapting a space to a collection: against plain loops, under rotation, for any shape of rows, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import lattqe
from lattqe import adaptation
from lattqe.adaptation import FEWEST, Adaptation, adapt_to, learn
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.search import FlatIndex
from lattqe.store import read_manifest, save_model
from lattqe.store.artifacts import verify_artifact
from lattqe.store.manifest import Part
from lattqe.store.models import CONFIG, TENSORS, load_model
from lattqe.store.parts import checksum
from lattqe.store.place import open_place
from lattqe.whitening import Whitening, load_map

BOUND = 2e-5  # of a component: the maps and what goes through them are float32


def unit(x):
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def neighbors(x, t=adaptation.NEAR):
    """The t nearest other rows (n, t, D) of each row, by a full ranking."""
    scores = x.astype(np.float64) @ x.T.astype(np.float64)
    np.fill_diagonal(scores, -np.inf)
    return x[np.argsort(-scores, axis=1, kind="stable")[:, :t]]


def clustered(rows, dim, seed=0, noise=1.0):
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % max(rows // 20, 1)
    return unit(rng.normal(size=(labels.max() + 1, dim))[labels] + noise * rng.normal(size=(rows, dim)))


class Twin:
    """The formulas of `lattqe.adaptation`, one row and one pair at a time in float64."""

    def __init__(self, x, near):
        x, near = x.astype(np.float64), near.astype(np.float64)
        n, dim = x.shape
        count = adaptation.centre_count(n, dim)
        self.centres = x.mean(axis=0)[None] / np.linalg.norm(x.mean(axis=0))
        if count > 1:
            self.centres = x[np.random.default_rng(0).choice(n, count, replace=False)]
            for _ in range(adaptation.ROUNDS):
                of = [int(np.argmax([row @ centre for centre in self.centres])) for row in x]
                means = [sum(row for row, own in zip(x, of) if own == c) for c in range(count)]
                self.centres = np.stack([mean / np.linalg.norm(mean) for mean in means])
        shares = [self.shares(row) for row in x]
        pairs = [(share, row - other) for row, share, others in zip(x, shares, near) for other in others]
        total = sum(np.outer(d, d) for _, d in pairs)
        plain = np.eye(dim) * np.trace(total) / (dim * len(pairs))
        whole = (total + adaptation.PRIOR * dim * plain) / (len(pairs) + adaptation.PRIOR * dim)
        self.maps = []
        for c in range(len(self.centres)):
            S, held = sum(share[c] * np.outer(d, d) for share, d in pairs), adaptation.CENTRE_PRIOR * dim
            S = (S + held * whole) / (sum(share[c] for share, _ in pairs) + held)
            values, vectors = np.linalg.eigh(S + adaptation.RIDGE * np.trace(S) / dim * np.eye(dim))
            M = vectors @ np.diag(values**-0.5) @ vectors.T
            kept = sum(share[c] * (M @ row) @ (M @ row) for row, share in zip(x, shares))
            self.maps.append(M / np.sqrt(kept / sum(share[c] for share in shares)))

    def shares(self, row):
        weights = np.exp(adaptation.SHARPNESS * np.array([row @ centre for centre in self.centres]))
        return weights / weights.sum()

    def apply(self, row):
        y = sum(share * (M @ row) for share, M in zip(self.shares(row.astype(np.float64)), self.maps))
        return y / np.linalg.norm(y)


@pytest.mark.parametrize(("rows", "dim"), [(120, 5), (1000, 6)], ids=["one centre", "three centres"])
def test_it_is_what_plain_loops_give(rows, dim):
    x = clustered(rows, dim)
    near, others = neighbors(x), clustered(30, dim, seed=7)
    twin, space = Twin(x, near), learn(x, near, rows)
    assert len(space.centres) == len(twin.centres) == max(rows // 300, 1)
    np.testing.assert_allclose(space.centres, twin.centres, atol=BOUND)
    np.testing.assert_allclose(space.maps, twin.maps, atol=20 * BOUND)  # numbers around 1 and above
    np.testing.assert_allclose(space.apply(others), np.stack([twin.apply(row) for row in others]), atol=BOUND)
    again = adapt_to(FlatIndex(x))  # finds the neighbors itself
    np.testing.assert_array_equal(again.maps, space.maps)


@st.composite
def collections(draw):
    """Unit rows: random ones, some of them the same, all of them the same, or nearly the same."""
    rows, dim = draw(st.integers(1, 5) | st.integers(FEWEST, FEWEST + 20)), draw(st.integers(2, 64))
    x = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(rows, dim))
    kind = draw(st.sampled_from(["random", "duplicates", "equal", "nearly equal", "opposite"]))
    if kind == "duplicates":
        x = x[np.arange(rows) // 3]
    elif kind in ("equal", "nearly equal"):
        x = np.eye(1, dim) + x * (draw(st.sampled_from([1e-3, 1e-7, 1e-20, 1e-22])) if kind != "equal" else 0)
    elif kind == "opposite":
        x = x[:1] * np.where(np.arange(rows) % 2, 1, -1)[:, None]
    return unit(x).astype(draw(st.sampled_from(["float16", "float32"])))


@settings(max_examples=60, derandomize=True)
@given(collections(), st.sampled_from(["float16", "float32"]))
def test_any_rows_stay_unit_vectors(x, dtype):
    space = adapt_to(FlatIndex(x))
    made = space.apply(x, dtype)
    assert (made.shape, made.dtype) == (x.shape, np.dtype(dtype))
    assert np.isfinite(space.maps).all()
    np.testing.assert_allclose(np.linalg.norm(made.astype(np.float64), axis=1), 1, atol=2e-3)
    assert space.apply(x[:0]).shape == (0, x.shape[1])


@pytest.mark.parametrize("rows", [0, 1])
def test_what_has_no_neighbors_stays_as_it_is(rows):
    x = clustered(4, 7)
    np.testing.assert_allclose(lattqe.adapt(x[:rows]).apply(x), x, atol=1e-7)


def test_lists_are_taken_as_arrays_are():
    x = clustered(120, 4)
    np.testing.assert_array_equal(lattqe.adapt(x.tolist()).apply(x.tolist()), lattqe.adapt(x).apply(x))


@pytest.mark.parametrize("rows", [100, 700])
def test_a_rotated_space_is_adapted_in_the_same_way(rows):
    x, others = clustered(rows, 12), clustered(50, 12, seed=5)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(12, 12)))[0].astype(np.float32)
    near = neighbors(x)
    plain, turned = learn(x, near, rows), learn(x @ turn, near @ turn, rows)
    np.testing.assert_allclose(turned.apply(others @ turn), plain.apply(others) @ turn, atol=5e-5)


def mean_ap(x, labels):
    found = lattqe.search(x, x, k=len(x))
    return 100 * lattqe.evaluate(found, labels=labels, query_rows=np.arange(len(x)))["label"].mean_ap


def test_noise_in_a_few_directions_is_taken_out_without_labels():
    rng, labels = np.random.default_rng(0), np.arange(800) % 40
    few = np.linalg.qr(rng.normal(size=(32, 4)))[0]
    x = rng.normal(size=(40, 32))[labels] + 0.3 * rng.normal(size=(800, 32)) + 3 * rng.normal(size=(800, 4)) @ few.T
    x = unit(x)
    before, after = mean_ap(x, labels), mean_ap(lattqe.adapt(x).apply(x), labels)
    assert before < 60
    assert after > before + 30


@pytest.mark.parametrize("rows", [2, 12, FEWEST - 1])
def test_a_tiny_collection_stays_as_it_is(rows):
    """Of a dozen rows the fifth neighbor is not near: there is nothing to learn from."""
    x = clustered(rows, 8)
    np.testing.assert_allclose(lattqe.adapt(x).apply(x), x, atol=1e-7)


def test_vectors_of_another_shape_or_without_direction_are_refused():
    space = lattqe.adapt(clustered(120, 6))
    for wrong in (np.ones((3, 5)), np.ones(6), np.ones((2, 3, 6))):
        with pytest.raises(LattqeError, match="do not fit an adaptation to 6 columns"):
            space.apply(wrong)
    for value in (0, np.nan, np.inf):
        bad = clustered(4, 6)
        bad[2] = value
        with pytest.raises(LattqeError, match="row 2 of 4 has no direction"):
            space.apply(bad)


@pytest.fixture
def stored(tmp_path):
    space = lattqe.adapt(clustered(700, 6))
    space.save(str(tmp_path / "space"))
    return str(tmp_path / "space")


def test_a_stored_adaptation_is_the_same(stored):
    space, manifest = Adaptation.load(stored)
    x = clustered(50, 6, seed=3)
    np.testing.assert_array_equal(space.apply(x), lattqe.adapt(clustered(700, 6)).apply(x))
    assert (manifest.config["kind"], manifest.config["centres"], manifest.config["rows"]) == ("adaptation", 2, 700)
    assert isinstance(load_map(stored)[0], Adaptation)
    verify_artifact(stored)


def forge(uri, tensors=None, config=None):
    """Store other tensors, or another config, in a model, with checksums and sizes that fit."""
    place, manifest = open_place(uri), read_manifest(open_place(uri))
    now = load_model(uri)
    files = {TENSORS: safetensors.numpy.save({**now[0], **tensors})} if tensors else {}
    files |= {CONFIG: json.dumps({**now[1], **config}).encode()} if config else {}
    shapes = {
        name: {"shape": list(each.shape), "dtype": each.dtype.name}
        for name, each in sorted({**now[0], **(tensors or {})}.items())
    }
    parts = tuple(
        Part(one.name, 0, len(files[one.name]), checksum(files[one.name])) if one.name in files else one
        for one in manifest.parts
    )
    for name, data in files.items():
        place.write(name, data)
    place.write("manifest.json", replace(manifest, parts=parts, fields={"tensors": shapes}).to_json())


def holding(value):
    centres = np.eye(2, 6, dtype=np.float32)
    centres[1, 1] = value
    return centres


@pytest.mark.parametrize(
    ("tensors", "config", "says"),
    [
        ({"centres": np.eye(3, 6, dtype=np.float32)}, {}, "do not fit maps of shape"),
        ({"centres": np.zeros((2, 0), np.float32), "maps": np.zeros((2, 0, 0), np.float32)}, {}, "do not fit"),
        ({"maps": np.zeros((2, 6, 7), np.float32)}, {}, "do not fit maps of shape"),
        ({"centres": holding(np.nan)}, {}, "'centres' holds NaN or infinity"),
        ({"maps": np.full((2, 6, 6), np.inf, np.float32)}, {}, "'maps' holds NaN or infinity"),
        ({"maps": np.ones((2, 6, 6), np.int64)}, {}, "'maps' holds int64"),
        ({"more": np.ones(3)}, {}, "not an adaptation"),
        ({}, {"centres": 8}, "its config says 8 centres, it has 2"),
        ({}, {"centres": None}, "its config says None centres"),
        ({}, {"kind": "whitening"}, "not an adaptation"),
    ],
)
def test_a_forged_adaptation_is_refused_in_one_line(stored, tensors, config, says):
    forge(stored, tensors, config)
    with pytest.raises(LattqeError, match=says) as caught:
        Adaptation.load(stored)
    assert "\n" not in str(caught.value)
    with pytest.raises(CorruptDataError):
        verify_artifact(stored)


def test_other_models_and_damaged_ones_are_refused(stored, tmp_path):
    Whitening(np.zeros(6), np.eye(6), {}).save(str(tmp_path / "whitening"))
    save_model(str(tmp_path / "model"), {"w": np.ones(3)}, {}, {})
    for other in ("whitening", "model"):
        with pytest.raises(LattqeError, match=f"{other} is a model, but not an adaptation"):
            Adaptation.load(str(tmp_path / other))
    with pytest.raises(LattqeError, match="is a model, but not a whitening"):
        Whitening.load(stored)
    damaged = bytearray((tmp_path / "space" / TENSORS).read_bytes())
    damaged[-3] ^= 1
    (tmp_path / "space" / TENSORS).write_bytes(damaged)
    with pytest.raises(CorruptDataError, match="checksum"):
        Adaptation.load(stored)
