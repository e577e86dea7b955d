"""Outputs in the making: killed, continued, joined, made twice at once; always one and the same result."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import lattqe.store.pending
from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store import (
    FeatureSet,
    NeighborGraph,
    Pending,
    find_manifest,
    neighbors_table,
    open_place,
    part_row_counts,
    row_bytes,
)
from lattqe.store.artifacts import verify_artifact

ROWS, K = 100, 3
PART_ROWS = part_row_counts(ROWS, 8 * K, 500)
STARTS = np.cumsum([0, *PART_ROWS])
INPUT = {"uri": "there", "digest": "d", "kind": "features"}


def part(number: int, score: float = 0.5):
    rows = np.arange(STARTS[number], STARTS[number + 1])
    I = (rows[:, None] + [[1, 2, 3]]) % ROWS
    return neighbors_table(I, np.full((len(rows), K), score, np.float32))


def begin(uri, **changes) -> Pending:
    plan = {
        "kind": "neighbors",
        "fields": {"k": K},
        "part_rows": PART_ROWS,
        "config": {"k": K},
        "inputs": {"features": INPUT},
    }
    return Pending.begin(str(uri), **{**plan, **changes})


def complete(uri) -> Pending:
    pending = begin(uri)
    for number in pending.missing():
        pending.publish(number, part(number))
    pending.finish()
    return pending


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    """The digest of the result made in one go."""
    return complete(tmp_path_factory.mktemp("straight") / "graph").finished.digest


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def uri(request: pytest.FixtureRequest, tmp_path) -> str:
    return str(tmp_path / "graph") if request.param == "disk" else request.getfixturevalue("s3_uri")


def test_continued_after_any_part(uri, expected):
    for number in range(len(PART_ROWS)):
        pending = begin(uri)
        assert pending.missing() == list(range(number, len(PART_ROWS)))
        pending.publish(number, part(number))
        with pytest.raises(LattqeError, match="not finished"):
            NeighborGraph.open(uri)
    assert begin(uri).finish().digest == expected
    assert open_place(uri).list() == ["manifest.json", *(f"part-{i:05d}.arrow" for i in range(len(PART_ROWS)))]


def test_unfinished_cannot_be_finished(tmp_path):
    pending = begin(tmp_path / "graph")
    pending.publish(0, part(0))
    with pytest.raises(LattqeError, match=f"not complete: {len(PART_ROWS) - 1} parts are still to make"):
        pending.finish()


def test_damaged_parts_and_receipts_are_made_again(uri, expected):
    pending = begin(uri)
    for number in range(len(PART_ROWS)):
        pending.publish(number, part(number))
    place = pending.place
    flipped = bytearray(place.read("part-00000.arrow"))
    flipped[-50] ^= 1
    place.write("part-00000.arrow", bytes(flipped))
    place.write("part-00001.arrow", b"short")
    place.delete("part-00002.arrow")
    place.write("_work/part-00003.json", b"no receipt")
    place.delete("_work/part-00004.json")
    pending = begin(uri)
    assert pending.missing() == [0, 1, 2, 3, 4]
    for number in pending.missing():
        pending.publish(number, part(number))
    assert pending.missing() == []
    assert pending.finish().digest == expected
    verify_artifact(uri)


@pytest.mark.parametrize("receipt", [{}, {"name": "../x"}, {"name": "part-00000.arrow", "rows": 1}, {"surplus": 1}, []])
def test_receipts_that_cannot_be(tmp_path, receipt):
    pending = begin(tmp_path / "graph")
    pending.publish(0, part(0))
    body = json.loads(pending.place.read("_work/part-00000.json"))
    pending.place.write("_work/part-00000.json", json.dumps({**body, **receipt} if receipt else receipt).encode())
    assert 0 in begin(tmp_path / "graph").missing()


def test_the_first_part_stands(tmp_path):
    """Two workers whose results differ in the last bit must not leave one's part with the other's receipt."""
    pending = begin(tmp_path / "graph")
    pending.publish(0, part(0, score=0.5))
    Pending.attach(pending.uri).publish(0, part(0, score=0.25))
    pending.place.delete("_work/part-00000.json")  # as if the first had died before its receipt
    Pending.attach(pending.uri).publish(0, part(0, score=0.25))
    assert 0 not in begin(pending.uri).missing()
    complete(pending.uri)
    assert NeighborGraph.open(pending.uri).read(0, 1)[1].tolist() == [[0.5] * K]
    verify_artifact(pending.uri)


def test_drivers_at_once_give_one_result(uri, expected):
    results, errors = [], []

    def drive(seed: int) -> None:
        try:
            pending = begin(uri)
            order = pending.missing()
            np.random.default_rng(seed).shuffle(order)
            for number in order:
                pending.publish(number, part(number))
            results.append(pending.finish())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=drive, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert {manifest.digest for manifest in results} == {expected}
    complete(uri)  # a later run cleans what stragglers left
    assert not [name for name in open_place(uri).list() if name.startswith("_work")]
    verify_artifact(uri)


def test_late_worker_after_the_end(tmp_path):
    late = begin(tmp_path / "graph")
    complete(tmp_path / "graph")
    late.publish(0, part(0))
    Pending.attach(late.uri).publish(1, part(1))
    assert (late.finish(), Pending.attach(late.uri).missing()) == (begin(late.uri).finished, [])
    assert not [name for name in late.place.list() if name.startswith("_work")]


def test_another_plan_is_refused_with_the_difference(tmp_path):
    uri = tmp_path / "graph"
    begin(uri)
    begin(uri, inputs={"features": {**INPUT, "uri": "moved elsewhere"}})
    for changes, match in [
        ({"config": {"k": 4}}, r"an unfinished artifact that differs: config\.k: 3 there, 4 here"),
        ({"config": {}}, r"config\.k: 3 there, null here"),
        ({"inputs": {"features": {**INPUT, "digest": "e"}}}, 'digest: "d" there, "e" here'),
        ({"part_rows": [60, 40]}, "part_rows"),
        ({"fields": {"k": 4}}, r"fields\.k"),
    ]:
        with pytest.raises(AlreadyExistsError, match=match):
            begin(uri, **changes)
    complete(uri)
    with pytest.raises(AlreadyExistsError, match="a finished artifact that differs: config"):
        begin(uri, config={"k": 4})


def test_other_code_does_not_continue(tmp_path, monkeypatch):
    begin(tmp_path / "graph")
    monkeypatch.setattr(lattqe.store.pending, "__version__", "9.9.9")
    with pytest.raises(AlreadyExistsError, match="code_version"):
        begin(tmp_path / "graph")


@pytest.mark.parametrize("plan", [b"", b"{}", b'{"kind": 5}'])
def test_damaged_plan(tmp_path, plan):
    place = begin(tmp_path / "graph").place
    place.write("_work/plan.json", plan)
    for action in (begin, Pending.attach):
        with pytest.raises(CorruptDataError, match=r"_work/plan\.json"):
            action(place.uri)


def test_tables_that_do_not_fit(tmp_path):
    pending = begin(tmp_path / "graph")
    with pytest.raises(LattqeError, match=r"part 0 .* has 20 rows, 5 were given"):
        pending.publish(0, part(0).slice(0, 5))
    with pytest.raises(LattqeError, match="has columns"):
        pending.publish(0, part(0).rename_columns(["neighbors", "points"]))
    with pytest.raises(LattqeError, match="nothing to store"):
        begin(tmp_path / "other", part_rows=[])
    with pytest.raises(LattqeError, match="needs the field 'dim'"):
        begin(tmp_path / "other", kind="features")
    with pytest.raises(LattqeError, match="no schema of its own"):
        begin(tmp_path / "other", kind="whatever")
    with pytest.raises(LattqeError, match="there is no unfinished artifact"):
        Pending.attach(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_leftovers_after_the_manifest_are_cleaned_by_the_next_run(tmp_path):
    complete(tmp_path / "graph")
    place = open_place(str(tmp_path / "graph"))
    place.write("_work/plan.json", b"{}")
    place.write("_work/part-00000.json", b"{}")
    assert begin(place.uri).finished is not None
    assert not [name for name in place.list() if name.startswith("_work")]


WRITER = """
import sys, time
import numpy as np
from lattqe.store import FeatureWriter
x = np.random.default_rng(0).standard_normal((400, 16))
with FeatureWriter(sys.argv[1], 16, part_bytes=1000, config={"source": "x"}) as writer:
    for start in range(0, 400, 10):
        writer.append(x[start:start + 10], [f"row-{i}" for i in range(start, start + 10)])
        while start == int(sys.argv[2]):  # wait to be killed
            time.sleep(1)
