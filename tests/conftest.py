"""Shared fixtures: a real S3 server, and where the real data is."""

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

# Ray, torch, boto3 and hypothesis are imported where they are used: the process that only hands out tests waits for
# none of them.
if TYPE_CHECKING:
    from s3_server import S3Server

# Before anything imports Ray: workers inherit these.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

# The commands and Ray workers that tests start share one compiled package instead of each compiling it anew; and pytest
# keeps what it makes of hypothesis, whose hundred files it rewrites like tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What the imports leave, some million objects, stays: it is looked through neither while they run nor in any test.
gc.disable()

# Before anything imports torch: of several processes that share the cores, each has one. Tests that need more say so.
if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# A shell that starts the tests in its background has them ignore Ctrl-C, and every command they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

PROJECT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Examples are not timed: a busy machine is not a failure. They are the same in each run: none hangs on chance."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only hands out tests
    from hypothesis import settings

    settings.register_profile("lattqe", deadline=None, derandomize=True, max_examples=50)
    settings.load_profile("lattqe")


@pytest.fixture
def call_lattqe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call the `lattqe` command in this process, `call_lattqe("info", folder)`: (exit code, stdout, stderr)."""
    from jobs import cli

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lattqe", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture(autouse=True)
def synced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors that were synced; no power is cut here, and thousands of small files would wait for the disk.

    Commands that a test starts, and all tests that kill something, sync as ever.
    """
    descriptors: list[int] = []
    if "kill" not in request.keywords:
        monkeypatch.setattr("os.fsync", descriptors.append)
    return descriptors


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's report without its figures: drawing a dozen takes longer than measuring a small run."""
    for place in ("lattqe.report", "lattqe.report.page"):
        monkeypatch.setattr(f"{place}.illustrations", lambda results: [])
    monkeypatch.setattr("lattqe.report.page.density_gains", lambda title, groups: "<svg/>")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The optional real data: where LATTQE_DATA says, or `shared/data` beside the project; else tests skip."""
    folder = Path(os.environ.get("LATTQE_DATA") or PROJECT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}: set LATTQE_DATA to the folder that holds photos/ and revisited/")
    return folder


def _part(data_folder: Path, name: str) -> Path:
    if not (data_folder / name).is_dir():
        pytest.skip(f"no {name}/ in {data_folder}: set LATTQE_DATA to a folder that has it")
    return data_folder / name


@pytest.fixture(scope="session")
def photos_folder(data_folder: Path) -> Path:
    """Descriptors of real photographs in four labelled sets."""
    return _part(data_folder, "photos")


@pytest.fixture(scope="session")
def revisited_folder(data_folder: Path) -> Path:
    """The published ground truths of Revisited Oxford and Paris."""
    return _part(data_folder, "revisited")


@pytest.fixture(params=["gnd_roxford5k.pkl", "gnd_rparis6k.pkl"])
def real_gnd(request: pytest.FixtureRequest, revisited_folder: Path) -> Path:
    """Each of the published ground-truth files in turn."""
    return revisited_folder / request.param


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[S3Server]":
    """A real S3 server for the whole run. Ask for it before Ray is started: workers inherit its settings."""
    from s3_server import S3Server

    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.kill()


@pytest.fixture
def s3_uri(request: pytest.FixtureRequest, s3: "S3Server") -> str:
    """A prefix on the server that no other test uses."""
    assert "s3" in request.keywords, "this test starts an S3 server, which `make check` does without: mark it s3"
    return s3.fresh_uri()


@pytest.fixture
def mortal_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[S3Server]":
    """A server of one's own, to be killed and started again."""
    from s3_server import S3Server

    server = S3Server(tmp_path / "mortal-s3").start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.kill()


