"""What shards need of a cluster: how many, which resources, and reserving them within a time limit."""

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.session import gpus_available
from lattqe.errors import LattqeError

ROWS_PER_SHARD = 100_000  # below this a further CPU shard costs more than it saves


def default_shards(rows: int) -> int:
    """One for each GPU; without GPUs as many CPUs as have enough rows to be worth it."""
    cpus = int(ray.cluster_resources().get("CPU", 1))
    return gpus_available() or max(min(rows // ROWS_PER_SHARD, cpus), 1)


def shard_resources(shards: int, cpus: int | None = None) -> dict[str, float]:
    """What one shard asks for: a GPU where there are any, and its share of the CPUs, as far as one node has them."""
    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    share = int(min(sum(nodes) // shards, min((owned for owned in nodes if owned >= 1), default=1)))
    resources: dict[str, float] = {"CPU": cpus or max(share, 1)}
    return resources | {"GPU": 1} if gpus_available() else resources


def check_memory(shard_bytes: int, shards: int) -> None:
    """Refuse rows that the nodes' memory cannot hold."""
    owned = sum(node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"])
    if shard_bytes * shards > owned:
        raise LattqeError(f"{shards} shards of {shard_bytes >> 20} MiB do not fit the cluster's {int(owned) >> 20} "
                          "MiB: add nodes, or store the features as float16")


def reserve(bundle: dict[str, float], count: int, timeout: float) -> PlacementGroup:
    """Reserve `count` bundles spread over the nodes, or say what is missing after `timeout` seconds."""
    group = placement_group([dict(bundle) for _ in range(count)], strategy="SPREAD")
    if group.wait(timeout):
        return group
    owned = ray.cluster_resources()
    asked = ", ".join(f"{amount * count:g} {name} (the cluster has {owned.get(name, 0):g}, free is "
                      f"{free_resources().get(name, 0):g})" for name, amount in bundle.items())
    remove_placement_group(group)
    raise LattqeError(f"{count} shards need {asked}, not granted within {timeout:.0f} s: ask for fewer with --workers, "
                      "wait for other jobs to end, or add nodes")


def free_resources() -> dict[str, float]:
    """CPUs and GPUs that nobody uses now."""
    return {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