"""


@pytest.mark.kill
def test_killed_writer_is_continued_by_the_same_command(tmp_path, monkeypatch):
    uri = str(tmp_path / "set")
    victim = subprocess.Popen([sys.executable, "-c", WRITER, uri, "200"])
    while not (tmp_path / "set" / "part-00003.arrow").exists():
        assert victim.poll() is None
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert find_manifest(open_place(uri)) is None
    for path in (uri, str(tmp_path / "straight")):
        monkeypatch.setattr(sys, "argv", ["writer", path, "-1"])
        exec(WRITER)
    assert FeatureSet.open(uri).digest == FeatureSet.open(str(tmp_path / "straight")).digest
    assert not [name for name in os.listdir(uri) if name.startswith((".tmp", "_work"))]
    verify_artifact(uri)


@pytest.mark.parametrize(("rows", "width", "limit"), [(1, 1, 1), (10, 3, 7), (1_000_000, 256, 64 << 20), (5, 100, 10)])
def test_rows_are_cut_evenly(rows, width, limit):
    counts = part_row_counts(rows, width, limit)
    assert sum(counts) == rows
    assert min(counts) >= 1
    assert len(set(counts[:-1])) <= 1
    assert all(count * width <= max(limit, width) for count in counts)


def test_bytes_of_a_row():
    assert row_bytes("features", {"dim": 128, "dtype": "float16"}) == 256 + 24
    assert row_bytes("neighbors", {"k": 10}) == 80
    with pytest.raises(LattqeError, match="nothing to store"):
        part_row_counts(0, 10)


def test_a_folder_that_lattqe_did_not_make_is_refused(tmp_path):
    """Also where its files lie deeper, as photographs do; what lattqe made below a destination may be there."""
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "photos" / "cats" / "1.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(AlreadyExistsError, match=r"holds other files \(cats/1\.jpg\): choose"):
        begin(str(tmp_path / "photos"))
    assert [path.name for path in (tmp_path / "photos").rglob("*")] == ["cats", "1.jpg"]
    inner = begin(str(tmp_path / "index" / "neighbors"))
    begin(str(tmp_path / "index"))  # the inner one is in the making
    assert inner.missing()
    complete(tmp_path / "other" / "neighbors")
    (tmp_path / "other" / ".DS_Store").write_bytes(b"")
    begin(str(tmp_path / "other"))


def test_the_first_difference_is_told(tmp_path):
    begin(str(tmp_path / "there"), config={"k": 3, "a": 1})
    with pytest.raises(AlreadyExistsError, match=r"differs: config\.a: 1 there, 2 here \(and 1 more diff"):
        begin(str(tmp_path / "there"), config={"k": 4, "a": 2})


def test_what_a_late_run_writes_is_cleared_away(tmp_path):
    """A second driver, or the same command repeated, may write below `_work` before it sees that all is done."""
    complete(tmp_path / "graph")
    late = begin(tmp_path / "graph")
    late.place.write("_work/cut.json", b"{}")
    late.finish()
    assert not (tmp_path / "graph" / "_work").exists()
