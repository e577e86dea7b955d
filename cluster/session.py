"""Connecting to Ray: a local one that starts and stops by itself, or a running cluster; quiet on the user's screen.

An autoscaling cluster is asked to grow before a job looks at what it has, and to shrink afterwards: it has no workers
while nothing runs, so a job would find neither GPUs nor CPUs and could not tell what to ask for. LATTQE_GPUS or
LATTQE_CPUS say so (`lattqe submit --gpus 8` sets it).

Workers elsewhere need the driver's storage settings. Ray writes `env_vars` of a runtime environment into its logs on
every node; so they come from a function that Ray runs in each new worker and keeps in its own memory only. A
driver notices when its Ray is gone, and leaves it all the same.
"""

import atexit
import logging
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

import lattqe
from lattqe.errors import LattqeError, event

LEAVE_SECONDS = 2.0  # for Ray to say goodbye to a cluster that is gone


class GoneError(LattqeError):
    """Ray has ended on this machine."""


def disconnect(gone: bool = False) -> None:
    """Leave Ray.

    From a cluster that is gone it would wait for an answer for a minute, and then end this process without a word from
    us: so that is left to a thread, which `jobs/console.py` knows by its name and does not wait for.
    """
    if not gone:
        ray.shutdown()
        return
    atexit.unregister(ray.shutdown)
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)


def processes_here() -> dict[str, int]:
    """Process ids, as far as known: of the raylet that this driver talks to and, where it has started one, its head."""
    node = ray._private.worker._global_node
    if node is None:
        return {}
    names = (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET)
    found = {name: started[0].process.pid for name in names if (started := node.all_processes.get(name))}
    if ray_constants.PROCESS_TYPE_RAYLET not in found:  # not started by this driver: who listens at its socket?
        with suppress(OSError, AttributeError), socket.socket(socket.AF_UNIX) as knock:
            knock.connect(node.raylet_socket_name)
            listener = knock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            found[ray_constants.PROCESS_TYPE_RAYLET] = struct.unpack("3i", listener)[0]
    return {name: pid for name, pid in found.items() if pid > 0}


