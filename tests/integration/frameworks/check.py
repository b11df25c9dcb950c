"""One case as a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.frameworks.case import Case
from integration.frameworks.cases import missing, warm
from integration.frameworks.run import run_case
from integration.frameworks.verdict import judge


def check(case: Case, folder: Path, shm: Path) -> None:
    """Run a case and fail where its outcome is not the one that its table row promises.

    Args:
        case: The case.
        folder: An empty folder on disk.
        shm: One on tmpfs.
    """
    if lacking := missing(case):
        pytest.skip(f"{', '.join(lacking)} is not installed (make test-frameworks)")
    warm(case)
    verdict = judge(run_case(case, folder, shm), from_rank_0=case.from_rank_0)
    found = f"{case.name}: {verdict.outcome}, {verdict.stage} {verdict.message}\n{verdict.text}"
    assert verdict.outcome == case.promised, found
    assert case.refused in verdict.message, found
