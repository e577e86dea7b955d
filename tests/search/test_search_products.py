"""Every kind of products: its error bound attacked, and the same answers as the definition."""

import sys
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search_exact import KINDS, data, slow_graph, slow_topk, use_lanes

from lattqe.device import exact_convolutions, matmul_precision
from lattqe.errors import LattqeError
from lattqe.search import FlatIndex, device_topk, index, knn_graph, topk
from lattqe.search import products as products_module
from lattqe.search.exact import FORMATS, encode, exact_scores
from lattqe.search.lanes import CPU_KINDS, kinds_for
from lattqe.search.products import STRIP_ENTRIES, Block, CoarseTorchProducts, TorchProducts

CPU = torch.device("cpu")
topk_module = sys.modules["lattqe.search.topk"]  # the package has a function of that name
MAKE = {
    **CPU_KINDS,
    "torch device float32": lambda **sizes: TorchProducts(CPU, **sizes),
    "torch device float16": lambda **sizes: CoarseTorchProducts(CPU, "float16", **sizes),
    "torch device tf32": lambda **sizes: CoarseTorchProducts(CPU, "tf32", **sizes),
}


def attack(shape, seed, n, dim, dtype):
    """Rows that are hard on one bound or another; finite in `dtype`, their norms finite in float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim))
    if shape == "near ties":
        x = x[:1] + 1e-5 * x
    if shape == "norm ratios":
        x *= 10.0 ** rng.uniform(-30, 15, (n, 1))
    if shape == "column ratios":
        x *= 10.0 ** rng.uniform(-12, 3, (1, dim))
    if shape == "subnormals":
        x *= 10.0 ** rng.uniform(-9, -4, (n, 1))
    if shape == "spikes":
        x[np.arange(n), rng.integers(0, dim, n)] = 1e4
    if shape == "one outlier":
        x[rng.integers(0, n)] *= 6e3 if dtype == np.float16 else 1e17
    if shape == "constant":
        x = np.full((n, dim), 0.1) * rng.integers(1, 4, (n, 1))
    if shape == "halves":  # every code exactly between two
        x = (rng.integers(-127, 127, (n, dim)) + 0.5) / 127
        x[:, 0] = 1
    if shape == "zeros":
        x[rng.random(n) < 0.5] = 0
    if shape == "opposite signs":
        x = np.abs(x) * np.where(np.arange(n) % 2, 1, -1)[:, None]
    if dtype == np.float16:
        x = np.clip(x, -60000, 60000)
    return x.astype(dtype)


SHAPES = (
    "random",
    "near ties",
    "norm ratios",
    "column ratios",
    "subnormals",
    "spikes",
    "one outlier",
    "constant",
    "halves",
    "zeros",
    "opposite signs",
)


@pytest.mark.parametrize("kind", MAKE)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_product_is_farther_from_the_truth_than_its_bound(kind, draw):
    dtype = draw.draw(st.sampled_from([np.float16, np.float32]))
    dim = draw.draw(st.sampled_from([1, 2, 7, 64, 333, 2048]))
    seed = draw.draw(st.integers(0, 10_000))
    xq = attack(draw.draw(st.sampled_from(SHAPES)), seed, draw.draw(st.integers(1, 30)), dim, dtype)
    xb = attack(draw.draw(st.sampled_from(SHAPES)), seed + 1, draw.draw(st.integers(1, 30)), dim, dtype)
    if draw.draw(st.booleans()):
        xb = np.concatenate([xb, xq])  # the largest products there can be
    products = MAKE[kind]()
    rows, others = (Block.load(x, products, widen=True) for x in (xq, xb))
    tile = np.asarray(products.multiply(rows.held, others.held), dtype=np.float64)
    i, j = np.divmod(np.arange(len(xq) * len(xb)), len(xb))
    exact = exact_scores(xq, xb, i, j).reshape(tile.shape)
    bound = products.error(rows, others)[:, None] + 1e-15 * np.abs(exact)  # what float64 itself may be off
    assert (np.abs(tile - exact) <= bound).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_bounds_of_ordinary_rows_are_useful_and_of_others_are_those_of_float32(form, dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((200, 128))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x[3, :] = 1e-3 * x[3]
    x[3, 5] = 50  # a spike and an outlier
    codes = encode(torch.from_numpy(x.astype(dtype)), FORMATS[form])
    assert np.flatnonzero(codes.wide).tolist() == [3]
    assert codes.residual[~codes.wide].max() < (0.02 if form == "int8" else 1e-3)
    if (form, dtype) == ("float16", np.float16):
        assert not codes.residual[~codes.wide].any()


@cache
def hard_rows(rows, dtype):
    """Rows of a kind, with a long one and a spike, and their graph: the same for every kind of products."""
    xb = data(rows, np.random.default_rng(2), 180, 24, dtype)
    xb[7] *= 30
    xb[11, 2] = 9
    return xb, slow_graph(xb, 9)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("rows", KINDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_every_kind_gives_the_graph_of_the_definition(kind, rows, dtype, monkeypatch):
    xb, expected = hard_rows(rows, dtype)
    use_lanes(monkeypatch, [MAKE[kind](tile=48)])
    for block_rows in (None, 80):
        for found, wanted in zip(knn_graph(xb, 9, block_rows=block_rows), expected):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", kinds_for(CPU))
def test_kinds_by_name_in_several_threads(kind):
    xb = data("near", np.random.default_rng(3), 900, 40, np.float32)
    expected = knn_graph(xb, 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = knn_graph(xb, 8, kind=kind)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_an_unknown_kind_is_refused():
    with pytest.raises(LattqeError, match="use one of float32 numpy, float32 torch, int8"):
        knn_graph(np.ones((3, 2), dtype=np.float32), 1, kind="tf32")


class CrampedProducts(TorchProducts):
    """A device with memory for tiles of at most so many entries."""

    def __init__(self, limit, **sizes):
        super().__init__(CPU, **sizes)
        self.limit, self.refused = limit, 0

    def _product(self, a, b, out):
        if out.numel() > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError("out of memory")
        return super()._product(a, b, out)


def test_tiles_are_halved_until_the_device_has_room(monkeypatch):
    rng = np.random.default_rng(4)
    xb = data("duplicates", rng, 900, 24, np.float16)
    products = CrampedProducts(130 * 130, tile=512)
    use_lanes(monkeypatch, [products])
    for found, expected in zip(knn_graph(xb, 9), slow_graph(xb, 9)):
        np.testing.assert_array_equal(found, expected)
    assert (products.tile, products.refused) == (128, 2)
    monkeypatch.setattr(index, "lanes_on", lambda device, **work: nullcontext([CrampedProducts(40_000)]))
    np.testing.assert_array_equal(topk(xb[:300], xb, 7)[1], slow_topk(xb[:300], xb, 7)[1])
    use_lanes(monkeypatch, [CrampedProducts(10)])
    with pytest.raises(LattqeError, match="no memory left, even for tiles of 64 rows"):
        knn_graph(xb, 9)


@pytest.mark.parametrize("kind", ["float32", "float16", "tf32"])
def test_float16_rows_are_scored_on_the_device(kind, monkeypatch):
    """No pair is scored on the CPU, and the lists are the same integers and the same bits."""
    rng = np.random.default_rng(5)
    xb = np.concatenate([data(rows, rng, 120, 32, np.float16) for rows in ("random", "duplicates", "near")])
    expected = knn_graph(xb, 11)
    monkeypatch.setattr(device_topk, "exact_scores", None)
    use_lanes(monkeypatch, [MAKE[f"torch device {kind}"](tile=128)])
    for block_rows in (None, 130):
        for found, wanted in zip(knn_graph(xb, 11, block_rows=block_rows), expected):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["float32", "float16", "tf32"])
def test_rows_sent_in_steps_give_the_same_integers(kind, monkeypatch):
    """On the CPU the two buffers only take turns; on a GPU they are pinned, and copied in a stream of their own."""
    rng = np.random.default_rng(7)
    for dtype in (np.float16, np.float32):
        xb = np.concatenate([data(rows, rng, 90, 20, dtype) for rows in ("random", "duplicates", "near")])
        expected = slow_graph(xb, 9)
        monkeypatch.setattr("lattqe.device.STAGED_BYTES", 17 * 20 * 4)
        use_lanes(monkeypatch, [MAKE[f"torch device {kind}"](tile=64)])
        for block_rows in (None, 100):
            for found, wanted in zip(knn_graph(xb, 9, block_rows=block_rows), expected):
                np.testing.assert_array_equal(found, wanted)


def test_the_places_of_codes_are_sent_to_the_device_once():
    xb = data("random", np.random.default_rng(8), 60, 16, np.float16)
    products = CoarseTorchProducts(CPU, "float16")
    rows, others = Block.load(xb, products).take(np.arange(20, 40)), Block.load(xb, products)
    running = topk_module.running_topk(products, rows, others, 4)
    for block in (rows, others):
        object.__setattr__(block.held, "place", None)  # what is not kept cannot be sent again
    i, j = torch.arange(20).repeat_interleave(60), torch.arange(60).repeat(20)
    running.offer(slice(None), i, j, products.multiply(rows.held, others.held).flatten())
    running.settle(0, 20)
    running.prepare_scores()
    running.score(0, 20)
    scores, ids = running.lists(0, 20)
    expected = slow_topk(xb[20:40], xb, 4)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(scores.astype(np.float32), expected[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_that_do_not_fit_a_device_are_told_with_what_to_do(dtype, monkeypatch):
    """A shard larger than the memory of its worker's device cannot be cut by the worker."""
    monkeypatch.setattr(index, "lanes_on", lambda device, **work: nullcontext([TorchProducts(CPU)]))
    empty = torch.empty

    def cramped(shape, *arguments, **more):
        if shape == (500, 16):
            raise torch.OutOfMemoryError("out of memory")
        return empty(shape, *arguments, **more)

    monkeypatch.setattr("lattqe.device.torch.empty", cramped)
    xb = np.ones((500, 16), dtype)
    FlatIndex(xb[:499])
    with pytest.raises(LattqeError, match=r"500 rows of 16 numbers do not fit .* more workers \(--workers\)"):
        FlatIndex(xb)


