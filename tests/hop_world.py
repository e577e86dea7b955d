"""A small weighted graph with every kind of row in it, for tests of hops in files."""

import numpy as np

from lattqe.augmentation.recipe import HopTask
from lattqe.expansion.diffusion import hop
from lattqe.store import Edges, FeatureSet, FeatureWriter, Pending, edges_table, part_row_counts

ROWS, DIM, K, HOPS, ALPHA = 230, 21, 6, 4, 0.85


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def make_world(folder):
    """Features in three parts, and edges with dropped weights, missing neighbors, a hub and isolated rows."""
    rng = np.random.default_rng(0)
    x = unit(rng.standard_normal((ROWS, DIM)))
    near = np.stack([rng.permutation(np.delete(np.arange(ROWS), row))[:K] for row in range(ROWS)]).astype(np.int32)
    near[:, 0] = np.where(np.arange(ROWS) == 7, 8, 7)
    near[rng.random(near.shape) < 0.1] = -1
    weights = (rng.random((ROWS, 1 + K)) - 0.3).astype(np.float32)
    weights[40] = -1
    weights[:, 1:][near < 0] = 0
    with FeatureWriter(f"{folder}/features", DIM, "float32", part_bytes=8000) as writer:
        writer.append(x, [f"row {row}" for row in range(ROWS)])
    pending = Pending.begin(f"{folder}/edges", "edges", {"k": K}, part_row_counts(ROWS, 56, 5000))
    stop = 0
    for part, rows in enumerate(pending.part_rows):
        start, stop = stop, stop + rows
        pending.publish(part, edges_table(near[start:stop], weights[start:stop]))
    pending.finish()
    return folder


def begun(world, name="index", **cut):
    """A task with small bands and groups, at a destination that is claimed."""
    task = HopTask(
        f"{world}/features",
        f"{world}/edges",
        f"{world}/{name}",
        HOPS,
        ALPHA,
        **{"band_rows": 80, "group_bytes": ROWS * 4 * 12} | cut,
    )
    features = FeatureSet.open(task.features)
    Pending.begin(
        task.to,
        "features",
        features.content_fields(),
        [part.rows for part in features.manifest.parts],
        schema=features.table(0, 1).schema,
    )
    return task


def published(task):
    Pending.attach(task.to).finish()
    index = FeatureSet.open(task.to)
    assert not [name for name in index.place.list() if name.startswith("_work")]
    return index


def expected(world):
    return hop(*Edges.open(f"{world}/edges").read(), FeatureSet.open(f"{world}/features").read(), ALPHA, HOPS)


def no_bar(rows):
    """Reports to no one."""
