"""The verbs of the command line, those of one topic in one file."""

import os

# Threads of torch that wait for each other give the core away after microseconds. By default they spin for
# milliseconds: where other programs use the cores too, a small network took ten times the processor time, for nothing.
# Read when torch is loaded, so it stands here, before any verb is imported; Ray's workers on this machine inherit it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
