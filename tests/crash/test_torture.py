"""A short run of the torture program; `make torture` runs hundreds of kills on both levels."""

from __future__ import annotations

import random

import pytest
from crash import torture


@pytest.mark.parametrize("slots", [2, 3])
def test_ranks_killed_at_random_instants_restore_a_step_really_taken_and_never_an_older_one(slots: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    assert torture.torture_segments(24, seed, slots=slots) >= 24


def test_two_training_ranks_killed_at_random_instants_restore_one_common_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASHCKPT_SHM_DIR", "FLASHCKPT_AGENT_DIR"):
        monkeypatch.setenv(name, "")  # the torture sets them: restored after the test
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    assert torture.torture_engine(6, seed, ranks=2) == 6
