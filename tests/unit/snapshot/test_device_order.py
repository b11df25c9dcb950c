"""Copies from a device beside training, on streams that keep to nothing but the order that events give them.

Every operation waits in its stream until somebody waits for it, or runs ahead as far as events allow: what lies in the slot is
then the state of the step only if every wait that is needed is there.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import train
from support.fake_cuda import FakeEvent, LateCuda, tensors_as_on_a_device
from support.one_rank import agent_of_the_test, crash, finished, opened  # noqa: F401 -- a fixture
from torch import nn

from flashckpt.snapshot.copy import Buffer, Item, StalePlanError
from flashckpt.snapshot.copy_plan import CopyPlan
from flashckpt.snapshot.device import DeviceCopier, SmallBatch
from flashckpt.state.placement import current_world
from flashckpt.state.registry import StateRegistry
from flashckpt.state.state_layout import StateLayout

STEPS = 3
SCHEDULES = ["", "main", "side"]
CPU = {torch.device("cpu")}


class Loop:
    """Training of one rank: parameters that an optimizer changes, buffers that change whenever they like."""

    def __init__(self, eager: str) -> None:
        self.model = nn.Sequential(nn.Linear(150, 150), nn.BatchNorm1d(150))
        self.model.register_buffer("table", torch.zeros(200, 100))  # large, not fenced: cloned on the device
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                tensor.zero_()
        tracked = StateRegistry(current_world())
        tracked.add("model", self.model)
        tracked.add("optimizer", torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.plan = CopyPlan.of(StateLayout.of(tracked.structure(tracked.capture())))
        self.cuda = LateCuda(eager)
        self.lanes = DeviceCopier(self.cuda)
        self.data = bytearray(self.plan.layout.total)

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)

    def change_buffers(self) -> None:
        for held_back in self.model.buffers():
            held_back.add_(1)

    def snapshots(self, steps: int = STEPS) -> list[set[float]]:
        """Train and take a snapshot of each step; return the values found in it: {n} where it is of step n as a whole."""
        found: list[set[float]] = []
        buffer = Buffer(memoryview(self.data))
        with self.cuda:
            for _ in range(steps):
                self.update()
                self.change_buffers()
                marks = self.lanes.mark(CPU, self.plan.unfenced)
                self.change_buffers()  # what is not fenced may change as soon as step() has returned
                batches = self.lanes.enqueue(self.plan.fenced, buffer, marks)
                self.lanes.fence()
                self.update()
                arrived = [item for items in self.lanes.arrivals(batches, buffer) for item in items]
                assert len(arrived) == len(self.plan.fenced) + len(self.plan.unfenced)
                found.append(set().union(*map(self.values, arrived)))
        return found

    def values(self, item: Item) -> set[float]:
        raw = bytearray(self.data[item.offset : item.offset + item.nbytes])
        return set(torch.frombuffer(raw, dtype=item.dtype).tolist())


@pytest.mark.parametrize("eager", SCHEDULES)
def test_the_slot_holds_the_state_of_the_step_however_late_the_streams_run(eager: str) -> None:
    assert Loop(eager).snapshots() == [{1.0}, {3.0}, {5.0}]


def test_without_the_fence_the_next_step_is_in_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is sharp: each of the two waits, and each copy made in stream order, is needed for it."""
    monkeypatch.setattr(DeviceCopier, "fence", lambda self: None)
    assert Loop("main").snapshots(1) != [{1.0}]


def test_without_waiting_for_the_training_stream_the_step_before_is_in_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop("side")
    real = loop.cuda.Stream

    def deaf(device: Any) -> Any:
        stream = real(device)
        stream.wait_event = lambda event: None  # type: ignore[method-assign]  # on purpose
        return stream

    monkeypatch.setattr(loop.cuda, "Stream", deaf)
    assert loop.snapshots(1) != [{1.0}]


