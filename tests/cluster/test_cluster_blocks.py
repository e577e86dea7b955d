"""The block map on a real Ray: exactly-once delivery through deaths, stragglers, poison blocks and bad input.

And what Prometheus reads and the log file keeps of it.
"""

import json
import os
import re
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import ray

from cluster.blocks import BlockPolicy, ask_actors, check_parts, run_blocks
from cluster.monitor import Tally, Watch, require_resources
from jobs.log_file import logging_to
from lattqe.errors import CorruptDataError, LattqeError
from lattqe.store import Pending, UnavailableError, neighbors_table, open_place
from lattqe.store.place import traffic

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def metrics_url():
    """A local Ray that tells its metrics soon, not after the usual ten seconds; where it serves them."""
    ray.shutdown()
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        _metrics_export_port=0,
        _system_config={"metrics_report_interval_ms": 500},
    )
    yield f"http://{context.address_info['node_ip_address']}:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    ray.shutdown()


@ray.remote(num_cpus=1)
class Squares:
    """Squares its block; misbehaves on the blocks it is told to, once for each marker file."""

    def __init__(self, folder, die_on=(), hang_on=(), always_die_on=(), bad_input=None, short_on=(), never_up=False):
        if bad_input == "constructor":
            raise CorruptDataError("part-00003.arrow: checksum differs")
        if bad_input == "storage":
            raise UnavailableError("cannot read s3://b/x: gave up after 60 s")
        self.folder, self.die_on, self.hang_on = Path(folder), die_on, hang_on
        self.always_die_on, self.bad_input, self.short_on = always_die_on, bad_input, short_on
        while never_up and self.first_time("never", "up"):
            time.sleep(1e6)

    def first_time(self, kind, block):
        try:
            (self.folder / f"{kind}-{block}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def run(self, block):
        if self.bad_input == block:
            raise LattqeError("block is wrong: fix it")
        if block in self.always_die_on or (block in self.die_on and self.first_time("died", block)):
            while not all((self.folder / f"hung-{other}").exists() for other in self.hang_on):
                time.sleep(0.02)  # whatever is to hang is hanging by then
            os._exit(1)
        if block in self.short_on and self.first_time("short", block):
            raise ray.exceptions.OutOfMemoryError("the node is short of memory")
        if block in self.hang_on and self.first_time("hung", block):
            while not (self.folder / "go on").exists():
                time.sleep(0.05)
        time.sleep(0.01)
        return block * block


def square_all(folder, blocks=range(12), policy=None, workers=2, **behaviour):
    results = {}

    def on_done(block, result):
        assert block not in results, "a block was delivered twice"
        results[block] = result

    summary = run_blocks(
        lambda number: Squares.remote(str(folder), **behaviour), workers, blocks, on_done=on_done, policy=policy
    )
    return results, summary


def expected(blocks=range(12)):
    return {block: block * block for block in blocks}


def test_every_block_once(tmp_path):
    results, summary = square_all(tmp_path)
    assert results == expected()
    assert summary.blocks == sum(summary.blocks_by_worker.values()) == 12
    assert summary.actors_lost == summary.retries == 0


def test_finished_blocks_may_ask_for_more(tmp_path):
    results = {}

    def on_done(block, result):
        results[block] = result
        return [100 + block] if block < 3 else None

    summary = run_blocks(lambda number: Squares.remote(str(tmp_path)), 2, range(4), on_done=on_done)
    assert sorted(results) == [0, 1, 2, 3, 100, 101, 102]
    assert summary.blocks == 7


def test_no_blocks_starts_nothing(tmp_path):
    results, summary = square_all(tmp_path, blocks=[])
    assert results == {}
    assert summary.blocks == 0


def test_dead_actors_are_replaced(tmp_path):
    results, summary = square_all(tmp_path, die_on=(0, 5, 11))
    assert results == expected()
    assert summary.actors_lost == 3
    assert summary.retries >= 3


def test_actors_that_the_memory_monitor_ends_are_replaced(tmp_path):
    """Ray has an error of its own for them, which is not the one of a lost actor."""
    results, summary = square_all(tmp_path, short_on=(0, 5), policy=BlockPolicy(window=1))
    assert results == expected()
    assert summary.actors_lost == 2


def test_straggler_is_copied_and_first_result_wins(tmp_path):
    results, summary = square_all(tmp_path, hang_on=(3,), policy=BlockPolicy(straggler_seconds=0.5))
    assert results == expected(), "although the first worker of block 3 hangs to this moment"
    assert 1 <= summary.spare_copies <= 12, "the hung block; on a crowded machine others too, each once"


def test_an_actor_that_never_comes_up_is_started_again(tmp_path):
    """Block 3 hangs on the only actor that is up: without the other one it would hang for ever."""
    policy = BlockPolicy(straggler_seconds=0.5, late_seconds=2)
    results, summary = square_all(tmp_path, hang_on=(3,), never_up=True, policy=policy)
    assert results == expected()
    assert len(summary.blocks_by_worker) == 2
    assert summary.actors_lost == 0


def test_poison_block_ends_with_a_clear_error(tmp_path):
    with pytest.raises(LattqeError, match="block 4 failed 2 times"):
        square_all(tmp_path, always_die_on=(4,), policy=BlockPolicy(max_failures=1))


def test_an_actor_that_dies_with_two_blocks_is_not_held_against_the_older_one(tmp_path):
    def start(number):
        return Squares.options(max_concurrency=2).remote(str(tmp_path), hang_on=(3,), always_die_on=(4,))

    policy = BlockPolicy(max_failures=0, window=2)
    with pytest.raises(LattqeError, match="block 4 failed 1 times"):
        run_blocks(start, 1, [3, 4], on_done=lambda block, _: None, policy=policy)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (7, "block is wrong: fix it"),
        ("constructor", "checksum differs"),
        ("storage", "^cannot read s3://b/x: gave up after 60 s$"),
    ],
)
def test_bad_input_is_not_retried(tmp_path, where, message):
    with pytest.raises(LattqeError, match=message):
        square_all(tmp_path, bad_input=where)


