"""What a campaign draws, what it forks, and what it removes after one that was killed."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import stale
import warm_workers
from campaign_faults import BETWEEN, ENDS_THE_COMMAND, Fault, Faults, kinds_for
from campaign_pipeline import STAGES
from campaign_plan import TIMES, TRIES, Bag, draw_tries
from campaign_world import PROJECT

WORLD = SimpleNamespace(disk=SimpleNamespace(available=True), nodes=[1], network=None, can_run_short=True)


def test_every_kind_of_a_verb_is_drawn_and_no_try_has_two_ends():
    kinds = kinds_for(WORLD, STAGES[3])
    bag, drawn = Bag(kinds, "1-augment"), Counter[str]()
    for _ in range(12):
        tries = draw_tries(bag, 24)
        assert len(tries) == TRIES
        assert sum(map(len, tries)) <= 24
        for chosen in tries:
            assert len(set(chosen)) == len(chosen)
            assert sum(kind in ENDS_THE_COMMAND for kind in chosen) <= 1
            assert not set(chosen[:-1]).intersection(ENDS_THE_COMMAND), "what ends a command is the last to strike it"
            assert len(chosen) == 1 or chosen[-1] not in BETWEEN
            drawn.update(chosen)
    assert set(drawn) == set(kinds)
    assert drawn["actor killed"] > drawn["node killed"]


def test_only_what_is_read_is_tampered_with():
    """An extraction reads images, which have no parts."""
    for stage in STAGES:
        assert set(BETWEEN).issubset(kinds_for(WORLD, stage)) == bool(stage.reads), stage.name
        assert set(BETWEEN).isdisjoint(kinds_for(WORLD, stage)) or stage.reads, stage.name
    assert [stage.name for stage in STAGES if not stage.reads] == ["import", "extract"]


def test_a_bag_goes_on_where_it_ended():
    kinds = ["actor killed", "node killed", "S3 hangs up"]
    whole = Bag(kinds, "7")
    sequence = [whole.draw() for _ in range(20)]
    assert Counter(sequence[:6]) == {kind: TIMES.get(kind, 1) for kind in kinds}
    later = Bag(kinds, "7", drawn=8)
    assert [later.draw() for _ in range(12)] == sequence[8:]
    later.put_back(["node killed"])
    assert later.draw() == "node killed"


class Lasting(Fault):
    """Strikes whenever it may, and lasts."""

    def _strike(self):
        self._later(1000, 1001, lambda: None)
        return True


def test_only_faults_of_different_parts_last_together():
    world = SimpleNamespace(proxy=SimpleNamespace(happened=Counter()))
    kinds = ("node killed", "node cut off for a while", "S3 server killed", "actor killed", "second driver")
    faults = Faults([Lasting(world, kind, 1, SimpleNamespace(randint=max, uniform=max)) for kind in kinds])
    faults.requests = 1
    faults.poll()
    assert [fault.injected for fault in faults.faults] == [True, False, True, True, False], "a rival needs storage"
    faults.faults[0].end()
    faults.poll()
    assert faults.faults[1].injected


@pytest.mark.kill
@pytest.mark.slow
def test_a_worker_is_forked_with_its_own_words_and_environment(tmp_path):
    script = tmp_path / warm_workers.WORKER
    script.write_text(
        "import json, os, sys\n"
        "known = sorted({'torch', 'ray'} & set(sys.modules))\n"
        "print(json.dumps([known, sys.argv[1:], os.environ['MARK'], os.getsid(0), os.getppid()]))\n"
    )
    (tmp_path / "sitecustomize.py").write_text("import warm_workers\nwarm_workers.hand_over()\n")
    folder = str(PROJECT / "tests" / "faults")
    path = os.pathsep.join((str(tmp_path), folder, str(PROJECT)))
    environment = {**os.environ, "PYTHONPATH": path, warm_workers.SOCKET: str(tmp_path / "s"), "MARK": "server"}
    server = subprocess.Popen([sys.executable, f"{folder}/warm_workers.py"], env=environment)
    try:
        while not (tmp_path / "s").exists():
            assert server.poll() is None
            time.sleep(0.05)
        command = [sys.executable, str(script), "--node-id=1"]
        environment["MARK"] = "worker"
        told = [subprocess.run(words, env=environment, capture_output=True, text=True) for words in (command, command)]
        for each in told:
            known, words, mark, session, parent = json.loads(each.stdout)
            assert (known, words, mark) == (["torch"], command[2:], "worker"), each.stderr
            assert (session, parent) == (os.getsid(server.pid), server.pid)
        environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path / warm_workers.SHIPPED}1"
        alone = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert json.loads(alone.stdout)[0] == [], "a worker with shipped code starts as usual"
    finally:
        server.kill()
        server.wait()


@pytest.mark.kill
def test_what_a_killed_campaign_left_is_removed_and_what_a_running_one_has_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(stale.tempfile, "gettempdir", lambda: str(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    left, mine, foreign = tmp_path / f"lq-{owner.pid}-a", tmp_path / f"{stale.prefix()}b", tmp_path / "lq-other"
    for folder in (left, mine, foreign):
        folder.mkdir()
        (folder / "file").write_text("x")
    code = "import time; time.sleep(600)"
    processes = [subprocess.Popen([sys.executable, "-c", code, f"{folder}/s3"]) for folder in (left, mine)]
    try:
        stale.remove()
        assert left.exists()
        owner.kill()
        owner.wait()
        stale.remove()
        assert (left.exists(), mine.exists(), foreign.exists()) == (False, True, True)
        assert processes[0].wait(60) == -9
        assert processes[1].poll() is None
    finally:
        for process in (owner, *processes):
            process.kill()
            process.wait()
