"""A benchmark on Ray: shards and workers give the numbers of one process; a killed run goes on where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from benchmark_sets import small_run

from cluster.benchmarking import Bench
from cluster.session import ray_session
from lattqe.benchmark.cells import Cell
from lattqe.benchmark.spec import Method, Setting
from lattqe.store import NeighborGraph

DQE = (("C", 0.1), ("negatives", 5))

# What the killed process runs.
PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from benchmark_sets import small_run
from jobs.benchmark import measure_run, publish
results = measure_run(small_run({folder!r}), {folder!r})
publish(results, {folder!r})
"""


@pytest.mark.ray
def test_shards_and_workers_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    methods = (Method("aqe", "AQE", "fixed", (4,), (4,), (4,)),
               Method("dqe", "DQE", "fixed", (4,), (2,), (2,), {name: (value,) for name, value in DQE}))
    run = small_run(tmp_path / "world", methods)
    cells = [Cell("oxford", "distractors", *pair) for pair in (
        (None, None), (None, Setting("dqe", 4, DQE)), (Setting("aqe", 4), Setting("aqe", 4)))]
    here = Bench(run, str(tmp_path / "here"))
    here.fill(cells, lambda cell: None)
    with ray_session(cpus=2):
        spread = Bench(run, str(tmp_path / "spread"), workers=1, shards=2)
        spread.fill(cells, lambda cell: None)
    for cell in cells:
        ours, theirs = here.lookup(cell), spread.lookup(cell)
        assert [one.to_dict() for one in ours.scores] == [one.to_dict() for one in theirs.scores]
        assert ours.weights == theirs.weights
    graphs = [{path.name: path for path in (tmp_path / name / "graphs").iterdir()} for name in ("here", "spread")]
    assert len(graphs[0]) == 1
    assert len(graphs[1]) == 2, "the distractors' own graph, and what it was merged into"
    for name, path in graphs[0].items():
        found = [NeighborGraph.open(str(each)).read() for each in (path, graphs[1][name])]
        np.testing.assert_array_equal(found[0][0], found[1][0])
        np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """SIGKILL again and again, in all its stages; then the report must be that of an undisturbed run."""
    folder = tmp_path / "killed"
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    cells, seen = folder / "cells", 0
    for share in (3, 20):
        driver = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        while driver.poll() is None and _count(cells) < share:
            time.sleep(0.01)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        assert driver.stderr is not None
        driver.stderr.close()
        before = {path.name: path.stat().st_mtime_ns for path in cells.iterdir() if path.suffix == ".json"}
        assert len(before) >= max(share, seen), "the run ended before it could be killed, or lost cells"
        seen = len(before)
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    after = {path.name: path.stat().st_mtime_ns for path in cells.iterdir()}
    assert {name: after[name] for name in before} == before, "finished cells were measured again"
    assert len(after) > len(before)

    undisturbed = Bench(small_run(tmp_path / "once"), str(tmp_path / "once"))
    while todo := undisturbed.cells_to_do():
        undisturbed.fill(todo, lambda cell: None)
    assert set(after) == {path.name for path in (tmp_path / "once" / "cells").iterdir()}
    for path in (tmp_path / "once" / "cells").iterdir():
        ours, theirs = (json.loads(each.read_bytes()) for each in (path, cells / path.name))
        assert (ours["scores"], ours["weights"]) == (theirs["scores"], theirs["weights"])

    files = {name: (folder / name).read_bytes() for name in ("results.json", "results.csv", "report.html")}
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert files == {name: (folder / name).read_bytes() for name in files}


def _count(cells: Path) -> int:
    return sum(path.suffix == ".json" for path in cells.iterdir()) if cells.is_dir() else 0
