"""The paper's numbers: rows are complete, and their printed means follow from their cells."""

import pytest

from lattqe.datasets.revisited import golden_differences, published_scores


@pytest.mark.parametrize(("table", "cells"), [("table2", 4), ("table3", 8)])
def test_means_follow_from_cells(table, cells):
    for row in published_scores()[table]:
        values = [value for setups in row["map"].values() for value in setups.values()]
        assert len(values) == cells
        assert sum(values) / cells == pytest.approx(row["mean"], abs=0.1), row["label"]


def test_every_method_and_figure_is_there():
    rows = [(row["kind"], row["method"]) for row in published_scores()["table3"]]
    methods = ["aqe", "aqewd", "dqe", "alphaqe", "lattqe"]
    assert rows == [("none", "none")] + [(kind, method) for kind in ("qe", "dba+qe") for method in methods]
    for grouping in ("by_positives", "by_ap_before"):
        for setup in ("medium", "hard"):
            figure = published_scores()["figure4"][grouping][setup]
            assert list(figure["relative"]) == methods
            assert all(len(bars) == len(figure["level"]) == 3 for bars in figure["relative"].values())
    assert published_scores()["figure4"]["by_positives"]["medium"]["relative"]["lattqe"] == [21.98, 14.81, 9.19]


def test_golden_numbers_are_compared():
    assert golden_differences("roxford5k", {"medium": 67.31, "hard": 44.2, "easy": 1.0}) == []
    (line,) = golden_differences("rparis6k", {"medium": 80.57, "hard": 60.0})
    assert line == "rparis6k hard: mAP 60.00 without expansion, 61.46 expected of the paper's features"
