"""How many blocks one driver can hand out: the block map with actors that do nothing, counted and logged.

    python benchmarks/load.py --blocks 20000 --workers 2

A real block takes seconds; what is measured here is what the driver adds to it, and whether it grows with their number.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import ray

from cluster.blocks import run_blocks
from cluster.monitor import Watch, Work
from cluster.session import ray_session
from jobs.log_file import logging_to


@ray.remote(num_cpus=1)
class Idle:
    """A worker without work."""

    def run(self, block):
        """Give the block back."""
        return block


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(blocks, workers, log):
    """Seconds from the first block delivered to the last."""
    delivered = {}
    with logging_to(log, "load", {}):
        run_blocks(
            lambda _: Idle.remote(),
            workers,
            range(blocks),
            work=Work("idle", rows=lambda block: 1),
            on_done=lambda block, result: delivered.setdefault(block, time.monotonic()) and None,
        )
    assert set(delivered) == set(range(blocks))
    return max(delivered.values()) - min(delivered.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ray_session(cpus=options.workers):
        measure(options.blocks // 10, options.workers, None)  # warm
        before = memory()
        for name, log in (("without a log file", None), ("with one", f"{folder}/log")):
            seconds = measure(options.blocks, options.workers, log)
            print(f"{options.blocks:,} blocks {name}: {options.blocks / seconds:,.0f} blocks/s, {seconds:.1f} s")
        print(f"the driver grew by {memory() - before:.0f} MiB over {2 * options.blocks:,} blocks")
        print(f"the log: {Path(folder, 'log').stat().st_size / options.blocks:.0f} bytes a block")
        watch, count = Watch("cost"), 20_000
        started = time.process_time()
        for block in range(count):
            watch.done(block, 0, 2048, 1.0)
        print(f"counting one block: {(time.process_time() - started) / count * 1e6:.1f} µs of the driver")


if __name__ == "__main__":
    main()
