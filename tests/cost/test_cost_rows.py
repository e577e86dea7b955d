"""The graph by owners: who is passed by which rows, and what that costs."""

import pytest

from lattqe.cost.rows import cut_owned


@pytest.mark.parametrize(("own", "others", "fit"), [(1000, 0, 300), (1000, 300, 130), (7, 5000, 600), (900, 0, 9999)])
def test_each_block_is_passed_by_all_rows_that_it_is_to_see(own, others, fit):
    cut = cut_owned(own, others, 2, fit)
    assert cut.bounds[cut.own] == own
    for block in range(cut.blocks):
        start, stop = cut.rows(block)
        assert 0 < stop - start <= fit
        spans = cut.visitors(block, 77)
        met = [row for lo, hi in spans for row in range(lo, hi)]
        seen = set(range(own + others)) - set(range(start, stop)) if block < cut.own else set(range(own))
        assert len(met) == len(seen)
        assert set(met) == seen
        assert all(0 < hi - lo <= 77 and (hi <= own or lo >= own) for lo, hi in spans), "a piece is of one set"
        diagonal = (stop - start) ** 2 // 2 if block < cut.own else 0
        assert cut.cost(block, block) == (stop - start) * len(seen) + diagonal
