"""When a rank wakes the persister of its node."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.one_rank import agent_of_the_test, crash, finished  # noqa: F401 -- fixtures
from torch import nn

from flashckpt import Checkpointer


def touched(tmp_path: Path, persist_every: int | str) -> list[bool]:
    """Take six snapshots; return at which of them the persister was woken."""
    model = nn.Linear(3, 3)
    ckpt = Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=persist_every, job="t")
    ckpt.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    ckpt.restore()
    event = ckpt._alive().directory.event_path(0)
    times = [0]
    for step in range(1, 7):
        ckpt.step(step)
        finished(ckpt)
        times.append(event.stat().st_mtime_ns)
    crash(ckpt)
    return [after > before for before, after in itertools.pairwise(times)]


@pytest.mark.usefixtures("agent_of_the_test")
@pytest.mark.parametrize("persist_every", [3, "10min"])
def test_the_persister_is_woken_by_persist_steps_and_by_each_snapshot_where_it_chooses_by_time(
    tmp_path: Path, persist_every: int | str
) -> None:
    by_step = [True, False, True, False, False, True]  # the first one: nothing was known before
    assert touched(tmp_path, persist_every) == (by_step if persist_every == 3 else [True] * 6)
