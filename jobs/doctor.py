"""Check every node of a cluster, and whether storage can be written; print what to fix."""

from dataclasses import asdict
from typing import Annotated

import typer

from jobs.console import command, human_bytes, print_json, run, screen, show_table

EXIT_TO_FIX = 1


def main(
    place: Annotated[
        str | None, typer.Argument(help="A folder or s3:// address that every node must be able to write.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster. [default: $RAY_ADDRESS, or here]")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Test this machine's GPU instead: bounds, bytes, rates.")] = False,
    device: Annotated[str, typer.Option(help="With --gpu: cuda, cuda:N, or cpu to try the run itself.")] = "cuda",
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on stdout.")] = False,
) -> None:
    """Check every node of a cluster, and whether storage can be written; exit code 1 if there is something to fix.

    Example: lattqe doctor s3://bucket/prefix --address auto
    """
    if gpu:
        accept_device(device, json)
        return
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
        raise SystemExit(EXIT_TO_FIX)
    screen.print(f"all well: {len(reports)} node{'s' if len(reports) != 1 else ''}")


def accept_device(name: str, json: bool) -> None:
    """Run everything that GPUs do on this machine's, or on the CPU in its place; exit code 1 where a check fails."""
    from cluster.doctor import accept
    from lattqe.device import pick_device

    found = accept(pick_device(name))
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
    show_table("rates", found["rates"])
    if not found["passed"]:
        raise SystemExit(EXIT_TO_FIX)


app = command(main)

if __name__ == "__main__":
    run(app)
