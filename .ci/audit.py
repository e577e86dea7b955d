"""Check the installed dependencies without a network: as pinned, nothing beside, nothing known to be unsafe.

`make audit` runs it. It is no substitute for a database of advisories: `.ci/advisories.toml` is what its writers knew.
Where `pip-audit` is installed and reaches its database, that is asked too.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
UNPINNED = {"lattqe", "pip", "setuptools", "wheel"}  # ourselves, and what a virtual environment brings along
OFFLINE = ("ConnectionError", "NameResolutionError", "Max retries exceeded", "ServiceError", "Connection refused")


def plain(name: str) -> str:
    """One spelling for each name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, str]:
    """{name: version} of `name==version` lines; anything else is an error, for it would float."""
    pins = {}
    for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
        name, separator, version = line.partition("==")
        if not separator:
            raise SystemExit(f"constraints.txt: {line!r} is no exact version")
        pins[plain(name)] = version
    return pins


def compare(pins: dict[str, str], installed: dict[str, str]) -> list[str]:
    """What is not installed as pinned, and what is installed without a pin."""
    wrong = [
        f"{name}: {installed[name]} is installed, {version} is pinned"
        for name, version in sorted(pins.items())
        if name in installed and Version(installed[name]).public != Version(version).public
    ]
    extra = sorted(set(installed) - set(pins) - UNPINNED)
    return wrong + [f"{name}: {installed[name]} is installed without a pin in constraints.txt" for name in extra]


def unsafe(pins: dict[str, str], advisories: dict[str, dict[str, str]]) -> list[str]:
    """Pins below the first version without a known hole."""
    return [
        f"{name}: {pins[name]} is pinned, {entry['id']} is fixed in {entry['since']}: {entry['what']}"
        for name, entry in sorted(advisories.items())
        if name in pins and Version(pins[name]) < Version(entry["since"])
    ]


def bill_of_materials(packages: list[tuple[str, str, str]]) -> dict[str, object]:
    """What is installed, as (name, version, license), in CycloneDX 1.5; the same packages give the same bytes."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "lattqe", "bom-ref": "lattqe"}},
        "components": [
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}@{version}",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
                **({"licenses": [{"license": {"name": stated}}]} if stated else {}),
            }
            for name, version, stated in sorted(set(packages))
            if name != "lattqe"
        ],
    }


def license_of(package: importlib.metadata.Distribution) -> str:
    """The license that a package states: its SPDX expression, its short name, or its classifiers."""
    data = package.metadata
    stated = data.get("License-Expression") or data.get("License") or ""
    if not stated or len(stated.splitlines()) > 1:
        found = [each.rsplit(" :: ", 1)[-1] for each in data.get_all("Classifier") or () if each.startswith("License")]
        stated = ", ".join(found)
    return stated.strip()


def ask_pip_audit() -> tuple[str, bool]:
    """What pip-audit says, if it is there and its database answers; and whether it found something."""
    program = shutil.which("pip-audit")
    if program is None:
        return "pip-audit is not installed: known holes were looked for in .ci/advisories.toml only", False
    done = subprocess.run(
        [program, "-r", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip"], capture_output=True, text=True
    )
    if any(mark in done.stderr for mark in OFFLINE):
        return "pip-audit cannot reach its database: .ci/advisories.toml alone was asked", False
    return (done.stdout + done.stderr).strip(), done.returncode != 0


def main() -> None:
    """Print what is wrong; exit code 1 if something is."""
    parser = argparse.ArgumentParser(description="Check the installed dependencies.")
    parser.add_argument("--sbom", type=Path, help="write what is installed to this file, as CycloneDX")
    target = parser.parse_args().sbom
    if target is not None:
        packages = [
            (plain(each.metadata["Name"]), each.version, license_of(each))
            for each in importlib.metadata.distributions()
        ]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(bill_of_materials(packages), indent=1) + "\n")
    pins = read_pins((ROOT / "constraints.txt").read_text())
    installed = {plain(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()}
    advisories = tomllib.loads((ROOT / ".ci" / "advisories.toml").read_text())
    lines = compare(pins, installed) + unsafe(pins, advisories)
    told, found = ask_pip_audit()
    print(
        "\n".join(
            [
                *lines,
                told,
                f"{len(pins)} pins, {len(installed)} installed, {len(advisories)} advisories: {len(lines)} to fix",
            ]
        )
    )
    sys.exit(1 if lines or found else 0)


if __name__ == "__main__":
    main()
