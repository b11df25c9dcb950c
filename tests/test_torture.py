"""A short run of the torture program; `make torture` runs hundreds of kills on both levels."""

from __future__ import annotations

import random

import pytest
import torture


@pytest.mark.parametrize("slots", [2, 3])
def test_ranks_killed_at_random_instants_restore_a_step_really_taken_and_never_an_older_one(slots: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    assert torture.torture_segments(24, seed, slots=slots) >= 24
