"""The whole matrix (`make test-frameworks`): needs what requirements.txt pins; what is missing is skipped by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.frameworks.case import Case
from integration.frameworks.cases import CASES
from integration.frameworks.check import check


@pytest.mark.parametrize("case", list(CASES.values()), ids=lambda case: case.name)
def test_exact_or_refused(case: Case, tmp_path: Path, shm_dir: Path) -> None:
    check(case, tmp_path, shm_dir)
