"""A copy that the training thread joins at the fence: where the copy thread has no core, training waits for no thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine import digest
from support.one_rank import agent_of_the_test, crash, opened  # noqa: F401 -- fixtures
from torch import nn

from flashckpt.native import SharedCopy
from flashckpt.snapshot import runs
from flashckpt.snapshot.copy import StalePlanError


class Starved(SharedCopy):
    """A copy whose own thread gets no core after its check, until another one has taken all rows."""

    taken = threading.Event()

    def run(self, *, check: bool = True) -> None:
        self._next[0], self._is_refused = 0, False
        self._checked.set()
        assert self.taken.wait(30)

    def join(self) -> int:
        copied = super().join()
        self.taken.set()
        return copied


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Starved, "taken", threading.Event())
    monkeypatch.setattr(runs, "SharedCopy", Starved)


def test_training_copies_what_the_copy_thread_has_no_core_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starved: None, copied_by: str
) -> None:
    wide = nn.Linear(3000, 1000)  # 12 MB: more than one part of a tensor
    model = nn.Sequential(wide, nn.Linear(1000, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = opened(tmp_path, model=model, optimizer=optimizer)
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(
        "flashckpt.snapshot.runs.time",
        SimpleNamespace(thread_time=lambda: next(clock), thread_time_ns=time.thread_time_ns),
    )
    ckpt.step(1)
    kept = digest(model, optimizer)
    ckpt.fence()
    with torch.no_grad():
        wide.weight.zero_()
    ckpt.wait()
    assert ckpt.stats["joined_bytes"] == sum(p.nbytes for p in model.parameters())
    assert ckpt.stats["copy_cpu_s"] >= 2.5, "what both threads took"
    crash(ckpt)
    crash(opened(tmp_path, model=model, optimizer=optimizer))
    assert digest(model, optimizer) == kept


def test_a_copy_that_cannot_begin_lets_training_go_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise StalePlanError("moved")

    model = nn.Linear(20, 20)
    ckpt = opened(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    failures: list[Exception] = []
    ckpt.on_failure = failures.append
    monkeypatch.setattr(runs.HostRuns, "check_forms", refused)
    ckpt.step(1)
    ckpt.fence()
    assert [type(error) for error in failures] == [StalePlanError]
    crash(ckpt)
