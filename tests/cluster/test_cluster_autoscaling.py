"""An autoscaling cluster is asked to grow, waited for, and released; without Ray."""

import pytest

from cluster import session
from lattqe.errors import LattqeError


@pytest.fixture
def cluster(monkeypatch):
    """A cluster that grows by one GPU each time it is looked at, up to a limit; what was asked for is kept."""

    class Cluster:
        gpus, limit, asked = 0, 8, []

        def resources(self):
            self.gpus = min(self.gpus + bool(self.asked), self.limit)
            return {"GPU": float(self.gpus), "CPU": 0.0}

    import ray.autoscaler.sdk

    made = Cluster()
    made.asked = []
    monkeypatch.setattr("ray.cluster_resources", made.resources)
    monkeypatch.setattr(ray.autoscaler.sdk, "request_resources", lambda bundles: made.asked.append(bundles))
    monkeypatch.setattr(session, "POLL_SECONDS", 0.001)
    return made


def test_nothing_is_asked_for_by_default(cluster, monkeypatch):
    monkeypatch.delenv("LATTQE_GPUS", raising=False)
    monkeypatch.delenv("LATTQE_CPUS", raising=False)
    with session.grown_cluster():
        assert cluster.asked == []


def test_the_cluster_grows_before_the_job_and_is_released_after_it(cluster, monkeypatch):
    monkeypatch.setenv("LATTQE_GPUS", "3")
    with session.grown_cluster(seconds=5):
        assert cluster.asked == [[{"GPU": 1}] * 3]
        assert cluster.gpus == 3
    assert cluster.asked[-1] == []
    with pytest.raises(ZeroDivisionError), session.grown_cluster(seconds=5):
        raise ZeroDivisionError
    assert cluster.asked[1:] == [[], [{"GPU": 1}] * 3, []]


def test_what_came_is_used_and_nothing_at_all_is_an_error(cluster, monkeypatch):
    monkeypatch.setenv("LATTQE_GPUS", "9")
    with session.grown_cluster(seconds=0.1):
        assert cluster.gpus == 8
    cluster.gpus = cluster.limit = 0
    with pytest.raises(LattqeError, match=r"still no GPU \(asked for 9\)"), session.grown_cluster(seconds=0.01):
        pass
    assert cluster.asked[-1] == []
    monkeypatch.setenv("LATTQE_GPUS", "many")
    with pytest.raises(LattqeError, match="LATTQE_GPUS is 'many'"), session.grown_cluster():
        pass
