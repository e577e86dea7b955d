"""Ray nodes as separate processes on this machine, each in a network namespace of its own where that is permitted.

A node can be killed, stopped, cut off from the others and started again. In a namespace, cutting off means that its
link goes down: its processes live and notice nothing, as behind a dead switch. Without namespaces the node's processes
are stopped, so that they answer no request.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ray._raylet import GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo

BESIDE = Path(sys.executable).parent
START_SECONDS = 300.0
# A node that does not answer is given up within seconds; by Ray's own settings it takes half a minute.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}


class Loopback:
    """All nodes in the machine's own network, on addresses of the loopback device."""

    name = "separate node processes on loopback addresses (network namespaces are not permitted here)"

    def __init__(self, nodes: int) -> None:
        self.outside = "127.0.0.1"
        self.addresses = [f"127.0.0.{2 + number}" for number in range(nodes)]

    def within(self, number: int) -> list[str]:
        """What a command on a node is prefixed with."""
        return []

    def close(self) -> None:
        """Nothing to remove."""


class Namespaces:
    """A bridge on this machine, and behind it one network namespace for each node."""

    name = "network namespaces with addresses of their own"

    def __init__(self, nodes: int) -> None:
        self.token = f"lq{os.getpid():06x}{secrets.token_hex(1)}"  # the owner is known when it has died
        net = f"198.18.{secrets.randbelow(256)}"  # set apart for testing networks (RFC 2544)
        self.outside = f"{net}.254"
        self.addresses = [f"{net}.{1 + number}" for number in range(nodes)]
        try:
            _ip("link", "add", self.token, "type", "bridge")
            _ip("addr", "add", f"{self.outside}/24", "dev", self.token)
            _ip("link", "set", self.token, "up")
            for number, address in enumerate(self.addresses):
                space, link = self.space(number), self.link(number)
                _ip("netns", "add", space)
                _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("link", "set", link, "master", self.token, "up")
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", space, "link", "set", device, "up")
            self._check()
        except BaseException:
            self.close()
            raise

    def space(self, number: int) -> str:
        return f"{self.token}-{number}"

    def link(self, number: int) -> str:
        return f"{self.token}-v{number}"

    def within(self, number: int) -> list[str]:
        """What a command on a node is prefixed with."""
        return ["ip", "netns", "exec", self.space(number)]

    def set_link(self, number: int, state: str) -> None:
        _ip("link", "set", self.link(number), state)

    def _check(self) -> None:
        """A firewall may drop what goes over a bridge: then this is no network."""
        with socket.create_server((self.outside, 0)) as server:
            server.settimeout(5)
            port = server.getsockname()[1]
            code = f"import socket; socket.create_connection(({self.outside!r}, {port}), 5)"
            subprocess.run([*self.within(0), sys.executable, "-c", code], check=True, capture_output=True, timeout=600)

    def close(self) -> None:
        """Remove all of it; a namespace goes when its last process is gone."""
        for command in (
            *(("netns", "del", self.space(number)) for number in range(len(self.addresses))),
            ("link", "del", self.token),
        ):
            with contextlib.suppress(subprocess.SubprocessError, OSError):  # the others go all the same
                _ip(*command)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=600)


def make_network(nodes: int) -> Loopback | Namespaces:
    """Namespaces where they are permitted, else loopback; `.name` says which."""
    try:
        return Namespaces(nodes)
    except (OSError, subprocess.SubprocessError):
        return Loopback(nodes)


