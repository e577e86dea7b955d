"""The graph by owners: who is passed by which rows, and what that costs."""

import pytest

from lattqe.cost.rows import cut_owned, graph_on_ray
from lattqe.cost.work import Cost, Machines, Stored


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


def test_the_schedule_is_chosen_by_cost():
    """Slow products: half of them. Fast ones and long lists over a network: lists that are written once."""
    million, more = (Stored.kind("features", rows, dim=512, dtype="float16") for rows in (1_000_000, 100_000_000))
    cut, work = graph_on_ray([million], 512, 64, Machines(asked=2), budget=4 << 30, products_per_second=1e8)
    assert cut.schedule == "pairs"
    assert work.products == pytest.approx(1e12 / 2, rel=0.05)
    machines = Machines(64, asked=64)
    fast = {"budget": 20 << 30, "products_per_second": 1.2e11}
    cut, work = graph_on_ray([more], 512, 256, machines, **fast)
    assert cut.schedule == "rows"
    assert work.products == pytest.approx(1e16, rel=0.02)
    assert work.worker_bytes <= 20 << 30
    _, pairs = graph_on_ray([more], 512, 256, machines, schedule="pairs", **fast)
    assert pairs.facts["schedule"] == "pairs: as asked for"
    assert pairs.written > 50 * work.written, "lists"
    longer = Cost((pairs,), machines).seconds / Cost((work,), machines).seconds
    assert longer > 1
    assert work.facts["schedule"].startswith(f"rows: by pairs {longer:.3g} times as long, with 0.5")
    _, small = graph_on_ray([million], 512, 64, Machines(asked=2), budget=1050 << 20, products_per_second=1e8)
    assert small.facts["schedule"] == "pairs: the other does not fit"
