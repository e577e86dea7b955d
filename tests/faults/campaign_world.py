"""Where a fault campaign takes place: Ray nodes, an S3 server behind a proxy, a small disk, a clock."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from ray_nodes import HEALTH, START_SECONDS, Loopback, RayNode, make_network
from s3_proxy import FaultyProxy
from s3_server import S3Server

LAUNCH = Path(__file__).with_name("launch.py")
PROJECT = LAUNCH.parent.parent.parent
ANSWER_SECONDS = 5  # that a client waits for S3: time-outs shall not take a minute each
DISK_BYTES = 32 << 20
NO_ACTORS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_")  # the last: some of Ray's own


class Disk:
    """A file system of its own, small enough to be filled. `available` is False where mounting is not permitted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        try:
            self.available = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        except OSError:
            self.available = False

    def fill(self) -> None:
        """Leave no byte free."""
        with open(self._ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.available:
            subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, check=False)


class WarmDriver:
    """A process that has imported everything and forks each command; looks like the command's `Popen`."""

    def __init__(self, within: list[str], environment: dict[str, str]) -> None:
        self._server = subprocess.Popen(
            [*within, sys.executable, str(LAUNCH), "--serve"],
            env=environment,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._codes: dict[int, int] = {}
        self._told = threading.Condition()
        self._latest: int | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._server.stdout or ():
            said = json.loads(line)
            with self._told:
                if "code" in said:
                    self._codes[said["pid"]] = said["code"]
                else:
                    self._latest = said["pid"]
                self._told.notify_all()

    def start(self, words: list[str], log: Path) -> "Command":
        """Fork a command."""
        with self._told:
            self._latest = None
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps({"words": words, "log": str(log)}) + "\n")
            if not self._told.wait_for(lambda: self._latest is not None, START_SECONDS):
                raise RuntimeError("the warm driver does not answer")
            return Command(self, self._latest or 0)

    def code(self, pid: int) -> int | None:
        """The exit code of a command, None while it runs."""
        with self._told:
            return self._codes.get(pid)

    def close(self) -> None:
        """End it."""
        self._server.kill()
        self._server.wait()


