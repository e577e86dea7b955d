"""A short, seeded part of the fuzzing of all readers, and proof that the fuzzer sees what it looks for."""

import faulthandler
import os
import time
from dataclasses import replace

import fuzz_readers
import numpy as np
import pytest
from fuzz_readers import Worker, _watch, fuzz
from fuzz_seeds import make_things

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet
from lattqe.store.manifest import checksum, parse_manifest

COUNT = 1000  # `make fuzz` runs 100,000


@pytest.mark.slow
def test_damaged_files_are_refused_or_right():
    result = fuzz(COUNT, seed=1)
    assert result.failures == []
    assert result.total == COUNT
    for name, outcomes in result.counts.items():
        assert outcomes["refused"] > 0, name
    assert sum(outcomes["accepted"] for outcomes in result.counts.values()) > 0


def test_what_the_fuzzer_found_in_the_store(tmp_path):
    """Forged manifests and parts with valid checksums."""
    features = make_things(tmp_path)[0]
    path = features / "manifest.json"
    manifest = parse_manifest(path.read_bytes(), "original")
    path.write_bytes(replace(manifest, fields={**manifest.fields, "dtype": [[]]}).to_json())
    with pytest.raises(LattqeError, match="are invalid"):
        FeatureSet.open(str(features))
    part = features / manifest.parts[0].name
    data = part.read_bytes().replace(b"label", b"l\xc9bel")
    part.write_bytes(data)
    forged = replace(manifest.parts[0], checksum=checksum(data))
    path.write_bytes(replace(manifest, parts=(forged, *manifest.parts[1:])).to_json())
    with pytest.raises(LattqeError, match="not a readable Arrow file"):
        FeatureSet.open(str(features)).read()


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
                faulthandler.disable()  # no report of what is meant
                os.abort()
            case "hangs":
                end = time.process_time() + 60
                while time.process_time() < end:
                    pass
            case "waits":
                time.sleep(3600)
            case "allocates":
                np.ones(200 << 20, np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raises", "KeyError"),
        ("crashes", "crashed"),
        ("hangs", "hung"),
        ("waits", "hung"),
        ("allocates", "held more than"),
    ],
)
def test_the_fuzzer_sees_faults_and_goes_on(tmp_path, monkeypatch, kind, words):
    monkeypatch.setattr(fuzz_readers, "MAX_SECONDS", 0.5 if kind == "hangs" else 30)
    monkeypatch.setattr(fuzz_readers, "MAX_WAITING_SECONDS", 0.3 if kind == "waits" else 600)
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
