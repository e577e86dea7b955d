"""A driver and the Ray it has joined or started: noticing that it is gone, and leaving it all the same."""

import atexit
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray
from ray._private import ray_constants

from lattqe.errors import LattqeError

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
