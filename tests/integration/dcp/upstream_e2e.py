"""PyTorch's own end-to-end tests of checkpoints on our storage, where PYTORCH_SOURCE names a source tree (`make test-frameworks`)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from integration.dcp.upstream_dcp import PASSED, compared

SOURCE = os.environ.get("PYTORCH_SOURCE", "")


@pytest.mark.skipif(not SOURCE, reason="needs a PyTorch source tree: PYTORCH_SOURCE=DIR, PyTorch's wheel has no tests")
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="needs expecttest (make test-frameworks)")
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    "file",
    [
        "test_e2e_save_and_load.py",
        "test_fine_tuning.py",
        "test_fsdp_ep.py",
        "test_pipeline.py",
        "test_compatibility.py",
    ],
)
def test_what_passes_on_torchs_storage_passes_on_ours(file: str, tmp_path: Path) -> None:
    (found,) = [tests for _, tests in compared(Path(SOURCE), tmp_path, [file])]
    passes = {name: mine for name, (theirs, mine) in found.items() if theirs == PASSED}
    assert passes == dict.fromkeys(passes, PASSED)
    assert passes, found
