"""The acceptance run of a device, on torch's CPU device: it passes, and it can fail."""

import json
import signal

import numpy as np
import pytest
import torch

from jobs.submit import accept_device
from lattqe import acceptance
from lattqe.acceptance import accept, attack, faiss_agrees, graph_in_blocks, kill_and_resume, peaks_of, search_agrees
from lattqe.cost.plans import parse_assumption
from lattqe.errors import LattqeError
from lattqe.search import knn_graph
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
    compared = ("bound of", "graph of float16 rows by", "graph of float32 rows by")
    assert {f"{what} {kind}" for what in compared for kind in ("float32", "float16", "tf32")} <= set(found["checks"])
    assert {"search", "faiss agrees, on the CPU"} <= set(found["checks"])
    assert found["fix"] == []
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


def rows_and_graph(dtype=np.float32):
    x = np.random.default_rng(1).standard_normal((300, 24)).astype(dtype)
    return x, knn_graph(x, acceptance.K)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_graphs_are_compared_in_tiles_off_the_diagonal_and_rows_sent_in_turns(dtype, monkeypatch):
    x, expected = rows_and_graph(dtype)
    monkeypatch.setattr(acceptance, "STAGED_BYTES", 10 * 24 * 4)
    tiles, sent = [], []

    class Watched(TorchProducts):
        def multiply(self, a, b):
            tiles.append((len(a), len(b), a.data_ptr() == b.data_ptr()))
            return super().multiply(a, b)

        def hold(self, x):
            sent.append((len(x), self.sender.staged_bytes))
            return super().hold(x)

    found = graph_in_blocks(x, Watched(CPU, tile=64))
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)
    diagonal = [tile for tile in tiles if tile[2]]
    assert len(diagonal) == 6, "three tiles in each of two blocks"
    assert len([tile for tile in tiles if tile[:2] == (50, 50)]) >= 2 * 6 + 9, "and each with the others"
    assert sent == [(150, 960)] * 2


def test_a_device_that_searches_or_compares_wrongly_is_found_out(monkeypatch):
    x, expected = rows_and_graph()
    monkeypatch.setattr(acceptance, "TILE", 64)
    assert search_agrees(x, CPU)

    class Forgetful(TorchProducts):
        def passing(self, tile, threshold, columns=False):
            i, j, scores = super().passing(tile, threshold, columns)
            kept = (i != 7) | (j % 5 > 0)
            return i[kept], j[kept], scores[kept]

    assert not acceptance._equal(graph_in_blocks(x, Forgetful(CPU, tile=64)), expected)
    monkeypatch.setattr(acceptance, "TorchProducts", Forgetful)
    assert not search_agrees(x, CPU)


def test_faiss_runs_on_the_gpu_where_it_can_and_its_scores_are_compared(monkeypatch):
    import faiss

    x, expected = rows_and_graph()
    cuda = torch.device("cuda:1")
    assert faiss_agrees(x, expected, cuda) == {"faiss agrees, on the CPU": {"passed": True, "uncertain": 0}}
    asked = []

    def knn_gpu(resources, xq, xb, k, metric, device):
        asked.append((resources, device))
        return faiss.knn(xq, xb, k, metric=metric)

    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: "resources", raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu, raising=False)
    assert faiss_agrees(x, expected, cuda)["faiss agrees, on the GPU"]["passed"]
    assert asked == [("resources", 1)]
    other = expected[0], np.nextafter(expected[1], np.float32(2))
    assert not faiss_agrees(x, other, cuda)["faiss agrees, on the GPU"]["passed"], "the scores are not those"


def test_a_driver_that_is_too_old_is_named(monkeypatch, capsys):
    monkeypatch.setattr("cluster.monitor._driver", lambda: "570.86")
    monkeypatch.setattr("cluster.monitor._gpus", lambda: ([], "13.0"))
    with pytest.raises(LattqeError, match=r"driver 570.86 is too old for torch's CUDA 13.0: install 580 or newer"):
        accept_device("cuda", json=False)
    # A machine whose GPU can be used all the same is tested, and has something to fix.
    monkeypatch.setattr("cluster.monitor._gpus", lambda: (["A10G"], "13.0"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    well = {"device": "cuda", "name": "A10G", "torch": "2", "cuda": "13.0", "passed": True}
    well |= {"checks": {"search": {"passed": True}}, "rates": {}, "peaks": {}, "machine": {}}
    monkeypatch.setattr("lattqe.acceptance.accept", lambda device, place: dict(well))
    with pytest.raises(SystemExit) as ended:
        accept_device("cuda", json=True)
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert "fix: this machine: driver 570.86 is too old" in " ".join(told.err.split())
    assert json.loads(told.out)["passed"] is False
    monkeypatch.setattr("cluster.monitor._driver", lambda: "580.1")
    accept_device("cuda", json=True)
    assert json.loads(capsys.readouterr().out)["passed"] is True
