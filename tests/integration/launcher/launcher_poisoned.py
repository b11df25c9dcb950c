"""A state that is intact and worthless: the job goes back to one that is good, and a fault of the script still ends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.poisoned import judged, planned, run_job, unbroken

from flashckpt.errors import RestartBudgetError

pytestmark = pytest.mark.timeout(600)

SEEDS = int(os.environ.get("SEEDS", "8"))
"""How many jobs are tried; `make test-poisoned SEEDS=150` tries more."""
FAULTS = 4


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_job_whose_state_becomes_bad_again_and_again_ends_equal_to_the_unbroken_run(
    seed: int, tmp_path: Path
) -> None:
    ranks = 2 if seed % 8 == 3 else 1
    plan = planned(seed, FAULTS)
    expected = unbroken(tmp_path / "unbroken", ranks, plan["steps"], plan["dtype"])
    outcome = judged(tmp_path / "job", seed, faults=FAULTS, ranks=ranks, expected=expected)
    assert not outcome.problem, (outcome, (tmp_path / "job" / "output.log").read_text())


def test_a_fault_of_the_script_ends_the_job_after_the_older_states_were_tried(tmp_path: Path) -> None:
    plan = {"steps": 45, "faults": [], "ends": 31, "dtype": "float32"}
    code, output = run_job(tmp_path / "job", plan, 1, "--escalate=2")
    assert code == RestartBudgetError.exit_code, output
    assert output.count("began at") == 4, output
    assert "(2 of 2, --escalate)" in output
    assert "and again from 2 older states" in output
