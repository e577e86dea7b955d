"""The cluster files are what Ray and Kubernetes expect, and keep what they promise."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def aws():
    return yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())


def test_ray_accepts_the_cluster_file(aws):
    from ray.autoscaler._private.util import fillout_defaults, validate_config

    validate_config(fillout_defaults(aws))


def test_an_unknown_key_would_be_refused(aws):
    from ray.autoscaler._private.util import fillout_defaults, validate_config

    with pytest.raises(Exception, match="surprise"):
        validate_config(fillout_defaults(aws | {"surprise": 1}))


def test_the_head_does_no_work(aws):
    assert aws["available_node_types"][aws["head_node_type"]]["resources"]["CPU"] == 0


def test_spot_is_preferred_with_a_fallback_on_demand(aws):
    types = aws["available_node_types"]
    gpu = {name: kind for name, kind in types.items() if kind["resources"].get("GPU")}
    spot = [kind for kind in gpu.values() if "InstanceMarketOptions" in kind["node_config"]]
    on_demand = [kind for kind in gpu.values() if "InstanceMarketOptions" not in kind["node_config"]]
    assert spot
    assert on_demand
    assert min(kind["priority"] for kind in spot) > max(kind["priority"] for kind in on_demand)
    assert all(kind["resources"].get("GPU", 0) == 0 for name, kind in types.items() if name == "cpu")


def test_only_ssh_is_open_and_no_keys_are_in_the_file(aws):
    rules = aws["provider"]["security_group"]["IpPermissions"]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in rules] == [(22, 22)]
    assert all(part["CidrIp"] != "0.0.0.0/0" for rule in rules for part in rule["IpRanges"])
    for kind in aws["available_node_types"].values():
        assert kind["node_config"]["IamInstanceProfile"]["Name"]
        assert kind["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
    text = (ROOT / "ray_cluster.yaml").read_text()
    assert "AWS_SECRET" not in text
    assert "AKIA" not in text
    assert all("RAY_AUTH_MODE=token" in line for line in text.splitlines() if "ray start" in line and "-" in line[:5])


def test_the_ray_version_is_the_tested_one_and_said_in_full(aws):
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    images = [aws["docker"]["image"], aws["available_node_types"]["cpu"]["docker"]["worker_image"]]
    assert all(f":{pinned['ray']}-py311" in image for image in images)
    assert aws["setup_commands"]


def test_the_kubernetes_job_runs_an_augmentation_that_can_be_created_again():
    job = yaml.safe_load((ROOT / "cluster" / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["entrypoint"].startswith("python -m jobs.augment s3://")
    assert spec["shutdownAfterJobFinishes"]
    assert spec["backoffLimit"] >= 1
    cluster = spec["rayClusterSpec"]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert cluster["rayVersion"] == pinned["ray"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/cache" in mounts
    assert f"--cache {'/cache'}" in spec["entrypoint"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_kubernetes_job_has_arguments_the_verb_understands():
    import shlex

    import typer.main

    from jobs.augment import app

    job = yaml.safe_load((ROOT / "cluster" / "kuberay.yaml").read_text())
    arguments = shlex.split(job["spec"]["entrypoint"])[3:]
    command = typer.main.get_command(app)
    parsed = command.make_context("augment", arguments)
    assert parsed.params["k"] == 48
    assert parsed.params["to"].startswith("s3://")
