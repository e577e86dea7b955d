"""The neighbor graph of a stored feature set, computed in this process: for sets that fit in its memory."""

from lattqe.search.graph import knn_graph
from lattqe.search.pieces import in_one
from lattqe.store import FeatureSet, NeighborGraph, Pending, neighbors_table, part_row_counts, row_bytes


def publish_graph(features: FeatureSet, k: int, to: str) -> NeighborGraph:
    """Compute the exact graph of all rows and publish it, unless it is there already."""
    fields = {"k": k}
    part_rows = part_row_counts(features.rows, row_bytes("neighbors", fields))
    pending = Pending.begin(to, "neighbors", fields, part_rows, config={"job": "neighbors"},
                            inputs={"features": features.as_input()})
    missing = pending.missing()
    if missing:
        I, D = knn_graph(in_one(features.pieces()), k)  # noqa: E741
        for part in missing:
            start = sum(part_rows[:part])
            pending.publish(part, neighbors_table(I[start:start + part_rows[part]], D[start:start + part_rows[part]]))
    pending.finish()
    return NeighborGraph.open(to)
