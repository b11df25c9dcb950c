"""With two slots a snapshot is written behind the persist of the one before it: begun where it will not wait, given up at the fence."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import killed_at
from support.one_rank import agent_of_the_test, crash, finished, opened_as  # noqa: F401 -- a fixture
from support.ranks import wait_for

from flashckpt import Checkpointer
from flashckpt.shm.acks import GiveBackRate
from flashckpt.shm.inventory import pin_all, release, scan
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.shm.lease import Pin
from flashckpt.snapshot.stager import Stager

PAGE = 4096


def model_of(value: float) -> torch.nn.Module:
    """Eight rows of four pages each."""
    return torch.nn.ParameterList([torch.full((PAGE,), value + k) for k in range(8)])


def started(root: Path) -> tuple[Checkpointer, torch.nn.Module, torch.optim.Optimizer]:
    """Two snapshots are there; the first one, of step 1, is next to be overwritten."""
    ckpt = Checkpointer(str(root), snapshot_every=1, persist_every=None, slots=2, job="t")
    model = model_of(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.restore()
    for step in (1, 2):
        train(optimizer)
        ckpt.step(step)
        finished(ckpt)
    return ckpt, model, optimizer


def train(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@contextlib.contextmanager
def persisted(step: int) -> Iterator[Pin]:
    """What the persister of a job holds of its only rank."""
    view = scan(JobDirectory.open("t", create=False))
    pins = pin_all(view, next(one for one in view.complete() if one.step == step), [0])
    assert pins is not None
    yield pins[0]
    release(pins)


@pytest.fixture(autouse=True)
def always_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GiveBackRate, "reaches", lambda *_args, **_options: True)


def seen(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the copy thread has begun."""
    begun, real = threading.Event(), Stager._copy

    def copy(self: Stager, snapshot: Any) -> None:
        begun.set()
        real(self, snapshot)

    monkeypatch.setattr(Stager, "_copy", copy)
    return begun


def test_the_copy_follows_as_bytes_are_given_back_and_is_whole_at_the_end(tmp_path: Path) -> None:
    ckpt, model, _ = started(tmp_path / "root")
    with persisted(1) as pin:
        ckpt.step(3)
        assert (ckpt.stats["busy"], ckpt.stats["skipped"]) == (1, 1), "nothing of it is given back"
        pin.keep_only(PAGE, pin.nbytes - PAGE)
        ckpt.step(4)
        assert ckpt._session is not None
        snapshot = ckpt._session._stager.current
        assert snapshot is not None
        for start in range(2 * PAGE, pin.nbytes, 4 * PAGE):
            assert not snapshot.done.is_set()
            pin.keep_only(start, pin.nbytes - PAGE) if start < pin.nbytes - PAGE else None
        pin.keep_only(0, 0)
        assert snapshot.done.wait(60)
        assert snapshot.error is None
    assert (ckpt.stats["busy"], ckpt.stats["snapshots"]) == (1, 3)
    want = [p.clone() for p in model.parameters()]
    crash(ckpt)
    other = model_of(99.0)
    assert opened_as(tmp_path / "root", "t", model=other, optimizer=torch.optim.SGD(other.parameters(), lr=1.0)) == 4
    assert all(torch.equal(one, two) for one, two in zip(want, other.parameters(), strict=True))


def test_a_fence_that_comes_before_gives_the_snapshot_up_and_training_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt, _, optimizer = started(tmp_path / "root")
    begun = seen(monkeypatch)
    failures: list[Exception] = []
    ckpt.on_failure = failures.append
    with persisted(1) as pin:
        pin.keep_only(PAGE, pin.nbytes - PAGE)
        ckpt.step(3)
        assert begun.wait(60)
        train(optimizer)  # would wait for ever
        finished(ckpt)
        assert (ckpt.stats["busy"], ckpt.stats["skipped"], ckpt.stats.get("discarded", 0)) == (1, 1, 0)
        assert pin.is_current(), "its bytes are still those of its persist"
        ckpt.step(4)
        pin.keep_only(0, 0)
        wait_for(lambda: ckpt.stats["snapshots"] == 3, what="the snapshot of step 4")
    assert (failures, [r for r in caplog.records if r.levelname == "ERROR"]) == ([], [])
    crash(ckpt)
    other = model_of(99.0)
    assert opened_as(tmp_path / "root", "t", model=other, optimizer=torch.optim.SGD(other.parameters(), lr=1.0)) == 4


@pytest.mark.parametrize("part", range(1, 6))
def test_killed_behind_each_part_of_a_persist_the_other_slot_is_restored_and_the_persist_goes_on(
    tmp_path: Path, part: int
) -> None:
    """SIGKILL where bytes that were given back are overwritten: what is still kept is what is being persisted."""
    ckpt, _, _ = started(tmp_path / "root")
    crash(ckpt)
    with persisted(1) as pin:
        whole = bytes(pin.data)
        edge = part * 4 * PAGE
        pin.keep_only(edge, pin.nbytes - PAGE)

        def follow() -> None:
            model = model_of(0.0)
            again = Checkpointer(str(tmp_path / "root"), snapshot_every=1, persist_every=None, slots=2, job="t")
            again.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
            assert (report := again.restore()) is not None
            assert report.step == 2
            assert again._session is not None
            for parameter in model.parameters():
                parameter.data.fill_(-100.0)
            again.step(3)
            again._session._stager.current.done.wait(60)  # type: ignore[union-attr]  # killed before

        killed_at("follow.after-part", follow)
        now = bytes(pin.data)
        assert now[edge : pin.nbytes - PAGE] == whole[edge : pin.nbytes - PAGE], "not durable, and overwritten"
        assert now[:edge] != whole[:edge], "nothing was written behind it"
        assert pin.is_current()
    other = model_of(99.0)
    assert opened_as(tmp_path / "root", "t", model=other, optimizer=torch.optim.SGD(other.parameters(), lr=1.0)) == 2
    assert all(float(p.detach()[0]) == k - 2.0 for k, p in enumerate(other.parameters()))


def test_it_begins_only_where_the_rest_will_be_given_back_before_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pace = GiveBackRate()
    pace.whole(10.0)
    assert not pace.reaches(75, 100, now_s=11.0, window_s=5.0), "25 bytes in a second: 3 s for the rest"
    assert pace.reaches(75, 100, now_s=11.0, window_s=6.0)
    assert pace.reaches(10, 100, now_s=20.0, window_s=3.0)
    assert not pace.reaches(10, 100, now_s=20.0, window_s=0.0), "as where a step must be persisted whatever happens"
