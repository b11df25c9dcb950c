"""The state changes its structure while it trains: its new memory is made beside training, and no step waits for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import net
from support.one_rank import (
    agent_of_the_test,  # noqa: F401 -- a fixture
    crash,
    finished,
    opened,
)

from flashckpt import Checkpointer
from flashckpt.shm.block import FileBlock
from flashckpt.shm.segment import Segment

ALLOCATING = (
    (Segment, "create"),
    (Segment, "reserve"),
    (Segment, "unlink"),
    (FileBlock, "close"),
    (os, "posix_fallocate"),
)


class Watched:
    """Notes which thread makes, reserves and gives back memory, and holds the making back until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.begun = threading.Event(), threading.Event()
        self.by_training: list[str] = []
        for owner, name in ALLOCATING:
            monkeypatch.setattr(owner, name, self._noted(name, getattr(owner, name)))

    def _noted(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.by_training.append(name)
            elif name == "create":
                self.begun.set()
                assert self.open.wait(60)
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("had_snapshots", [True, False])
def test_memory_for_another_structure_is_made_beside_training_and_no_step_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_snapshots: bool
) -> None:
    model = net()
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    ckpt.track(model=model)
    ckpt.restore()
    if had_snapshots:
        ckpt.step(1)
        finished(ckpt)
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        model.register_buffer("later", torch.randn(400, 500))
        for step in (2, 3, 4):
            ckpt.step(step)
        assert watched.by_training == []
        assert watched.begun.wait(60)
        assert ckpt.stats["late"] == ckpt.stats["skipped"] == 3
        watched.open.set()
        assert ckpt._alive().memory.wait_first(60)
        ckpt.step(5)
        finished(ckpt)
        assert watched.by_training == []
    assert ckpt.stats["late"] == 3
    crash(ckpt)
    again = net()
    again.register_buffer("later", torch.zeros(400, 500))
    back = opened(tmp_path, model=again)
    report = back._alive().outcome.report
    assert report is not None
    assert report.step == 5
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    crash(back)


def test_a_structure_that_changes_again_before_its_memory_is_made_gets_memory_for_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    ckpt = Checkpointer(str(tmp_path), snapshot_every=1, job="t")
    ckpt.track(model=model)
    ckpt.restore()
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        for step, side in ((1, 300), (2, 600)):
            model.register_buffer(f"later{step}", torch.randn(side, side))
            ckpt.step(step)
        watched.open.set()
        assert ckpt._alive().memory.wait_first(60)
        ckpt.step(3)
        finished(ckpt)
        assert watched.by_training == []
    held = ckpt._alive().memory.segment
    assert held is not None
    assert {header.step for header in held.headers() if header.is_complete} == {3}
    files = sorted(path.name for path in ckpt._alive().directory.segments())
    assert files == [held.path.name], "what was made on the way is gone"
    crash(ckpt)
