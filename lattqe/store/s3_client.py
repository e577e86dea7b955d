"""The two S3 clients of this process, boto3 and pyarrow, on one endpoint and one chain of credentials."""

import os
import threading
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from pyarrow import fs

from lattqe.errors import LattqeError
from lattqe.store.s3_errors import seconds_setting

# What decides where requests go and as whom: a change of any of these makes new clients.
SETTINGS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_REGION",
            "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
            "LATTQE_S3_ANSWER_SECONDS")
CONNECT_SECONDS = 5.0


class Clients:
    """boto3 for what needs its answers (conditions, listings, causes of errors), pyarrow for moving bytes."""

    def __init__(self) -> None:
        session = boto3.Session()
        # Of one attempt, which is then repeated: a server that is silent for longer will not speak any more.
        self._answer_seconds = seconds_setting("LATTQE_S3_ANSWER_SECONDS", 60.0, least=1.0)
        self._credentials = session.get_credentials()
        self._region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
        # Attempts are ours alone: an attempt that boto3 repeats in silence could meet its own conditional PUT.
        config = Config(retries={"total_max_attempts": 1}, connect_timeout=CONNECT_SECONDS,
                        read_timeout=self._answer_seconds, max_pool_connections=32)
        try:
            self.boto: Any = session.client("s3", region_name=self._region, config=config)
        except ValueError as error:
            raise LattqeError("AWS_ENDPOINT_URL is not an address such as http://127.0.0.1:8333") from error
        self._lock = threading.Lock()
        self._arrow: tuple[tuple[str | None, ...], fs.S3FileSystem] | None = None

    def arrow(self) -> fs.S3FileSystem:
        """A pyarrow file system with boto3's present credentials: roles expire, so they are asked for each time."""
        key: tuple[str | None, ...] = ()
        if self._credentials is not None:
            frozen = self._credentials.get_frozen_credentials()
            key = (frozen.access_key, frozen.secret_key, frozen.token)
        with self._lock:
            if self._arrow is None or self._arrow[0] != key:
                self._arrow = key, self._connect(*key)
            return self._arrow[1]

    def _connect(self, access_key: str | None = None, secret_key: str | None = None,
                 token: str | None = None) -> fs.S3FileSystem:
        endpoint = urlsplit(self.boto.meta.endpoint_url)
        own_server = not (endpoint.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
        override = {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme} if own_server else {}
        return fs.S3FileSystem(
            access_key=access_key, secret_key=secret_key, session_token=token, region=self._region,
            connect_timeout=CONNECT_SECONDS, request_timeout=self._answer_seconds,
            tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE"),
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1), **override)


@lru_cache(maxsize=8)
def _clients(process: int, settings: tuple[str | None, ...]) -> Clients:
    return Clients()


def clients() -> Clients:
    """The clients of this process for the present settings."""
    return _clients(os.getpid(), tuple(os.environ.get(name) for name in SETTINGS))
