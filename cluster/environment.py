"""The driver's storage settings for workers and jobs elsewhere, by ways that leave no credential in Ray's logs.

Ray writes `env_vars` of a runtime environment into its logs on every node. So workers get the settings from a function
that Ray runs in each new worker and keeps in its own memory only. A submitted job cannot be given such a function: its
settings travel in two halves, each of which is noise without the other: an environment variable, which Ray logs, and a
file beside the code. `python -m cluster.environment jobs.cli VERB ...` puts them together and runs the job.
"""

import base64
import json
import os
import runpy
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

# What a worker must share with the driver to reach the same storage. On a cluster with an IAM profile none is set.
FORWARDED = ("AWS_", "LATTQE_")
SEALED = "LATTQE_SEALED"
PAD_FILE = "environment.pad"


def forwarded_environment() -> dict[str, str]:
    """The driver's storage settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED) and name != SEALED}


def setting_function(settings: dict[str, str]) -> Callable[[], None]:
    """A function that makes these settings in the process that calls it; defined here, it is sent by value."""

    def apply_settings() -> None:
        import os

        os.environ.update(settings)

    return apply_settings


def seal(settings: dict[str, str]) -> tuple[str, bytes]:
    """Split settings into a text and a pad of random bytes; either alone says nothing but their length."""
    plain = json.dumps(settings).encode()
    pad = secrets.token_bytes(len(plain))
    return base64.b64encode(bytes(a ^ b for a, b in zip(plain, pad))).decode(), pad


def unseal(text: str, pad: bytes) -> dict[str, str]:
    """The settings that `seal` split."""
    return json.loads(bytes(a ^ b for a, b in zip(base64.b64decode(text), pad)))


def main() -> None:
    """Run a module, `jobs.cli`, with the settings that came with it."""
    os.environ.update(unseal(os.environ.pop(SEALED), Path(PAD_FILE).read_bytes()))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
