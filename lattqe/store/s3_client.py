"""The two S3 clients of this process, boto3 and pyarrow, and what their errors mean: a retry, or a line for the user.

No message ever holds a credential.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
from botocore import exceptions as boto
from botocore.config import Config
from pyarrow import fs

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store.place import MissingFileError, UnavailableError, traffic

T = TypeVar("T")
logger = logging.getLogger("lattqe.store")

BAD_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "AuthFailure",
    "TokenRefreshRequired",
    "AuthorizationHeaderMalformed",
}
TRANSIENT = {
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequestsException",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "ServerBusy",
    "OperationAborted",
    "ConditionalRequestConflict",
    "BadDigest",
    "IncompleteBody",
}
TRANSIENT_STATUS = {408, 409, 429, 500, 502, 503, 504}


FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
PAUSE_TOLD = FIRST_PAUSE * 2**3  # a hiccup needs no message, a longer silence does
# What decides where requests go and as whom: a change of any of these makes new clients.
SETTINGS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "LATTQE_S3_ANSWER_SECONDS",
)
CONNECT_SECONDS = 5.0


class TransientError(Exception):
    """pyarrow could not read what boto3 finds readable a moment later: worth another attempt."""


def seconds_setting(name: str, default: float, least: float = 0.0) -> float:
    """A number of seconds from the environment."""
    text = os.environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 86_400:
        raise LattqeError(f"{name} is {text!r}: give a number of seconds from {least:.0f} to 86400")
    return seconds


def retry_seconds() -> float:
    """How long to keep trying: LATTQE_S3_RETRY_SECONDS, 60 unless set."""
    return seconds_setting("LATTQE_S3_RETRY_SECONDS", 60.0)


def retrying(action: str, uri: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it succeeds, fails for good, or the time is over; backoff doubles, with jitter.

    A single request may have stayed without an answer for all that time: there is a second attempt in any case.
    """
    deadline = time.monotonic() + retry_seconds()
    pause, attempts = FIRST_PAUSE, 0
    while True:
        attempts += 1
        try:
            return attempt()
        except LattqeError:
            raise
        except Exception as error:
            reason = explain(action, uri, error)
            left = deadline - time.monotonic()
            if left <= 0 and attempts > 1:
                raise UnavailableError(
                    f"cannot {action} {uri}: {reason}; gave up after {retry_seconds():.0f} s "
                    "(LATTQE_S3_RETRY_SECONDS): run the same command again when the storage answers"
                ) from error
            if pause == PAUSE_TOLD:
                logger.warning("cannot %s %s: %s; trying for another %.0f s", action, uri, reason, left)
            time.sleep(max(min(random.uniform(0.5, 1.0) * pause, left), 0.0))
            pause = min(pause * 2, LONGEST_PAUSE)


def explain(action: str, uri: str, error: Exception) -> str:
    """The reason of an error worth a retry; an error that is final is raised as the user shall see it."""
    if isinstance(error, boto.ClientError):
        return _explain_answer(action, uri, error)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.SSOError):
        raise LattqeError(
            f"cannot {action} {uri}: no S3 credentials were found, or a login has expired: set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        ) from error
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        raise LattqeError(
            f"cannot {action} {uri}: the server's certificate is not trusted: set AWS_CA_BUNDLE to the "
            "file that holds its authority"
        ) from error
    if isinstance(
        error,
        boto.ProfileNotFound
        | boto.ConfigParseError
        | boto.ParamValidationError
        | boto.InvalidRegionError
        | boto.NoRegionError,
    ):
        raise LattqeError(f"cannot {action} {uri}: {_one_line(error)}") from error
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError | ConnectionRefusedError):
        return "the S3 server cannot be reached (AWS_ENDPOINT_URL)"
    if isinstance(error, TransientError):
        return "reading was interrupted"
    if isinstance(error, boto.BotoCoreError | OSError):
        return f"the connection to S3 failed ({type(error).__name__})"
    raise error


def _explain_answer(action: str, uri: str, error: boto.ClientError) -> str:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchBucket":
        bucket = uri.removeprefix("s3://").split("/")[0]
        raise LattqeError(
            f"cannot {action} {uri}: the bucket {bucket!r} does not exist: create it, or check the "
            "name and AWS_ENDPOINT_URL"
        ) from error
    if code in BAD_CREDENTIALS:
        raise LattqeError(
            f"cannot {action} {uri}: S3 refused the credentials ({code}): check AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or AWS_PROFILE"
        ) from error
    if code == "RequestTimeTooSkewed":
        raise LattqeError(
            f"cannot {action} {uri}: this machine's clock is off by more than S3 accepts: set it (by "
            "NTP), then run the same command again"
        ) from error
    if code in TRANSIENT or (status in TRANSIENT_STATUS and code != "PreconditionFailed"):
        return f"S3 answered {status} {code}".rstrip()
    if code == "PreconditionFailed" or status == 412:
        raise AlreadyExistsError(f"{uri} exists already") from error
    if code in ("AccessDenied", "Forbidden", "AllAccessDisabled") or status in (401, 403):
        raise LattqeError(f"cannot {action} {uri}: permission denied for these credentials") from error
    if code in ("NoSuchKey", "NotFound") or status == 404:
        raise MissingFileError(f"cannot {action} {uri}: there is no such object") from error
    if code == "PermanentRedirect" or status == 301:
        raise LattqeError(f"cannot {action} {uri}: the bucket is in another region: set AWS_DEFAULT_REGION") from error
    raise LattqeError(f"cannot {action} {uri}: S3 answered {status} {code}".rstrip()) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class Clients:
    """boto3 for what needs its answers (conditions, listings, causes of errors), pyarrow for moving bytes."""

    def __init__(self) -> None:
        session = boto3.Session()
        # Of one attempt, which is then repeated: a server that is silent for longer will not speak any more.
        self._answer_seconds = seconds_setting("LATTQE_S3_ANSWER_SECONDS", 60.0, least=1.0)
        self._credentials = session.get_credentials()
        self._region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
        # Attempts are ours alone: an attempt that boto3 repeats in silence could meet its own conditional PUT.
        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=self._answer_seconds,
            max_pool_connections=32,
        )
        try:
            self.boto: Any = session.client("s3", region_name=self._region, config=config)
        except ValueError as error:
            raise LattqeError("AWS_ENDPOINT_URL is not an address such as http://127.0.0.1:8333") from error
        self.boto.meta.events.register("before-send.s3", _count_request)
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

    def _connect(
        self, access_key: str | None = None, secret_key: str | None = None, token: str | None = None
    ) -> fs.S3FileSystem:
        endpoint = urlsplit(self.boto.meta.endpoint_url)
        own_server = not (endpoint.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
        override = {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme} if own_server else {}
        return fs.S3FileSystem(
            access_key=access_key,
            secret_key=secret_key,
            session_token=token,
            region=self._region,
            connect_timeout=CONNECT_SECONDS,
            request_timeout=self._answer_seconds,
            tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE"),
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
            **override,
        )


def _count_request(event_name: str, **_: Any) -> None:
    """Count what boto3 is about to send: "before-send.s3.PutObject"."""
    traffic.ask(event_name.rsplit(".", 1)[-1])


@lru_cache(maxsize=8)
def _clients(process: int, settings: tuple[str | None, ...]) -> Clients:
    return Clients()


def clients() -> Clients:
    """The clients of this process for the present settings."""
    return _clients(os.getpid(), tuple(os.environ.get(name) for name in SETTINGS))
