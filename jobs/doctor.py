"""Check every node of a cluster, and whether storage can be written; print what to fix."""

from dataclasses import asdict
from typing import Annotated

import typer

from jobs.console import command, human_bytes, print_json, run, screen, show_table
from lattqe.errors import LattqeError

EXIT_TO_MEND = 1


def main(
    place: Annotated[
        str | None, typer.Argument(help="A folder or s3:// address that every node must be able to write.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster. [default: $RAY_ADDRESS, or here]")] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Test this machine's GPU instead: bounds, bytes, a kill, rates.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --gpu: cuda, cuda:N, or cpu to try the run itself. [default: cuda]")
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the findings as JSON on stdout; with --gpu --assume of a plan reads them."),
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
        raise LattqeError("--device belongs to --gpu: add --gpu, or leave it out")
    from cluster.doctor import examine, to_fix
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
                "storage": report.storage or "not asked",
            },
        )
    for line in lines:
        screen.print(f"fix: {line}", markup=False, soft_wrap=True)
    if lines:
        raise SystemExit(EXIT_TO_MEND)
    screen.print(f"all well: {len(reports)} node{'s' if len(reports) != 1 else ''}")


def accept_device(name: str, json: bool, place: str | None = None) -> None:
    """Run everything that GPUs do on this machine's, or on the CPU in its place; exit code 1 where a check fails."""
    from lattqe.acceptance import accept
    from lattqe.device import pick_device

    found = accept(pick_device(name), place=place)
    if json:
        print_json(found)
    show_table(
        f"{found['name']} ({found['device']}), torch {found['torch']}, CUDA {found['cuda'] or 'none'}",
        {
            check: ("passed" if said["passed"] else "FAILED")
            + "".join(f", {what} {value:.3g}" for what, value in said.items() if what != "passed")
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
    if not found["passed"]:
        raise SystemExit(EXIT_TO_MEND)


app = command(main)

if __name__ == "__main__":
    run(app)
