"""Clusters that run elsewhere: the verb submit runs a job there, the verb doctor checks every node and the storage.

Storage settings travel with a job by a way that leaves no credential in Ray's logs: in two halves, each of which is
noise without the other. One is an environment variable, which Ray logs; the other a file beside the code.
"""

import asyncio
import base64
import json as json_text
import logging
import os
import secrets
import shlex
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.cli import SEALED, VERBS
from jobs.console import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    Terminated,
    command,
    human_bytes,
    print_json,
    run,
    screen,
    show_table,
)
from lattqe.errors import LattqeError, event

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

POLL_SECONDS = 0.5
START_SECONDS = 60.0  # a dashboard answers before its node can take jobs
PACKAGES = ("lattqe", "cluster", "jobs")
PAD_FILE = "environment.pad"


def main(
    job: Annotated[list[str], typer.Argument(help="The verb and its arguments, after `--`.")],
    address: Annotated[str, typer.Option(help="The cluster's dashboard.")] = "http://127.0.0.1:8265",
    gpus: Annotated[int, typer.Option(min=0, help="Let an autoscaling cluster grow to this many GPUs first.")] = 0,
    cpus: Annotated[int, typer.Option(min=0, help="Let an autoscaling cluster grow to this many CPUs first.")] = 0,
) -> None:
    """Run a job on a cluster and return its exit code; storage settings (AWS_*, LATTQE_*) go with it, unlogged.

    Example: lattqe submit --address http://head:8265 -- augment s3://b/features --model s3://b/model --to s3://b/index
    """
    from cluster.session import forwarded_environment

    if job[0] not in {verb.name for verb in VERBS}:
        raise LattqeError(f"there is no verb {job[0]!r} to submit: see lattqe --help")
    client = connect(address)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).resolve().parent.parent
        for package in PACKAGES:
            shutil.copytree(root / package, Path(folder) / package, ignore=shutil.ignore_patterns("__pycache__"))
        growth = {name: str(count) for name, count in (("LATTQE_GPUS", gpus), ("LATTQE_CPUS", cpus)) if count}
        sealed, pad = seal(forwarded_environment() | growth)
        (Path(folder) / PAD_FILE).write_bytes(pad)
        entrypoint = shlex.join(["python", "-m", "jobs.cli", *job])
        environment = {"working_dir": folder, "env_vars": {SEALED: sealed}}
        number = hand_over(client, entrypoint, environment)
    screen.print(
        f"submitted {number}; follow it elsewhere with: ray job logs --follow {number} --address {address}",
        markup=False,
        soft_wrap=True,
    )
    raise SystemExit(follow(client, number))


def seal(settings: dict[str, str]) -> tuple[str, bytes]:
    """Split settings into a text and a pad of random bytes; either alone says nothing but their length."""
    plain = json_text.dumps(settings).encode()
    pad = secrets.token_bytes(len(plain))
    return base64.b64encode(bytes(a ^ b for a, b in zip(plain, pad))).decode(), pad


def unseal(text: str, pad: bytes) -> dict[str, str]:
    """The settings that `seal` split."""
    return json_text.loads(bytes(a ^ b for a, b in zip(base64.b64decode(text), pad)))


def restore_settings() -> None:
    """Put the halves together: where a submitted job runs, before anything else."""
    os.environ.update(unseal(os.environ.pop(SEALED), Path(PAD_FILE).read_bytes()))


