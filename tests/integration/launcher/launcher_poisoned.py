"""A state that is intact and worthless: the job goes back to one that is good, and a fault of the script still ends it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.poisoned import judged, planned, run_job, traced, unbroken

from flashckpt.errors import HangError, RestartBudgetError

pytestmark = pytest.mark.timeout(600)

SEEDS = int(os.environ.get("SEEDS", "12"))
"""How many jobs are tried; `make test-poisoned SEEDS=150` tries more. Every kind of job is among 12."""
FAULTS = 4


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_job_whose_state_becomes_bad_again_and_again_ends_equal_to_the_unbroken_run(
    seed: int, tmp_path: Path
) -> None:
    plan = planned(seed, FAULTS)
    expected = unbroken(tmp_path / "unbroken", plan, plan["steps"])
    outcome = judged(tmp_path / f"job-{seed}", seed, faults=FAULTS, expected=expected)
    assert not outcome.problem, (outcome, (tmp_path / f"job-{seed}" / "output.log").read_text())


PLAN = {
    "kind": "script", "nodes": 1, "ranks": 1, "steps": 45, "faults": [], "ends": 0, "sample": -1, "how": "raise", "dtype": "float32"
}  # fmt: skip


def test_a_fault_of_the_script_ends_the_job_after_the_older_states_were_tried_and_each_can_be_gone_back_to(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job"
    code, output = run_job(job, PLAN | {"ends": 31}, "--escalate=2")
    assert code == RestartBudgetError.exit_code, output
    assert output.count("began at") == 4, output
    assert "(2 of 2, --escalate)" in output
    assert "and again from 2 older states" in output
    left = [int(step) for step in re.findall(r"dlrun --restore-step (\d+) ", output)]
    assert len(left) > 1, output
    shutil.rmtree(job / "node0")
    code, output = run_job(job, PLAN, f"--restore-step={left[-1]}")
    assert (code, f"began at {left[-1]}\n" in output) == (0, True), output


@pytest.mark.parametrize("how", ["raise", "nan", "spin", "crash"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sample_that_is_always_bad_is_left_out_the_third_time_and_every_other_is_trained_once(
    how: str, ranks: int, tmp_path: Path
) -> None:
    seed = next(seed for seed in range(1000) if _is_of(planned(seed, 0), how, ranks))
    plan = planned(seed, 0)
    expected = unbroken(tmp_path / "unbroken", plan, plan["steps"])
    outcome = judged(tmp_path / f"job-{seed}", seed, faults=0, expected=expected)
    assert not outcome.problem, (outcome, (tmp_path / f"job-{seed}" / "output.log").read_text())


def _is_of(plan: dict[str, Any], how: str, ranks: int) -> bool:
    return (plan["kind"], plan["how"], plan["ranks"]) == ("sample", how, ranks)


def test_what_one_node_saw_of_its_numbers_counts_where_the_agent_of_another_decides(tmp_path: Path) -> None:
    """The rank on the second node has the flip."""
    fault = {"step": 16, "kind": "flip", "where": "exp_avg", "place": 653661, "bit": 5}
    plan = PLAN | {"ranks": 2, "faults": [fault]}
    expected = unbroken(tmp_path / "unbroken", plan, 45)
    code, output = run_job(tmp_path / "job", plan | {"nodes": 2})
    assert code == 0, output
    assert traced(tmp_path / "job") == expected, output


def test_a_hang_at_one_step_from_every_state_ends_the_job_and_names_those_left(tmp_path: Path) -> None:
    """All samples there are bad, so that none is to be left out."""
    code, output = run_job(tmp_path / "job", PLAN | {"hangs": 31}, "--hang-timeout=3", "--escalate=1")
    assert code == HangError.exit_code, output
    assert output.count("began at") == 3, output
    assert "the ranks hang at step 30 again and again, and again from 1 older state" in output
    assert "dlrun --restore-step " in output