@contextmanager
def watched() -> Iterator[None]:
    """End the body with one line when a process of Ray on this machine has ended: alone it might wait for an answer
    without end.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(os, "pidfd_open"):
        yield
        return
    ended: list[str] = []
    node = ray._private.worker._global_node
    tell = signal.SIGRTMIN + 7  # jobs in the background of a script ignore SIGINT
    with ExitStack() as stack:
        watched = {}
        for name, pid in processes_here().items():
            with suppress(OSError):  # ended already, or of another user
                watched[os.pidfd_open(pid)] = name
                stack.callback(os.close, next(reversed(watched)))
        done, finish = os.pipe()
        stack.callback(os.close, done)

        def wait() -> None:
            poll = select.poll()
            for descriptor in (done, *watched):
                poll.register(descriptor, select.POLLIN)
            seen = [descriptor for descriptor, _ in poll.poll()]
            if done not in seen and ray.is_initialized() and ray._private.worker._global_node is node:  # not by us
                ended.append(watched[seen[0]])
                signal.pthread_kill(main, tell)

        def interrupt(number: int, frame: Any) -> None:
            raise KeyboardInterrupt  # which every job knows how to end by

        stack.callback(signal.signal, tell, signal.signal(tell, interrupt))
        main, thread = threading.get_ident(), threading.Thread(target=wait, name="ray-watch", daemon=True)
        thread.start()
        try:
            yield
        except KeyboardInterrupt as error:
            if not ended:
                raise
            raise GoneError(
                f"Ray has ended on this machine (its {ended[0]} is gone, often for lack of memory): finished work is "
                "kept; run the same command again to continue, with fewer --workers if memory was short"
            ) from error
        finally:
            os.close(finish)  # which the thread sees as the end of the pipe
            thread.join()


GROW_SECONDS = 1200.0  # to start machines, pull their images and install; a spot request may be refused first
POLL_SECONDS = 2.0
# Set before Ray starts: no usage prompt, no advice about accelerators, no metrics exporters.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    # Ray starts workers at nice 15: beside anything else on the machine they would hardly start at all.
    "RAY_worker_niceness": "0",
}
# What a worker must share with the driver to reach the same storage. On a cluster with an IAM profile none is set.
FORWARDED = ("AWS_", "LATTQE_")
KNOCK_SECONDS = 10.0
START_ATTEMPTS = 5
# The object store only carries query blocks and answers; vectors live in actors and memory maps.
LOCAL_OBJECT_STORE_BYTES = 512 * 2**20
# What starts them: the autoscaler of one machine, the copying of workers' logs to a screen that shows none, and the
# server of the dashboard that is not there.
NOT_NEEDED = ("start_monitor", "start_log_monitor", "start_api_server")


def wanted() -> dict[str, int]:
    """What the environment asks for: {"GPU": 8}; nothing where it asks for nothing."""
    found = {}
    for resource, name in (("GPU", "LATTQE_GPUS"), ("CPU", "LATTQE_CPUS")):
        text = os.environ.get(name, "0")
        if not text.isdecimal():
            raise LattqeError(f"{name} is {text!r}: give a number of {resource}s")
        if int(text):
            found[resource] = int(text)
    return found


@contextmanager
def grown_cluster(seconds: float = GROW_SECONDS) -> Iterator[None]:
    """Run the body on a cluster with what is wanted, or with as much of it as came in time; none at all is an error."""
    needs = wanted()
    if not needs:
        yield
        return
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{resource: 1} for resource, count in needs.items() for _ in range(count)])
    try:
        _wait(needs, seconds)
        yield
    finally:
        request_resources(bundles=[])  # idle nodes may go


def _wait(needs: dict[str, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        owned = ray.cluster_resources()
        if all(owned.get(resource, 0) >= count for resource, count in needs.items()):
            break
        if time.monotonic() >= deadline:
            missing = [
                f"{resource} (asked for {count})" for resource, count in needs.items() if not owned.get(resource)
            ]
            if missing:
                raise LattqeError(
                    f"the cluster did not grow within {seconds:.0f} s: still no {', '.join(missing)}: "
                    "look at `ray status` on its head, quotas and limits of its node types"
                )
            break
        time.sleep(min(POLL_SECONDS, seconds))
    event("cluster grown", wanted=needs, owned={resource: owned.get(resource, 0) for resource in needs})


def forwarded_environment() -> dict[str, str]:
    """The driver's storage settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}


def setting_function(settings: dict[str, str]) -> Callable[[], None]:
    """A function that makes these settings in the process that calls it; defined here, it is sent by value."""

    def apply_settings() -> None:
        import os

        os.environ.update(settings)

    return apply_settings


def _runtime_env() -> dict[str, Any]:
    """Ship our packages and storage settings to a running cluster, so that every node runs the driver's code.

    Inside `ray job submit` the submission's own runtime environment brings the code.
    """
    settings = forwarded_environment()
    environment: dict[str, Any] = {"worker_process_setup_hook": setting_function(settings)} if settings else {}
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        root = Path(lattqe.__file__).parent
        environment["py_modules"] = [str(root), str(root.parent / "cluster")]
    return environment