@ray.remote(num_cpus=0, max_restarts=-1)
class Adder:
    """Adds to what it is asked; dies once, with all that it has been asked until then."""

    def __init__(self, number, folder):
        self.number, self.folder = number, Path(folder)

    def add(self, value):
        dying = self.folder / "dying"
        if value == 3 and self.number == 1 and dying.exists():
            dying.unlink()
            os._exit(1)
        return self.number + value


def test_all_answers_that_died_with_an_actor_are_asked_for_again(tmp_path):
    (tmp_path / "dying").touch()
    actors, recovered = [Adder.remote(number, tmp_path) for number in range(3)], []

    def recover(actor, error):
        recovered.append(actor)
        while True:
            try:
                return ray.get(actors[actor].add.remote(0))
            except ray.exceptions.RayActorError:
                time.sleep(0.05)

    requests = ({0: [value], 1: [value], 2: [2 * value]} for value in range(8))
    found = list(ask_actors(actors, "add", requests, recover, window=4))
    assert found == [{0: value, 1: value + 1, 2: 2 * value + 2} for value in range(8)]
    assert recovered == [1], "one death, however many answers it took along"
    assert list(ask_actors(actors, "add", [{2: [5]}, {}], recover)) == [{2: 7}, {}]
    with pytest.raises(ZeroDivisionError):
        list(ask_actors(actors, "add", [{0: ["not a number"]}], lambda actor, error: 1 / 0))


def test_missing_resources_are_named():
    with pytest.raises(LattqeError, match=r"3 workers need 3 GPU \(the cluster has 0\)"):
        require_resources({"CPU": 0.5, "GPU": 1}, 3, timeout=0.1)


def read_metrics(url):
    """{(name, kind, shard): value} of our metrics."""
    text = urllib.request.urlopen(url, timeout=60).read().decode()
    found = {}
    for name, labels, value in re.findall(r"^ray_(lattqe_\w+)\{(.*)\} (\S+)$", text, re.M):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert tags["job"] == ray.get_runtime_context().get_job_id()
        key = (name, tags["kind"], tags.get("shard"))
        found[key] = found.get(key, 0.0) + float(value)
    return found


def wait_for(url, condition):
    """Ask until it is so; pytest's time limit shows the last answer."""
    while not condition(found := read_metrics(url)):
        time.sleep(0.2)
    return found