def test_float16_products_on_a_gpu_are_summed_in_float32(monkeypatch):
    """Asked of the settings alone: there is no GPU here."""
    setting, found = torch.backends.cuda.matmul, []
    before = setting.fp32_precision, setting.allow_fp16_reduced_precision_reduction

    class There:
        device = torch.device("cuda")
        T = "transposed"

    def mm(a, b, out_dtype):
        found.append((b, out_dtype, setting.fp32_precision, setting.allow_fp16_reduced_precision_reduction))

    monkeypatch.setattr(torch, "mm", mm)
    FORMATS["float16"].multiply(There(), There())
    assert found == [("transposed", torch.float32, "ieee", False)]
    assert (setting.fp32_precision, setting.allow_fp16_reduced_precision_reduction) == before
    with matmul_precision(torch.device("cuda"), "tf32"):
        assert (setting.fp32_precision, setting.allow_fp16_reduced_precision_reduction) == ("tf32", False)
    assert (setting.fp32_precision, setting.allow_fp16_reduced_precision_reduction) == before


def test_precision_settings_are_put_back():
    setting = torch.backends.cudnn.conv
    before = setting.fp32_precision, torch.backends.cudnn.deterministic
    with exact_convolutions():
        assert (setting.fp32_precision, torch.backends.cudnn.deterministic) == ("ieee", True)
    assert (setting.fp32_precision, torch.backends.cudnn.deterministic) == before


