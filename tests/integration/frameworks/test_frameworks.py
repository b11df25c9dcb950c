"""What training may hold is restored exactly or refused in time: the part of the matrix for `make test`, and the table in docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.frameworks import table
from integration.frameworks.case import Case
from integration.frameworks.cases import CASES
from integration.frameworks.check import check
from integration.frameworks.run import Life, Lives
from integration.frameworks.verdict import judge

QUICK = [case for case in CASES.values() if case.quick]


@pytest.mark.matrix
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_exact_or_refused(case: Case, tmp_path: Path, shm_dir: Path) -> None:
    check(case, tmp_path, shm_dir)


def test_the_committed_table_has_a_promised_outcome_of_every_case() -> None:
    rows = table.committed()
    assert set(rows) == set(CASES)
    assert [name for name, found in rows.items() if not _promised(CASES[name], found)] == []


def _promised(case: Case, outcome: str) -> bool:
    if outcome.startswith(f"{table.SKIPPED}: "):
        return set(outcome.removeprefix(f"{table.SKIPPED}: ").split(", ")) <= set(case.needs)
    return outcome == case.promised


@pytest.mark.parametrize("outcome", ["no result", "wrong", "refused", "skipped", "skipped: ", "skipped: torch"])
def test_a_row_that_promises_nothing_is_seen(outcome: str) -> None:
    exact = next(case for case in CASES.values() if not case.refused)
    assert not _promised(exact, outcome)


def test_the_versions_of_the_committed_table_are_those_that_are_pinned() -> None:
    found, pinned = table.committed_versions(), table.pinned_versions()
    skipped = {
        word for outcome in table.committed().values() for word in outcome.removeprefix(table.SKIPPED).split(": ")[1:]
    }
    assert found == {name: version for name, version in pinned.items() if name.replace("-", "_") not in skipped}


def _session(*lines: dict[str, Any], end: int = 0) -> Life:
    return Life(lines=[list(lines)], ends=[end])


def _lives(*, loss: str = "0x1", state: str = "a", **error: Any) -> Lives:
    """Lives of a case of which the killed one differs from the unbroken one where an argument does."""
    steps = [{"step": step, "loss": "0x1", "state": {"p": "a"}} for step in range(1, 8)]
    killed = [{"restored": 0, "tiers": {}, "state": {}}, {"step": 1, "loss": loss, "state": {"p": state}}]
    return Lives(_session(*steps), _session(*killed, *([error] if error else []), end=0 if error else 9))


def test_the_judge_sees_a_loss_that_differs() -> None:
    assert judge(_lives()).outcome == "exact"
    assert "loss" in judge(_lives(loss="0x2")).message


def test_the_judge_sees_state_that_differs_and_names_it() -> None:
    verdict = judge(_lives(state="b"))
    assert verdict.outcome == "wrong"
    assert "1 of 1 different: p" in verdict.message


@pytest.mark.parametrize(
    ("stage", "known", "outcome"),
    [("track", True, "refused"), ("step(1)", True, "refused"), ("step(2)", True, "wrong"), ("step(1)", False, "wrong"), ("snapshot", True, "wrong")],
)  # fmt: skip
def test_only_an_error_of_ours_before_the_first_step_is_over_is_a_refusal(
    stage: str, known: bool, outcome: str
) -> None:
    error: dict[str, Any] = {
        "error": "UnsupportedStateError",
        "known": known,
        "stage": stage,
        "problem": "no",
        "text": "",
    }
    assert judge(_lives(**error)).outcome == outcome


def test_the_judge_sees_a_death_that_was_not_asked_for() -> None:
    lives = _lives()
    lives.killed.ends = [11]
    assert "SIGSEGV" in judge(lives).message
