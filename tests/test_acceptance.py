"""The acceptance run of a device, on torch's CPU device: it passes, and it can fail."""

import json

import numpy as np
import torch

from cluster import doctor
from cluster.doctor import accept, attack
from jobs.submit import accept_device
from lattqe.search.products import TorchProducts

CPU = torch.device("cpu")


def test_the_run_passes_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "SECONDS", 0.0)
    monkeypatch.setattr(doctor, "ROWS", 300)
    monkeypatch.setitem(doctor.SIDE, "cpu", 64)
    monkeypatch.setattr(doctor, "augmentation", lambda x, device: {"passed": True})  # tested with the methods
    monkeypatch.setattr("cluster.doctor.accept", lambda device: accept(device, rows=300))
    accept_device("cpu", json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert {f"{what} {kind}" for what in ("bound of", "graph by") for kind in ("float32", "float16", "tf32")} <= set(
        found["checks"]
    )
    assert all(rate > 0 for rate in found["rates"].values())


def test_a_device_that_rounds_more_than_it_says_is_found_out():
    class Sloppy(TorchProducts):
        def _product(self, a, b, out):
            return super()._product(a.half().float(), b.half().float(), out)

    x = np.random.default_rng(0).standard_normal((50, 64))
    assert attack(TorchProducts(CPU), x) < 1
    assert attack(Sloppy(CPU), x) > 1
