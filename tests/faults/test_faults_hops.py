"""Hops through kills at known moments: in the transpose and in a hop, of the driver and of the storage."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hop_world import begun, expected, make_world, no_bar, published
from killing import end_session

from lattqe.augmentation.bands import run_hops
from lattqe.augmentation.recipe import AugmentSummary

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow]


def start(world, to, kind, what):
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).parent.parent / "hop_driver.py"), str(world), to, kind, str(what)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("kind", ["turn", "fold", "hop"])
def test_the_driver_killed(tmp_path, kind):
    world = make_world(tmp_path)
    killed = start(world, "index", kind, "die")
    killed.wait(timeout=800)
    end_session(killed)
    assert killed.returncode == -signal.SIGKILL
    task = begun(world)
    assert not (tmp_path / "index" / "manifest.json").exists()
    run_hops(task, no_bar, AugmentSummary())  # what Ray began, this process ends
    assert published(task).read().tobytes() == expected(world).tobytes()


def test_the_storage_killed(mortal_s3, tmp_path, monkeypatch):
    """Twice in one run, in the transpose and in a hop; the driver waits for a storage that comes back."""
    monkeypatch.setenv("LATTQE_S3_RETRY_SECONDS", "300")  # however long a server takes to start
    world, door = make_world(mortal_s3.fresh_uri()), tmp_path / "door"
    process = start(world, "index", "turn,hop", door)
    try:
        for _ in range(2):
            while not door.exists():
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.01)
            mortal_s3.kill()
            door.unlink()
            mortal_s3.start()
        _, shown = process.communicate(timeout=800)
    finally:
        end_session(process)
    assert process.returncode == 0, shown
    assert "Traceback" not in shown
    task = begun(world)
    run_hops(task, no_bar, AugmentSummary())
    assert published(task).read().tobytes() == expected(world).tobytes()
    assert os.environ["AWS_ENDPOINT_URL"] == mortal_s3.endpoint
