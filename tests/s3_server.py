"""A real S3 server (SeaweedFS) on loopback for tests: start it, kill it, start it again on the same data."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

PORTS = ("master", "volume", "filer", "s3", "admin", "metrics")
ACCESS_KEY, SECRET_KEY, BUCKET = "testak", "testsecretkey123", "test-bucket"
GRPC_OFFSET = 10_000  # each of the server's ports takes a second one this far above


class S3Server:
    """One `weed mini` process. `environment` points boto3, pyarrow and child processes to it.

    `ports`: those of an earlier server on the same folder, which it remembers; by default free ones.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", ports: dict[str, int] | None = None) -> None:
        self.folder, self.address = folder, address
        self.ports = ports or dict(zip(PORTS, _free_ports(len(PORTS), address)))
        self.endpoint = f"http://{address}:{self.ports['s3']}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def start(self) -> "S3Server":
        """Start the server and wait until it takes a PUT."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ports = [f"-{name}.port={port}" for name, port in self.ports.items() if name != "metrics"]
        with open(self.folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    _weed(),
                    f"-logdir={self.folder}",
                    "mini",
                    f"-dir={self.folder / 'data'}",
                    f"-bucket={BUCKET}",
                    f"-ip={self.address}",
                    f"-ip.bind={self.address}",
                    *ports,
                    f"-metricsPort={self.ports['metrics']}",
                    "-webdav=false",
                    "-admin.ui=false",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    "-master.telemetry=false",
                    "-s3.allowDeleteBucketNotEmpty=false",
                    "-s3.autoCreateBucket=false",
                ],
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        client = self.client(read_timeout=2)  # a PUT that comes too early hangs for 20 s, and so do all to its key
        deadline = time.monotonic() + 600
        while True:
            try:
                client.put_object(Bucket=BUCKET, Key=f"ready/{secrets.token_hex(6)}", Body=b"ready")
                return self
            except (BotoCoreError, ClientError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.kill()
                    raise RuntimeError((self.folder / "server.log").read_text()[-2000:]) from None
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, as a crashed machine would; acknowledged data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        """A signal, such as SIGSTOP: then it takes connections and never answers."""
        if self._process is not None:
            self._process.send_signal(number)

    def traffic(self) -> tuple[int, int, int]:
        """Bytes sent (read by clients), bytes received (written by them) and requests, since it was started."""
        with urllib.request.urlopen(f"http://{self.address}:{self.ports['metrics']}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        names = ("bucket_traffic_sent_bytes_total", "bucket_traffic_received_bytes_total", "request_total")
        counted = [
            sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"SeaweedFS_s3_{name}{{"))
            for name in names
        ]
        return int(counted[0]), int(counted[1]), int(counted[2])

    def client(self, read_timeout: float = 30):
        """A plain boto3 client for looking behind the scenes."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=read_timeout),
        )

    def fresh_uri(self) -> str:
        """A prefix of its own."""
        return f"s3://{BUCKET}/{secrets.token_hex(6)}"


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed") or "weed"


def _free_ports(count: int, address: str) -> list[int]:
    """Ports that are free now together with their gRPC twins; all below the range that clients draw from."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = 20_000 + secrets.randbelow(12_000)
            try:
                for number in (port, port + GRPC_OFFSET):
                    held.enter_context(socket.socket()).bind((address, number))
            except OSError:
                continue
            found.append(port)
    return found