def test_buffers_gathered_behind_the_step_instead_of_in_it_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceCopier.mark

    def mark(self: DeviceCopier, items: Any, unfenced: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(SmallBatch, "gather", lambda pack: None)
            marks = real(self, items, unfenced)
        fetch = SmallBatch.fetch
        monkeypatch.setattr(SmallBatch, "fetch", lambda pack: (pack.gather(), fetch(pack))[1])
        return marks

    monkeypatch.setattr(DeviceCopier, "mark", mark)
    assert Loop("main").snapshots(1) != [{1.0}]


@pytest.mark.parametrize("eager", SCHEDULES)
def test_a_plan_that_does_not_fit_ends_with_no_copy_under_way(eager: str) -> None:
    """Its slot is EMPTY then and may be given to the next snapshot: a copy that is still queued would write into that."""
    loop = Loop(eager)
    buffer = Buffer(memoryview(loop.data))
    loop.model.register_buffer("other", torch.zeros(300, 300))
    large = max(loop.plan.fenced, key=lambda item: item.nbytes)
    with loop.cuda:
        marks = loop.lanes.mark(CPU, [])
        other = large._replace(local=loop.model.get_buffer("other"))  # of another shape, found behind the small ones
        items = [other if item is large else item for item in loop.plan.fenced]
        with pytest.raises(StalePlanError):
            loop.lanes.enqueue(items, buffer, marks)
    assert not any(stream.work for stream in loop.cuda.sides)


@pytest.mark.parametrize("name", ["table", "1.running_var"])
def test_a_buffer_of_another_shape_discards_the_snapshot_and_step_does_not_raise(name: str) -> None:
    loop = Loop("")
    assert any(item.fqn == f"model.{name}" for item in loop.plan.unfenced)
    unfenced = [
        item._replace(local=torch.zeros(7)) if item.fqn == f"model.{name}" else item for item in loop.plan.unfenced
    ]
    with loop.cuda:
        marks = loop.lanes.mark(CPU, unfenced)  # within step(), in the training thread
        with pytest.raises(StalePlanError):  # in the copy thread
            loop.lanes.enqueue(loop.plan.fenced, Buffer(memoryview(loop.data)), marks)


def test_the_devices_of_a_plan_are_looked_up_once() -> None:
    loop, looked = Loop(""), []

    class Counted:
        device = torch.device("cpu")

        def __getattribute__(self, name: str) -> Any:
            looked.append(name)
            return object.__getattribute__(self, name)

    items: Any = [type("Item", (), {"local": Counted(), "nbytes": 0})() for _ in range(50)]
    nothing: list[torch.device] = []
    for _ in range(3):
        loop.lanes.mark(nothing, items)
    assert looked == ["device"] * 50


def test_a_job_whose_state_lies_on_a_device_restores_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole engine over the device's path: every tensor goes by side streams, packs and events."""
    with tensors_as_on_a_device(monkeypatch) as cuda:
        first = train(0, "plain", str(tmp_path / "root"), 4, {"persist_every": 100})
    assert ("host waits", "side1") in cuda.log
    assert ("stream waits", "main", "side1") in cuda.log, "the optimizer's step was fenced by the stream"
    second = train(0, "plain", str(tmp_path / "root"), 4, {"persist_every": 100})
    assert second["first"] == 4
    assert second["restored"] == first["digests"]["4"]


def test_a_write_between_step_and_fence_discards_the_snapshot_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, copied = nn.Linear(8, 8), threading.Event()
    real = FakeEvent.synchronize
    with tensors_as_on_a_device(monkeypatch):
        monkeypatch.setattr(FakeEvent, "synchronize", lambda event: (copied.wait(30), real(event))[1])
        copied.set()
        ckpt = opened(tmp_path / "root", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        ckpt.step(1)
        finished(ckpt)
        copied.clear()
        ckpt.step(2)
        with torch.no_grad():
            model.weight.add_(1)  # a write past the fence, while the copy is under way
        copied.set()
        finished(ckpt)
        assert ckpt.stats["discarded"] == 1
        ckpt.step(3)
        finished(ckpt)
        assert ckpt.stats["snapshots"] == 2
        crash(ckpt)
