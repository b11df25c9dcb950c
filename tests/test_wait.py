"""`ckpt.wait()` ends also where training was quicker than the daemon."""

from __future__ import annotations

from pathlib import Path

import torch
from support.engine import agent_dir, net

from flashckpt import Checkpointer
from flashckpt.checkpoint.checkpoints import list_checkpoints
from flashckpt.memory.job import JobDirectory
from flashckpt.storage.opening import open_store


def test_persist_step_overwritten_before_the_daemon_came_wait_has_a_newer_one_persisted(tmp_path: Path) -> None:
    """The snapshot of the persist step is gone from all slots when the daemon starts: it persists the newest instead."""
    agent_dir()  # nobody starts a daemon
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=4, job="t") as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.restore()
        for step in range(1, 8):
            model(torch.ones(2, 24)).sum().backward()
            optimizer.step()
            ckpt.step(step)
            ckpt._alive()._stager.finish()  # every snapshot is taken, so that 5, 6 and 7 fill the slots
        JobDirectory.open("t").ensure_daemon()
        ckpt.wait(timeout=60)
    (info,) = list_checkpoints(open_store(tmp_path / "root"))
    assert info.step == 7
