"""The benchmark of graphs: it says what it measured; the run itself takes too long."""

import json
import sys

import numpy as np
import pytest

from benchmarks import knn_graph
from lattqe.search.lanes import kinds_for

WORDS = ["knn_graph", "--no-ray", "--rounds", "1", "--threads", "1"]


@pytest.mark.slow
def test_rows_of_a_file_by_the_fastest_kind_and_what_each_k_costs_beyond_products(tmp_path, monkeypatch, capsys):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((200, 16)).astype(np.float16))
    ran, told, measure = [], [], knn_graph.measure
    others = {"seconds": 1.0, "peak_bytes": 1}

    def ours_alone(body, path, *arguments):
        """Only ours is measured, and once: what it does after its products is told to take twice as long next time."""
        x = np.load(path)
        ran.append((x.shape, x.dtype))
        np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-5)
        if body is not knn_graph.ONE_OURS:
            return others
        if told:
            told.append({**told[0], "parts": {name: 2 * seconds for name, seconds in told[0]["parts"].items()}})
        else:
            told.append(measure(body, path, *arguments))
        return told[-1]

    monkeypatch.setattr(knn_graph, "measure", ours_alone)
    monkeypatch.setattr(sys, "argv", [*WORDS, "--rows-from", str(tmp_path / "rows.npy"), "--k", "4,8"])
    knn_graph.main()
    few, many = json.loads(capsys.readouterr().out)
    assert ran == [((200, 16), np.float32)] * 6
    assert [(one["rows"], one["dim"], one["k"]) for one in (few, many)] == [(200, 16, 4), (200, 16, 8)]
    assert all(set(one["kinds"]) <= set(kinds_for()) for one in (few, many))
    assert {"products", "selection", "scoring", "merging"} <= set(few["parts_seconds"])
    assert few["after_products_seconds"] > 0
    assert "after_products_over_first_k" not in few
    assert many["after_products_over_first_k"] == pytest.approx(2, abs=0.05)
    assert len(told) == 2


def test_a_file_and_sizes_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*WORDS, "--rows-from", "rows.npy", "--sizes", "10x10"])
    with pytest.raises(SystemExit):
        knn_graph.main()
    assert "leave out --sizes" in capsys.readouterr().err
