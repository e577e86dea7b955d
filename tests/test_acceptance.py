"""The acceptance run of a device, on torch's CPU device: it passes, and it can fail."""

import json
import signal

import numpy as np
import pytest
import torch

from jobs.submit import accept_device
from lattqe import acceptance
from lattqe.acceptance import accept, attack, kill_and_resume, peaks_of
from lattqe.cost.plans import parse_assumption
from lattqe.search.products import TorchProducts

CPU = torch.device("cpu")


@pytest.mark.kill
def test_the_run_passes_on_the_cpu_and_a_plan_reads_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(acceptance, "SECONDS", 0.0)
    monkeypatch.setattr(acceptance, "ROWS", 300)
    monkeypatch.setitem(acceptance.SIDE, "cpu", 64)
    monkeypatch.setattr(acceptance, "augmentation", lambda x, device: {"passed": True})  # tested with the methods
    monkeypatch.setattr(acceptance, "STORED_BYTES", 1 << 16)
    monkeypatch.setattr("lattqe.acceptance.accept", lambda device, place: accept(device, rows=300, place=place))
    accept_device("cpu", json=True, place=str(tmp_path / "place"))
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert found["passed"]
    assert found["checks"]["killed and resumed"] == {"passed": True, "rows": 300, "blocks": 5}
    assert not list((tmp_path / "place").glob("*"))
    assert {f"{what} {kind}" for what in ("bound of", "graph by") for kind in ("float32", "float16", "tf32")} <= set(
        found["checks"]
    )
    assert all(rate > 0 for rate in found["rates"].values())
    (tmp_path / "found.json").write_text(printed)
    machines = parse_assumption(f"measured={tmp_path}/found.json,nodes=3,cpus=7")
    assert (machines.nodes, machines.cpus, machines.gpus) == (3, 7, 0)
    assert machines.gflops == found["rates"]["one core, GFLOP/s"]
    assert machines.network == found["rates"]["storage, GB/s"] * 1e9
    assert machines.flops == machines.gflops * 1e9  # seven workers of one core each on each node


def test_a_run_that_was_not_killed_or_ends_in_other_bytes_fails(monkeypatch):
    x = np.random.default_rng(0).standard_normal((70, 16))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16)
    there = acceptance.augment_stored

    class Ended:
        returncode = 0

    monkeypatch.setattr(acceptance.subprocess, "run", lambda *_, **__: Ended())
    assert not kill_and_resume(x, CPU)["passed"]
    Ended.returncode = -signal.SIGKILL
    assert kill_and_resume(x, CPU)["passed"]

    def other(folder, name, device):
        monkeypatch.setattr(acceptance, "NETWORK_K", 8 if name == "killed" else 9)
        return there(folder, name, device)

    monkeypatch.setattr(acceptance, "augment_stored", other)
    assert not kill_and_resume(x, CPU)["passed"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 19.5),
        ("NVIDIA H100 80GB HBM3", 67),
        ("NVIDIA H100 PCIe", 51),
        ("Tesla T4", 8.1),
        ("NVIDIA L4", 30.3),
        ("NVIDIA L40S", 91.6),
        ("CPU", None),
    ],
)
def test_peaks_are_found_by_name(name, peak):
    assert peaks_of(name).get("float32") == peak


def test_a_device_that_rounds_more_than_it_says_is_found_out():
    class Sloppy(TorchProducts):
        def _product(self, a, b, out):
            return super()._product(a.half().float(), b.half().float(), out)

    x = np.random.default_rng(0).standard_normal((50, 64))
    assert attack(TorchProducts(CPU), x) < 1
    assert attack(Sloppy(CPU), x) > 1
