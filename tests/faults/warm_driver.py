"""Commands that are forked from one process, which has imported everything once."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ray_nodes import START_SECONDS

LAUNCH = Path(__file__).with_name("launch.py")


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
        self._gone = False
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
        with self._told:
            self._gone = True
            self._told.notify_all()

    def start(self, words: list[str], log: Path, **environment: str) -> "Command":
        """Fork a command; `environment` is added to ours."""
        asked = {"words": words, "log": str(log), "environment": environment}
        with self._told:
            self._latest = None
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(asked) + "\n")
            self._told.wait_for(lambda: self._latest is not None or self._gone, START_SECONDS)
            if self._latest is None:
                raise RuntimeError("the warm driver does not answer")
            return Command(self, self._latest)

    def code(self, pid: int) -> int | None:
        """The exit code of a command, None while it runs; -SIGKILL where no process is left to say."""
        with self._told:
            return self._codes.get(pid, -signal.SIGKILL if self._gone else None)

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
