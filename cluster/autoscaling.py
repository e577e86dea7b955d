"""Asking an autoscaling cluster to grow before a job looks at what it has, and to shrink afterwards.

Such a cluster has no workers while nothing runs, so a job would find neither GPUs nor CPUs and could not tell what to
ask for. LATTQE_GPUS or LATTQE_CPUS say so (`lattqe submit --gpus 8` sets it).
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from lattqe.errors import LattqeError
from lattqe.events import event

GROW_SECONDS = 1200.0  # to start machines, pull their images and install; a spot request may be refused first
POLL_SECONDS = 2.0


def wanted() -> dict[str, int]:
    """What the environment asks for: {"GPU": 8}; nothing where it asks for nothing."""
    found = {}
    for resource, name in (("GPU", "LATTQE_GPUS"), ("CPU", "LATTQE_CPUS")):
        text = os.environ.get(name, "0")
        if not text.isdecimal():
            raise LattqeError(f"{name} is {text!r}: give a number of {resource}s")
        if int(text):
            found[resource] = int(text)
    return found


@contextmanager
def grown_cluster(seconds: float = GROW_SECONDS) -> Iterator[None]:
    """Run the body on a cluster with what is wanted, or with as much of it as came in time; none at all is an error."""
    needs = wanted()
    if not needs:
        yield
        return
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{resource: 1} for resource, count in needs.items() for _ in range(count)])
    try:
        _wait(needs, seconds)
        yield
    finally:
        request_resources(bundles=[])  # idle nodes may go


def _wait(needs: dict[str, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        owned = ray.cluster_resources()
        if all(owned.get(resource, 0) >= count for resource, count in needs.items()):
            break
        if time.monotonic() >= deadline:
            missing = [f"{resource} (wanted {count})" for resource, count in needs.items() if not owned.get(resource)]
            if missing:
                raise LattqeError(
                    f"the cluster did not grow within {seconds:.0f} s: still no {', '.join(missing)}: "
                    "look at `ray status` on its head, quotas and limits of its node types"
                )
            break
        time.sleep(min(POLL_SECONDS, seconds))
    event("cluster grown", wanted=needs, owned={resource: owned.get(resource, 0) for resource in needs})
