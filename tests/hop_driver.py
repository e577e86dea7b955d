"""A driver of hops on a Ray of its own, struck at known moments: python hop_driver.py WORLD TO KIND,... die|DOOR.

When the first item of each KIND is done, before the driver knows of it, it dies by SIGKILL, or waits at the door: a
file that it writes, until the file is gone.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hop_world import begun, no_bar, published

from cluster.augmentation import run_hops
from cluster.session import ray_session
from lattqe.augmentation import bands
from lattqe.augmentation.recipe import AugmentSummary
from lattqe.errors import LattqeError


def main(world: str, to: str, kinds: str, what: str) -> None:
    to_come = set(kinds.split(","))
    done = bands.HopSchedule.done

    def strike(schedule: bands.HopSchedule, item: bands.HopItem) -> list[bands.HopItem]:
        if item[0] in to_come:
            to_come.remove(item[0])
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            Path(what).write_text(item[0])
            while Path(what).exists():
                time.sleep(0.01)
        return done(schedule, item)

    bands.HopSchedule.done = strike  # type: ignore[method-assign]
    task = begun(world, to)
    try:
        with ray_session(cpus=2):
            run_hops(task, no_bar, AugmentSummary(), workers=2)
        published(task)
    except LattqeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
