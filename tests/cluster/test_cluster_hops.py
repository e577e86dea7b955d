"""Hops on Ray: the bytes of one process, for any number of workers, on disk and on S3, through deaths."""

import os
import signal

import pytest
import ray
from hop_world import HOPS, ROWS, begun, expected, make_world, no_bar, published

from cluster.augmentation import run_hops
from lattqe.augmentation import bands
from lattqe.augmentation.bands import HopWorker, StaleHopsError
from lattqe.augmentation.recipe import AugmentSummary

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def test_several_workers_give_the_bytes_of_one_array(tmp_path):
    world = make_world(tmp_path)
    task, seen = begun(world), []
    summary = run_hops(task, seen.append, AugmentSummary(), workers=3, resources={"num_cpus": 0.5})
    assert published(task).read().tobytes() == expected(world).tobytes()
    assert sum(seen) == ROWS * HOPS * len(task.cut(ROWS, 21).groups)
    assert summary.written["hop"] >= 4 * ROWS * 21 * HOPS
    run_hops(task, no_bar, AugmentSummary(), workers=3)


def test_rows_and_edges_on_s3(s3_uri):
    world = make_world(s3_uri)
    task = begun(world)
    run_hops(task, no_bar, AugmentSummary(), workers=2)
    assert published(task).read().tobytes() == expected(world).tobytes()


def dying_worker():
    """A worker that kills its own process instead of the first item of each kind, once in all processes.

    Made in a function, so that Ray takes the class along: its workers know nothing of this file.
    """

    class DyingWorker(HopWorker):
        def run(self, item):
            try:
                self.place.create(f"_work/died-{item[0]}", b"")
            except bands.LattqeError:
                return super().run(item)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

    return DyingWorker


def forgetful_worker():
    """A worker that finds, once for each hop, that the hop before is gone."""

    class ForgetfulWorker(HopWorker):
        def run(self, item):
            if item[0] == "hop" and not self.place.exists(f"_work/lost-{item[2]}"):
                self.place.write(f"_work/lost-{item[2]}", b"")
                raise self._stale(f"{bands.FOLDER}h{item[2] - 1:03d}-g{item[1]:04d}-b{item[3]:05d}.bin")
            return super().run(item)

    return ForgetfulWorker


@pytest.mark.kill
def test_workers_that_die_in_the_transpose_and_in_hops(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.augmentation.HopWorker", dying_worker())
    world = make_world(tmp_path)
    task = begun(world)
    summary = run_hops(task, no_bar, AugmentSummary(), workers=2)
    assert summary.workers_lost == 5  # turn, start, fold, hop, part
    assert published(task).read().tobytes() == expected(world).tobytes()


def test_files_that_get_lost_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.augmentation.HopWorker", forgetful_worker())
    world = make_world(tmp_path)
    task = begun(world)
    run_hops(task, no_bar, AugmentSummary(), workers=1)
    assert published(task).read().tobytes() == expected(world).tobytes()


def test_what_never_becomes_sound_ends_in_one_line(tmp_path, monkeypatch):
    class Broken(HopWorker):
        def fold(self, band):
            raise self._stale("nothing")

    monkeypatch.setattr("cluster.augmentation.HopWorker", Broken)
    monkeypatch.setattr(bands, "RESCANS", 1)
    with pytest.raises(StaleHopsError, match="run the same command again"):
        run_hops(begun(make_world(tmp_path)), no_bar, AugmentSummary(), workers=1)
    assert ray.is_initialized()
