"""What a job under failures has lost is added up from the times of its steps."""

from __future__ import annotations

import pytest
from crash.soak_failures import measured


def test_steps_taken_twice_and_the_one_broken_off_are_lost() -> None:
    steps = [(0.0, 1), (2.0, 2), (4.0, 3), (9.0, 3), (11.0, 4)]
    found = measured(steps, kills=[5.0], ranks=2)
    assert (found.step_s, found.restarts_s, found.kept) == (2.0, [2.0], 3)
    assert found.goodput == pytest.approx(6 / 11)
    assert found.lost == pytest.approx(1.5)  # step 3 again, and half of step 4
