"""Storage that goes away just before workers start: the verb ends with one line, and goes on when it is back."""

from collections.abc import Iterator

import numpy as np
import pytest
from s3_server import S3Server

from cluster.blocks import _BlockRun
from cluster.session import ray_session
from cluster.shards import ShardedIndex
from lattqe.store import FeatureWriter

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.s3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server to be killed, and a Ray whose workers inherit its address and give it up soon."""
    server = S3Server(tmp_path_factory.mktemp("mortal")).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**server.environment, "LATTQE_S3_RETRY_SECONDS": "1"}.items():
            patch.setenv(name, value)
        with ray_session(cpus=2):
            yield server
    server.kill()


@pytest.mark.parametrize(
    ("verb", "options", "starts"),
    [
        ("neighbors", ["-k", "4"], (_BlockRun, "start")),
        ("search", ["-k", "4", "--expand", "alphaqe"], (ShardedIndex, "_start")),
    ],
)
def test_storage_gone_while_workers_start(server, call_lattqe, monkeypatch, verb, options, starts):
    there = server.fresh_uri()
    with FeatureWriter(f"{there}/rows", 8) as writer:
        vectors = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
        writer.append(vectors, [f"row-{row}" for row in range(60)])
    rows = [f"{there}/rows"] * (2 if verb == "search" else 1)
    words = (verb, *rows, *options, "--workers", "2", "--to", f"{there}/made")
    begin = getattr(*starts)

    def without_storage(*args: object) -> object:
        server.kill()
        return begin(*args)

    monkeypatch.setattr(*starts, without_storage)
    code, out, err = call_lattqe(*words)
    server.start()
    assert (code, out) == (2, ""), err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert err.rstrip().endswith(errors[0])
    assert "the S3 server cannot be reached" in errors[0]
    assert "run the same command again when the storage answers" in errors[0]
    assert "Traceback" not in err
    monkeypatch.undo()
    code, _, err = call_lattqe(*words)
    assert code == 0, err
