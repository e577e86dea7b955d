"""Ray workers that are forked from one process of their node, which has imported all but Ray once.

    python tests/faults/warm_workers.py     (beside `ray start`, in its session)

Most of the time of a small command is that of starting Python in its workers. A node's `sitecustomize` calls
`hand_over` in every process: one that is to be a Ray worker gives its arguments, its environment and its streams to the
node's server, which forks the worker, and waits for its end. A worker with code that its job has shipped, or before the
server is ready, starts as usual. Ray is not imported before: it reads the job's id from the environment when it is.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

SOCKET = "LATTQE_CAMPAIGN_WORKERS"  # where the server listens
WORKER = "default_worker.py"
SHIPPED = "_ray_pkg_"  # in the path of a worker whose code Ray has unpacked
WARM = ("torch", "torch.distributed", "boto3", "pandas", "pyarrow.fs", "pydantic", "requests", "scipy.sparse")
OURS = ("lattqe.augmentation", "lattqe.search", "lattqe.training")
LENGTH = struct.Struct("!I")


def hand_over() -> None:
    """Let the server fork what this process was to become and stay until that has ended; else return."""
    words = sys.orig_argv[1:]
    if SOCKET not in os.environ or not words or os.path.basename(words[0]) != WORKER:
        return
    if SHIPPED in os.environ.get("PYTHONPATH", ""):
        return
    message = json.dumps({"words": words, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(os.environ[SOCKET])
        except OSError:
            return
        socket.send_fds(server, [LENGTH.pack(len(message))], [0, 1, 2])
        server.sendall(message)
        server.recv(1)  # nothing comes: it is closed with the worker
        os._exit(0)


def serve() -> None:
    """Import what takes long, then fork a worker for each process that hands itself over."""
    for module in (*WARM, *OURS):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the workers are not waited for
    path = Path(os.environ[SOCKET])
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        while True:
            connection, _ = listener.accept()
            asked, streams = _receive(connection)
            if asked and os.fork() == 0:
                listener.close()
                connection.detach()  # open for as long as the worker lives
                _become(asked, streams)
            for stream in streams:
                os.close(stream)
            connection.close()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What a process wants to become, nothing where it has ended meanwhile, and its streams."""
    head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    with connection.makefile("rb") as file:
        message = file.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    return (json.loads(message) if message.endswith(b"}") else {}), list(streams)


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Be a worker, to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = asked["words"]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve()
