"""Connecting to Ray fails in one line; a Ray of our own is closed to everybody else."""

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from ray._private.node import Node
from ray_nodes import Loopback, RayNode
from training_sets import plan_for, write_sets

from cluster import graph_worker, process_group, training
from cluster.monitor import require_resources, room_for
from cluster.session import ray_session
from lattqe.errors import LattqeError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379", "ray://127.0.0.1:1", "rubbish", "a:999999"])
def test_an_address_that_does_not_answer(address):
    with (
        pytest.raises(LattqeError, match=r"no Ray cluster answers at|is not the address of a Ray cluster") as told,
        ray_session(address),
    ):
        pass
    assert "\n" not in str(told.value)


def test_a_ray_that_cannot_start(monkeypatch):
    tries = []

    def fail(**_):
        tries.append(1)
        raise Exception("The current node timed out during startup.\nSee the logs.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("cluster.session.ray.init", fail)
    with (
        pytest.raises(LattqeError, match=r"could not start on this machine \(The current node timed out") as told,
        ray_session(),
    ):
        pass
    assert "\n" not in str(told.value)
    assert len(tries) == 5, "a crowded machine gets further tries"


@pytest.fixture
def nodes(monkeypatch):
    """Pretend to be connected to nodes with these CPUs and GPUs, beside one that has died."""

    def pretend(*owned):
        alive = [{"Alive": True, "Resources": {"CPU": float(cpus), "GPU": float(gpus)}} for cpus, gpus in owned]
        dead = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}
        total = {name: sum(node["Resources"][name] for node in alive) for name in ("CPU", "GPU")}
        monkeypatch.setattr(ray, "nodes", lambda: [*alive, dead])
        monkeypatch.setattr(ray, "cluster_resources", lambda: total)

    monkeypatch.delenv("LATTQE_DEVICE", raising=False)
    return pretend


