"""What an S3 error means: try again, or tell the user in one line. No message ever holds a credential."""

import logging
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from botocore import exceptions as boto

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store.place import MissingFileError, UnavailableError

T = TypeVar("T")
logger = logging.getLogger("lattqe.store")

BAD_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthFailure",
                   "TokenRefreshRequired", "AuthorizationHeaderMalformed"}
TRANSIENT = {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "RequestLimitExceeded",
             "TooManyRequestsException", "RequestTimeout", "InternalError", "ServiceUnavailable", "ServerBusy",
             "OperationAborted", "ConditionalRequestConflict", "BadDigest", "IncompleteBody"}
TRANSIENT_STATUS = {408, 409, 429, 500, 502, 503, 504}


FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
PAUSE_TOLD = FIRST_PAUSE * 2**3  # a hiccup is nobody's business, a longer silence is


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
                    "(LATTQE_S3_RETRY_SECONDS): run the same command again when the storage answers") from error
            if pause == PAUSE_TOLD:
                logger.warning("cannot %s %s: %s; trying for another %.0f s", action, uri, reason, left)
            time.sleep(max(min(random.uniform(0.5, 1.0) * pause, left), 0.0))
            pause = min(pause * 2, LONGEST_PAUSE)


def explain(action: str, uri: str, error: Exception) -> str:
    """The reason of an error worth a retry; an error that is final is raised as the user shall see it."""
    if isinstance(error, boto.ClientError):
        return _explain_answer(action, uri, error)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.SSOError):
        raise LattqeError(f"cannot {action} {uri}: no S3 credentials were found, or a login has run out: set "
                          "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE") from error
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        raise LattqeError(f"cannot {action} {uri}: the server's certificate is not trusted: set AWS_CA_BUNDLE to the "
                          "file that holds its authority") from error
    if isinstance(error, boto.ProfileNotFound | boto.ConfigParseError | boto.ParamValidationError
                  | boto.InvalidRegionError | boto.NoRegionError):
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
        raise LattqeError(f"cannot {action} {uri}: the bucket {bucket!r} does not exist: create it, or check the "
                          "name and AWS_ENDPOINT_URL") from error
    if code in BAD_CREDENTIALS:
        raise LattqeError(f"cannot {action} {uri}: S3 refused the credentials ({code}): check AWS_ACCESS_KEY_ID, "
                          "AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or AWS_PROFILE") from error
    if code == "RequestTimeTooSkewed":
        raise LattqeError(f"cannot {action} {uri}: this machine's clock is off by more than S3 accepts: set it (by "
                          "NTP), then run the same command again") from error
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
