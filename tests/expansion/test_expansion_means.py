"""Lists whose vectors are sent to a device, or only averaged there: the same as from all the lists' vectors."""

import numpy as np
import pytest
import torch

from lattqe.errors import LattqeError
from lattqe.expansion import base, create
from lattqe.expansion import rows as rows_module
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.rows import _expand_there, _tables, augment_rows, expand_queries
from lattqe.model.network import LAttQE, LAttQEConfig
from lattqe.search import FlatIndex, knn_graph
from lattqe.search.index import StoredIndex
from lattqe.store import FeatureSet, FeatureWriter

K = 6
CPU = torch.device("cpu")


def network(gated):
    torch.manual_seed(0)
    made = LAttQE(
        LAttQEConfig(
            dim=16,
            relational=True,
            gated=gated,
            visual=False,
            background=20,
            max_k=12,
            layers=2,
            heads=2,
            width=16,
            ffn=32,
            relation_bias=True,
            temperature_start=1.0,
        )
    )
    with torch.no_grad():  # heads start at zero: weights must say something of the lists
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()


def count_gathered(index, monkeypatch):
    """How many rows each call of `gather` asks for, as they come."""
    asked, gather = [], index.gather
    monkeypatch.setattr(index, "gather", lambda wanted: asked.append(len(wanted)) or gather(wanted))
    return asked


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [300, 9])  # nine rows have lists of eight, with padding behind them
def test_rows_from_means_are_rows_from_all_vectors(gated, n, monkeypatch):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n, 16))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16)
    x[n // 2 :: 3] = x[0]
    ids, scores = knn_graph(x, 24)
    index, rows = FlatIndex(x), rng.permutation(n)[: n - 2]
    method = AttentionExpansion(network(gated), dba=True)
    asked = count_gathered(index, monkeypatch)
    monkeypatch.setattr(rows_module, "MEANS_BYTES", 50 * 20 * 16 * 4)  # several batches
    found = augment_rows(index, rows, scores[rows], ids[rows], method, K)
    assert sum(asked) < len(rows) * 21, "each row that a batch names is read once"
    monkeypatch.setattr(AttentionExpansion, "means_suffice", False)
    slow = augment_rows(index, rows, scores[rows], ids[rows], method, K)
    np.testing.assert_allclose(found.vectors, slow.vectors, atol=1e-5)
    np.testing.assert_allclose(found.weights, slow.weights, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found.rows, slow.rows)
    assert np.abs(slow.vectors - x[rows]).max() > 0.01, "the lists matter"


def test_rows_that_lie_on_the_device_give_the_same_bytes(tmp_path, monkeypatch):
    x = np.random.default_rng(1).standard_normal((300, 16))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16)
    ids, scores = knn_graph(x, 24)
    with FeatureWriter(str(tmp_path / "x"), 16, dtype="float16") as writer:
        writer.append(x, [str(row) for row in range(len(x))])
    method, rows = AttentionExpansion(network(gated=True), dba=True), np.arange(len(x))
    monkeypatch.setattr(rows_module, "MEANS_BYTES", 50 * 20 * 16 * 4)  # several batches
    sent = augment_rows(FlatIndex(x), rows, scores, ids, method, K)
    monkeypatch.setattr("lattqe.search.index.room_on", lambda device: x.nbytes)
    for index in (FlatIndex(x), StoredIndex([FeatureSet.open(str(tmp_path / "x"))])):
        asked = count_gathered(index, monkeypatch)
        found = augment_rows(index, rows, scores, ids, method, K)
        assert asked == [len(x)], "of neighbors nothing is read again"
        assert index.resident(CPU) is index.resident(CPU)
        assert index.resident(CPU).dtype == torch.float16
        np.testing.assert_array_equal(found.vectors, sent.vectors)
        np.testing.assert_array_equal(found.weights, sent.weights)


def test_rows_without_room_stay_where_they_are(monkeypatch):
    x = np.eye(8, dtype=np.float32)
    assert FlatIndex(x).resident(CPU) is None, "the CPU reads rows where they are"
    monkeypatch.setattr("lattqe.search.index.room_on", lambda device: x.nbytes - 1)
    assert FlatIndex(x).resident(CPU) is None
    monkeypatch.setattr("lattqe.search.index.room_on", lambda device: x.nbytes)
    assert FlatIndex(x, first_row=3).resident(CPU) is None, "its rows have other numbers"
    assert torch.equal(FlatIndex(x).resident(CPU), torch.from_numpy(x))


def test_tables_for_another_device_are_sent_one_batch_ahead(monkeypatch):
    """The device "meta" holds nothing, and is another one than the CPU."""
    x = np.random.default_rng(1).standard_normal((60, 16)).astype(np.float16)
    lists = np.random.default_rng(2).integers(-1, 60, (4, 5, 9))
    index = FlatIndex(x)
    asked = count_gathered(index, monkeypatch)
    here = list(_tables(index, list(lists), CPU))
    asked.clear()
    there = _tables(index, list(lists), torch.device("meta"))
    for number, (table, places) in enumerate(here):
        sent, found = next(there)
        assert (sent.device.type, sent.shape, sent.dtype) == ("meta", table.shape, torch.float32)
        np.testing.assert_array_equal(found, places)
        np.testing.assert_array_equal(table.numpy()[places[places >= 0]], x[lists[number][lists[number] >= 0]])
    assert asked == [len(table) for table, _ in here]


