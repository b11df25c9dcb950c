"""What a device refuses or does wrong, named and told apart; training goes on wherever it can, with the numbers of an unbroken run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import emulated_device

from integration.device.device_jobs import Case, Jobs, unbroken
from integration.device.job import DIES_AT, FAILS_AT, STEPS

__all__ = ["unbroken"]
pytestmark = [
    pytest.mark.skipif(bool(emulated_device.why_not()), reason=emulated_device.why_not()),
    pytest.mark.timeout(400),
]
LOCKED, STAGED = Case("locked"), Case("staged", staged=True)
Unbroken = Callable[[Case, Path], Jobs]


def run(case: Case, fault: str, tmp_path: Path, shm_dir: Path) -> tuple[Jobs, dict[str, Any]]:
    """Run a job to its end although its device makes trouble; return what it says of itself."""
    jobs = Jobs(tmp_path / "troubled", shm_dir)
    assert jobs.run(case, "--fault", fault, seed=3) == [0], jobs.log(0)
    return jobs, json.loads((jobs.folder / "end0").read_text())


@pytest.mark.parametrize("case", [LOCKED, STAGED], ids=lambda case: case.name)
@pytest.mark.parametrize("fault", ["memory", "memory-in-the-copy"])
def test_out_of_memory_discards_one_snapshot_and_training_goes_on(
    case: Case, fault: str, unbroken: Unbroken, tmp_path: Path, shm_dir: Path
) -> None:
    jobs, end = run(case, fault, tmp_path, shm_dir)
    assert end["nets"] == unbroken(case, shm_dir).ends(case)[0]
    (failure,) = end["failures"]
    assert failure.startswith("OutOfMemoryError: emu out of memory")
    assert end["snapshots"] == STEPS - 1, jobs.log(0)


@pytest.mark.parametrize("case", [LOCKED, STAGED], ids=lambda case: case.name)
def test_refused_page_locking_makes_copies_slower_and_no_more(
    case: Case, unbroken: Unbroken, tmp_path: Path, shm_dir: Path
) -> None:
    jobs, end = run(case, "pins", tmp_path, shm_dir)
    assert end["nets"] == unbroken(case, shm_dir).ends(case)[0]
    assert (end["failures"], end["snapshots"], end["pinned"]) == ([], STEPS, 0)
    assert jobs.log(0).count("no page-locked memory for copies of emu:0") == 1, jobs.log(0)
    assert jobs.log(0).count("the snapshots' memory could not be page-locked") == (0 if case.staged else 1)


def test_refused_streams_discard_snapshots_until_there_are_some(
    unbroken: Unbroken, tmp_path: Path, shm_dir: Path
) -> None:
    jobs, end = run(LOCKED, "streams", tmp_path, shm_dir)
    assert end["nets"] == unbroken(LOCKED, shm_dir).ends(LOCKED)[0]
    assert all("no stream could be made" in failure for failure in end["failures"]), end["failures"]
    assert (len(end["failures"]), end["snapshots"]) == (FAILS_AT, STEPS - FAILS_AT), jobs.log(0)


@pytest.mark.parametrize("case", [LOCKED, STAGED], ids=lambda case: case.name)
@pytest.mark.parametrize("fault", ["lost", "lost-in-the-copy"])
def test_a_lost_context_ends_the_rank_with_its_own_error_and_the_next_one_goes_on(
    case: Case, fault: str, unbroken: Unbroken, tmp_path: Path, shm_dir: Path
) -> None:
    jobs = Jobs(tmp_path / "lost", shm_dir)
    assert jobs.run(case, "--fault", fault, seed=3) == [1], jobs.log(0)
    last = [line for line in jobs.log(0).splitlines() if re.match(r"\S*(Error|Exception)\b", line)][-1]
    assert last == "torch.AcceleratorError: emu error: unspecified launch failure", jobs.log(0)
    assert jobs.run(case, life=1, seed=9) == [0], jobs.log(1)
    assert jobs.ends(case, "first") == [DIES_AT - 1], "what was COMPLETE is intact"
    assert jobs.ends(case) == unbroken(case, shm_dir).ends(case)


def test_a_rank_uses_no_other_device_than_its_own(unbroken: Unbroken, tmp_path: Path, shm_dir: Path) -> None:
    """Model on device 1 while device 0 is the current one: a context there costs memory of another rank."""
    jobs = Jobs(tmp_path / "other", shm_dir)
    assert jobs.run(LOCKED, "--device", "1", die="copy") == [-9], jobs.log(0)
    assert jobs.run(LOCKED, "--device", "1", life=1) == [0], jobs.log(1)
    assert jobs.ends(LOCKED, "contexts") == [[1]]
    assert jobs.ends(LOCKED, "first") == [DIES_AT - 1]
    assert jobs.ends(LOCKED) == unbroken(LOCKED, shm_dir).ends(LOCKED), "its generator was restored too"
    fsdp = Case("fsdp", kind="fsdp")
    assert unbroken(fsdp, shm_dir).ends(fsdp, "contexts") == [[0], [1]]
