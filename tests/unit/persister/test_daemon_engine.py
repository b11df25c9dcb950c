"""The daemon under a real Checkpointer: `wait()` tells the truth while storage fails and after it came back."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from support.engine import net
from support.ranks import wait_for

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.errors import PersistError
from flashckpt.shm.job_directory import memory_root
from flashckpt.storage.factory import open_store


def test_root_fails_in_the_middle_wait_raises_training_goes_on_and_it_resumes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    root = tmp_path / "root"
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(str(root), snapshot_every=1, persist_every=1)
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.restore()

    def train(step: int) -> None:
        model(torch.ones(2, 24)).square().sum().backward()
        optimizer.step()
        ckpt.step(step)

    train(1)
    ckpt.wait(60)
    root.rename(tmp_path / "away")  # as if unmounted: a file lies where the directory was
    root.write_text("")
    train(2)
    train(3)
    with pytest.raises(PersistError, match="step 3 of generation 1 is not on storage"):
        ckpt.wait(60)
    train(4)
    root.unlink()
    (tmp_path / "away").rename(root)

    def durable() -> bool:
        with contextlib.suppress(PersistError):
            ckpt.wait(60)
            return True
        return False

    wait_for(durable, what="the daemon to resume", deadline_s=60)
    ckpt.close()
    wait_for(lambda: not any(memory_root().iterdir()), what="the memory to be given back")
    assert list_checkpoints(open_store(root))[0].step == 4
