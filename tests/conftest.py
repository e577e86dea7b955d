"""Shared fixtures: a real S3 server, and where the real data is."""

import os

# Before anything imports Ray: workers inherit these.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
