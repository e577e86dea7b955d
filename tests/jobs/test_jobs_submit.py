"""Settings on their way to workers and jobs; that Ray's logs do not show them is in test_cluster_head.py."""

import os
import subprocess
import sys
from pathlib import Path

import cloudpickle

from cluster.session import forwarded_environment, setting_function
from jobs.cli import SEALED
from jobs.submit import PAD_FILE, seal, unseal

ROOT = Path(__file__).resolve().parents[2]


def test_only_storage_settings_are_forwarded(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AWS_", "LATTQE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "me")
    monkeypatch.setenv("LATTQE_S3_RETRY_SECONDS", "5")
    monkeypatch.setenv(SEALED, "noise")
    monkeypatch.setenv("GITHUB_TOKEN", "private")
    assert forwarded_environment() == {"AWS_PROFILE": "me", "LATTQE_S3_RETRY_SECONDS": "5"}


def test_halves_say_nothing_alone_and_join_again():
    settings = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "AWS_PROFILE": "größe"}
    (text, pad), (other_text, other_pad) = seal(settings), seal(settings)
    assert unseal(text, pad) == unseal(other_text, other_pad) == settings
    assert text != other_text
    assert b"wJalr" not in pad + text.encode()


def test_the_function_needs_nothing_of_ours_where_it_runs(monkeypatch):
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    sent = cloudpickle.dumps(setting_function({"AWS_PROFILE": "me"}))
    code = f"import cloudpickle, os; cloudpickle.loads({sent!r})(); print(os.environ['AWS_PROFILE'])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path = {sys.path[1:]!r}; sys.modules['cluster'] = None; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "me"


def test_a_job_runs_with_what_came_with_it(tmp_path):
    text, pad = seal({"LATTQE_S3_RETRY_SECONDS": "nonsense"})
    (tmp_path / PAD_FILE).write_bytes(pad)
    command = [sys.executable, "-m", "jobs.cli", "info", "s3://bucket/x", "--log-file", "log"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {SEALED: text, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "LATTQE_S3_RETRY_SECONDS is 'nonsense'" in done.stderr
    assert '"job": "info"' in (tmp_path / "log").read_text()
