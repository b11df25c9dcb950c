"""Training never waits: neither for storage nor for memory. What is skipped is counted, logged once, and made up for."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.daemons import QUICK
from support.engine import net
from support.one_rank import Gate, agent_of_the_test, crash, finished, opened, opened_as  # noqa: F401 -- fixtures

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import coordinator
from flashckpt.daemon.persister.service import Daemon
from flashckpt.session.durability import Skips
from flashckpt.shm.inventory import pin_all, release, scan
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.storage.factory import open_store


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training thread that sleeps is an error."""
    training, real = threading.current_thread(), time.sleep

    def sleep(seconds: float) -> None:
        assert threading.current_thread() is not training, "training slept"
        real(seconds)

    monkeypatch.setattr(time, "sleep", sleep)


@contextlib.contextmanager
def pinned(job: str, step: int) -> Iterator[None]:
    """Hold one snapshot pinned, as the daemon does while storage takes its time."""
    view = scan(JobDirectory.open(job, create=False))
    identity = next(i for i in view.complete() if i[1] == step)
    pins = pin_all(view, identity, sorted(view.holders(identity)))
    assert pins
    yield
    release(pins)


def test_two_slots_and_a_pinned_one_no_step_waits_and_the_next_possible_snapshot_is_persisted(
    tmp_path: Path, no_sleep: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Every step of this is a persist step or not; none of them may sleep, and the request is carried over."""
    ckpt = Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=3, slots=2, job="t")
    ckpt.track(model=net())
    ckpt.restore()
    for step in (1, 2, 3):
        ckpt.step(step)
        finished(ckpt)
    with caplog.at_level(logging.WARNING, logger="flashckpt"), pinned("t", 2), pinned("t", 3):
        for step in range(4, 11):
            ckpt.step(step)
    assert (ckpt.stats["skipped"], ckpt.stats["busy"]) == (7, 7)
    assert "late" not in ckpt.stats
    assert len([r for r in caplog.records if "no snapshot of step" in r.message]) == 1, "one line, not one per step"
    ckpt.step(11)  # no persist step, and yet the one that takes the place of 6 and 9
    finished(ckpt)
    assert max(scan(JobDirectory.open("t", create=False)).flagged()) == (1, 11)
    ckpt.step(12)
    crash(ckpt)


def test_memory_that_is_still_being_made_delays_no_step_and_the_first_slot_is_used_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sleep: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for the reservation, at persist steps neither; the snapshot is taken before the next regular step."""
    gate = Gate(monkeypatch, below=0)
    ckpt = Checkpointer(str(tmp_path / "root"), snapshot_every=100, persist_every=100, job="t")
    ckpt.track(model=torch.nn.Linear(300, 300))
    ckpt.restore()
    assert ckpt._session is not None
    memory = ckpt._session.memory
    monkeypatch.setattr(memory, "wait_first", None)  # whoever waits fails
    with caplog.at_level(logging.INFO, logger="flashckpt"):
        for step in range(1, 104):
            ckpt.step(step)
            ckpt.fence()
        assert ckpt.stats["late"] == ckpt.stats["skipped"] == 3, "at 100, 101 and 102"
        gate.open.set()
        assert memory._reservation.first.wait(60)
        for step in range(104, 150):
            ckpt.step(step)
    finished(ckpt)
    assert ckpt.stats["snapshots"] == 1
    assert scan(JobDirectory.open("t", create=False)).flagged() == [(1, 104)], "and it is persisted in place of 100"
    assert len([r for r in caplog.records if "no snapshot of step" in r.message]) == 1
    assert len([r for r in caplog.records if "taken again from step 104 on, 3 were skipped" in r.message]) == 1
    crash(ckpt)
    assert opened_as(tmp_path / "root", "t", model=torch.nn.Linear(300, 300)) == 104


def test_a_missed_first_snapshot_is_tried_at_the_same_steps_on_all_ranks_until_one_is_common() -> None:
    def steps(skips: Skips, until: int, unrecoverable: set[SnapshotId]) -> list[int]:
        return [step for step in range(11, until) if skips.is_retry(step, unrecoverable=lambda: unrecoverable)]

    missed, other = Skips(1), Skips(1)
    for skips in (missed, other):
        assert not skips.is_retry(9, unrecoverable=lambda: {SnapshotId(1, 9)}), "nothing was due yet"
        skips.tried(10, is_due=True)
    missed.skipped(10, "late")
    other.taken(10)
    assert steps(missed, 30, set()) == [11, 12, 14, 18, 26]
    assert steps(other, 30, set()) == [], "nobody missed anything, as far as this rank knows"
    assert steps(other, 30, {SnapshotId(1, 10)}) == [11, 12, 14, 18, 26]
    for skips in (missed, other):
        skips.saw([SnapshotId(0, 5)])
        assert steps(skips, 13, {SnapshotId(1, 10)}) == [11, 12], "a snapshot of an earlier session is none of this one"
        skips.saw([SnapshotId(1, 11)])
        assert steps(skips, 30, {SnapshotId(1, 10)}) == []


def test_the_snapshot_of_a_stop_is_taken_even_if_its_slot_is_pinned_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = Checkpointer(str(tmp_path / "root"), snapshot_every=1, slots=2, job="t")
    ckpt.track(model=net())
    ckpt.restore()
    for step in (1, 2):
        ckpt.step(step)
        finished(ckpt)
    assert ckpt._session is not None
    ckpt._session._control.stop_after = 3
    slept: list[float] = []
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        for step in (1, 2):
            stack.enter_context(pinned("t", step))

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                stack.close()

        patch.setattr("flashckpt.session.session.time.sleep", sleep)
        ckpt.step(3)
    assert len(slept) >= 3
    assert ckpt.should_stop
    finished(ckpt)
    assert scan(JobDirectory.open("t", create=False)).flagged() == [(1, 3)]
    crash(ckpt)


def test_the_last_persist_step_was_skipped_wait_takes_it_and_sees_it_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_DAEMON_LINGER", "0.2")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=4, slots=2, job="t")
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.restore()
    for step in (1, 2, 3):
        ckpt.step(step)
        finished(ckpt)
    with pinned("t", 2), pinned("t", 3):
        model(torch.ones(2, 24)).sum().backward()
        optimizer.step()
        ckpt.step(4)
    assert ckpt.stats["busy"] == 1
    kept = [p.detach().clone() for p in model.parameters()]
    JobDirectory.open("t").ensure_daemon()
    ckpt.wait(60)
    (info,) = list_checkpoints(open_store(tmp_path / "root"))
    assert info.step == 4
    crash(ckpt)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    reader = Checkpointer.readonly(tmp_path / "root")
    reader.track(model=model)
    reader.restore()
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))