def _check_reachable(address: str) -> None:
    """Knock at host:port: Ray itself would try for minutes, with a page of warnings, before it gives up."""
    if address in ("auto", "local"):
        return
    if address.startswith("ray://"):  # Ray Client has no metrics, and can only pass settings that Ray then logs
        raise LattqeError(
            f"{address!r} is not the address of a Ray cluster that jobs can join: use host:port (6379) "
            "on a machine of the cluster, or `lattqe submit` from elsewhere"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LattqeError(f"{address!r} is not the address of a Ray cluster: use host:port, as `ray start` printed it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> LattqeError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return LattqeError(
        f"no Ray cluster answers at {address!r} ({reason}): start one with `ray start --head`, or leave "
        "--address out to run on this machine"
    )


def _note_message(data: dict[str, Any], **_: Any) -> None:
    event("ray message", text=" ".join(" ".join(map(str, data.get("lines", ()))).split())[:500])


def _connect(address: str | None, cpus: int | None) -> None:
    # Ray prints what happens to nodes on stdout, where scripts read our results, and has no setting against it.
    ray._private.worker.print_to_stdstream = _note_message
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        _start_local(num_cpus=cpus, **quiet)
        return
    _check_reachable(address)
    try:
        ray.init(address=address, runtime_env=_runtime_env(), **quiet)
    except Exception as error:  # Ray's own, of a dozen kinds down to plain `Exception`: none is a bug of ours
        ray.shutdown()
        raise _no_cluster(address, error) from error


@contextmanager
def _closed_to_others() -> Iterator[None]:
    """Within the body a Ray that starts here listens on 127.0.0.1 alone, and answers only to this session's token.

    The first is Ray's own switch for machines whose firewalls ask about every port; it has no public name. The token is
    random, goes to Ray's processes by their environment and is written to no file.
    """
    switch, clusters = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    names = (switch, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= {switch: "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray_constants.ENABLE_RAY_CLUSTER = False
    _read_authentication()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _read_authentication()


def _read_authentication() -> None:
    """Let Ray look at the environment again: it has done so when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM that is in place: Ray sets its own, which ends the process without a word."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _without_servants() -> Iterator[None]:
    """Within the body a Ray that starts here leaves out the processes in `NOT_NEEDED`, half of what its start costs.

    Only the nodes that `ray start` makes have switches for them.
    """
    kept = {name: getattr(Node, name) for name in NOT_NEEDED if hasattr(Node, name)}  # another Ray may have others
    try:
        for name in kept:
            setattr(Node, name, lambda *_, **__: None)
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


def _start_local(**settings: Any) -> None:
    """Start our own Ray. It gives itself half a minute, too little on a crowded machine: then again."""
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # an actor that waits for nodes to be taken away
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.25")  # else the end of a training is seen 2 s late
    # "local": a cluster that runs on this machine is joined only when asked for.
    settings |= {"address": "local", "include_dashboard": False, "object_store_memory": LOCAL_OBJECT_STORE_BYTES}
    for attempt in range(START_ATTEMPTS):
        try:
            with _without_servants():
                ray.init(**settings)
            return
        except Exception as error:
            ray.shutdown()  # what was started half
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if "timed out" in reason and attempt + 1 < START_ATTEMPTS:
                continue
            raise LattqeError(
                f"Ray could not start on this machine ({reason}): free memory, disk or processor time, "
                "or give the --address of a running cluster"
            ) from error


@contextmanager
def ray_session(address: str | None = None, cpus: int | None = None) -> Iterator[None]:
    """Run the body connected to Ray.

    `address` (or the environment's RAY_ADDRESS) joins a running cluster; without one a local Ray with `cpus` CPUs
    starts here and stops afterwards. A session that is already connected is used as it is and left open.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    address = address or os.environ.get("RAY_ADDRESS") or None
    with nullcontext() if address else _closed_to_others():
        with _own_signals():
            _connect(address, cpus)
        gone = False
        try:
            owned = ray.cluster_resources()
            event(
                "ray",
                ray_job=ray.get_runtime_context().get_job_id(),
                nodes=len(ray.nodes()),
                resources={name: owned[name] for name in ("CPU", "GPU", "memory") if name in owned},
            )
            with watched(), grown_cluster():
                yield
        except GoneError:
            gone = address is not None  # a Ray of our own is ended with all its processes
            raise
        finally:
            disconnect(gone)


def gpus_available() -> int:
    """Count the GPUs of the connected cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


def worker_device() -> str:
    """The kind of device that workers compute on: what LATTQE_DEVICE says, or GPUs where the cluster has any."""
    named = os.environ.get("LATTQE_DEVICE") or "auto"
    return ("cuda" if gpus_available() else "cpu") if named == "auto" else named.partition(":")[0]