def test_stored_rows_are_gathered_in_their_own_width():
    x = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float16)
    index, rows = FlatIndex(x, first_row=100), np.array([103, 119, 100, 103])
    assert index.gather_stored(rows).dtype == np.float16
    np.testing.assert_array_equal(index.gather_stored(rows), x[rows - 100])
    assert index.gather(rows).dtype == np.float32


@pytest.mark.parametrize(("spread", "together"), [(0.0, True), (0.1, True), (3.0, False), (np.inf, False)])
def test_rows_and_columns_looked_at_once_are_those_looked_at_one_after_the_other(spread, together, monkeypatch):
    """Thresholds alike, far apart or missing, every third of a longer array; the tile is more than one strip.

    Alike, the lowest of them is enough to find what is then told apart.
    """
    apart = []
    above_lower = products_module._above_lower
    monkeypatch.setattr(products_module, "_above_lower", lambda *args: (apart.append(1), above_lower(*args)))
    rng = np.random.default_rng(0)
    tile = rng.standard_normal((500, 300)).astype(np.float32)
    tile[rng.integers(0, 500, 900), rng.integers(0, 300, 900)] = 2.0  # some equal a threshold
    products = CPU_KINDS["float32 numpy"]()
    products._mask = np.empty(tile.size, dtype=bool)
    rows, columns = (np.full(size, 2, dtype=np.float32) for size in tile.shape)
    rows[::7] -= spread
    columns[::5] -= spread
    found = products.passing_both(tile, np.repeat(rows, 3)[::3], np.repeat(columns, 3)[::3])
    expected = products.passing(tile, rows), products.passing(tile, columns, columns=True)
    for one, other in zip(found, expected):
        for a, b in zip(one, other):
            np.testing.assert_array_equal(a, b)
    i, j = np.nonzero(tile > rows[:, None])
    np.testing.assert_array_equal(found[0][0], i)
    np.testing.assert_array_equal(found[0][1], j)
    assert tile.size > STRIP_ENTRIES
    assert bool(apart) != together
