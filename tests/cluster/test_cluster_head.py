"""A real head with its dashboard, tokens on: submit, doctor, metrics, and no credential in anything that is written.

The head knows nothing of the storage: keys travel with the jobs, as they must where nodes have no IAM profile.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import boto3
import numpy as np
import pytest
from ray_nodes import Loopback, RayNode
from s3_server import BUCKET, S3Server

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.kill, pytest.mark.slow]

ROWS, DIM = 300, 16
ACCESS, SECRET = f"LQACCESS{secrets.token_hex(6)}", f"lqsecret{secrets.token_hex(16)}"
TOKEN = secrets.token_hex(32)
WRONG_SECRET, SESSION = f"lqwrong{secrets.token_hex(16)}", f"lqsession{secrets.token_hex(16)}"
BESIDE = Path(sys.executable).parent
STARTS = 3


class SecretServer(S3Server):
    """A server whose keys can be told from everything else."""

    @property
    def environment(self):
        return super().environment | {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}

    def client(self, read_timeout=30):
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )


def free_ports(count):
    """Ports that are free now (another Ray may hold the usual ones), between those of Ray's workers and of clients."""
    with contextlib.ExitStack() as held:
        found = []
        while len(found) < count:
            with contextlib.suppress(OSError):
                port = 20_000 + secrets.randbelow(12_000)
                held.enter_context(socket.socket()).bind(("0.0.0.0", port))
                found.append(port)
        return found


class Head(RayNode):
    """A head with its dashboard and two CPUs, and jobs that reach it."""

    def __init__(self, folder, server):
        self.dashboard_port, self.metrics_port, self.agent_port, self.client_port, port = free_ports(5)
        super().__init__(Loopback(1), 0, Path(folder), {}, port)
        self.folder, self.server, self.shown = Path(folder), server, []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self.environment = clean | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "HOME": str(folder),
            "PATH": f"{BESIDE}:{os.environ['PATH']}",
        }

    def begin(self):
        with open(self.home / "start.log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    BESIDE / "ray",
                    "start",
                    "--head",
                    "--block",
                    f"--port={self.port}",
                    "--num-cpus=2",
                    "--num-gpus=0",
                    f"--node-ip-address={self.address}",
                    f"--dashboard-port={self.dashboard_port}",
                    f"--temp-dir={self.home}/t",
                    f"--metrics-export-port={self.metrics_port}",
                    "--object-store-memory=100000000",
                    f"--ray-client-server-port={self.client_port}",
                    f"--dashboard-agent-listen-port={self.agent_port}",
                    '--system-config={"metrics_report_interval_ms":500}',
                ],
                env=self.environment,
                start_new_session=True,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._sessions.append(self._process.pid)

    def start(self):
        """Ray gives itself 30 seconds to start: on a crowded machine it may need a second try."""
        for attempt in range(STARTS):
            self.begin()
            try:
                self.wait_started()
                break
            except RuntimeError:
                self.kill()
                if attempt == STARTS - 1:
                    raise
        self.wait(self.jobs)
        return self

    def jobs(self):
        """What the dashboard tells of all jobs."""
        return urllib.request.urlopen(
            urllib.request.Request(
                f"http://127.0.0.1:{self.dashboard_port}/api/jobs/", headers={"Authorization": f"Bearer {TOKEN}"}
            )
        ).read()

    def wait(self, attempt, seconds=90):
        deadline = time.monotonic() + seconds
        while True:
            try:
                return attempt()
            except (OSError, AssertionError):
                if not self.running or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def run(self, *words, **settings):
        """A job of ours as a program, with the keys in its environment alone."""
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=800,
            cwd=self.folder,
            env=self.environment | self.server.environment | settings,
        )
        self.shown.append(done.stdout + done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def submit(self, *words, **settings):
        return self.run(
            "submit",
            "--address",
            f"http://127.0.0.1:{self.dashboard_port}",
            "--log-file",
            self.folder / "submit.jsonl",
            "--",
            *words,
            **settings,
        )

    def metrics(self):
        """{(name, kind): value}, over all shards and processes."""
        text = urllib.request.urlopen(f"http://{self.address}:{self.metrics_port}/metrics", timeout=60).read().decode()
        found = {}
        for name, labels, value in re.findall(r"^ray_(lattqe_\w+)\{(.*)\} (\S+)$", text, re.M):
            key = name, re.search(r'[,{]kind="([^"]*)"', labels)[1]
            found[key] = found.get(key, 0.0) + float(value)
        return found


@pytest.fixture(scope="module")
def head():
    with tempfile.TemporaryDirectory(prefix="lq-") as folder:  # a short path: Ray has sockets in it
        server = SecretServer(Path(folder) / "s3").start()
        head = Head(folder, server)
        try:
            yield head.start()
        finally:
            head.kill()
            server.kill()


@pytest.fixture(scope="module")
def place(head):
    """Where everything goes, with a feature set in it."""
    place = f"s3://{BUCKET}/head"
    np.save(head.folder / "x.npy", np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32))
    assert head.run("import", "x.npy", "--to", f"{place}/features").returncode == 0
    return place