def connect(address: str) -> "JobSubmissionClient":
    """Reach the cluster's job server, or say plainly that it does not answer."""
    from ray.job_submission import JobSubmissionClient

    for name in ("ray", "ray.dashboard.modules.dashboard_sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no lines about packages on their way
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LattqeError(
            f"no Ray job server answers at {address} ({_first_line(error)}): start the cluster with its "
            "dashboard, and forward port 8265 if it is remote (`ray dashboard ray_cluster.yaml`)"
        ) from error


def hand_over(client: "JobSubmissionClient", entrypoint: str, environment: dict[str, Any]) -> str:
    """Upload the code and start the job; its number. A head that has only just started is given some time."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            number = str(client.submit_job(entrypoint=entrypoint, runtime_env=environment))
        except (ConnectionError, RuntimeError, ValueError) as error:
            if "try again later" in str(error) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                continue
            raise LattqeError(
                f"the cluster did not take the job ({_first_line(error)}): look at it with `lattqe "
                "doctor --address HEAD:6379`, then submit it again"
            ) from error
        event("submitted", submission=number)
        return number


def follow(client: "JobSubmissionClient", number: str) -> int:
    """Print the job's log as it comes; its exit code, or 1 where it has none."""

    async def tail() -> None:
        async for text in client.tail_job_logs(number):
            print(text, end="", flush=True)

    try:
        try:
            asyncio.run(tail())
        except (OSError, RuntimeError) as error:  # the connection was cut; the job is not affected
            screen.print(
                f"lost the connection to the log ({_first_line(error)}); waiting for the job to end", markup=False
            )
        info = client.get_job_info(number)
        while not info.status.is_terminal():  # the log may end a moment before the job
            time.sleep(POLL_SECONDS)
            info = client.get_job_info(number)
    except KeyboardInterrupt as interrupt:
        screen.print(f"{number} keeps running; stop it with: ray job stop {number}")
        raise SystemExit(EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED) from None
    except (OSError, RuntimeError) as error:
        raise LattqeError(
            f"the cluster no longer answers ({_first_line(error)}); {number} may still be running: check with "
            f"`ray job status {number}`"
        ) from error
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    return 0 if info.status == "SUCCEEDED" else 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


app = command(main)


EXIT_TO_FIX = 1


def doctor(
    place: Annotated[
        str | None, typer.Argument(help="A folder or s3:// address that every node must be able to write.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster; default: $RAY_ADDRESS, or this machine.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Test this machine's GPU instead: error bounds, results, a kill, speed.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --gpu: cuda, cuda:N, or cpu to try it without a GPU; default cuda.")
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the findings as JSON on stdout; `--assume measured=FILE` reads those of --gpu."
        ),
    ] = False,
) -> None:
    """Check every node of a cluster, and whether storage can be written; exit code 1 if there is something to fix.

    Example: lattqe doctor s3://bucket/prefix --address auto
    """
    if gpu:
        if address is not None:
            raise LattqeError("--gpu tests this machine, not a cluster: leave --address out")
        accept_device(device or "cuda", json, place)
        return
    if device is not None:
        raise LattqeError("--device needs --gpu: add it, or leave --device out")
    from cluster.monitor import examine, to_fix
    from cluster.session import ray_session

    with ray_session(address):
        reports = examine(place)
    lines = to_fix(reports)
    if json:
        print_json({"nodes": [asdict(report) for report in reports], "fix": lines})
    for report in reports:
        versions = ", ".join(f"{name} {version}" for name, version in report.packages.items())
        show_table(
            report.node,
            {
                "python": report.python,
                "packages": versions,
                "faiss": report.faiss,
                "GPUs": ", ".join(report.gpus) or "none",
                "driver, torch's CUDA": f"{report.driver or 'none'}, {report.cuda or 'none'}",
                "shared memory free": human_bytes(report.shared_memory),
                "disk free": human_bytes(report.disk),
                "storage": report.storage or "not tested",
            },
        )
    for line in lines:
        screen.print(f"fix: {line}", markup=False, soft_wrap=True)
    if lines:
        raise SystemExit(EXIT_TO_FIX)
    screen.print(f"no problems found: {len(reports)} node{'s' if len(reports) != 1 else ''}")


def accept_device(name: str, json: bool, place: str | None = None) -> None:
    """Run everything that GPUs do on this machine's, or on the CPU in its place; exit code 1 where a check fails."""
    import torch

    from cluster.monitor import driver_to_fix
    from lattqe.acceptance import accept
    from lattqe.device import pick_device

    lines = [] if name == "cpu" else driver_to_fix("this machine")
    if lines and not torch.cuda.is_available():  # nothing can run, and this is why
        raise LattqeError(lines[0])
    found = accept(pick_device(name), place=place)
    found["fix"], found["passed"] = lines, found["passed"] and not lines
    if json:
        print_json(found)
    show_table(
        f"{found['name']} ({found['device']}), torch {found['torch']}, CUDA {found['cuda'] or 'none'}",
        {
            check: ("passed" if said["passed"] else "FAILED")
            + "".join(f", {what} {value:,.4g}" for what, value in said.items() if what != "passed")
            for check, said in found["checks"].items()
        },
    )
    peaks = found["peaks"]
    show_table(
        "rates",
        {
            what: f"{rate:,g}" + (f", {rate / peaks[what]:.0%} of the data sheet's" if what in peaks else "")
            for what, rate in found["rates"].items()
        },
    )
    for line in lines:
        screen.print(f"fix: {line}", markup=False, soft_wrap=True)
    if not found["passed"]:
        raise SystemExit(EXIT_TO_FIX)


doctor_app = command(doctor)

if __name__ == "__main__":
    run(app)
