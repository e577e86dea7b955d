"""Hops in files, cut into bands and groups: the bytes of one array, after any interruption and any damage."""

import numpy as np
import pytest
import torch
from hop_world import ALPHA, DIM, HOPS, ROWS, begun, expected, make_world, no_bar, published

from lattqe.augmentation.bands import FOLDER, HopSchedule, HopWorker, StaleHopsError, run_hops
from lattqe.augmentation.recipe import AugmentSummary, HopTask
from lattqe.device import planned_device
from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, FeatureWriter


@pytest.fixture
def world(tmp_path):
    return make_world(tmp_path)


@pytest.mark.parametrize("cut", [{}, {"band_rows": 1000, "group_bytes": 1 << 20}, {"band_rows": 23}])
def test_bands_and_groups_give_the_bytes_of_one_array(world, cut):
    task = begun(world, **cut)
    seen = []
    summary = run_hops(task, seen.append, AugmentSummary())
    index = published(task)
    assert index.read().tobytes() == expected(world).tobytes()
    assert index.ids() == FeatureSet.open(task.features).ids()
    index.verify()
    assert sum(seen) == ROWS * HOPS * len(task.cut(ROWS, DIM).groups)
    assert summary.written["hop"] > 0
    run_hops(task, no_bar, AugmentSummary())  # nothing left to do


def items_of(task):
    """All items of a run, in the order of one worker."""
    schedule, done = HopSchedule(task), []
    queue = schedule.ready()
    worker = HopWorker(task)
    while queue:
        worker.run(queue[0])
        done.append(queue[0])
        queue = [*schedule.done(queue[0]), *queue[1:]]
    return done


def test_killed_after_any_item_it_ends_in_the_same_bytes(world):
    everything = items_of(begun(world, "whole"))
    assert {item[0] for item in everything} == {"turn", "start", "fold", "hop", "part"}
    for stop in range(1, len(everything), 8):
        task = begun(world, f"stopped-{stop}")
        schedule, left = HopSchedule(task), stop
        queue, worker = schedule.ready(), HopWorker(task)
        while left:
            worker.run(queue[0])
            # Killed between the work and the driver's notice of it, half of the time.
            queue = [*schedule.done(queue[0]), *queue[1:]] if left > 1 or stop % 2 else queue
            left -= 1
        run_hops(task, no_bar, AugmentSummary())
        assert published(task).read().tobytes() == expected(world).tobytes()


@pytest.mark.parametrize("kind", ["turned-", "rows-", "h000", "h002", "h003", f"h{HOPS:03d}"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_files_are_made_again(world, kind, damage):
    task = begun(world)
    schedule, worker = HopSchedule(task), HopWorker(task)
    queue, place = schedule.ready(), schedule.pending.place

    def files():
        return [name for name in place.list() if name.startswith(FOLDER + kind)]

    while len(files()) < 3:
        worker.run(queue[0])
        queue = [*schedule.done(queue[0]), *queue[1:]]
    name = files()[1]
    path = world / "index" / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(data if damage == "flip" else data[:-5])
    run_hops(task, no_bar, AugmentSummary())
    assert published(task).read().tobytes() == expected(world).tobytes()


def test_a_worker_behind_another_driver_is_told_to_look_again(world):
    task = begun(world)
    late = HopWorker(task)
    run_hops(task, no_bar, AugmentSummary())
    with pytest.raises(StaleHopsError, match="run the same command again"):
        late.run(("hop", 0, 2, 0))
    assert published(task).read().tobytes() == expected(world).tobytes()


def test_edges_of_other_features_are_refused(world):
    with FeatureWriter(str(world / "few"), DIM, "float32") as writer:
        writer.append(np.eye(2, DIM, dtype=np.float32), ["a", "b"])
    task = begun(world)
    other = HopTask(str(world / "few"), task.edges, task.to, HOPS, ALPHA)
    with pytest.raises(LattqeError, match=r"edges of 230 rows, but .* has 2"):
        HopWorker(other)


def test_bands_are_cut_by_the_number_of_rows_alone(world):
    task = begun(world, band_rows=16384, group_bytes=512 << 20)
    assert task.cut(1_000_000, 128).groups == [slice(0, 128)]
    assert len(task.cut(1_000_000, 2048).groups) == 16
    assert len(task.cut(100_000_000, 128).bands) == 256
    assert task.cut(20_000, 128).bands == [(0, 16384), (16384, 20000)]


def on_device(world, name, monkeypatch, room, most=1 << 30):
    """All rows after hops planned for a GPU, on torch's CPU device, as LATTQE_DEVICE says; `room` in bytes for vectors
    that stay there, memory for the sums of at most so many edges. And how many vectors each sum could name.
    """
    monkeypatch.setenv("LATTQE_DEVICE", "cpu")
    monkeypatch.setattr("lattqe.device.room_on", lambda device: room)
    tables, sums = [], torch.nn.functional.embedding_bag

    def cramped(columns, table, starts, **more):
        if len(columns) > most:
            raise torch.OutOfMemoryError("no room")
        tables.append(len(table))
        return sums(columns, table, starts, **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "embedding_bag", cramped)
        task = begun(world, name, device="cuda")
        run_hops(task, no_bar, AugmentSummary())
    return published(task).read(), tables


def test_hops_on_a_device_are_those_of_the_cpu_but_for_rounding(world, monkeypatch):
    """Sums of at most some hundred terms below 1, in float32 and maybe in another order: far below 1e-5."""
    there, tables = on_device(world, "resident", monkeypatch, 1 << 30)
    np.testing.assert_allclose(there, expected(world), rtol=0, atol=1e-5)
    assert set(tables) == {ROWS}, "all vectors of the hop before lay on the device"
    sent, tables = on_device(world, "sent", monkeypatch, ROWS * 12 * 4 - 1)
    assert max(tables) < ROWS or len(set(tables)) > 1, "each block sent those that it named"
    assert sent.tobytes() == there.tobytes()


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_blocks_are_halved_until_the_device_has_room(world, monkeypatch, room):
    there, tables = on_device(world, "whole", monkeypatch, 1 << 30)
    monkeypatch.setattr("lattqe.device.LEAST_SUM_BYTES", 64)
    halved, more = on_device(world, "halved", monkeypatch, room, most=300)
    assert len(more) > 2 * len(tables)
    assert halved.tobytes() == there.tobytes()
    with pytest.raises(LattqeError, match=r"cpu has no memory left, even for 0 KiB .*LATTQE_DEVICE=cpu"):
        on_device(world, "none", monkeypatch, room, most=0)


def test_a_planned_gpu_must_be_there(monkeypatch):
    monkeypatch.delenv("LATTQE_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert planned_device("cpu") is None
    with pytest.raises(LattqeError, match="torch sees no GPU"):
        planned_device("cuda")
    monkeypatch.setenv("LATTQE_DEVICE", "cpu")
    assert planned_device("cuda") == torch.device("cpu")