def test_requests_without_the_token_are_refused(head):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{head.dashboard_port}/api/jobs/")
    assert refused.value.code in (401, 403)


def test_a_submitted_job_writes_to_s3_and_is_counted(head, place):
    log = head.folder / "augment.jsonl"
    done = head.submit(
        "augment",
        f"{place}/features",
        "--method",
        "alphaqe",
        "--alpha",
        "3",
        "-k",
        "4",
        "--to",
        f"{place}/index",
        "--workers",
        "1",
        "--log-file",
        log,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "augmented" in done.stdout, "the job's log is followed"
    manifest = json.load(head.server.client().get_object(Bucket=BUCKET, Key="head/index/manifest.json")["Body"])
    assert manifest["rows"] == ROWS
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["start", "finish"]
    (block,) = [line for line in events if line["event"] == "block done" and line["kind"] == "augment"]
    assert (block["job"], block["rows"], block["shard"]) == ("augment", ROWS, 0)
    assert block["bytes_written"] >= ROWS * DIM * 2
    assert '"submitted"' in (head.folder / "submit.jsonl").read_text()

    def counted():
        found = head.metrics()
        assert found.get(("lattqe_rows_done_total", "augment")) == ROWS
        assert found.get(("lattqe_rows_done_total", "neighbors")) == ROWS
        assert found.get(("lattqe_blocks_done_total", "augment")) == 1
        assert found.get(("lattqe_bytes_written_total", "augment"), 0) >= ROWS * DIM * 2
        assert found.get(("lattqe_bytes_read_total", "augment"), 0) >= ROWS * DIM * 2

    head.wait(counted, seconds=30)


def test_a_failing_job_gives_its_exit_code_and_its_line(head, place):
    done = head.submit(
        "augment",
        f"{place}/features",
        "--method",
        "aqe",
        "--to",
        f"{place}/refused",
        "--log-file",
        head.folder / "failed.jsonl",
        LATTQE_S3_RETRY_SECONDS="1",
        AWS_SECRET_ACCESS_KEY=WRONG_SECRET,
        AWS_SESSION_TOKEN=SESSION,
    )
    assert done.returncode == 2
    assert "S3 refused the credentials" in done.stdout
    assert "S3 refused the credentials" in (head.folder / "failed.jsonl").read_text()


def test_doctor_looks_at_every_node_and_writes_to_the_storage(head, place):
    done = head.run(
        "doctor", place, "--address", head.head_address, "--json", "--log-file", head.folder / "doctor.jsonl"
    )
    told = json.loads(done.stdout)
    (node,) = told["nodes"]
    assert node["storage"] == "ok"
    assert node["packages"]["ray"] == "2.60.0"
    assert done.returncode == (1 if told["fix"] else 0)
    assert not [line for line in told["fix"] if "storage" in line or "differs" in line]


def test_no_credential_is_in_anything_that_was_written(head, place):
    """Runs last: over all that the tests above have left, and more failures."""
    wrong = head.run("info", "s3://no-such-bucket/features", "--log-file", head.folder / "failed.jsonl")
    assert "does not exist" in wrong.stderr
    refused = head.run(
        "info", f"s3://{ACCESS}:{SECRET}@{BUCKET}/features?token={SESSION}", "--log-file", head.folder / "failed.jsonl"
    )
    assert refused.returncode == 2
    client = head.server.client()
    objects = [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix="head")["Contents"]]
    stored = b"".join(client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in objects)
    assert any(key.endswith("manifest.json") for key in objects)
    logs = [
        path
        for path in head.folder.rglob("*")
        if path.is_file()
        and "s3" not in path.parts
        and path.suffix in (".log", ".out", ".err", ".jsonl", ".json", ".txt", ".pad", "")
    ]
    assert any(path.name == "runtime_env_agent.log" for path in logs), "Ray's logs are among them"
    everything = stored + "".join(head.shown).encode() + b"".join(path.read_bytes() for path in logs)
    details = head.jobs()
    for name, value in {
        "access key": ACCESS,
        "secret key": SECRET,
        "wrong key": WRONG_SECRET,
        "session token": SESSION,
        "Ray's token": TOKEN,
    }.items():
        found = [str(path) for path in logs if value.encode() in path.read_bytes()]
        assert value.encode() not in everything + details, f"the {name} is in {found or 'the storage or on the screen'}"
