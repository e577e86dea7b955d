"""Rows that lie in several arrays give what one array gives; and exact scores are one dot product for each pair."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattqe.errors import LattqeError
from lattqe.search import FlatIndex, exact, knn_graph
from lattqe.search.exact import exact_scores, norms
from lattqe.search.products import Block, TorchProducts
from lattqe.search.rows import Clock, Pieces, in_one, pieces_of, row_range, surplus_rows
from lattqe.search.stored import publish_graph
from lattqe.store import FeatureSet, FeatureWriter

DTYPES = [np.float16, np.float32]


def unit(rng, n, dim, dtype=np.float32):
    x = rng.standard_normal((n, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(dtype)


def in_pieces(x, *cuts):
    """x cut before the given rows."""
    return Pieces(np.split(x, cuts))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.data())
@settings(deadline=None, max_examples=60)
def test_pieces_are_used_like_one_array(lengths, data):
    x = np.arange(sum(lengths) * 3, dtype=np.float32).reshape(-1, 3)
    pieces = in_pieces(x, *np.cumsum(lengths[:-1]))
    assert (len(pieces), pieces.shape, pieces.dtype) == (len(x), x.shape, x.dtype)
    start = data.draw(st.integers(0, len(x)))
    stop = data.draw(st.integers(start, len(x)))
    np.testing.assert_array_equal(pieces[start:stop], x[start:stop])
    part = row_range(pieces, start, stop)
    np.testing.assert_array_equal(part[0 : len(part)], x[start:stop])
    assert all(np.shares_memory(piece, x) for piece in pieces_of(part) if piece.size), "a copy"
    if len(x):
        rows = np.array(data.draw(st.lists(st.integers(0, len(x) - 1))), dtype=np.int32)
        np.testing.assert_array_equal(pieces[rows], x[rows])


def test_arrays_of_two_widths_become_one():
    joined = in_one([np.ones((2, 3), np.float16), np.zeros((1, 3), np.float32)])
    assert isinstance(joined, np.ndarray)
    assert joined.shape == (3, 3)


def test_vectors_of_two_lengths_are_refused():
    with pytest.raises(LattqeError, match=r"\[3, 4\] dimensions"):
        in_one([np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("staged", [1, 100, 1 << 24])
def test_pieces_come_to_a_device_whole(dtype, staged, monkeypatch):
    monkeypatch.setattr("lattqe.device.STAGED_BYTES", staged)  # at least one row at a time, in two buffers
    x = unit(np.random.default_rng(6), 50, 8, dtype)
    block = Block.load(in_pieces(x, 11, 30), TorchProducts(torch.device("cpu")), 5, widen=True)
    part = block.part(20, 45)
    np.testing.assert_array_equal(block.held.numpy(), x.astype(np.float32))
    np.testing.assert_array_equal(part.held.numpy(), x[20:45].astype(np.float32))
    np.testing.assert_array_equal(part.stored[0:25], x[20:45])


ROADS = {"chosen": {}, "pairs": {"SHORT_RUN": 10**6}, "runs": {"SHORT_RUN": 0, "CALL_ELEMENTS": 0}}
EQUAL_RUNS = [[1] * 40, [9] * 30, [64] * 8, [500]]
UNEQUAL_RUNS = [[3, 1, 2] * 20, [9, 9, 9, 10, 9, 9], [40, 9, 1, 33] * 5, [700, 2, 8], [1] * 13 + [1000], [0]]


@pytest.mark.parametrize("dtypes", [(np.float16,) * 2, (np.float32,) * 2, (np.float32, np.float16)])
@pytest.mark.parametrize("runs", EQUAL_RUNS + UNEQUAL_RUNS)
@pytest.mark.parametrize("chunk", [64, 4096, exact.SCORING_CHUNK])
@pytest.mark.parametrize("road", ROADS)
def test_exact_scores_are_dot_products_pair_by_pair(road, runs, chunk, dtypes, monkeypatch):
    """Whatever stands in the same chunk, in the same run or in another piece, and however pairs are gathered."""
    for name, value in {"SCORING_CHUNK": chunk, "SERIAL_ELEMENTS": 100, **ROADS[road]}.items():
        monkeypatch.setattr(exact, name, value)
    rng = np.random.default_rng(0)
    xq, xb = unit(rng, len(runs), 37, dtypes[0]), unit(rng, 90, 37, dtypes[1])
    i = np.repeat(np.arange(len(runs)), runs)
    j = rng.integers(0, len(xb), len(i)).astype(np.int32)
    expected = np.array([np.dot(xq[a].astype(np.float64), xb[b].astype(np.float64)) for a, b in zip(i, j)])
    np.testing.assert_array_equal(exact_scores(xq, xb, i, j), expected)
    np.testing.assert_array_equal(exact_scores(in_pieces(xq, 1), in_pieces(xb, 20, 21, 80), i, j), expected)


def test_every_float16_is_widened_exactly():
    """Subnormal ones, both zeros and infinities included."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[~np.isnan(values)][:, None]
    scores = exact_scores(np.ones((1, 1), np.float16), values, np.zeros(len(values), int), np.arange(len(values)))
    np.testing.assert_array_equal(scores, values[:, 0].astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("runs", [[12] * 12, [12, 1, 7, 7, 2], [1] * 9])
def test_long_vectors_are_cut_for_the_dot_product(runs, dtype):
    rng = np.random.default_rng(1)
    x = unit(rng, 12, exact.DOT_LENGTH + 100, dtype)
    i, j = np.repeat(np.arange(len(runs)), runs), rng.integers(0, 12, sum(runs))
    wide = x.astype(np.float64)
    cut = exact.DOT_LENGTH
    expected = [np.dot(wide[a, :cut], wide[b, :cut]) + np.dot(wide[a, cut:], wide[b, cut:]) for a, b in zip(i, j)]
    np.testing.assert_array_equal(exact_scores(x, x, i, j), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_graph_and_the_search_of_pieces(dtype):
    rng = np.random.default_rng(2)
    x = np.concatenate([unit(rng, 300, 24, dtype), np.repeat(unit(rng, 2, 24, dtype), 40, axis=0)])
    x = x[rng.permutation(len(x))]
    pieces = in_pieces(x, 7, 7, 190, 377)
    np.testing.assert_array_equal(norms(pieces), norms(x))
    np.testing.assert_array_equal(surplus_rows(pieces, 5), surplus_rows(x, 5))
    for block_rows in (None, 90):
        for ours, theirs in zip(knn_graph(pieces, 5, block_rows=block_rows), knn_graph(x, 5)):
            np.testing.assert_array_equal(ours, theirs)
    xq = unit(rng, 9, 24)
    one, several = FlatIndex(x, first_row=3), FlatIndex(pieces, first_row=3)
    rows = one.search(xq, 6)[1]
    for name, arguments in (
        ("search", (xq, 6)),
        ("lowest", (xq, 6)),
        ("score", (xq, rows)),
        ("count_above", (xq, one.score(xq, rows), rows)),
        ("gather", (rows.ravel(),)),
    ):
        for ours, theirs in zip(getattr(several, name)(*arguments), getattr(one, name)(*arguments)):
            np.testing.assert_array_equal(ours, theirs)


def test_candidates_that_known_lists_rule_out_are_not_scored():
    """In blocks a row keeps k·f/(s+f) newcomers of a block with a fraction f of the rows, having seen a fraction s."""
    x, k = unit(np.random.default_rng(3), 2000, 32), 20
    whole, cut = Clock(), Clock()
    knn_graph(x, k, clock=whole)
    knn_graph(x, k, block_rows=500, clock=cut)
    kept = k * (1 + 1 / 2 + 1 / 3 + 1 / 4) * len(x)  # what is in the lists after each of the four blocks
    assert whole.counts["scored"] < 1.05 * k * len(x)
    assert cut.counts["scored"] < 1.05 * kept


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_rows_are_views_of_their_parts(tmp_path, dtype):
    x = unit(np.random.default_rng(4), 100, 16, dtype)
    with FeatureWriter(str(tmp_path / "set"), 16, dtype=np.dtype(dtype).name, part_bytes=2000) as writer:
        writer.append(x, [str(row) for row in range(100)])
    stored = FeatureSet.open(str(tmp_path / "set"))
    pieces = stored.pieces(5, 95)
    assert len(pieces) > 1
    assert not any(piece.flags.writeable or piece.flags.owndata for piece in pieces)
    np.testing.assert_array_equal(np.concatenate(pieces), stored.read(5, 95))
    assert [piece.shape for piece in stored.pieces(9, 9)] == [(0, 16)]


def test_reading_rows_does_not_load_pandas(tmp_path):
    """Arrow would, wherever it is installed: a fifth of a second and 30 MiB in every worker."""
    with FeatureWriter(str(tmp_path / "set"), 4) as writer:
        writer.append(unit(np.random.default_rng(5), 10, 4), [str(row) for row in range(10)])
    code = (
        "import sys; from lattqe.store import FeatureSet; s = FeatureSet.open(sys.argv[1]); s.read(); "
        "s.gather(__import__('numpy').arange(3)); print('pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "set")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_graph_of_parts_on_s3(s3_uri, tmp_path):
    """Fetched parts, and parts mapped from the cache, are compared where they lie."""
    x = unit(np.random.default_rng(7), 200, 16)
    with FeatureWriter(f"{s3_uri}/set", 16, dtype="float32", part_bytes=3000) as writer:
        writer.append(x, [str(row) for row in range(200)])
    expected = knn_graph(FeatureSet.open(f"{s3_uri}/set").read(), 5)
    for name, cache in (("fetched", None), ("mapped", str(tmp_path / "cache"))):
        stored = FeatureSet.open(f"{s3_uri}/set", cache)
        assert len(stored.pieces()) > 3
        for ours, theirs in zip(publish_graph(stored, 5, f"{s3_uri}/{name}").read(), expected):
            np.testing.assert_array_equal(ours, theirs)
