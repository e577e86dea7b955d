"""Connecting to Ray fails in one line."""

import pytest

from cluster.session import ray_session
from lattqe.errors import LattqeError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379", "ray://127.0.0.1:1", "rubbish", "a:999999"])
def test_an_address_where_nobody_answers(address):
    with pytest.raises(LattqeError, match=r"no Ray cluster answers at|is not the address of a Ray cluster") as told, \
            ray_session(address):
        pass
    assert "\n" not in str(told.value)


def test_a_ray_that_cannot_start(monkeypatch):
    tries = []

    def fail(**_):
        tries.append(1)
        raise Exception("The current node timed out during startup.\nSee the logs.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("cluster.session.ray.init", fail)
    with pytest.raises(LattqeError, match=r"could not start on this machine \(The current node timed out") as told, \
            ray_session():
        pass
    assert "\n" not in str(told.value)
    assert len(tries) == 3, "a crowded machine gets another try"
