"""Figure 4: the groups of the paper come out of the published ground truth, and the bars of a slow twin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lattqe.errors import LattqeError
from lattqe.evaluation.analysis import group_queries, regimes


def test_groups_have_the_means_printed_in_the_paper(revisited_folder):
    from lattqe.datasets.revisited import load_gnd

    gnds = [g for name in ("roxford5k", "rparis6k") for g in load_gnd(revisited_folder / f"gnd_{name}.pkl").gnd]
    medium = np.array([len(g["easy"]) + len(g["hard"]) for g in gnds])
    hard = np.array([len(g["hard"]) for g in gnds])
    for counts, printed in ((medium, (25, 137, 342)), (hard, (13, 71, 206))):
        means = [counts[mask].mean() for mask in group_queries(counts)]
        assert means == pytest.approx(printed, abs=0.5 + 0.05)


PERCENT = st.integers(0, 100).map(lambda value: value / 100)


@given(st.lists(st.tuples(PERCENT, PERCENT, st.integers(1, 20)), min_size=1, max_size=40))
def test_equals_plain_loops(rows):
    before, after, positives = (np.array(column, dtype=float) for column in zip(*rows))
    groups = regimes(before, after, positives)
    assert sum(group.queries for group in groups) == len(rows)
    ordered = sorted(positives)
    cuts = [next(v for i, v in enumerate(ordered) if 100 * i >= share * (len(rows) - 1)) for share in (33, 66)]
    for place, group in enumerate(groups):
        mine = [row for row in rows if sum(row[2] > cut for cut in cuts) == place]
        assert group.queries == len(mine)
        if not mine:
            continue
        assert group.level == pytest.approx(sum(row[2] for row in mine) / len(mine))
        gains = [(b - a) / a for a, b, _ in mine if a > 0]
        assert group.undefined == len(mine) - len(gains)
        assert group.relative == pytest.approx(sum(gains) / len(gains) if gains else 0.0)
        mean_before, mean_after = (sum(column) / len(mine) for column in list(zip(*mine))[:2])
        expected = (mean_after - mean_before) / mean_before if mean_before else 0.0
        assert group.relative_of_means == pytest.approx(expected)


def test_ties_stay_together_and_nothing_is_refused():
    groups = regimes(np.array([0.5, 0.5, 0.5]), np.array([0.6, 0.7, 0.8]), np.array([4, 4, 4]))
    assert [group.queries for group in groups] == [3, 0, 0]
    assert groups[0].relative == pytest.approx(0.4)
    assert groups[2].to_dict()["relative_of_means"] == 0.0
    with pytest.raises(LattqeError, match="nothing to group"):
        group_queries(np.array([]))
    with pytest.raises(LattqeError, match="got 2, 1 and 2"):
        regimes(np.ones(2), np.ones(1), np.ones(2))
