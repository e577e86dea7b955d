"""What doctor says of what nodes report; the real cluster is in test_cluster_head.py."""

from dataclasses import replace

import pytest

from cluster.monitor import NodeReport, _try_storage, examine_node, to_fix

WELL = NodeReport(
    "10.0.0.1 (abc)",
    "3.11.7",
    {"ray": "2.60.0", "lattqe": "0.1.0", "faiss-cpu": "1.15.1"},
    faiss="1.15.1 CPU",
    shared_memory=8 << 30,
    disk=100 << 30,
    storage="ok",
)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"error": "lost"}, "does not answer (lost): restart Ray there"),
        (
            {"shared_memory": 64 << 20},
            "64 MiB of shared memory free: give the container a larger /dev/shm (--shm-size)",
        ),
        ({"disk": 3 << 30}, "3 GiB of disk free"),
        ({"clock_skew": 7.0}, "its clock is 7 s off"),
        ({"storage": "permission denied"}, "storage: permission denied"),
        ({"packages": WELL.packages | {"faiss-cuda": "1.14.3"}}, "faiss-cpu and faiss-cuda overwrite each other"),
        ({"faiss": "missing: no module"}, "faiss is missing"),
        ({"gpus": ["A10G"]}, "has 1 GPUs but a faiss without them"),
        ({"driver": "570.86"}, "has an NVIDIA driver (570.86) but a torch without CUDA"),
        ({"driver": "570.86", "cuda": "13.0"}, "driver 570.86 is too old for torch's CUDA 13.0: install 580 or newer"),
        ({"driver": "570.86", "cuda": "12.8"}, "driver 570.86 is there, but torch sees no GPU"),
    ],
)
def test_each_trouble_is_one_line_that_says_what_to_do(change, told):
    (line,) = to_fix([replace(WELL, **change)])
    assert line.startswith(WELL.node)
    assert told in line


def test_nodes_that_differ_are_told_and_equal_ones_are_well():
    assert to_fix([WELL, replace(WELL, node="other")]) == []
    other = replace(WELL, python="3.12.1", packages=WELL.packages | {"ray": "2.59.0", "faiss-cpu": "1.14"})
    assert to_fix([WELL, other]) == [
        "python differs between nodes (3.11.7, 3.12.1): install the same version everywhere",
        "ray differs between nodes (2.59.0, 2.60.0): install the same version everywhere",
    ]


def test_a_node_reports_what_it_has(tmp_path):
    report = examine_node("here", str(tmp_path))
    assert report["storage"] == "ok"
    assert list(tmp_path.iterdir()) == [], "what was tried is cleaned up"
    assert examine_node("here", str(tmp_path / "new"))["storage"] == "ok"
    assert not (tmp_path / "new").exists(), "and so is a folder that was not there"
    assert report["packages"]["ray"]
    assert report["disk"] > 0


def test_storage_that_refuses_is_explained(s3, tmp_path):
    assert "the bucket 'no-such-bucket' does not exist" in _try_storage("s3://no-such-bucket/x")
    (tmp_path / "file").write_text("")
    assert "cannot write" in _try_storage(str(tmp_path / "file"))
