"""Where a fault campaign takes place: Ray nodes, an S3 server behind a proxy, a small disk, a clock."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import warm_workers
from ray_nodes import HEALTH, Loopback, Namespaces, RayNode, make_network
from s3_proxy import FaultyProxy
from s3_server import S3Server
from warm_driver import LAUNCH, Command, WarmDriver

PROJECT = LAUNCH.parent.parent.parent
ANSWER_SECONDS = 5  # that a client waits for S3: time-outs shall not take a minute each
# Where commands are forked, all that waits does so for seconds: clients for S3, the head for its nodes.
HURRY = {
    "LATTQE_S3_ANSWER_SECONDS": "2",
    "LATTQE_S3_RETRY_SECONDS": "15",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "500",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # an actor less to start
}
STALL_SECONDS = 2.5
DISK_BYTES = 32 << 20
MEMORY_BYTES = 4 << 30
SHARED_BYTES = 1 << 30
# A process with shared memory of its own (its first argument), and control groups of its own (the second, or "").
ALONE = 'mount --bind "$0" /dev/shm; [ -z "$1" ] || mount --bind "$1" /sys/fs/cgroup; shift; exec "$@"'
SITE = """import os, sys
from pathlib import Path
sys.path.append({folder!r})
import clock, warm_workers
warm_workers.hand_over()
clock.follow(Path(os.environ["LATTQE_CAMPAIGN_NODE_CLOCK"]))
"""
WARM_WORKERS = ("sh", "-c", '"$0" "$1" & shift; exec "$@"', sys.executable, str(LAUNCH.with_name("warm_workers.py")))
LEFTOVER_SECONDS = 60.0
NO_ACTORS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_")  # the last: some of Ray's own


class Disk:
    """A file system of its own, small enough to be filled. `available` is False where mounting is not permitted."""

    def __init__(self, folder: Path, size: int = DISK_BYTES) -> None:
        self.folder, self._ballast = folder, folder / "ballast"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
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


class Memory:
    """What one node takes for its memory: Ray's monitor reads the files of a control group, and these are ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "memory"
        self.folder.mkdir(parents=True)
        (self.folder / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
        (self.folder / "memory.stat").write_text("total_inactive_file 0\ntotal_active_file 0\n")
        self.use(MEMORY_BYTES // 8)

    def use(self, count: int) -> None:
        """Let so many bytes be in use; the monitor never sees half a file."""
        (self.folder / "next").write_text(str(count))
        (self.folder / "next").replace(self.folder / "memory.usage_in_bytes")


class World:
    """All of it. With `nodes`, jobs run on a head and that many workers; without, each starts its own Ray.

    `warm`: commands and the nodes' workers are forked from processes that have imported everything, instead of starting
    Python for each, and nothing is waited for as long as by default (`HURRY`, and `hurry` in `launch.py`). `shipped`:
    the next commands ship code and settings to new workers all the same, as users' commands do.
    """

    def __init__(self, folder: Path, nodes: int, warm: bool = False) -> None:
        self._closing, self.warm, self._hurry = ExitStack(), None, HURRY if warm else {}
        self.shipped = False
        self.memories: dict[int, Memory] = {}
        try:
            self._set_up(folder, nodes)
            if warm:
                within = [*(self.network.within(0) if self.nodes else []), *self._alone()]
                self.warm = WarmDriver(within, self._driver_environment)
                self._closing.callback(self.warm.close)
                self._closing.callback(self.end_driver)  # before the one who knows how it ended
        except BaseException:
            self.close()
            raise

    def _set_up(self, folder: Path, nodes: int) -> None:
        self.folder, self.clock = folder, folder / "clock"
        self.network = make_network(nodes + 2) if nodes else Loopback(0)
        self._closing.callback(self.network.close)
        self.server = S3Server(folder / "s3", self.network.outside)
        self._closing.callback(self.server.kill)
        self.server.start()
        self.proxy = FaultyProxy(self.server.endpoint, lambda method, path: None, self.network.outside)
        self._closing.callback(self.proxy.close)
        if self._hurry:
            self.proxy.stall_seconds = STALL_SECONDS
        self.disk = Disk(folder / "disk")
        self._closing.callback(self.disk.close)
        self.away: set[int] = set()  # nodes that shall be down for now
        self.driver: Command | subprocess.Popen[bytes] | None = None
        self.rival: Command | subprocess.Popen[bytes] | None = None  # a second driver
        self._closing.callback(self.end_driver)
        shared = Disk(folder / "shm", SHARED_BYTES)
        self._closing.callback(shared.close)
        self.shared, self.temporary = shared.folder, self.disk.folder / "tmp"
        self.temporary.mkdir()
        self.environment = self.server.environment | {
            "AWS_ENDPOINT_URL": self.proxy.endpoint,
            "LATTQE_S3_ANSWER_SECONDS": str(ANSWER_SECONDS),
            "PYTHONPATH": f"{PROJECT}{os.pathsep}{PROJECT / 'tests'}",
            "LATTQE_CAMPAIGN_CLOCK": str(self.clock),
            "TMPDIR": str(self.temporary),
            **self._hurry,
        }
        everyone = [self._make_node(number) for number in range(nodes + 2 if nodes else 0)]
        self.nodes, self.spare = everyone[: nodes + 1], everyone[-1] if everyone else None
        homes = [node.home for node in everyone] or [folder / "home"]
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
        for node in everyone:
            self._closing.callback(node.kill)
        for node in self.nodes:
            node.begin()
            if node.number == 0:
                node.wait_started()
        self.repair()

    def _make_node(self, number: int) -> RayNode:
        """A node whose clock and memory are what its files say."""
        site = self.folder / f"site{number}"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE.format(folder=str(LAUNCH.parent)))
        environment = self.environment | {
            "PYTHONPATH": f"{site}{os.pathsep}{self.environment['PYTHONPATH']}",
            "LATTQE_CAMPAIGN_NODE_CLOCK": str(self.node_clock(number)),
            "RAY_memory_monitor_refresh_ms": "100",
        }
        before: list[str] = []
        if self._hurry:
            environment[warm_workers.SOCKET] = str(self.folder / f"workers{number}")
        if self.can_run_short:
            self.memories[number] = Memory(self.folder / f"cgroup{number}")
            before = ["unshare", "-m", "sh", "-c", ALONE, str(self.shared), str(self.folder / f"cgroup{number}")]
        if self._hurry:
            before += WARM_WORKERS
        return RayNode(self.network, number, self.folder, environment, port=27400 + os.getpid() % 1000, before=before)

    @property
    def can_run_short(self) -> bool:
        """Whether a node's memory can be what we say: mounting is permitted."""
        return self.disk.available and isinstance(self.network, Namespaces)

    def node_clock(self, number: int) -> Path:
        """The file that moves a node's clock."""
        return self.folder / f"clock{number}"

    def start(self, words: list[str]) -> None:
        """Start one verb; its driver runs on the head node."""
        self.driver = self._start_driver(self._at_cluster(words), "driver.log")

    def start_rival(self, words: list[str]) -> None:
        """Start a second driver beside the first."""
        self.rival = self._start_driver(self._at_cluster(words), "rival.log")

    def _at_cluster(self, words: list[str]) -> list[str]:
        return [*words, *(["--address", self.nodes[0].head_address] if self.nodes and words[0] != "import" else [])]

    def _start_driver(self, words: list[str], log: str) -> Command | subprocess.Popen[bytes]:
        if self.warm is not None:
            (self.folder / log).write_bytes(b"")
            hurry = {} if self.shipped else {"LATTQE_CAMPAIGN_HURRY": "1"}
            return self.warm.start(words, self.folder / log, **hurry)
        within = self.network.within(0) if self.nodes else []
        with open(self.folder / log, "wb") as file:
            return subprocess.Popen(
                [*within, *self._alone(), sys.executable, str(LAUNCH), *words],
                env=self._driver_environment,
                start_new_session=True,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )

    def _alone(self) -> list[str]:
        return ["unshare", "-m", "sh", "-c", ALONE, str(self.shared), ""] if self.disk.available else []

    def told(self, log: str = "driver.log") -> str:
        """What the verb has printed."""
        return (self.folder / log).read_text(errors="replace")

    def wait_for_rival(self, seconds: float, meanwhile: Callable[[], None]) -> int | str | None:
        """Exit code of the second driver, None where there was none, "hung" where it does not end."""
        if self.rival is None:
            return None
        code = self._wait_for(self.rival, seconds, meanwhile)
        return "hung" if code is None else code

    def end_driver(self) -> None:
        """End whatever is left of the verb, and of a second one, its own Ray included."""
        for driver in (self.driver, self.rival):
            if driver is None:
                continue
            while left := list(_in_session(driver.pid)):
                for pid in left:
                    _signal(pid, signal.SIGKILL)
                driver.poll()
                time.sleep(0.02)
            driver.wait()
        self.rival = None

    def leftovers(self, seconds: float = LEFTOVER_SECONDS) -> dict[str, list[str]]:
        """What a command that has ended left of itself, looked for until it is gone or so many seconds are over.

        Processes of its session and its actors on the nodes; files in shared memory; temporary files.
        """
        deadline = time.monotonic() + seconds
        while True:
            drivers = [driver.pid for driver in (self.driver, self.rival) if driver is not None]
            found = {
                "processes": [_title(pid) for driver in drivers for pid in _in_session(driver)]
                + [title for _, title in self.actors() if self.nodes],
                "shared memory": [path.name for path in self.shared.iterdir() if not _is_kept(path.name)],
                "temporary": [path.name for path in self.temporary.iterdir() if not _is_kept(path.name)],
            }
            found = {what: names for what, names in found.items() if names}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def sweep(self) -> None:
        """Remove what was left, so that the next round does not count it again."""
        for folder in (self.shared, self.temporary):
            for path in folder.iterdir():
                if not _is_kept(path.name):
                    _remove(path)

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
            gone = not node.running or (self.nodes[0].running and node.given_up())
            if gone and node.number not in self.away:
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
        for memory in self.memories.values():
            memory.use(MEMORY_BYTES // 8)
        for number in range(len(self.network.addresses)):
            self.node_clock(number).write_text("0")
        if self.spare is None:
            return
        self.spare.kill()
        if not self.nodes[0].running:
            self.restart_cluster()
        deadline = time.monotonic() + 600
        while not (all(node.joined() for node in self.nodes) and self.spare.instances_alive() == 0):
            self.keep_nodes()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster does not come back: {self.nodes[0].home}/start.log")
            time.sleep(0.1)

    def tidy(self) -> None:
        """Forget what earlier passes left on the small disk and in the proxy."""
        self.proxy.forget()
        for path in self.disk.folder.iterdir():
            if path.name.startswith("cache"):
                for cached in path.iterdir():
                    _remove(cached)
            elif path != self.temporary:
                _remove(path)

    def close(self) -> None:
        """End and remove all of it, as far as it was set up."""
        self._closing.close()

    def wait(self, seconds: float, meanwhile: Callable[[], None]) -> int | None:
        """Wait for the verb, doing something meanwhile; its exit code, or None where it did not end in time."""
        if self.driver is None:
            raise RuntimeError("nothing was started")
        return self._wait_for(self.driver, seconds, meanwhile)

    def _wait_for(
        self, driver: Command | subprocess.Popen[bytes], seconds: float, meanwhile: Callable[[], None]
    ) -> int | None:
        deadline, last = time.monotonic() + seconds, 0.0
        while driver.poll() is None and time.monotonic() < deadline:
            meanwhile()
            if time.monotonic() - last > 1:
                self.keep_nodes()
                last = time.monotonic()
            time.sleep(0.02)
        return driver.poll()


def _in_session(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and os.getsid(int(entry.name)) == session
                and b"\nState:\tZ" not in (entry / "status").read_bytes()
            ):
                yield int(entry.name)


def _is_kept(name: str) -> bool:
    """What a running Ray keeps, and the one folder of each user that torch does."""
    return name.startswith(("plasma", "ray", "torchinductor_"))


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
