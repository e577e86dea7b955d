"""What all tests of the store share."""

import pytest


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors that were synced; no power is cut here, and hundreds of small files would wait for the disk."""
    descriptors: list[int] = []
    monkeypatch.setattr("os.fsync", descriptors.append)
    return descriptors
