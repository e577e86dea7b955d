"""Run a job on a cluster: ship the code, pass the storage settings, follow its log, return its exit code."""

import asyncio
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.console import command, run, screen
from lattqe.errors import LattqeError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

PACKAGES = ("lattqe", "cluster", "jobs")


def main(
    job: Annotated[list[str], typer.Argument(help="The verb and its arguments, after `--`.")],
    address: Annotated[str, typer.Option(help="The cluster's dashboard.")] = "http://127.0.0.1:8265",
) -> None:
    """Run a job on a cluster and return its exit code; storage settings (AWS_*, LATTQE_*) go with it.

    Example: lattqe submit --address http://head:8265 -- augment s3://b/features --model s3://b/model --to s3://b/index
    """
    from cluster.session import forwarded_environment
    from jobs.cli import VERBS

    modules = {verb.name: verb.module for verb in VERBS}
    if job[0] not in modules:
        raise LattqeError(f"there is no verb {job[0]!r} to submit: see lattqe --help")
    client = connect(address)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).resolve().parent.parent
        for package in PACKAGES:
            shutil.copytree(root / package, Path(folder) / package, ignore=shutil.ignore_patterns("__pycache__"))
        entrypoint = " ".join(["python", "-m", modules[job[0]], *map(shlex.quote, job[1:])])
        environment = {"working_dir": folder, "env_vars": forwarded_environment()}
        number = client.submit_job(entrypoint=entrypoint, runtime_env=environment)
    screen.print(f"submitted {number}; follow it elsewhere with: ray job logs --follow {number} --address {address}",
                 soft_wrap=True)
    raise SystemExit(follow(client, number))


def connect(address: str) -> "JobSubmissionClient":
    """Reach the cluster's job server, or say plainly that nobody answers."""
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LattqeError(f"no Ray job server answers at {address} ({reason}): start the cluster with its dashboard, "
                          "and forward port 8265 if it is remote (`ray dashboard ray_cluster.yaml`)") from error


def follow(client: "JobSubmissionClient", number: str) -> int:
    """Print the job's log as it comes; its exit code, or 1 where it has none."""

    async def tail() -> None:
        async for text in client.tail_job_logs(number):
            print(text, end="", flush=True)

    try:
        asyncio.run(tail())
    except KeyboardInterrupt:
        screen.print(f"{number} goes on; stop it with: ray job stop {number}")
        raise
    info = client.get_job_info(number)
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    return 0 if info.status == "SUCCEEDED" else 1


app = command(main)

if __name__ == "__main__":
    run(app)
