"""A benchmark on Ray: shards and workers give the numbers of one process; a killed run goes on where it stopped."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmark_sets import small_run

from cluster.benchmark import Bench
from cluster.session import ray_session
from jobs.benchmark import measure_run, publish
from lattqe.benchmark.cells import Cell
from lattqe.benchmark.spec import Candidate, Setting
from lattqe.store import NeighborGraph

DQE = (("C", 0.1), ("negatives", 5))

# What the killed process runs: it kills itself instead of storing a cell when so many are there (-1: never).
PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from benchmark_sets import small_run
from jobs.benchmark import measure_run, publish
from lattqe.store.local import LocalPlace
settle = os.replace, os.link
def last_step(step):
    def act(source, target, **options):
        cells = Path({folder!r}) / "cells"
        if Path(target).parent == cells and sum(path.suffix == ".json" for path in cells.iterdir()) == {limit}:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(source, target, **options)
    return act
os.replace, os.link = map(last_step, settle)
results = measure_run(small_run({folder!r}), {folder!r})
publish(results, {folder!r})
"""


@pytest.mark.ray
def test_shards_and_workers_give_the_numbers_of_one_process(local_ray: None, tmp_path: Path) -> None:
    methods = (
        Candidate("aqe", "AQE", "fixed", (4,), (4,), (4,)),
        Candidate("dqe", "DQE", "fixed", (4,), (2,), (2,), {name: (value,) for name, value in DQE}),
    )
    run = small_run(tmp_path / "world", methods)
    cells = [
        Cell("oxford", "distractors", *pair)
        for pair in ((None, None), (None, Setting("dqe", 4, DQE)), (Setting("aqe", 4), Setting("aqe", 4)))
    ]
    here = Bench(run, str(tmp_path / "here"))
    here.fill(cells, lambda cell: None)
    with ray_session(cpus=2):
        spread = Bench(run, str(tmp_path / "spread"), workers=1, shards=2)
        spread.fill(cells, lambda cell: None)
        distractors = spread.distractors["oxford", "distractors"]
        given = [uri for uri in (tmp_path / "spread" / "graphs").iterdir() if distractors.digest[:16] in uri.name]
        known = Bench(dataclasses.replace(run, graphs=(str(given[0]),)), str(tmp_path / "known"), workers=1, shards=1)
        known.fill(cells[-1:], lambda cell: None)
    merged = [[one.to_dict() for one in each.lookup(cells[-1]).scores] for each in (known, spread)]
    assert merged[0] == merged[1]
    assert len(list((tmp_path / "known" / "graphs").iterdir())) == 1, "the distractors' own graph was there"
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


@pytest.mark.kill
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """SIGKILL again and again, in all its stages; then the report must be that of an undisturbed run."""
    folder = tmp_path / "killed"
    cells = folder / "cells"

    def run(limit: int) -> subprocess.CompletedProcess[bytes]:
        program = PROGRAM.format(tests=str(Path(__file__).parents[1]), folder=str(folder), limit=limit)
        return subprocess.run([sys.executable, "-c", program], capture_output=True)

    for limit in (3, 20):
        done = run(limit)
        assert done.returncode == -signal.SIGKILL, done.stderr
        before = {path.name: path.stat().st_mtime_ns for path in cells.iterdir() if path.suffix == ".json"}
        assert len(before) == limit
    done = run(-1)
    assert done.returncode == 0, done.stderr
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
    publish(measure_run(small_run(folder), str(folder)), str(folder))
    assert files == {name: (folder / name).read_bytes() for name in files}
