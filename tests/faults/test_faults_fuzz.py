"""A short, seeded part of the fuzzing of all readers, and proof that the fuzzer sees what it looks for."""

import os
import time

import fuzz_readers
import numpy as np
import pytest
from fuzz_readers import Worker, _watch, fuzz

from lattqe.errors import LattqeError

COUNT = 2000  # `make fuzz` runs 100,000


@pytest.mark.timeout(240)
def test_damaged_files_are_refused_or_right():
    result = fuzz(COUNT, seed=1)
    assert result.failures == []
    assert result.total == COUNT
    for name, outcomes in result.counts.items():
        assert outcomes["refused"] > 0, name
    assert sum(outcomes["accepted"] for outcomes in result.counts.values()) > 0


class Behaves:
    """A reader with a fault of the given kind."""

    def __init__(self, kind):
        self.name = self.kind = kind

    def run(self, folder, rng):
        match self.kind:
            case "refuses":
                raise LattqeError("no")
            case "raises":
                raise KeyError("surprise")
            case "crashes":
                os.abort()
            case "hangs":
                end = time.process_time() + 60
                while time.process_time() < end:
                    pass
            case "allocates":
                np.ones(200 << 20, np.uint8)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("raises", "KeyError"), ("crashes", "crashed"), ("hangs", "hung"), ("allocates", "held more than")],
)
def test_the_fuzzer_sees_faults_and_goes_on(tmp_path, monkeypatch, kind, words):
    monkeypatch.setattr(fuzz_readers, "MAX_SECONDS", 0.5 if kind == "hangs" else 30)
    monkeypatch.setattr(fuzz_readers, "MAX_RESIDENT", 100 << 20)
    targets = [Behaves("refuses"), Behaves(kind)]
    result = fuzz_readers.Result()
    worker = Worker(targets, 0, tmp_path / "input", range(4))
    _watch([worker], targets, 0, result)
    wanted = [number for number in range(4) if fuzz_readers.choose(targets, 0, number)[0].kind == kind]
    assert 0 < len(wanted) < 4
    assert [number for number, _, _ in result.failures] == wanted
    assert all(words in what for _, _, what in result.failures)
    assert sum(worker.counts) == 4
