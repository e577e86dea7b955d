"""All that touches Ray: connecting, sharded search, the graph's schedule, resumable block maps, Ray Train.

Only what decides whether Ray is needed is here, and imports nothing of it.
"""

import os

# Below this, one process is done before the workers of a cluster have started.
ROWS_HERE = 50_000


def runs_here(rows: int, workers: int | None = None, address: str | None = None) -> bool:
    """Whether this many rows are processed in this process: not if workers or a cluster were requested."""
    asked = workers is not None or address is not None or bool(os.environ.get("RAY_ADDRESS"))
    return not asked and rows <= ROWS_HERE