def listed_rows(n=60, dim=16):
    x = np.random.default_rng(3).standard_normal((n, dim))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16)
    ids, scores = knn_graph(x, 24)
    ids[:5, 4:], scores[:5, 4:] = -1, 0  # shorter lists
    return x, ids, scores


def as_on_a_gpu(monkeypatch):
    """Expansions take the road of another device, and are computed here; the sizes of their batches, and `keep`."""
    taken = []

    def there(index, x, rows, D, method, k, device, keep):
        assert device.type == "meta"
        taken.append(keep)
        return _expand_there(index, x, rows, D, method, k, CPU, keep)

    monkeypatch.setattr(rows_module, "pick_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(rows_module, "_expand_there", there)
    return taken


METHODS = {
    "aqe": lambda: create("aqe"),
    "alphaqe": lambda: create("alphaqe", alpha=2.0),
    "dqe": lambda: create("dqe"),
    "lattqe": lambda: AttentionExpansion(network(gated=True)),
    "direct": lambda: AttentionExpansion(LAttQE(LAttQEConfig(dim=16, layers=1, heads=2, max_k=12, direct=True))),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("at_once", [1 << 20, 5000])
def test_lists_that_are_sent_to_a_device_give_what_gathered_ones_do(name, at_once, monkeypatch):
    x, ids, scores = listed_rows()
    index, method, rows = FlatIndex(x), METHODS[name](), np.arange(len(x))
    here = augment_rows(index, rows, scores, ids, method, K), expand_queries(index, x[::7], method, K)
    taken = as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(rows_module, "BLOCK_BYTES_GPU", at_once)
    asked = count_gathered(index, monkeypatch)
    there = augment_rows(index, rows, scores, ids, method, K), expand_queries(index, x[::7], method, K)
    assert taken == [True, False], "a whole database is brought to a device for its own rows only"
    assert max(asked[1:]) <= len(x), "each row that a batch names is read once"
    for one, other in zip(there, here):
        np.testing.assert_array_equal(one.rows, other.rows)
        np.testing.assert_allclose(one.vectors, other.vectors, rtol=0, atol=1e-6)
        np.testing.assert_allclose(one.weights, other.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", ["expand_rows", "expand_places"])
def test_batches_are_halved_while_the_device_has_no_memory_for_them(call, monkeypatch):
    x, ids, scores = listed_rows()
    index, method, rows = FlatIndex(x), AttentionExpansion(network(gated=True), dba=True), np.arange(len(x))
    if call == "expand_places":
        monkeypatch.setattr(AttentionExpansion, "means_suffice", False)
        as_on_a_gpu(monkeypatch)
    expected = augment_rows(index, rows, scores, ids, method, K)
    expand, sizes, most = getattr(method, call), [], 9

    def cramped(x, *arguments):
        sizes.append(len(x))
        if len(x) > most or len(sizes) == 6:  # at another time something else takes the memory
            raise torch.OutOfMemoryError("out of memory")
        return expand(x, *arguments)

    monkeypatch.setattr(method, call, cramped)
    found = augment_rows(index, rows, scores, ids, method, K)
    assert sizes == [60, 30, 15, 7, 7, 7, *[3] * 15, 1]
    np.testing.assert_allclose(found.vectors, expected.vectors, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-4, atol=1e-6)
    most = 0
    with pytest.raises(LattqeError, match="no memory left, even for one list of 20 vectors: end what else uses it"):
        augment_rows(index, rows, scores, ids, method, K)


def test_batches_of_gathered_lists_have_the_size_of_their_device(monkeypatch):
    x, ids, scores = listed_rows()
    network = LAttQE(LAttQEConfig(dim=16, layers=1, heads=2, max_k=12)).eval()
    method, index, rows = AttentionExpansion(network, dba=True), FlatIndex(x), np.arange(len(x))
    table = method.shared_rows(x)
    expected = augment_rows(index, rows, scores, ids, method, K, table)
    pack, sizes = base.pack, []

    def packed(parts, masks, scores, device):
        sizes.append((len(scores), device.type))
        return pack(parts, masks, scores, CPU)

    one = (1 + K) * 16 * 4
    for module, name, value in ((rows_module, "GATHER_BYTES", 20 * one), (base, "BLOCK_BYTES", 8 * one)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(base, "pack", packed)
    augment_rows(index, rows, scores, ids, method, K, table)
    assert sizes == [(8, "cpu"), (8, "cpu"), (4, "cpu")] * 3
    sizes.clear()
    for module in (rows_module, base):
        monkeypatch.setattr(module, "pick_device", lambda name: torch.device("meta"))
        monkeypatch.setattr(module, "BLOCK_BYTES_GPU", 40 * one)
    found = augment_rows(index, rows, scores, ids, method, K, table)
    assert sizes == [(40, "meta"), (20, "meta")]
    np.testing.assert_allclose(found.vectors, expected.vectors, rtol=0, atol=1e-6)
