"""The planned memory of workers against peaks that were measured."""

import numpy as np
import pytest

from lattqe.augmentation import recipe
from lattqe.cost import Machines, cut_rows
from lattqe.cost.augment import Weighing, augmentation_memory, hops
from lattqe.cost.rows import COSTS, clusters_memory, cut_owned
from lattqe.cost.stages import adapting_memory, shard_memory
from lattqe.cost.work import Stored

CUTS = {"pairs": cut_rows, "rows": cut_owned}
# Stage, rows, columns, k, what else decides, and the peak of a worker in MiB: docs/results/scale.md says how they were
# measured.
PEAKS = [
    ("graph", 2_000, 128, 16, {"block": 500}, 352),
    ("graph", 60_000, 128, 64, {"block": 15_000}, 545),
    ("graph", 60_000, 128, 256, {"block": 15_000}, 770),
    ("graph", 80_000, 128, 256, {"block": 20_000}, 898),
    ("graph", 12_000, 128, 256, {"block": 3_000}, 478),
    ("graph", 100_000, 64, 32, {"block": 25_000}, 510),
    ("graph", 30_000, 512, 64, {"block": 7_500}, 496),
    ("graph", 20_000, 2048, 64, {"block": 5_000, "dtype": "float32"}, 593),
    ("graph", 60_000, 128, 256, {"block": 15_000, "schedule": "rows"}, 632),
    ("graph", 1_000_000, 128, 256, {"block": 83_334, "remote": True}, 2_941),
    ("approximate graph", 60_000, 128, 256, {"threads": 1}, 771),
    ("approximate graph", 120_000, 128, 64, {"threads": 2}, 736),
    ("approximate graph", 1_000_000, 128, 256, {"threads": 1, "remote": True}, 1_802),
    ("adaptation", 12_000, 128, 6, {}, 390),
    ("edges", 12_000, 128, 256, {}, 450),
    ("edges", 30_000, 128, 256, {}, 538),
    ("edges", 1_000_000, 128, 256, {"remote": True}, 1_291),
    ("hops", 12_000, 128, 32, {}, 389),
    ("hops", 30_000, 128, 32, {}, 448),
    ("hops", 60_000, 128, 32, {}, 516),
    ("hops", 1_000_000, 128, 32, {"remote": True}, 1_928),
    ("search", 60_000, 128, 100, {}, 402),
    ("search", 60_000, 128, 1000, {}, 519),
    ("search", 200_000, 128, 1000, {}, 547),
    ("search", 1_000_000, 128, 1000, {"remote": True}, 803),
]


def predicted_peak(stage, rows, dim, k, block=0, threads=1, schedule="pairs", dtype="float16", remote=False):
    """Bytes of one of two workers, mapped files included."""
    features, two = Stored.kind("features", rows, dim=dim, dtype=dtype), Machines(cpus=2, asked=2)
    if stage == "graph":
        cut = CUTS[schedule](rows, 0, 2, block, exact=True)
        work = COSTS[schedule]([features], dim, k, cut, two, itemsize=np.dtype(dtype).itemsize, remote=remote)
        return work.worker_bytes + work.mapped
    if stage == "approximate graph":
        return sum(clusters_memory(features, dim, k, threads, remote))
    if stage == "adaptation":
        return sum(adapting_memory(features, features, dim, 2, remote))
    if stage == "edges":
        graph, weighs = Stored.kind("neighbors", rows, k=k), Weighing(32, k, 0.0, network=True)
        far = {"shards": remote, "fetched": remote, "graph_fetched": remote}
        return augmentation_memory(features, graph, dim, weighs, **far).total
    if stage == "hops":
        cut, edges = recipe.HopCut.of(rows, dim), Stored.kind("edges", rows, k=k)
        work = hops(features, edges, dim, k, 8, cut.band_sizes, cut.group_sizes, two, here=False, fetched=remote)
        return work.worker_bytes + work.mapped
    return sum(shard_memory([features], 2, 2_000, k, remote))


@pytest.mark.parametrize(("stage", "rows", "dim", "k", "more", "mib"), PEAKS)
def test_memory_of_workers_is_within_a_tenth_of_what_was_measured(stage, rows, dim, k, more, mib):
    assert predicted_peak(stage, rows, dim, k, **more) / 2**20 == pytest.approx(mib, rel=0.1)