class Command:
    """One command of a warm driver."""

    def __init__(self, driver: WarmDriver, pid: int) -> None:
        self._driver, self.pid = driver, pid

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._driver.code(self.pid)

    def wait(self) -> int:
        """Its exit code, when it has one."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


class World:
    """All of it. With `nodes`, jobs run on a head and that many workers; without, each starts its own Ray.

    `warm`: commands are forked from one process that has imported everything, instead of starting Python for each.
    """

    def __init__(self, folder: Path, nodes: int, warm: bool = False) -> None:
        self._closing, self.warm = ExitStack(), None
        try:
            self._set_up(folder, nodes)
            if warm:
                self.warm = WarmDriver(self.network.within(0) if self.nodes else [], self._driver_environment)
                self._closing.callback(self.warm.close)
        except BaseException:
            self.close()
            raise

    def _set_up(self, folder: Path, nodes: int) -> None:
        self.folder, self.clock = folder, folder / "clock"
        self.network = make_network(nodes + 1) if nodes else Loopback(0)
        self._closing.callback(self.network.close)
        self.server = S3Server(folder / "s3", self.network.outside)
        self._closing.callback(self.server.kill)
        self.server.start()
        self.proxy = FaultyProxy(self.server.endpoint, lambda method, path: None, self.network.outside)
        self._closing.callback(self.proxy.close)
        self.disk = Disk(folder / "disk")
        self._closing.callback(self.disk.close)
        self.away: set[int] = set()  # nodes that shall be down for now
        self.driver: Command | subprocess.Popen[bytes] | None = None
        self._closing.callback(self.end_driver)
        self.environment = self.server.environment | {
            "AWS_ENDPOINT_URL": self.proxy.endpoint,
            "LATTQE_S3_ANSWER_SECONDS": str(ANSWER_SECONDS),
            "PYTHONPATH": str(PROJECT),
            "LATTQE_CAMPAIGN_CLOCK": str(self.clock),
        }
        self.nodes = (
            [
                RayNode(self.network, number, folder, self.environment, port=27400 + os.getpid() % 1000)
                for number in range(nodes + 1)
            ]
            if nodes
            else []
        )
        homes = [node.home for node in self.nodes] or [folder / "home"]
        for number, home in enumerate(homes):
            home.mkdir(exist_ok=True)
            (self.disk.folder / f"cache{number}").mkdir()
            (home / "cache").symlink_to(self.disk.folder / f"cache{number}")
        self._driver_environment = {
            **os.environ,
            **HEALTH,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            **self.environment,
            "HOME": str(homes[0]),
        }
        for node in self.nodes:
            self._closing.callback(node.kill)
            node.begin()
            if node.number == 0:
                node.wait_started()
        self.repair()

    def start(self, words: list[str]) -> None:
        """Start one verb; its driver runs on the head node."""
        address = ["--address", self.nodes[0].head_address] if self.nodes and words[0] != "import" else []
        within = self.network.within(0) if self.nodes else []
        with open(self.folder / "driver.log", "wb") as log:
            if self.warm is not None:
                self.driver = self.warm.start([*words, *address], self.folder / "driver.log")
                return
            self.driver = subprocess.Popen(
                [*within, sys.executable, str(LAUNCH), *words, *address],
                env=self._driver_environment,
                start_new_session=True,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def told(self) -> str:
        """What the verb has printed."""
        return (self.folder / "driver.log").read_text(errors="replace")

    def end_driver(self) -> None:
        """End whatever is left of the verb, its own Ray included."""
        if self.driver is None:
            return
        while left := list(_in_session(self.driver.pid)):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            self.driver.poll()
            time.sleep(0.02)
        self.driver.wait()

    def actors(self) -> list[tuple[int, str]]:
        """Process id and title of the actors that are at work now."""
        sessions = [pid for node in self.nodes for pid in node.processes()]
        if not self.nodes and self.driver is not None:
            sessions = [(pid, _title(pid)) for pid in _in_session(self.driver.pid)]
        return sorted(
            (pid, title.strip())
            for pid, title in sessions
            if title.startswith("ray::") and not title.startswith(NO_ACTORS)
        )

    def keep_nodes(self) -> None:
        """Start nodes again that are gone, as an autoscaler would."""
        for node in self.nodes[1:]:
            if not node.running and node.number not in self.away:
                node.kill()
                node.begin()

    def restart_cluster(self) -> None:
        """Start a killed head again, and with it all nodes: they belong to the head that they joined."""
        for node in reversed(self.nodes):
            node.kill()
        for node in self.nodes:
            node.begin()
            if node.number == 0:
                node.wait_started()

    def repair(self) -> None:
        """Everything works again: the disk has room, clocks are right, nothing is stopped, all nodes are there."""
        self.proxy.fault = lambda method, path: None
        self.away.clear()
        self.disk.free()
        self.clock.write_text("0")
        deadline = time.monotonic() + 600
        if self.nodes and not self.nodes[0].running:
            self.restart_cluster()
        while self.nodes and not all(node.counted_as_alive() for node in self.nodes):
            self.keep_nodes()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster does not come back: {self.nodes[0].home}/start.log")
            time.sleep(0.1)

    def close(self) -> None:
        """End and remove all of it, as far as it was set up."""
        self._closing.close()

    def wait(self, seconds: float, meanwhile: Callable[[], None]) -> int | None:
        """Wait for the verb, doing something meanwhile; its exit code, or None where it did not end in time."""
        if self.driver is None:
            raise RuntimeError("nothing was started")
        deadline, last = time.monotonic() + seconds, 0.0
        while self.driver.poll() is None and time.monotonic() < deadline:
            meanwhile()
            if time.monotonic() - last > 1:
                self.keep_nodes()
                last = time.monotonic()
            time.sleep(0.02)
        return self.driver.poll()


def _in_session(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and os.getsid(int(entry.name)) == session
                and b"\nState:\tZ" not in (entry / "status").read_bytes()
            ):
                yield int(entry.name)


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
