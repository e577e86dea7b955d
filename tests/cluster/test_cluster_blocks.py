"""The block map on a real Ray: exactly-once delivery through deaths, stragglers, poison blocks and bad input."""

import os
import time
from pathlib import Path

import pytest
import ray

from cluster.blocks import BlockPolicy, run_blocks
from cluster.session import ray_session, require_resources
from lattqe.errors import CorruptDataError, LattqeError

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with ray_session(cpus=2):
        yield


@ray.remote(num_cpus=1)
class Squares:
    """Squares its block; misbehaves on the blocks it is told to, once for each marker file."""

    def __init__(self, folder, die_on=(), hang_on=(), always_die_on=(), bad_input=None):
        if bad_input == "constructor":
            raise CorruptDataError("part-00003.arrow: checksum differs")
        self.folder, self.die_on, self.hang_on = Path(folder), die_on, hang_on
        self.always_die_on, self.bad_input = always_die_on, bad_input

    def first_time(self, kind, block):
        try:
            (self.folder / f"{kind}-{block}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def run(self, block):
        if self.bad_input == block:
            raise LattqeError("block is wrong: mend it")
        if block in self.always_die_on or (block in self.die_on and self.first_time("died", block)):
            os._exit(1)
        if block in self.hang_on and self.first_time("hung", block):
            time.sleep(60)
        time.sleep(0.01)
        return block * block


def square_all(folder, blocks=range(12), policy=None, workers=2, **behaviour):
    results = {}

    def on_done(block, result):
        assert block not in results, "a block was delivered twice"
        results[block] = result

    summary = run_blocks(lambda number: Squares.remote(str(folder), **behaviour), workers, blocks,
                         on_done=on_done, policy=policy)
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


def test_straggler_is_copied_and_first_result_wins(tmp_path):
    started = time.monotonic()
    results, summary = square_all(tmp_path, hang_on=(3,), policy=BlockPolicy(straggler_seconds=0.5))
    assert results == expected()
    assert 1 <= summary.spare_copies <= 2, "the hung block and the one queued behind it, each copied once"
    assert time.monotonic() - started < 30


def test_poison_block_ends_with_a_clear_error(tmp_path):
    with pytest.raises(LattqeError, match="block 4 failed 2 times"):
        square_all(tmp_path, always_die_on=(4,), policy=BlockPolicy(max_failures=1))


@pytest.mark.parametrize(("where", "message"), [(7, "block is wrong: mend it"), ("constructor", "checksum differs")])
def test_bad_input_is_not_retried(tmp_path, where, message):
    with pytest.raises(LattqeError, match=message):
        square_all(tmp_path, bad_input=where)


def test_missing_resources_are_named():
    with pytest.raises(LattqeError, match=r"3 workers need 3 GPU \(the cluster has 0\)"):
        require_resources({"CPU": 0.5, "GPU": 1}, 3, timeout=0.1)
