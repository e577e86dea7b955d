"""Database rows whose long lists are only averaged: the same as from all the lists' vectors."""

import numpy as np
import pytest
import torch

from lattqe.expansion import rows as rows_module
from lattqe.expansion.attention import AttentionExpansion
from lattqe.expansion.rows import augment_rows
from lattqe.model.config import LAttQEConfig
from lattqe.model.network import LAttQE
from lattqe.search import FlatIndex, knn_graph

K = 6


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
    asked = []
    gather = index.gather
    monkeypatch.setattr(index, "gather", lambda wanted: asked.append(len(wanted)) or gather(wanted))
    monkeypatch.setattr(rows_module, "MEANS_BYTES", 50 * 20 * 16 * 4)  # several batches
    found = augment_rows(index, rows, scores[rows], ids[rows], method, K)
    assert sum(asked) < len(rows) * 21, "each row that a batch names is read once"
    monkeypatch.setattr(AttentionExpansion, "means_suffice", False)
    slow = augment_rows(index, rows, scores[rows], ids[rows], method, K)
    np.testing.assert_allclose(found.vectors, slow.vectors, atol=1e-5)
    np.testing.assert_allclose(found.weights, slow.weights, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found.rows, slow.rows)
    assert np.abs(slow.vectors - x[rows]).max() > 0.01, "the lists matter"
