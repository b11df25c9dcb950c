"""One rank of a job inside the test's own process: opened, and ended without a clean end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from flashckpt import Checkpointer
from support.engine import agent_dir


@pytest.fixture(autouse=True)
def agent_of_the_test(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()


def crash(ckpt: Checkpointer) -> None:
    """End this rank's life without a clean end: what is in memory stays."""
    life = ckpt._session
    assert life is not None
    life.close()


def finished(ckpt: Checkpointer) -> None:
    """Wait until the snapshot under way is done."""
    assert ckpt._session is not None
    ckpt._session._stager.finish()


def step_kept(ckpt: Checkpointer, step: int) -> None:
    """`ckpt.step(step)`; where memory is still being made for another structure, the snapshot is taken once it is there.

    Training would go on meanwhile; these tests compare the state of this step, as `ckpt.wait()` keeps it.
    """
    life = ckpt._alive()
    late = life.stats.get("late", 0)
    ckpt.step(step)
    if life.stats.get("late", 0) > late:
        assert life.memory.wait_first(60)
        assert life._take(step)


class Holder:
    """Any object with state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def opened(root: Path, **things: Any) -> Checkpointer:
    ckpt = Checkpointer(str(root), snapshot_every=1, job="t")
    ckpt.track(**things)
    ckpt.restore()
    return ckpt


def opened_as(root: Path, job: str, **things: Any) -> int:
    ckpt = Checkpointer(str(root), snapshot_every=1, job=job)
    ckpt.track(**things)
    report = ckpt.restore()
    crash(ckpt)
    return report.step if report else 0


class Gate:
    """Lets `touch` through below a byte, and holds it back above while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, below: int) -> None:
        from flashckpt.shm import segment
        from flashckpt.snapshot import segments

        self.open, self._below, self._real = threading.Event(), below, segment.touch  # type: ignore[attr-defined]  # not exported
        monkeypatch.setattr(segment, "RESERVE_BYTES", 64 << 10)
        monkeypatch.setattr(segment, "touch", self._touch)
        monkeypatch.setattr(segments, "SMALL_SLOT_BYTES", 0)  # as if the slots were large

    def _touch(self, mapping: Any, address: int, start: int, size: int) -> None:
        assert start < self._below or self.open.wait(60)
        self._real(mapping, address, start, size)