@pytest.mark.parametrize(
    ("owned", "needs", "workers", "message"),
    [
        ([(8, 0), (8, 0)], {"CPU": 16}, 1, r"1 workers need 16 CPU each on one node \(there is room for 0 of them\)"),
        ([(8, 0)] * 3, {"CPU": 6, "GPU": 0}, 4, r"6 CPU each on one node \(there is room for 3 of them\)"),
        ([(4, 1), (64, 0)], {"CPU": 8, "GPU": 1}, 1, r"8 CPU and 1 GPU each on one node \(there is room for 0"),
        ([(8, 0)], {"CPU": 3}, 3, r"3 workers need 9 CPU \(the cluster has 8\)"),
    ],
)
def test_workers_that_fit_on_no_node_are_refused(nodes, owned, needs, workers, message):
    """Even where all nodes together own enough: a worker that waits for room on one of them waits without end."""
    nodes(*owned)
    with pytest.raises(LattqeError, match=message) as told:
        require_resources(needs, workers, timeout=0)
    assert "\n" not in str(told.value)
    require_resources({name: amount // 8 for name, amount in needs.items()} | {"CPU": 1}, workers, timeout=0)


def test_room_is_counted_node_by_node(nodes):
    nodes((8, 0), (7.5, 2), (0, 0))
    assert room_for({"CPU": 4}) == 3
    assert room_for({"CPU": 0.5}) == 31
    assert room_for({"CPU": 4, "GPU": 0}) == 3
    assert room_for({"CPU": 4, "GPU": 1}) == 1
    assert room_for({"CPU": 1, "GPU": 1}) == 2


def test_training_workers_share_the_cpus_of_nodes_that_have_any(nodes, monkeypatch):
    nodes((0, 0), (8, 0), (4, 0))
    assert [training.threads_for(workers) for workers in (1, 2, 3, 4, 12, 24)] == [8, 4, 4, 2, 1, 1]
    assert graph_worker.threads_for(2) == 4
    nodes((0, 0))
    assert training.threads_for(1) == 1, "refused later, by name"
    nodes((8, 4), (64, 0))
    assert training.threads_for(4) == 2, "beside their GPUs, which are on one node"
    monkeypatch.setenv("LATTQE_DEVICE", "cpu")
    assert training.threads_for(4) == 16, "no GPU is taken"


def descendants(pid):
    """Process ids of a process and of all that it has started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def titles(pid):
    """The command lines of a process and of all that it has started, in one string."""
    found = []
    for each in descendants(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(Path(f"/proc/{each}/cmdline").read_bytes().decode(errors="replace"))
    return " ".join(found)


def listening(pids):
    """Addresses, as /proc writes them, on which these processes take connections."""
    waiting = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # LISTEN
                waiting[words[9]] = words[1].split(":")[0]
    found = []
    for pid in pids:
        try:
            links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found += [
            waiting[match[1]]
            for link in links
            if (match := re.match(r"socket:\[(\d+)\]", link)) and match[1] in waiting
        ]
    return found


THIS_MACHINE = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, as IPv4 and within IPv6


@pytest.fixture
def own_session(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")  # as if it were the interface of a cluster's network
    with ray_session(cpus=2):
        yield


@pytest.mark.ray
def test_a_session_listens_to_this_machine_and_to_its_token_only(own_session, tmp_path):
    """Although the tests' environment turns Ray's tokens off; also while two workers train."""
    assert ray.get(ray.remote(lambda: os.getpid()).remote())
    started = [name for name in ("gcs_server", "raylet", "monitor.py", "dashboard.py") if name in titles(os.getpid())]
    assert started == ["gcs_server", "raylet"], "no autoscaler, no copying of logs, no server of a dashboard"
    assert Node.start_monitor.__name__ == "start_monitor", "Ray's own again, for nodes that others start here"
    addresses = listening(descendants(os.getpid()))
    assert len(addresses) > 5, "head, node, agents and workers"
    assert set(addresses) <= THIS_MACHINE
    assert os.environ["RAY_AUTH_MODE"] == "token"
    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    code = f"import ray; ray.init({address!r}, logging_level='ERROR'); print('in')"
    strangers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment | auth,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for auth in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64})
    ]
    try:  # both knock while it trains: each waits long before it gives up
        assert while_training(tmp_path, strangers) == THIS_MACHINE
    finally:
        told = [stranger.communicate() for stranger in strangers]
    for stranger, (out, err) in zip(strangers, told):
        assert stranger.returncode != 0
        assert out == ""
        assert re.search(r"[Aa]uthenticat|token", err), err
    logs = Path(ray._private.worker._global_node.get_session_dir_path())
    written = b"".join(path.read_bytes() for path in logs.rglob("*") if path.is_file())
    assert written
    assert os.environ["RAY_AUTH_TOKEN"].encode() not in written


def while_training(folder, strangers):
    """Addresses on which this process and its Ray take connections while two workers train; not those of strangers."""
    seen = set()

    def show(standing):
        if 0 < standing.step < standing.total:
            ours = descendants(os.getpid()).difference(*(descendants(stranger.pid) for stranger in strangers))
            seen.update(listening(ours))

    plan = plan_for(write_sets(folder), folder / "model", "steps=8", "validate_every=1")
    training.train_on_cluster(plan, workers=2, threads=1, show=show)
    return seen


@pytest.mark.parametrize(
    ("addresses", "workers", "here"),
    [
        (["127.0.0.1"], 1, True),
        (["127.0.0.1"], 2, True),
        (["10.0.0.1"], 1, True),
        (["10.0.0.1"], 2, False),
        (["127.0.0.1", "10.0.0.2"], 2, False),
    ],
)
def test_training_opens_a_store_for_other_machines_only_if_there_are_any(monkeypatch, addresses, workers, here):
    nodes = [{"Alive": True, "NodeManagerAddress": address} for address in addresses]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "NodeManagerAddress": "10.0.0.9"}])
    config = process_group.torch_config("gloo", workers, "/tmp", 60)
    assert isinstance(config, process_group.OneMachineConfig) == here
    assert (config.backend, config.timeout_s) == ("gloo", 60)


ENDED = """
import os, signal, time
import ray
from cluster import session
from lattqe.errors import LattqeError

try:
    with session.ray_session(cpus=1):
        started = ray._private.worker._global_node.all_processes
        pids = session.processes_here()
        own, started["raylet"] = started["raylet"], []  # as in a driver that has joined a cluster
        assert session.processes_here() == pids, "who listens at the socket"
        started["raylet"] = own
        os.kill(pids[{name!r}], signal.SIGKILL)
        time.sleep(600)
except LattqeError as error:
    print(error)
"""


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_ray_that_ends_ends_the_session_in_one_line(name):
    """Without the watch, a driver sleeps on, or waits for an actor that no raylet will start."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-c", ENDED.format(name=name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert re.match(rf"Ray has ended on this machine \(its {name} is gone.*run the same command again", done.stdout)


JOINED = """
import time
from cluster.session import ray_session
from jobs.console import command, run

def main():
    with ray_session():
        print("joined", flush=True)
        time.sleep(600)
run(command(main))
"""


@pytest.mark.ray
@pytest.mark.kill
def test_a_cluster_whose_head_is_killed_ends_its_driver_in_one_line():
    """Leaving a cluster that is gone, Ray waits for its head and then ends the process, with a message of its own."""
    with tempfile.TemporaryDirectory(prefix="lq") as folder:  # a short path: Ray has sockets in it
        head = RayNode(Loopback(1), 0, Path(folder), {}, port=20_000 + secrets.randbelow(10_000))
        head.begin()
        try:
            head.wait_started()
            environment = head.environment | {"RAY_ADDRESS": head.head_address}
            driver = subprocess.Popen(
                [sys.executable, "-c", JOINED],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            joined = driver.stdout.readline()
            head.kill()
            _, told = driver.communicate(timeout=300)
        finally:
            head.kill()
    assert joined == "joined\n", told
    assert driver.returncode == 2, told
    assert told.splitlines()[-1].startswith("error: Ray has ended on this machine (its raylet is gone"), told