@pytest.fixture
def local_ray(s3: "S3Server") -> None:
    """A Ray with two CPUs, shared by all files that ask for it: starting one costs more than most tests.

    The S3 server comes first, for workers inherit its address. A test or a file that needs another Ray ends this one
    first; the next test that asks for it starts it again.
    """
    import ray

    from cluster.session import ray_session

    if not ray.is_initialized():
        SHARED_RAY.enter_context(ray_session(cpus=2))


@pytest.fixture(scope="module", autouse=True)
def shared_ray_ends_where_another_is_needed(request: pytest.FixtureRequest) -> None:
    """Files with a Ray of their own, in this process or in others, find none: neither connected nor in the environment.

    A local session forbids clusters of several nodes to all that inherits its environment.
    """
    text = request.path.read_text()
    if "mark.ray" in text and "local_ray" not in text:
        SHARED_RAY.close()


@pytest.fixture(autouse=True)
def signals_stay_as_they_were() -> Iterator[None]:
    """An interrupted job ignores further signals until its process ends; here that process is the tests' own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_ray_without_its_mark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make check` leaves out what is marked: a test that starts Ray without the mark would slow it down unnoticed."""
    if "ray" not in request.keywords:
        import ray

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("this test starts Ray: mark it with pytest.mark.ray")

        monkeypatch.setattr(ray, "init", refuse)


SHARED_RAY = ExitStack()


def pytest_sessionfinish() -> None:
    """End the shared Ray."""
    SHARED_RAY.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Whatever asks for an S3 server is marked so; the other marks stand in the files."""
    if {"s3", "mortal_s3"} & set(getattr(item, "fixturenames", ())):
        item.add_marker("s3")


def pytest_collection_finish() -> None:
    """All is imported: garbage is that of tests."""
    gc.freeze()
    gc.enable()


@cache
def starts_ray(path: str) -> bool:
    """Whether a test file, relative to the project, has tests marked `ray`."""
    return "mark.ray" in (PROJECT / path).read_text()


def without_ray(config: pytest.Config) -> bool:
    """Whether tests with Ray are left out, as `make check` does."""
    return "not ray" in config.getoption("markexpr")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shuffle 3`: no verdict may hang on what ran before."""
    parser.addoption("--shuffle", metavar="SEED", help="files, and the tests of each, in an order drawn from this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first: a mistake shows in seconds, not after the last kill. Files stay together.

    In two processes (`make test`) one begins with the clusters' tests, the other with the fast ones, and both share
    what is left: see `ClustersInOne`. Files that share one Ray come before those that need their own. Without Ray
    (`make check`) all are fast and stay as they are: sorted, a long file would come last, and one process wait for it.
    """
    if (seed := config.getoption("shuffle")) is not None:
        draw = random.Random(seed)
        files = {path: draw.random() for path in dict.fromkeys(item.location[0] for item in items)}
        items.sort(key=lambda item: (files[item.location[0]], draw.random()))
    if without_ray(config):
        return
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    asks = {
        name: {item.location[0] for item in items if name in getattr(item, "fixturenames", ())}
        for name in ("s3", "local_ray")
    }

    def place(item: pytest.Item) -> tuple[bool, ...]:
        path = item.location[0]
        ray = starts_ray(path)
        own_ray = ray and path not in asks["local_ray"]
        return parallel and scope_of(path) != CLUSTERS, ray, own_ray, path in asks["s3"]

    items.sort(key=place)


CLUSTERS = "ray: clusters"


def scope_of(path: str) -> str:
    """What one process runs without a break: a file, or all files with clusters, whose nodes have fixed ports."""
    return CLUSTERS if starts_ray(path) and path.startswith("tests/cluster") else path


class ClustersInOne(LoadScopeScheduling):
    """One process takes the clusters, then what the other has left: so both end at the same time.

    Each has one Ray at a time at most, which mostly waits: more would starve each other on two cores. Where tests with
    Ray are left out (`make check`), any process takes any file.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        return path if without_ray(self.config) else scope_of(path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ClustersInOne:
    """Hand out the tests as `ClustersInOne` does."""
    return ClustersInOne(config, log)
