"""Loaders of other libraries: exact over kills, other workers and other ranks, or refused. Part of `make test-loaders`."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.loaders.table import committed
from integration.loaders.trials import Trials
from integration.loaders.workloads import EXACT, TRIALS, WORKLOADS, prepare

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaders") / "data"
    prepare(folder)
    return folder


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_loader_continues_exactly_or_is_refused(name: str, data: Path, tmp_path: Path) -> None:
    workload = WORKLOADS[name]
    if lacking := workload.missing():
        pytest.skip(f"{', '.join(lacking)} did not install (make test-loaders)")
    (tmp_path / "data").symlink_to(data)
    trials = Trials(workload, tmp_path)
    for trial in TRIALS:
        found = trials.run(trial)
        assert found.outcome == workload.promised.get(trial, EXACT), f"{trial}: {found.message}"


def test_the_page_says_what_is_promised() -> None:
    """It is written by a run that held each outcome against the promise: `make exactness`."""
    rows = committed()
    assert set(rows) == set(WORKLOADS)
    for name, cells in rows.items():
        assert cells == [WORKLOADS[name].promised.get(trial, EXACT) for trial in TRIALS]
