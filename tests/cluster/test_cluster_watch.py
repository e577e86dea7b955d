"""The rate that is shown is that of the last minute; without Ray."""

from unittest.mock import MagicMock

import pytest

from cluster import metrics


def test_rows_per_second_forget_what_is_older_than_a_minute(monkeypatch):
    counters, now = MagicMock(job="1"), [0.0]
    monkeypatch.setattr(metrics, "metrics", lambda: counters)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    watch = metrics.Watch("augment")

    def rate_after(seconds, rows):
        now[0] += seconds
        watch.count_rows(rows)
        return counters.rate.set.call_args[0][0]

    assert rate_after(10, 100) == pytest.approx(10)
    assert rate_after(10, 300) == pytest.approx(400 / 20)
    for _ in range(60):
        last = rate_after(5, 10)
    assert last == pytest.approx(2), "the fast beginning is forgotten"
    assert len(watch._recent) < 20
    watch.close()
    assert counters.rate.set.call_args[0][0] == 0
