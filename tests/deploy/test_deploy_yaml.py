"""The cluster files are what Ray and Kubernetes expect, and keep what they promise."""

import copy
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


def test_ray_makes_no_security_group_of_its_own(aws):
    """It would open SSH to the world; it makes none where every node type names one."""
    from ray.autoscaler._private.aws.config import _configure_security_group, _create_default_ssh_inbound_rules

    assert _create_default_ssh_inbound_rules()[0]["IpRanges"] == [{"CidrIp": "0.0.0.0/0"}]
    before = copy.deepcopy(aws)
    assert _configure_security_group(copy.deepcopy(aws)) == before, "nothing was added, and AWS was not asked"
    assert all(kind["node_config"]["SecurityGroupIds"] for kind in aws["available_node_types"].values())


def test_rights_come_from_profiles_and_no_keys_are_in_the_file(aws):
    profiles = {
        name: kind["node_config"]["IamInstanceProfile"]["Name"] for name, kind in aws["available_node_types"].items()
    }
    assert profiles.pop("head") not in profiles.values(), "workers may not start instances"
    for kind in aws["available_node_types"].values():
        assert kind["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
        assert all(disk["Ebs"]["Encrypted"] for disk in kind["node_config"]["BlockDeviceMappings"])
    text = (ROOT / "ray_cluster.yaml").read_text()
    assert "AWS_SECRET" not in text
    assert "AKIA" not in text


def test_every_process_of_the_cluster_asks_for_the_token(aws):
    starts = [
        line
        for name in ("head_start_ray_commands", "worker_start_ray_commands")
        for line in aws[name]
        if "ray start" in line
    ]
    assert len(starts) == 2
    assert all(line.startswith("RAY_AUTH_MODE=token ") for line in starts)
    assert "--env RAY_AUTH_MODE=token" in aws["docker"]["run_options"]
    assert any(target.endswith("/.ray/auth_token") for target in aws["file_mounts"])
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_boto_understands_every_node_type(aws):
    """What is sent to EC2, checked against its own description of the call; nothing is sent."""
    import botocore.session
    from botocore.exceptions import ParamValidationError
    from botocore.validate import validate_parameters

    session = botocore.session.get_session()
    shape = session.get_service_model("ec2").operation_model("RunInstances").input_shape
    for kind in aws["available_node_types"].values():
        request = kind["node_config"] | {"MinCount": 1, "MaxCount": 1}
        validate_parameters(request, shape)
        with pytest.raises(ParamValidationError, match="surprise"):
            validate_parameters(request | {"surprise": 1}, shape)


def test_every_value_has_a_reason(aws):
    """Each key of the file has a comment on its line, above it, or above the group it stands in."""
    commented = False
    bare = []
    for line in (ROOT / "ray_cluster.yaml").read_text().splitlines():
        stripped = line.strip()
        if not stripped:
            commented = False
        elif "#" in stripped:
            commented = True
        elif not commented and not stripped.endswith(":"):
            bare.append(stripped)
    assert bare == ["cluster_name: lattqe", "type: aws", "ssh_user: ubuntu", "head_node_type: head"], "obvious ones"


def test_the_ray_version_is_the_tested_one_and_said_in_full(aws):
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ARG RAY={pinned['ray']}-py311-gpu" in dockerfile
    assert f"--build-arg RAY={pinned['ray']}-py311 " in dockerfile
    assert aws["setup_commands"]


def test_what_every_extra_installs_is_pinned():
    """But for backbones: their torchvision belongs to the torch that is there, and is not in the image."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().split()
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name != "backbones"}
    assert {"cpu", "gpu", "extract", "test"} <= set(extras)
    for name, wanted in {"lattqe": project["dependencies"], **extras}.items():
        for each in map(Requirement, wanted):
            version = pinned.get(canonicalize_name(each.name))
            assert version is not None, f"{each.name} of {name} has no line in constraints.txt"
            assert version in each.specifier, f"{each.name} {version} is not what {name} asks for"


def test_the_docs_name_the_pinned_wheels_of_gpus():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    text = (ROOT / "docs" / "cluster.md").read_text()
    assert f"pinned torch {pinned['torch']} " in text
    assert f"pinned faiss-cuda {pinned['faiss-cuda']} " in text
    assert f"https://pypi.org/project/faiss-cuda/{pinned['faiss-cuda']}/" in text


def test_the_cluster_files_run_the_image_of_the_dockerfile(aws):
    """Tags are those that its first lines build, from the constraints, with this version and the code that is there."""
    import tomllib

    lines = (ROOT / "Dockerfile").read_text().splitlines()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    built = [line.split("-t ")[1].split()[0] for line in lines if line.startswith("#   docker build")]
    assert built == [f"your-registry/lattqe:{version}", f"your-registry/lattqe:{version}-cpu"]
    job = yaml.safe_load((ROOT / "cluster" / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (job["headGroupSpec"], *job["workerGroupSpecs"])]
    assert {container["image"] for pod in pods for container in pod["containers"]} == {built[0]}
    assert [aws["docker"]["image"], aws["available_node_types"]["cpu"]["docker"]["worker_image"]] == built
    installs = [line for line in lines if "pip install" in line and not line.startswith("#")]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[2:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"lattqe", "cluster", "jobs"} <= set(copied)


def test_gpu_pods_go_to_tainted_nodes_and_the_cache_to_local_disks(aws):
    job = yaml.safe_load((ROOT / "cluster" / "kuberay.yaml").read_text())
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in workers["template"]["spec"][
        "tolerations"
    ]
    (mount,) = [line.split()[1] for line in aws["docker"]["run_options"] if line.startswith("--volume")]
    assert mount.endswith(":/cache")
    assert any(mount.split(":")[0] in line for line in aws["initialization_commands"])


def test_the_kubernetes_job_runs_an_augmentation_that_can_be_created_again():
    job = yaml.safe_load((ROOT / "cluster" / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["entrypoint"].startswith("python -m jobs.cli augment s3://")
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
    wanted = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert set(wanted) == {"LATTQE_GPUS"}
    assert int(wanted["LATTQE_GPUS"]) <= workers["maxReplicas"]


def test_the_kubernetes_job_has_arguments_the_verb_understands():
    import shlex

    import typer.main

    from jobs.augment import app

    job = yaml.safe_load((ROOT / "cluster" / "kuberay.yaml").read_text())
    arguments = shlex.split(job["spec"]["entrypoint"])[4:]
    command = typer.main.get_command(app)
    parsed = command.make_context("augment", arguments)
    assert parsed.params["k"] == 48
    assert parsed.params["to"].startswith("s3://")
