"""Rates, and what is counted of a training; without Ray."""

from unittest.mock import MagicMock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster import monitor


def test_rows_per_second_forget_what_is_older_than_a_minute(monkeypatch):
    counters, now = MagicMock(job="1"), [0.0]
    monkeypatch.setattr(monitor, "metrics", lambda: counters)
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now[0])
    watch = monitor.Watch("augment")

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


def test_a_training_is_counted_from_where_it_began(monkeypatch):
    from cluster.training import Standing, _counting

    counters, shown = MagicMock(job="1"), []
    monkeypatch.setattr(monitor, "metrics", lambda: counters)
    show = _counting(shown.append, batch=64)
    for standing in (
        Standing(0),
        Standing(100, starts=1),
        Standing(103, starts=1),
        Standing(101, starts=2),
        Standing(105, starts=2),
    ):
        show(standing)
    assert sum(call.args[0] for call in counters.blocks.inc.call_args_list) == 5, "updates 101 to 105"
    assert sum(call.args[0] for call in counters.rows.inc.call_args_list) == 5 * 64
    assert counters.lost.inc.call_count == 1, "a restart is a loss"
    assert len(shown) == 5


def test_workers_leave_without_an_error_only_where_their_board_is_dead(monkeypatch):
    """One that is out of reach for a while must not end the training as if there were a model."""
    from cluster import training

    def raising(error):
        def work(config):
            raise error

        monkeypatch.setattr(training, "_train_as_one_of_a_team", work)
        training.run_worker({})

    raising(ActorDiedError())
    with pytest.raises(ActorUnavailableError):
        raising(ActorUnavailableError("out of reach", b"0" * 16))