class RayNode:
    """One `ray start --block`; number 0 is the head, which owns no CPUs. HOME and temporary files are its own.

    before: a command that ends by becoming the words that follow it, such as `nice`.
    """

    def __init__(
        self,
        network: Loopback | Namespaces,
        number: int,
        folder: Path,
        environment: Mapping[str, str],
        port: int,
        cpus: int = 1,
        before: Sequence[str] = (),
    ) -> None:
        self.network, self.number, self.port, self.cpus, self.before = network, number, port, cpus, before
        self.home = folder / f"node{number}"
        self.home.mkdir(parents=True)
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **HEALTH,
            **environment,
            "HOME": str(self.home),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []

    @property
    def address(self) -> str:
        return self.network.addresses[self.number]

    @property
    def head_address(self) -> str:
        """Where the cluster is joined."""
        return f"{self.network.addresses[0]}:{self.port}"

    def begin(self) -> None:
        """Start it, or start it again where all of it is gone."""
        role = (
            [
                "--head",
                f"--port={self.port}",
                "--include-dashboard=false",
                "--no-monitor",
                f"--ray-client-server-port={self.port + 1}",
            ]
            if self.number == 0
            else [f"--address={self.head_address}"]
        )
        with open(self.home / "start.log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    *self.network.within(self.number),
                    *self.before,
                    str(BESIDE / "ray"),
                    "start",
                    "--block",
                    *role,
                    f"--node-ip-address={self.address}",
                    f"--num-cpus={self.cpus if self.number else 0}",
                    "--num-gpus=0",
                    f"--temp-dir={self.home}/t",
                    "--object-store-memory=100000000",
                    "--include-log-monitor=false",
                    "--disable-usage-stats",
                ],
                env=self.environment,
                start_new_session=True,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._sessions.append(self._process.pid)

    def wait_started(self) -> "RayNode":
        """Wait until it says that it runs. Ray gives up after 30 s, which on a busy machine is no reason to fail."""
        deadline = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in (self.home / "start.log").read_bytes():
            if time.monotonic() > deadline:
                raise RuntimeError((self.home / "start.log").read_text()[-2000:])
            if not self.running:
                self.kill()
                self.begin()
            time.sleep(0.05)
        return self

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self) -> Iterator[tuple[int, str]]:
        """Process id and title of everything that belongs to the node: all in its process session."""
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getsid(int(entry.name)) in self._sessions:
                    title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if title:  # one that has ended but was not waited for has none
                        yield int(entry.name), title
            except OSError:
                continue  # it has ended meanwhile

    def send(self, number: signal.Signals) -> None:
        """A signal to all its processes."""
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut_off(self) -> None:
        """Cut it off; it goes on by itself, or is stopped where there is no link to take down."""
        if isinstance(self.network, Namespaces):
            self.network.set_link(self.number, "down")
        else:
            self.send(signal.SIGSTOP)

    def end_cut(self) -> None:
        """Let everybody reach it again."""
        if isinstance(self.network, Namespaces):
            self.network.set_link(self.number, "up")
        else:
            self.send(signal.SIGCONT)

    def reconnect(self) -> None:
        """End a cut that was long enough for Ray to give the node up: it learns of that and ends; `begin` it again."""
        self.end_cut()
        if self._process is not None:
            self._process.wait(timeout=START_SECONDS)
        self.kill()

    def counted_as_dead(self) -> bool:
        """Whether the head has given up the node that last had this address."""
        return self._state() == GcsNodeInfo.DEAD

    def counted_as_alive(self) -> bool:
        """Whether the head counts on it."""
        return self._state() == GcsNodeInfo.ALIVE

    def joined(self) -> bool:
        """Whether it runs and the head counts on it alone, no longer on one that had its address before."""
        return self.running and self._has_started() and self.instances_alive() == 1

    def given_up(self) -> bool:
        """Whether it had started and the head no longer counts on it: its raylet may end and `ray start` wait on."""
        try:
            return self._has_started() and self._state() == GcsNodeInfo.DEAD
        except Exception:  # the head is going down itself, which Ray says in many ways
            return False

    def _has_started(self) -> bool:
        return b"Ray runtime started" in (self.home / "start.log").read_bytes()

    def instances_alive(self) -> int:
        """How many nodes with this address the head counts on; killed ones too, until it notices."""
        return sum(state == GcsNodeInfo.ALIVE for _, state in self._states())

    def _state(self) -> int | None:
        return max(self._states(), default=(0, None))[1]

    def _states(self) -> list[tuple[int, int]]:
        nodes = GcsClient(address=self.head_address).get_all_node_info().values()
        return [(info.start_time_ms, info.state) for info in nodes if info.node_manager_address == self.address]

    def kill(self) -> None:
        """SIGKILL to all of it."""
        while any(self.processes()):
            self.send(signal.SIGKILL)
            if self._process is not None:
                self._process.wait()
            time.sleep(0.02)
        self._process = None
        self._sessions.clear()