def run_watched(tmp_path, kind, policy, workers, **behaviour):
    """Eight blocks in a run of this kind: its summary and the lines of its log."""
    folder = tmp_path / kind
    folder.mkdir()
    work = Tally(kind, rows=lambda block: 10, label=lambda block: f"block-{block}")
    with logging_to(str(folder / "log"), "test", {}):
        summary = run_blocks(
            lambda number: Squares.remote(str(folder), **behaviour),
            workers,
            range(8),
            on_done=lambda block, result: None,
            policy=policy,
            work=work,
        )
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    done = [line for line in lines if line["event"] == "block done"]
    assert sorted(line["block"] for line in done) == [f"block-{number}" for number in range(8)]
    assert all(line["rows"] == 10 and line["shard"] in (0, 1) and line["kind"] == kind for line in done)
    return summary, lines


def test_blocks_deaths_and_copies_are_counted_and_logged(metrics_url, tmp_path):
    """A death and a straggler in runs of their own: a copy of the dead actor's block would spare its retry."""
    died, lines = run_watched(tmp_path, "dying", BlockPolicy(straggler_seconds=1e6), 1, die_on=(2,))
    events = [line["event"] for line in lines]
    assert events.count("actor lost") == died.actors_lost == 1
    assert events.count("actor started") == 2
    assert events.count("block retried") == died.retries >= 1
    assert died.spare_copies == 0
    failed = next(line for line in lines if line["event"] == "block failed" and line["block"] == "block-2")
    assert failed["level"] == "warning"

    hung, lines = run_watched(tmp_path, "hanging", BlockPolicy(straggler_seconds=0.5), 2, hang_on=(5,))
    events = [line["event"] for line in lines]
    assert events.count("straggler copied") == hung.spare_copies >= 1
    assert hung.actors_lost == hung.retries == 0

    def total(found, name, kind):
        return sum(value for (metric, of, _), value in found.items() if (metric, of) == (name, kind))

    for kind, summary in (("dying", died), ("hanging", hung)):
        found = wait_for(metrics_url, lambda found, kind=kind: total(found, "lattqe_blocks_done_total", kind) == 8)
        assert total(found, "lattqe_rows_done_total", kind) == 80
        assert total(found, "lattqe_actors_lost_total", kind) == summary.actors_lost
        assert total(found, "lattqe_retries_total", kind) == summary.retries
        assert total(found, "lattqe_spare_copies_total", kind) == summary.spare_copies
        assert total(found, "lattqe_block_seconds_count", kind) == 8
        for shard, count in summary.blocks_by_worker.items():
            assert found["lattqe_blocks_done_total", kind, str(shard)] == count
        wait_for(metrics_url, lambda found, kind=kind: found.get(("lattqe_rows_per_second", kind, None)) == 0)


def test_rates_and_bytes(metrics_url, tmp_path):
    traffic.take()  # whatever was moved before
    watch, place = Watch("copying"), open_place(str(tmp_path))
    place.write("file", bytes(1000))
    assert len(place.read("file")) == 1000
    assert place.read_range("file", 5, 10) == bytes(10)
    watch.count_traffic(*traffic.take())
    time.sleep(0.2)
    watch.count_rows(50)
    watch.count_rows(0)
    found = wait_for(metrics_url, lambda found: ("lattqe_rows_done_total", "copying", None) in found)
    assert found["lattqe_bytes_written_total", "copying", None] == 1000
    assert found["lattqe_bytes_read_total", "copying", None] == 1010
    assert 0 < found["lattqe_rows_per_second", "copying", None] <= 250, "50 rows in 0.2 s or more"


def test_finished_parts_are_checked_by_workers_once(tmp_path, monkeypatch):
    """The driver of a run that is continued reads nothing but names; what is damaged is found all the same."""
    lists = neighbors_table(np.full((4, 2), -1, np.int32), np.zeros((4, 2), np.float32))
    pending = Pending.begin(str(tmp_path / "graph"), "neighbors", {"k": 2}, [4] * 9)
    for part in range(7):
        pending.publish(part, lists)
    place = open_place(pending.uri)
    place.write("part-00003.arrow", place.read("part-00003.arrow")[:-1] + b"?")
    place.write("_work/part-00005.json", b"{}")
    continued = Pending.attach(pending.uri)
    monkeypatch.setattr("lattqe.store.pending.load_part", lambda place, part: pytest.fail("the driver reads a part"))
    assert continued.unchecked() == list(range(7))
    check_parts(continued)
    traffic.take()
    assert continued.missing() == [3, 5, 7, 8]
    assert continued.unchecked() == []
    assert traffic.take() == (0, 0)
    assert not place.exists("part-00003.arrow")
    check_parts(Pending.begin(str(tmp_path / "empty"), "neighbors", {"k": 2}, [4]))
