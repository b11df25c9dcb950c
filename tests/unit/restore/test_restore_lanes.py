"""Where other nodes' memory and storage hold the same state: the one that has shown to be faster brings the rest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.engine import agent_dir
from support.ranks import run_ranks, values
from support.spread import lose, train_spread

from flashckpt.restore.lanes import WORTH_S, Lanes

pytestmark = pytest.mark.timeout(600)
BUSY_S = 200
"""Far beyond what ranks take, also on a machine that does much else."""
OPTIONS = {"width": 12_000, "persist_every": 2}


def slowed(rank: int, root: str, nodes: list[int], slow: str) -> dict[str, Any]:
    """Restore where one of both sources seems to take a million times as long as it does."""
    from flashckpt.planning import pieces
    from flashckpt.restore import executor, lanes, peers

    changed: Any = executor
    exchanged: Any = peers

    class Seen(Lanes):
        def __init__(self) -> None:
            super().__init__()
            lane: Any = getattr(self, slow)
            add = lane.add
            lane.add = lambda nbytes, seconds: add(nbytes, seconds * 1e6)

    def hook() -> None:
        pieces.JOB_BYTES = exchanged.JOB_BYTES = exchanged.ROUND_BYTES = 1 << 20
        lanes.WORTH_S = 0.0
        changed.Lanes = Seen  # of this process alone

    return train_spread(rank, "plain", root, nodes, 2, dict(OPTIONS), hook=hook)


@pytest.mark.parametrize("slow", ["far", "near"])
def test_a_slow_source_gives_way_to_the_other_that_holds_the_same(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shm_dir: Path
) -> None:
    """Step 2 is in the memory of one node and on storage; the other node is new."""
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    del os.environ["FLASHCKPT_AGENT_DIR"]  # a daemon of its own per node
    options = {**OPTIONS, "persisted": True}
    before = values(run_ranks(train_spread, 2, "plain", str(tmp_path), [0, 1], 2, options, timeout_s=BUSY_S))
    lose(1)
    agent_dir()
    kept, new = values(run_ranks(slowed, 2, str(tmp_path), [0, 2], slow, timeout_s=BUSY_S))
    assert new["whole"] == before[0]["states"]["2"]
    assert set(kept["report"]["tiers"]) == {"memory"}
    tiers = new["report"]["tiers"]
    assert set(tiers) == {"peer", "storage"}, "both were tried"
    first, second = ("peer", "storage") if slow == "far" else ("storage", "peer")
    assert tiers[first] <= 3 << 20 < tiers[second]
    assert not new["report"]["damaged"]


def test_storage_is_looked_at_where_the_rest_takes_long_and_used_where_it_is_faster() -> None:
    lanes = Lanes()
    assert not lanes.is_choice_due(1 << 30), "nothing is known"
    lanes.far.add(1 << 20, 1.0)
    assert not lanes.is_choice_due(0)
    assert not lanes.is_choice_due(int(WORTH_S * (1 << 20))), "over soon"
    assert lanes.is_choice_due(1 << 20)
    assert not lanes.is_near_faster()
    lanes.near.add(3 << 20, 2.0)
    assert lanes.is_near_faster()
    lanes.far.add(9 << 20, 1.0)
    assert not lanes.is_near_faster()
    lanes.near.is_only = lanes.far.is_only = True
    assert not lanes.is_choice_due(1 << 30), "there is no other"
