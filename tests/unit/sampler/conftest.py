"""Where the loader workers of these tests put their sockets."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _sockets_that_go(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that torch ends, since its loop raised or was killed, leaves the folder of its sockets: here it goes with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(shm_dir))
