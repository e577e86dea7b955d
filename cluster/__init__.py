"""All that touches Ray: connecting, sharded search, the graph's schedule, resumable block maps, Ray Train."""