class Stuck:
    """A root that takes data and never says that it has it."""

    def __init__(self, root: str) -> None:
        self.inner, self.let_go = open_store(root), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put_object(self, key: str, parts: Any, nbytes: int | None = None) -> None:
        assert self.let_go.wait(60)
        self.inner.put_object(key, parts, nbytes)


@pytest.mark.parametrize("slots", [2, 3])
def test_storage_that_does_not_answer_costs_snapshots_and_no_step(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sleep: None
) -> None:
    stuck = Stuck(str(tmp_path / "root"))
    monkeypatch.setattr(coordinator, "open_store", lambda *_, **__: stuck)
    ckpt = Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=5, slots=slots, job="t")
    ckpt.track(model=net())
    ckpt.restore()
    directory = JobDirectory.open("t")
    lock = directory.hold_daemon()
    assert lock is not None
    daemon = Daemon(directory, lock, QUICK)
    for step in range(1, 41):
        ckpt.step(step)
        finished(ckpt)
        daemon.turn()
    assert ckpt.stats["snapshots"] + ckpt.stats.get("skipped", 0) == 40
    assert (ckpt.stats.get("busy", 0) > 0) == (slots == 2), "with two slots there is none to write while one is read"
    stuck.let_go.set()
    while daemon.persisting is not None and daemon.persisting.flush is not None:
        daemon.turn()
    ckpt.step(41)
    finished(ckpt)
    assert max(scan(directory).complete()) == (1, 41)
    daemon.close()
    crash(ckpt)
